//! The gradient kernels whose products run by themselves.

use cubecl::prelude::*;

use super::super::{TensorView, address_type, forward::walked, grid, mask_arg};
use super::{
    BackwardInputs,
    kernels::{DkvLaunch, DqLaunch},
};
use crate::{
    AttentionError,
    kernel::{
        backward::{
            dkv_overlapped::dkv_overlapped as dkv_kernel, dq_overlapped::dq_overlapped as dq_kernel,
        },
        seq::Seq,
        unit::HalfFloat,
    },
};

/// The tensors that the copy engine reads, in the order in which `walked` counts them.
pub(super) fn boxed<'a>(inputs: &BackwardInputs<'a>) -> [&'a TensorView; 4] {
    [inputs.q, inputs.k, inputs.v, inputs.d_out]
}

/// Launches the kernel of dq.
pub(super) fn dq<E: HalfFloat>(launch: &DqLaunch) -> Result<(), AttentionError> {
    let (call, plan) = (launch.call, launch.plan);
    let (client, problem, device) = (call.client, call.problem, &call.device);
    let (shape, tile) = (&problem.shape, &plan.tile);
    let cubes = Seq::count(shape.batch, shape.num_heads, shape.seqlen_q, tile.block_m);
    let (count, cubes) = grid(cubes, device.max_cubes)?;
    let [q, k, v, d_out] = boxed(&call.inputs);
    let element = E::elem_type_native();
    let (mask, mask_type) = mask_arg(client, call.inputs.mask);
    let [scores, pairs, columns, _] = plan.held();
    // SAFETY: every access of the kernel is guarded by the lengths given here.
    unsafe {
        dq_kernel::launch_unchecked::<E>(
            client,
            count,
            CubeDim::new_1d(plan.threads as u32),
            address_type(device, &call.views(&[launch.dq]))?,
            scores,
            pairs,
            columns,
            q.boxes(tile.block_m, element),
            k.boxes(tile.block_n, element),
            v.boxes(tile.block_n, element),
            d_out.boxes(tile.block_m, element),
            BufferArg::from_raw_parts(call.stats.clone(), call.stats_len()),
            mask,
            BufferArg::from_raw_parts(launch.dq.handle.clone(), launch.dq.reach() / 8),
            cubes,
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

/// Launches the kernel of dk and dv.
pub(super) fn dkv<E: HalfFloat>(launch: &DkvLaunch) -> Result<(), AttentionError> {
    let (call, plan) = (launch.call, launch.plan);
    let (client, problem, device) = (call.client, call.problem, &call.device);
    let (shape, tile) = (&problem.shape, &plan.tile);
    let cubes = Seq::count(
        shape.batch,
        shape.num_kv_heads,
        shape.seqlen_k,
        tile.block_m,
    );
    let (count, cubes) = grid(cubes, device.max_cubes)?;
    let [q, k, v, d_out] = boxed(&call.inputs);
    let element = E::elem_type_native();
    let (mask, mask_type) = mask_arg(client, call.inputs.mask);
    let [scores, pairs, dk_columns, dv_columns] = plan.held();
    let (both, dv_offset) = launch.buffer();
    // SAFETY: every access of the kernel is guarded by the lengths given here.
    unsafe {
        dkv_kernel::launch_unchecked::<E>(
            client,
            count,
            CubeDim::new_1d(plan.threads as u32),
            address_type(device, &call.views(&[launch.dk, launch.dv]))?,
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
            BufferArg::from_raw_parts(both, (dv_offset + launch.dv.reach()) / 8),
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
