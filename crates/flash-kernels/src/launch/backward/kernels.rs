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

/// dq.
pub(super) struct DqLaunch<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) plan: &'a Plan,
    pub(super) dq: &'a TensorView,
}

impl Launch for DqLaunch<'_> {
    fn launch<U: MatrixUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        let Call {
            client,
            problem,
            device,
            inputs,
            stats,
        } = self.call;
        let shape = &problem.shape;
        let block_m = self.plan.tile.block_m;
        let cubes = Seq::count(shape.batch, shape.num_heads, shape.seqlen_q, block_m);
        let (count, cubes) = grid(cubes, device.max_cubes)?;
        let (mask, mask_type) = mask_arg(client, inputs.mask);
        let [q, k, v, d_out] =
            [inputs.q, inputs.k, inputs.v, inputs.d_out].map(|view| bindable(client, view).arg());
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            dq::dq::launch_unchecked::<U, L, E>(
                client,
                count,
                CubeDim::new_1d(self.plan.threads as u32),
                address_type(device, &self.call.views(&[self.dq]))?,
                self.plan.load_components(),
                self.plan.store_width,
                q,
                k,
                v,
                d_out,
                BufferArg::from_raw_parts(stats.clone(), self.call.stats_len()),
                mask,
                self.dq.arg(),
                cubes,
                problem.scale,
                problem.scale * core::f32::consts::LOG2_E,
                *self.plan,
                mask_type,
            );
        }
        Ok(())
    }

    fn launch_mapped<U: MappedUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        let Call {
            client,
            problem,
            device,
            inputs,
            stats,
        } = self.call;
        let shape = &problem.shape;
        let block_m = self.plan.tile.block_m;
        let cubes = Seq::count(shape.batch, shape.num_heads, shape.seqlen_q, block_m);
        let (count, cubes) = grid(cubes, device.max_cubes)?;
        let (mask, mask_type) = mask_arg(client, inputs.mask);
        let [q, k, v, d_out] =
            [inputs.q, inputs.k, inputs.v, inputs.d_out].map(|view| bindable(client, view).arg());
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            dq_mapped::dq_mapped::launch_unchecked::<U, L, E>(
                client,
                count,
                CubeDim::new_1d(self.plan.threads as u32),
                address_type(device, &self.call.views(&[self.dq]))?,
                self.plan.load_components(),
                self.plan.store_width,
                q,
                k,
                v,
                d_out,
                BufferArg::from_raw_parts(stats.clone(), self.call.stats_len()),
                mask,
                self.dq.arg(),
                cubes,
                problem.scale,
                problem.scale * core::f32::consts::LOG2_E,
                *self.plan,
                mask_type,
            );
        }
        Ok(())
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
        let Call {
            client,
            problem,
            device,
            inputs,
            stats,
        } = self.call;
        let shape = &problem.shape;
        let block_m = self.plan.tile.block_m;
        let cubes = Seq::count(shape.batch, shape.num_kv_heads, shape.seqlen_k, block_m);
        let (count, cubes) = grid(cubes, device.max_cubes)?;
        let (mask, mask_type) = mask_arg(client, inputs.mask);
        let [q, k, v, d_out] =
            [inputs.q, inputs.k, inputs.v, inputs.d_out].map(|view| bindable(client, view).arg());
        let (both, dv_offset) = self.buffer();
        let len = dv_offset + self.dv.reach();
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            dkv::dkv::launch_unchecked::<U, L, E>(
                client,
                count,
                CubeDim::new_1d(self.plan.threads as u32),
                address_type(device, &self.call.views(&[self.dk, self.dv]))?,
                self.plan.load_components(),
                self.plan.store_width,
                q,
                k,
                v,
                d_out,
                BufferArg::from_raw_parts(stats.clone(), self.call.stats_len()),
                mask,
                BufferArg::from_raw_parts(both, len),
                cubes,
                dv_offset,
                problem.scale,
                problem.scale * core::f32::consts::LOG2_E,
                *self.plan,
                mask_type,
            );
        }
        Ok(())
    }

    fn launch_mapped<U: MappedUnit, L: Numeric, E: Float>(&self) -> Result<(), AttentionError> {
        let Call {
            client,
            problem,
            device,
            inputs,
            stats,
        } = self.call;
        let shape = &problem.shape;
        let block_m = self.plan.tile.block_m;
        let cubes = Seq::count(shape.batch, shape.num_kv_heads, shape.seqlen_k, block_m);
        let (count, cubes) = grid(cubes, device.max_cubes)?;
        let (mask, mask_type) = mask_arg(client, inputs.mask);
        let [q, k, v, d_out] =
            [inputs.q, inputs.k, inputs.v, inputs.d_out].map(|view| bindable(client, view).arg());
        let (both, dv_offset) = self.buffer();
        let len = dv_offset + self.dv.reach();
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            dkv_mapped::dkv_mapped::launch_unchecked::<U, L, E>(
                client,
                count,
                CubeDim::new_1d(self.plan.threads as u32),
                address_type(device, &self.call.views(&[self.dk, self.dv]))?,
                self.plan.load_components(),
                self.plan.store_width,
                q,
                k,
                v,
                d_out,
                BufferArg::from_raw_parts(stats.clone(), self.call.stats_len()),
                mask,
                BufferArg::from_raw_parts(both, len),
                cubes,
                dv_offset,
                problem.scale,
                problem.scale * core::f32::consts::LOG2_E,
                *self.plan,
                mask_type,
            );
        }
        Ok(())
    }

    fn launch_overlapped<E: HalfFloat>(&self) -> Result<(), AttentionError> {
        overlapped::dkv::<E>(self)
    }
}
