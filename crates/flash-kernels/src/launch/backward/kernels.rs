//! The launches of the two gradient kernels.

use cubecl::prelude::*;

use super::super::{Launch, TensorView, address_type, bindable, grid, mask_arg};
use super::{Call, overlapped};
use crate::{
    AttentionError,
    kernel::{
        backward::{dkv, dkv_mapped, dq, dq_mapped},
        seq::Seq,
        unit::{HalfFloat, MappedUnit, MatrixUnit},
    },
    plan::Plan,
};

/// Launches a kernel of dq: all take the same arguments.
macro_rules! launch_dq {
    ($launch:ident, $kernel:expr) => {{
        let Call {
            client,
            problem,
            device,
            inputs,
            stats,
        } = $launch.call;
        let shape = &problem.shape;
        let block_m = $launch.plan.tile.block_m;
        let cubes = Seq::count(shape.batch, shape.num_heads, shape.seqlen_q, block_m);
        let (count, cubes) = grid(cubes, device.max_cubes)?;
        let (mask, mask_type) = mask_arg(client, inputs.mask);
        let [q, k, v, d_out] =
            [inputs.q, inputs.k, inputs.v, inputs.d_out].map(|view| bindable(client, view).arg());
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            $kernel(
                client,
                count,
                CubeDim::new_1d($launch.plan.threads as u32),
                address_type(device, &$launch.call.views(&[$launch.dq]))?,
                $launch.plan.load_components(),
                $launch.plan.store_width,
                q,
                k,
                v,
                d_out,
                BufferArg::from_raw_parts(stats.clone(), $launch.call.stats_len()),
                mask,
                $launch.dq.arg(),
                cubes,
                problem.scale,
                problem.scale * core::f32::consts::LOG2_E,
                *$launch.plan,
                mask_type,
            );
        }
        Ok(())
    }};
}

/// Launches a kernel of dk and dv: all take the same arguments.
macro_rules! launch_dkv {
    ($launch:ident, $kernel:expr) => {{
        let Call {
            client,
            problem,
            device,
            inputs,
            stats,
        } = $launch.call;
        let shape = &problem.shape;
        let block_m = $launch.plan.tile.block_m;
        let cubes = Seq::count(shape.batch, shape.num_kv_heads, shape.seqlen_k, block_m);
        let (count, cubes) = grid(cubes, device.max_cubes)?;
        let (mask, mask_type) = mask_arg(client, inputs.mask);
        let [q, k, v, d_out] =
            [inputs.q, inputs.k, inputs.v, inputs.d_out].map(|view| bindable(client, view).arg());
        let (both, dv_offset) = $launch.buffer();
        let len = dv_offset + $launch.dv.reach();
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            $kernel(
                client,
                count,
                CubeDim::new_1d($launch.plan.threads as u32),
                address_type(device, &$launch.call.views(&[$launch.dk, $launch.dv]))?,
                $launch.plan.load_components(),
                $launch.plan.store_width,
                q,
                k,
                v,
                d_out,
                BufferArg::from_raw_parts(stats.clone(), $launch.call.stats_len()),
                mask,
                BufferArg::from_raw_parts(both, len),
                cubes,
                dv_offset,
                problem.scale,
                problem.scale * core::f32::consts::LOG2_E,
                *$launch.plan,
                mask_type,
            );
        }
        Ok(())
    }};
}

/// dq.
pub(super) struct DqLaunch<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) plan: &'a Plan,
    pub(super) dq: &'a TensorView,
}

impl Launch for DqLaunch<'_> {
    fn launch<U: MatrixUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        launch_dq!(self, dq::dq::launch_unchecked::<U, L, E>)
    }

    fn launch_mapped<U: MappedUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        launch_dq!(self, dq_mapped::dq_mapped::launch_unchecked::<U, L, E>)
    }

    fn launch_overlapped<E: HalfFloat>(&self) -> Result<(), AttentionError> {
        overlapped::dq::<E>(self)
    }
}

/// dk and dv.
pub(super) struct DkvLaunch<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) plan: &'a Plan,
    pub(super) dk: &'a TensorView,
    pub(super) dv: &'a TensorView,
}

impl DkvLaunch<'_> {
    /// The buffer of both, and the element of it at which dv begins.
    pub(super) fn buffer(&self) -> (cubecl::server::Handle, usize) {
        let start = |view: &TensorView| view.handle.offset_start.unwrap_or(0) as usize;
        let dv_offset = (start(self.dv) - start(self.dk)) / self.call.problem.dtype.bytes();
        let mut both = self.dk.handle.clone();
        both.offset_end = None;
        (both, dv_offset)
    }
}

impl Launch for DkvLaunch<'_> {
    fn launch<U: MatrixUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        launch_dkv!(self, dkv::dkv::launch_unchecked::<U, L, E>)
    }

    fn launch_mapped<U: MappedUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        launch_dkv!(self, dkv_mapped::dkv_mapped::launch_unchecked::<U, L, E>)
    }

    fn launch_overlapped<E: HalfFloat>(&self) -> Result<(), AttentionError> {
        overlapped::dkv::<E>(self)
    }
}
