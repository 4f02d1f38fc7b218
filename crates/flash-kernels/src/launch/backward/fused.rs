//! The gradient in one walk: zeros, the kernel, and dq from f32 to elements.

use cubecl::prelude::*;

use super::super::{
    Launch, TensorView, address_type, dispatch, empty, forward::walked, grid, mask_arg,
};
use super::{Call, kernels::DkvLaunch, overlapped::boxed};
use crate::{
    AttentionError, AttentionProblem,
    kernel::{
        backward::{
            fused_overlapped::fused_overlapped as fused_kernel,
            fused_sums::{self, CLEARED, PIECE_LEN, THREADS},
        },
        seq::Seq,
        unit::{HalfFloat, MatrixUnit},
    },
    plan::Plan,
};

/// Pieces of 64 × 64 of dq.
fn pieces(problem: &AttentionProblem, plan: &Plan) -> usize {
    let shape = &problem.shape;
    let block_n = plan.tile.block_n;
    Seq::count(shape.batch, shape.num_heads, shape.seqlen_q, block_n) * plan.pieces()
}

/// The kernel counts the vectors of its sums in 32 bits.
pub(super) fn can_address(problem: &AttentionProblem, plan: &Plan) -> bool {
    u32::try_from(pieces(problem, plan).saturating_mul(PIECE_LEN)).is_ok()
}

/// Launches the kernels of all gradients, `[dq, dk, dv]`.
pub(super) fn launch(
    call: &Call,
    plan: &Plan,
    [dq, dk, dv]: [&TensorView; 3],
) -> Result<(), AttentionError> {
    let pieces = pieces(call.problem, plan);
    let sums = empty(call.client, [1, 1, pieces, 4 * PIECE_LEN], 4);
    let keys = DkvLaunch { call, plan, dk, dv };
    let launch = FusedLaunch {
        keys,
        dq,
        sums: &sums,
    };
    dispatch(plan, call.problem.dtype, &launch)
}

struct FusedLaunch<'a> {
    keys: DkvLaunch<'a>,
    dq: &'a TensorView,
    /// dq before it is scaled, as `kernel::backward::fused_sums` has it.
    sums: &'a TensorView,
}

impl Launch for FusedLaunch<'_> {
    fn launch<U: MatrixUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        let unit = format!("{:?} for the fused gradient", self.keys.plan.unit);
        Err(AttentionError::new("plan", unit, "Wgmma for it"))
    }

    fn launch_overlapped<E: HalfFloat>(&self) -> Result<(), AttentionError> {
        self.clear()?;
        self.multiply::<E>()?;
        self.convert::<E>()
    }
}

impl FusedLaunch<'_> {
    fn address(&self) -> Result<AddressType, AttentionError> {
        let DkvLaunch { call, dk, dv, .. } = self.keys;
        address_type(&call.device, &call.views(&[dk, dv, self.dq, self.sums]))
    }

    fn clear(&self) -> Result<(), AttentionError> {
        let call = self.keys.call;
        let vectors = self.sums.reach() / 4;
        let (count, _) = grid(vectors.div_ceil(THREADS * CLEARED), call.device.max_cubes)?;
        // SAFETY: the kernel writes no vector but these.
        unsafe {
            fused_sums::clear::launch_unchecked(
                call.client,
                count,
                CubeDim::new_1d(THREADS as u32),
                self.address()?,
                BufferArg::from_raw_parts(self.sums.handle.clone(), vectors),
                vectors,
            );
        }
        Ok(())
    }

    fn multiply<E: HalfFloat>(&self) -> Result<(), AttentionError> {
        let DkvLaunch { call, plan, dv, .. } = self.keys;
        let problem = call.problem;
        let (shape, tile) = (&problem.shape, &plan.tile);
        let (heads, keys) = (shape.num_kv_heads, shape.seqlen_k);
        let cubes = Seq::count(shape.batch, heads, keys, tile.block_m);
        let (count, cubes) = grid(cubes, call.device.max_cubes)?;
        let [q, k, v, d_out] = boxed(&call.inputs);
        let element = E::elem_type_native();
        let (mask, mask_type) = mask_arg(call.client, call.inputs.mask);
        let [scores, pairs, dk_columns, dv_columns] = plan.held();
        let (both, dv_offset) = self.keys.buffer();
        // SAFETY: every access of the kernel is guarded by the lengths given here, and `sums` has a
        // piece for each of a query tile.
        unsafe {
            fused_kernel::launch_unchecked::<E>(
                call.client,
                count,
                CubeDim::new_1d(plan.threads as u32),
                self.address()?,
                scores,
                pairs,
                dk_columns,
                dv_columns,
                q.boxes(tile.block_n, element),
                k.boxes(tile.block_m, element),
                v.boxes(tile.block_m, element),
                d_out.boxes(tile.block_n, element),
                BufferArg::from_raw_parts(call.stats.clone(), call.stats_len()),
                mask,
                BufferArg::from_raw_parts(both, (dv_offset + dv.reach()) / 8),
                BufferArg::from_raw_parts(self.sums.handle.clone(), self.sums.reach()),
                cubes,
                dv_offset,
                shape.num_heads as u32,
                shape.group() as u32,
                walked(&[q, k, v, d_out]),
                shape.seqlen_q as u32,
                shape.seqlen_k as u32,
                shape.head_dim as u32,
                shape.val_dim as u32,
                problem.scale,
                problem.scale * core::f32::consts::LOG2_E,
                *plan,
                mask_type,
            );
        }
        Ok(())
    }

    fn convert<E: HalfFloat>(&self) -> Result<(), AttentionError> {
        let DkvLaunch { call, plan, .. } = self.keys;
        let problem = call.problem;
        let shape = &problem.shape;
        let parts = pieces(problem, plan) / plan.head_boxes();
        let (count, cubes) = grid(parts, call.device.max_cubes)?;
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            fused_sums::convert::launch_unchecked::<E>(
                call.client,
                count,
                CubeDim::new_1d(THREADS as u32),
                self.address()?,
                BufferArg::from_raw_parts(self.sums.handle.clone(), self.sums.reach() / 4),
                BufferArg::from_raw_parts(self.dq.handle.clone(), self.dq.reach() / 8),
                cubes,
                shape.seqlen_q as u32,
                shape.head_dim as u32,
                problem.scale,
                *plan,
            );
        }
        Ok(())
    }
}
