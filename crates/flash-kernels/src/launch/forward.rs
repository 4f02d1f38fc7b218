//! The forward pass.

use cubecl::{client::Client, prelude::*};

use super::{
    Launch, MaskView, TensorView, address_for, address_type, alignment, bindable, check_plan,
    check_views, dispatch, empty, grid, mask_arg, packed_alignment, split::Workspace,
};
use crate::{
    AttentionError, AttentionProblem, DeviceClass,
    kernel::{
        forward::forward as kernel,
        forward_overlapped::forward_overlapped as overlapped,
        seq::Seq,
        unit::{HalfFloat, MatrixUnit},
    },
    plan::{Pass, Plan},
    select::select,
};

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
    let device = DeviceClass::of(client);
    let plan = select(&device, problem, Pass::Forward, packed_alignment(problem))?;
    let shape = &problem.shape;
    grid(cubes(problem, &plan), device.max_cubes)?;
    let rows = |heads, seqlen| shape.batch * heads * seqlen;
    let queries = rows(shape.num_heads, shape.seqlen_q);
    let keys = rows(shape.num_kv_heads, shape.seqlen_k);
    let width = shape.head_dim.max(shape.val_dim);
    let rows = keys.max(queries.saturating_mul(plan.splits));
    address_for(&device, rows.saturating_mul(width))?;
    Ok(plan)
}

fn cubes(problem: &AttentionProblem, plan: &Plan) -> usize {
    let shape = &problem.shape;
    let tiles = Seq::count(
        shape.batch,
        shape.num_heads,
        shape.seqlen_q,
        plan.tile.block_m,
    );
    tiles.saturating_mul(plan.splits)
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
    let device = class_for(client, problem, &[q, k, v]);
    let alignment = alignment(&[q, k, v], problem);
    let plan = select(&device, problem, Pass::Forward, alignment)?;
    forward_with(client, problem, &plan, q, k, v, mask)
}

/// [`forward`] with a plan of the caller's choice, for tests and measurements.
///
/// # Errors
///
/// As [`forward`], when the device cannot run `plan`, and when `plan` rounds what `problem` does not let
/// it round.
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
    check_plan(plan, Pass::Forward, problem)?;
    plan.check(&class_for(client, problem, &[q, k, v]))?;
    let shape = &problem.shape;
    let output = ForwardOutput {
        out: empty(client, shape.out(), problem.dtype.bytes()),
        lse: empty(client, shape.lse(), 4),
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
    dispatch(plan, problem.dtype, &call)?;
    Ok(output)
}

/// What the device can do with these tensors: no products whose operands its copy engine cannot
/// reach.
pub(super) fn class_for(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &[&TensorView],
) -> DeviceClass {
    let device = DeviceClass::of(client);
    let bytes = problem.dtype.bytes();
    let wgmma = device.wgmma && inputs.iter().all(|view| view.has_boxes(bytes));
    DeviceClass { wgmma, ..device }
}

/// Bytes of keys and values that are walked at the same time: two thirds of an H200's L2 cache.
const CACHED_BYTES: usize = 32 << 20;

/// Fewest heads of a section: with fewer, a round of cubes holds tiles of too different work.
const SECTION_HEADS: usize = 32;

/// Query heads of a section of [`Schedule`](crate::kernel::seq::Schedule): those whose keys and
/// values fit in the cache, but enough of them; sections are about equal.
fn section(problem: &AttentionProblem) -> usize {
    let shape = &problem.shape;
    let per_head = shape.seqlen_k * (shape.head_dim + shape.val_dim) * problem.dtype.bytes();
    let cached = (CACHED_BYTES / per_head.max(1)).saturating_mul(shape.group());
    let lines = shape.batch * shape.num_heads;
    lines.div_ceil((lines / cached.max(SECTION_HEADS)).max(1))
}

/// Bit `2·i` where tensor `i` has batch entries of its own, bit `2·i + 1` where it has heads.
pub(super) fn walked(inputs: &[&TensorView]) -> u32 {
    inputs.iter().rev().fold(0, |bits, view| {
        let (batch, heads) = (view.is_walked(0), view.is_walked(1));
        bits << 2 | u32::from(heads) << 1 | u32::from(batch)
    })
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
    /// Launches the walk over keys, which leaves elements of `O` in `out`, and in `lse` what goes with
    /// each row.
    fn walk<U: MatrixUnit, L: Numeric, O: Float>(
        &self,
        out: &TensorView,
        lse: &TensorView,
    ) -> Result<(), AttentionError> {
        let device = DeviceClass::of(self.client);
        let (count, cubes) = grid(cubes(self.problem, self.plan), device.max_cubes)?;
        let mut views = self.inputs.to_vec();
        views.extend(self.mask.map(|mask| &mask.tensor));
        views.push(out);
        let address = address_type(&device, &views)?;
        let [q, k, v] = self.inputs.map(|view| bindable(self.client, view).arg());
        let (mask, mask_type) = mask_arg(self.client, self.mask);
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            kernel::launch_unchecked::<U, L, O>(
                self.client,
                count,
                CubeDim::new_1d(self.plan.threads as u32),
                address,
                self.plan.load_components(),
                self.plan.store_width,
                q,
                k,
                v,
                mask,
                out.arg(),
                BufferArg::from_raw_parts(lse.handle.clone(), lse.reach()),
                cubes,
                self.plan.splits as u32,
                self.problem.scale * core::f32::consts::LOG2_E,
                self.plan.compiled(),
                mask_type,
            );
        }
        Ok(())
    }

    /// `walk` by warpgroups that multiply tensors of `E`; `out` has elements of `O`.
    fn walk_overlapped<E: HalfFloat, O: Float>(
        &self,
        out: &TensorView,
        lse: &TensorView,
    ) -> Result<(), AttentionError> {
        let (shape, tile) = (&self.problem.shape, &self.plan.tile);
        let device = DeviceClass::of(self.client);
        let tiles = cubes(self.problem, self.plan);
        // Cubes that stay: no more than run at the same time.
        let (count, _) = grid(tiles.min(device.processors), device.max_cubes)?;
        grid(tiles.saturating_add(device.processors), (u32::MAX, 1))?;
        let mut views = vec![out];
        views.extend(self.mask.map(|mask| &mask.tensor));
        let address = address_type(&device, &views)?;
        let [q, k, v] = self.inputs;
        let element = E::elem_type_native();
        let (mask, mask_type) = mask_arg(self.client, self.mask);
        let vector = 16 / O::elem_type_native().size();
        let [scores, probabilities, _, outputs] = self.plan.held();
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            overlapped::launch_unchecked::<E>(
                self.client,
                count,
                CubeDim::new_1d(self.plan.threads as u32),
                address,
                scores,
                probabilities,
                outputs,
                q.boxes(tile.block_m, element),
                k.boxes(tile.block_n, element),
                v.boxes(tile.block_n, element),
                mask,
                BufferArg::from_raw_parts(out.handle.clone(), out.reach() / vector),
                BufferArg::from_raw_parts(lse.handle.clone(), lse.reach()),
                (shape.batch * shape.num_heads) as u32,
                shape.num_heads as u32,
                shape.group() as u32,
                walked(&self.inputs),
                section(self.problem) as u32,
                shape.seqlen_q as u32,
                shape.seqlen_k as u32,
                shape.val_dim as u32,
                self.plan.splits as u32,
                self.problem.scale * core::f32::consts::LOG2_E,
                self.plan.compiled(),
                mask_type,
            );
        }
        Ok(())
    }
}

impl Launch for Call<'_> {
    fn launch<U: MatrixUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        let ForwardOutput { out, lse } = self.output;
        if !self.plan.is_split() {
            return self.walk::<U, L, E>(out, lse);
        }
        let workspace = Workspace::new(self.client, self.problem, self.plan);
        self.walk::<U, L, f32>(&workspace.parts, &workspace.stats)?;
        workspace.combine::<E>(self.client, self.problem, self.plan, self.output)
    }

    fn launch_overlapped<E: HalfFloat>(&self) -> Result<(), AttentionError> {
        let ForwardOutput { out, lse } = self.output;
        if !self.plan.is_split() {
            return self.walk_overlapped::<E, E>(out, lse);
        }
        let workspace = Workspace::new(self.client, self.problem, self.plan);
        self.walk_overlapped::<E, f32>(&workspace.parts, &workspace.stats)?;
        workspace.combine::<E>(self.client, self.problem, self.plan, self.output)
    }
}
