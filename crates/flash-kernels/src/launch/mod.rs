//! From buffers to launches: check, allocate, choose the unit, launch.

use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
    server::Handle,
};
use half::{bf16, f16};

use crate::{
    AttentionError, AttentionProblem, DeviceClass, FloatKind, Masking, Precision,
    kernel::unit::{self, Cmma, HalfFloat, MappedUnit, MatrixUnit, Mma, Tf32},
    plan::{BOX_COLS, Pass, Plan, UnitKind},
    select::{Alignment, widest},
};

mod backward;
mod forward;
mod split;

pub use backward::{
    BackwardInputs, BackwardPlans, Gradients, Wanted, backward, backward_with, plan_backward,
};
pub use forward::{ForwardOutput, forward, forward_with, plan_forward};

/// A tensor of four dimensions in device memory.
///
/// The buffer must hold every element that `shape` and `strides` reach: launches do not check it, and
/// would read or write beside it.
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

    pub(crate) fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// One past the largest element offset.
    pub(crate) fn reach(&self) -> usize {
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
    pub(crate) fn alignment(&self, bytes: usize) -> usize {
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

    /// Can the copy engine of sm_90 walk it in boxes? It steps by multiples of 16 bytes, and its rows
    /// must be apart.
    pub(crate) fn has_boxes(&self, bytes: usize) -> bool {
        !self.is_empty()
            && self.alignment(bytes) * bytes >= 16
            && (self.strides[2] > 0 || self.shape[2] == 1)
            && self.strides.iter().all(|stride| stride * bytes < 1 << 40)
            && self.shape.iter().all(|n| u32::try_from(*n).is_ok())
    }

    /// Is it stepped along in dimension `d`, rather than broadcast?
    pub(crate) fn is_walked(&self, d: usize) -> bool {
        self.shape[d] > 1 && self.strides[d] > 0
    }

    /// The view as the copy engine walks it: `rows` rows of 64 columns at a time. A dimension that is
    /// not walked has one element.
    pub(crate) fn boxes(&self, rows: usize, element: ElemType) -> TensorMapArg<Tiled> {
        let mut walked = self.clone();
        for d in 0..3 {
            if !self.is_walked(d) {
                walked.shape[d] = 1;
                // Never stepped along, but the engine wants a multiple of 16 bytes, and not 0.
                walked.strides[d] = BOX_COLS;
            }
        }
        let args = TiledArgs {
            tile_size: [1, 1, rows, BOX_COLS].into(),
        };
        TensorMapArg::new(args, walked.arg(), element)
            .with_swizzle(TensorMapSwizzle::B128)
            .with_prefetch(TensorMapPrefetch::B256)
    }

    pub(crate) fn arg(&self) -> TensorArg {
        // SAFETY: shape and strides come from the tensor that owns the buffer.
        unsafe {
            TensorArg::from_raw_parts(self.handle.clone(), self.strides.into(), self.shape.into())
        }
    }
}

/// How a bool is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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

/// A launch that only lacks its types.
trait Launch {
    /// Launches for tensors of `E`, read as `L`, multiplied by `U`.
    fn launch<U: MatrixUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError>;

    /// Launches the kernel for tensors of `E`, read as `L`, that changes the products of `U` where they
    /// are.
    fn launch_mapped<U: MappedUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        let allowed = "a gradient's, which alone have such a kernel";
        Err(AttentionError::new("plan", "Mapped", allowed))
    }

    /// Launches the overlapped kernel for tensors of `E`.
    fn launch_overlapped<E: HalfFloat>(&self) -> Result<(), AttentionError>;
}

/// Is `plan` for `pass` and for what `problem` asks? A kernel's sizes and masks are its plan's.
fn check_plan(plan: &Plan, pass: Pass, problem: &AttentionProblem) -> Result<(), AttentionError> {
    let shape = &problem.shape;
    let differing = [
        (
            plan.pass != pass,
            "plan pass",
            format!("{:?}", plan.pass),
            format!("{pass:?}"),
        ),
        (
            plan.causality != problem.causality,
            "plan causality",
            format!("{:?}", plan.causality),
            format!("{:?}, as the problem's", problem.causality),
        ),
        (
            plan.masking != problem.masking,
            "plan masking",
            format!("{:?}", plan.masking),
            format!("{:?}, as the problem's", problem.masking),
        ),
        (
            plan.tile.head_pad < shape.head_dim,
            "plan head_pad",
            plan.tile.head_pad.to_string(),
            format!("at least head_dim, {}", shape.head_dim),
        ),
        (
            plan.tile.val_pad < shape.val_dim,
            "plan val_pad",
            plan.tile.val_pad.to_string(),
            format!("at least val_dim, {}", shape.val_dim),
        ),
    ];
    match differing.into_iter().find(|(differs, ..)| *differs) {
        Some((_, argument, value, allowed)) => Err(AttentionError::new(argument, value, allowed)),
        None => check_precision(plan, problem),
    }
}

/// Does `plan` multiply as exactly as `problem` asks for, and by a unit that can? What is less exact is
/// nobody's choice but the caller's.
fn check_precision(plan: &Plan, problem: &AttentionProblem) -> Result<(), AttentionError> {
    let exact = match (plan.unit, problem.dtype) {
        (UnitKind::Mma, FloatKind::F32) => Precision::Tf32,
        _ => Precision::Full,
    };
    let is_allowed = exact == Precision::Full || problem.precision == Precision::Tf32;
    if is_allowed && plan.precision == exact {
        return Ok(());
    }
    let allowed = match is_allowed {
        true => format!(
            "{exact:?}, as {:?} multiplies {:?}",
            plan.unit, problem.dtype
        ),
        false => "Full, as the problem says".to_owned(),
    };
    Err(AttentionError::new(
        "plan precision",
        format!("{:?}", plan.precision),
        allowed,
    ))
}

/// The one place where a plan's unit becomes a type.
fn dispatch(plan: &Plan, dtype: FloatKind, call: &impl Launch) -> Result<(), AttentionError> {
    match (plan.unit, dtype) {
        (UnitKind::Scalar, FloatKind::F32) => call.launch::<unit::Scalar, f32, f32>(),
        (UnitKind::Scalar, FloatKind::F16) => call.launch::<unit::Scalar, f16, f16>(),
        (UnitKind::Scalar, FloatKind::Bf16) => call.launch::<unit::Scalar, bf16, bf16>(),
        (UnitKind::Cmma, FloatKind::F16) => cmma::<f16>(plan, call),
        (UnitKind::Cmma, FloatKind::Bf16) if plan.is_mapped() => Err(AttentionError::new(
            "instruction set",
            "Mapped for bf16",
            "Mapped for f16, to which sums can be rounded where they are",
        )),
        (UnitKind::Cmma, FloatKind::Bf16) => cmma::<bf16>(plan, call),
        (UnitKind::Mma, FloatKind::F16) => call.launch::<Mma<f16>, f16, f16>(),
        (UnitKind::Mma, FloatKind::Bf16) => call.launch::<Mma<bf16>, bf16, bf16>(),
        (UnitKind::Mma, FloatKind::F32) => call.launch::<Mma<Tf32>, f32, f32>(),
        (UnitKind::Wgmma, FloatKind::F16) => call.launch_overlapped::<f16>(),
        (UnitKind::Wgmma, FloatKind::Bf16) => call.launch_overlapped::<bf16>(),
        (unit, FloatKind::F32) => Err(AttentionError::new(
            "plan",
            format!("{unit:?} for f32"),
            "Scalar or Mma for f32",
        )),
    }
}

/// `Cmma` by what global memory is read as.
fn cmma<E: HalfFloat>(plan: &Plan, call: &impl Launch) -> Result<(), AttentionError> {
    match (plan.is_mapped(), plan.loads_words()) {
        (true, true) => call.launch_mapped::<Cmma<E>, u32, E>(),
        (true, false) => call.launch_mapped::<Cmma<E>, E, E>(),
        (false, true) => call.launch::<Cmma<E>, u32, E>(),
        (false, false) => call.launch::<Cmma<E>, E, E>(),
    }
}

/// The widest vector in which every row of every view can be read.
fn alignment(views: &[&TensorView], problem: &AttentionProblem) -> Alignment {
    let bytes = problem.dtype.bytes();
    let widths = views.iter().map(|view| view.alignment(bytes));
    Alignment(widths.min().unwrap_or(1))
}

/// `alignment` of packed tensors.
fn packed_alignment(problem: &AttentionProblem) -> Alignment {
    let shape = &problem.shape;
    Alignment(widest(shape.head_dim, 8).min(widest(shape.val_dim, 8)))
}

/// A new packed tensor.
fn empty(client: &Client, shape: [usize; 4], bytes: usize) -> TensorView {
    // A buffer of no bytes cannot be bound.
    let len = shape.iter().product::<usize>().max(1);
    TensorView::packed(client.empty(len * bytes), shape)
}

/// `view`, or one over a buffer that can be bound where there is no element to read.
fn bindable(client: &Client, view: &TensorView) -> TensorView {
    let mut view = view.clone();
    if view.is_empty() {
        view.handle = client.empty(16);
    }
    view
}

/// The mask's argument and element type.
fn mask_arg<M: CubePrimitive>(
    client: &Client,
    mask: Option<&MaskView>,
) -> (ComptimeOptionArgs<OwnedTensor<M>>, ElemType) {
    match mask {
        Some(mask) => (
            ComptimeOptionArgs::Some(bindable(client, &mask.tensor).arg()),
            ElemType::UInt(match mask.kind {
                MaskKind::U8 => UIntKind::U8,
                MaskKind::U32 => UIntKind::U32,
            }),
        ),
        None => (ComptimeOptionArgs::None, ElemType::UInt(UIntKind::U32)),
    }
}

/// Wide enough for the farthest element of any of `views`.
fn address_type(
    device: &DeviceClass,
    views: &[&TensorView],
) -> Result<AddressType, AttentionError> {
    address_for(
        device,
        views.iter().map(|view| view.reach()).max().unwrap_or(0),
    )
}

/// Wide enough for `reach` elements.
fn address_for(device: &DeviceClass, reach: usize) -> Result<AddressType, AttentionError> {
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
