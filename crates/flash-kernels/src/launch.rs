//! From buffers to a launch: check, allocate, choose the unit, launch.

use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
    server::Handle,
};
use half::{bf16, f16};

use crate::{
    AttentionError, AttentionProblem, FloatKind, Masking,
    kernel::{
        forward::forward as kernel,
        seq::Seq,
        unit::{self, Cmma, MatrixUnit, Mma},
    },
    plan::{Pass, Plan, UnitKind},
    select::{Alignment, DeviceClass, select, widest},
};

/// A tensor of four dimensions in device memory.
#[derive(Clone, Debug)]
pub struct TensorView {
    /// The buffer; its offset is the first element.
    pub handle: Handle,
    /// `[batch, heads, seqlen, dim]`.
    pub shape: [usize; 4],
    /// Elements between neighbours along each dimension; 0 where broadcast.
    pub strides: [usize; 4],
}

impl TensorView {
    /// A packed tensor.
    pub fn packed(handle: Handle, shape: [usize; 4]) -> Self {
        let [_, b, c, d] = shape;
        Self {
            handle,
            shape,
            strides: [b * c * d, c * d, d, 1],
        }
    }

    fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// One past the largest element offset.
    fn reach(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        let last = |(n, s): (&usize, &usize)| (n - 1) * s;
        self.shape
            .iter()
            .zip(&self.strides)
            .map(last)
            .sum::<usize>()
            + 1
    }

    /// The widest vector in which every row can be read.
    fn alignment(&self, bytes: usize) -> usize {
        let [_, _, _, dim] = self.shape;
        if self.strides[3] != 1 && dim > 1 {
            return 1;
        }
        let start = self.handle.offset_start.unwrap_or(0) as usize / bytes;
        let outer = self.shape.iter().zip(&self.strides).take(3);
        outer
            .filter(|(n, _)| **n > 1)
            .map(|(_, stride)| *stride)
            .chain([start, dim])
            .map(|length| widest(length, 8))
            .min()
            .unwrap_or(1)
    }

    fn arg(&self) -> TensorArg {
        // SAFETY: shape and strides come from the tensor that owns the buffer.
        unsafe {
            TensorArg::from_raw_parts(self.handle.clone(), self.strides.into(), self.shape.into())
        }
    }
}

/// How a bool is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskKind {
    /// In a byte.
    U8,
    /// In 32 bits.
    U32,
}

/// A bool mask `[batch, heads, seqlen_q, seqlen_k]`, `true` = drop, broadcast by stride 0.
#[derive(Clone, Debug)]
pub struct MaskView {
    /// The bools.
    pub tensor: TensorView,
    /// Their storage.
    pub kind: MaskKind,
}

/// What a forward pass leaves.
#[derive(Clone, Debug)]
pub struct ForwardOutput {
    /// `[batch, heads, seqlen_q, val_dim]`, packed, in the inputs' type.
    pub out: TensorView,
    /// `[batch, heads, seqlen_q, 1]`, packed, f32: `ln Σ exp(logit)`.
    pub lse: TensorView,
}

/// The plan that [`forward`] would run for packed tensors.
///
/// # Errors
///
/// When no kernel can run; the error says why, and a caller takes its composed path.
pub fn plan_forward(client: &Client, problem: &AttentionProblem) -> Result<Plan, AttentionError> {
    let dims = [problem.shape.head_dim, problem.shape.val_dim];
    let align = dims
        .map(|dim| widest(dim, 8))
        .into_iter()
        .min()
        .unwrap_or(1);
    select(
        &DeviceClass::of(client),
        problem,
        Pass::Forward,
        Alignment(align),
    )
}

/// `softmax(scale·q·kᵀ, masked)·v` with its log-sum-exp.
///
/// q `[batch, num_heads, seqlen_q, head_dim]`, k `[batch, num_kv_heads, seqlen_k, head_dim]`,
/// v `[batch, num_kv_heads, seqlen_k, val_dim]` in `problem.dtype`, any strides.
///
/// # Errors
///
/// When the views disagree with `problem`, or no plan of the table can run here.
pub fn forward(
    client: &Client,
    problem: &AttentionProblem,
    q: &TensorView,
    k: &TensorView,
    v: &TensorView,
    mask: Option<&MaskView>,
) -> Result<ForwardOutput, AttentionError> {
    let alignment = [q, k, v].map(|x| x.alignment(problem.dtype.bytes()));
    let alignment = Alignment(alignment.into_iter().min().unwrap_or(1));
    let plan = select(&DeviceClass::of(client), problem, Pass::Forward, alignment)?;
    forward_with(client, problem, &plan, q, k, v, mask)
}

/// [`forward`] with a plan of the caller's choice, for tests and measurements.
///
/// # Errors
///
/// As [`forward`], and when the device cannot run `plan`.
pub fn forward_with(
    client: &Client,
    problem: &AttentionProblem,
    plan: &Plan,
    q: &TensorView,
    k: &TensorView,
    v: &TensorView,
    mask: Option<&MaskView>,
) -> Result<ForwardOutput, AttentionError> {
    check_views(problem, q, k, v, mask)?;
    plan.check(&DeviceClass::of(client))?;
    let shape = &problem.shape;
    let empty = |shape: [usize; 4], bytes: usize| {
        // A buffer of no bytes cannot be bound.
        let len = shape.iter().product::<usize>().max(1);
        TensorView::packed(client.empty(len * bytes), shape)
    };
    let output = ForwardOutput {
        out: empty(shape.out(), problem.dtype.bytes()),
        lse: empty(shape.lse(), 4),
    };
    if output.lse.is_empty() {
        return Ok(output);
    }
    let call = Call {
        client,
        problem,
        plan,
        inputs: [q, k, v],
        mask,
        output: &output,
    };
    match (plan.unit, problem.dtype) {
        (UnitKind::Scalar, FloatKind::F32) => call.launch::<unit::Scalar, f32>(),
        (UnitKind::Scalar, FloatKind::F16) => call.launch::<unit::Scalar, f16>(),
        (UnitKind::Scalar, FloatKind::Bf16) => call.launch::<unit::Scalar, bf16>(),
        (UnitKind::Cmma, FloatKind::F16) => call.launch::<Cmma<f16>, f16>(),
        (UnitKind::Cmma, FloatKind::Bf16) => call.launch::<Cmma<bf16>, bf16>(),
        (UnitKind::Mma, FloatKind::F16) => call.launch::<Mma<f16>, f16>(),
        (UnitKind::Mma, FloatKind::Bf16) => call.launch::<Mma<bf16>, bf16>(),
        (unit, FloatKind::F32) => Err(AttentionError::new(
            "plan",
            format!("{unit:?} for f32"),
            "Scalar for f32",
        )),
    }?;
    Ok(output)
}

fn check_views(
    problem: &AttentionProblem,
    q: &TensorView,
    k: &TensorView,
    v: &TensorView,
    mask: Option<&MaskView>,
) -> Result<(), AttentionError> {
    let shape = &problem.shape;
    let kv = |seqlen, dim| [shape.batch, shape.num_kv_heads, seqlen, dim];
    let scores = [shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k];
    let queries = [shape.batch, shape.num_heads, shape.seqlen_q, shape.head_dim];
    let mut wanted = vec![
        ("query shape", q.shape, queries),
        ("key shape", k.shape, kv(shape.seqlen_k, shape.head_dim)),
        ("value shape", v.shape, kv(shape.seqlen_k, shape.val_dim)),
    ];
    if let Some(mask) = mask {
        wanted.push(("mask shape", mask.tensor.shape, scores));
    }
    for (argument, has, needs) in wanted {
        if has != needs {
            return Err(AttentionError::new(
                argument,
                format!("{has:?}"),
                format!("{needs:?}"),
            ));
        }
    }
    if mask.is_some() != (problem.masking == Masking::Dense) {
        return Err(AttentionError::new(
            "mask",
            if mask.is_some() { "given" } else { "absent" },
            format!("as the problem says, {:?}", problem.masking),
        ));
    }
    if !problem.scale.is_finite() {
        return Err(AttentionError::new(
            "scale",
            problem.scale,
            "a finite number",
        ));
    }
    Ok(())
}

/// Everything a launch needs but the types.
struct Call<'a> {
    client: &'a Client,
    problem: &'a AttentionProblem,
    plan: &'a Plan,
    inputs: [&'a TensorView; 3],
    mask: Option<&'a MaskView>,
    output: &'a ForwardOutput,
}

impl Call<'_> {
    fn launch<U: MatrixUnit, E: Float>(&self) -> Result<(), AttentionError> {
        let shape = &self.problem.shape;
        let device = DeviceClass::of(self.client);
        let cubes = Seq::count(
            shape.batch,
            shape.num_heads,
            shape.seqlen_q,
            self.plan.tile.block_m,
        );
        let (count, cubes) = grid(cubes, device.max_cubes)?;
        let address = self.address_type(&device)?;
        let [q, k, v] = self.inputs.map(|view| self.bindable(view).arg());
        let (mask, mask_type) = match self.mask {
            Some(mask) => (
                ComptimeOptionArgs::Some(self.bindable(&mask.tensor).arg()),
                match mask.kind {
                    MaskKind::U8 => ElemType::UInt(UIntKind::U8),
                    MaskKind::U32 => ElemType::UInt(UIntKind::U32),
                },
            ),
            None => (ComptimeOptionArgs::None, ElemType::UInt(UIntKind::U32)),
        };
        let lse = &self.output.lse;
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            kernel::launch_unchecked::<U, E>(
                self.client,
                count,
                CubeDim::new_1d(self.plan.threads as u32),
                address,
                self.plan.load_width,
                self.plan.store_width,
                q,
                k,
                v,
                mask,
                self.output.out.arg(),
                BufferArg::from_raw_parts(lse.handle.clone(), lse.reach()),
                cubes,
                self.problem.scale * core::f32::consts::LOG2_E,
                *self.plan,
                mask_type,
            );
        }
        Ok(())
    }

    /// `view`, or one over a buffer that can be bound where there is no element to read.
    fn bindable(&self, view: &TensorView) -> TensorView {
        let mut view = view.clone();
        if view.is_empty() {
            view.handle = self.client.empty(16);
        }
        view
    }

    /// Wide enough for the farthest element of any tensor.
    fn address_type(&self, device: &DeviceClass) -> Result<AddressType, AttentionError> {
        let views = self.inputs.into_iter().chain([&self.output.out]);
        let views = views.chain(self.mask.map(|mask| &mask.tensor));
        let reach = views.map(TensorView::reach).max().unwrap_or(0);
        let address = AddressType::from_len(reach);
        if address == AddressType::U64 && !device.wide_addresses {
            return Err(AttentionError::device(
                "address type",
                "32 bits",
                format!("64 bits for {reach} elements"),
            ));
        }
        Ok(address)
    }
}

/// A two-dimensional grid of at least `cubes` cubes.
fn grid(cubes: usize, (max_x, max_y): (u32, u32)) -> Result<(CubeCount, u32), AttentionError> {
    let refused = || {
        AttentionError::device(
            "number of cubes",
            format!("{max_x} × {max_y}"),
            format!("{cubes}"),
        )
    };
    let total = u32::try_from(cubes).map_err(|_| refused())?;
    let y = total.div_ceil(max_x).max(1);
    if y > max_y {
        return Err(refused());
    }
    Ok((CubeCount::Static(total.div_ceil(y), y, 1), total))
}
