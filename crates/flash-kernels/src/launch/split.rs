//! The forward pass over parts of the keys: room for what they leave, and the kernel that merges it.

use cubecl::{client::Client, prelude::*};

use super::{ForwardOutput, TensorView, address_for, empty, grid};
use crate::{
    AttentionError, AttentionProblem, DeviceClass,
    kernel::combine::{THREADS, combine as kernel},
    plan::{Plan, ScaleKind},
    select::widest,
};

/// What the parts of the keys leave, in f32.
pub(super) struct Workspace {
    /// Sums of values, `[splits · batch, heads, seqlen_q, val_dim]`.
    pub parts: TensorView,
    /// Maximum and sum of each row, `[splits · batch, heads, seqlen_q, 2]`.
    pub stats: TensorView,
}

impl Workspace {
    /// Room for the parts of `plan`.
    pub fn new(client: &Client, problem: &AttentionProblem, plan: &Plan) -> Self {
        let shape = &problem.shape;
        let rows = |dim| {
            let batch = plan.splits * shape.batch;
            [batch, shape.num_heads, shape.seqlen_q, dim]
        };
        Self {
            parts: empty(client, rows(shape.val_dim), 4),
            stats: empty(client, rows(2), 4),
        }
    }

    /// Merges the parts of `plan` into `output`.
    ///
    /// # Errors
    ///
    /// When the output has more elements than a launch can address.
    pub fn combine<E: Float>(
        &self,
        client: &Client,
        problem: &AttentionProblem,
        plan: &Plan,
        output: &ForwardOutput,
    ) -> Result<(), AttentionError> {
        let device = DeviceClass::of(client);
        let val_dim = problem.shape.val_dim;
        let width = widest(val_dim, device.max_vector.min(4));
        let ForwardOutput { out, lse } = output;
        let vectors = out.reach() / width;
        let (count, _) = grid(vectors.div_ceil(THREADS), device.max_cubes)?;
        // The last cube counts on past the last vector.
        let address = address_for(&device, self.parts.reach().max(vectors + THREADS))?;
        // SAFETY: every access of the kernel is guarded by the lengths given here.
        unsafe {
            kernel::launch_unchecked::<E>(
                client,
                count,
                CubeDim::new_1d(THREADS as u32),
                address,
                width,
                BufferArg::from_raw_parts(self.parts.handle.clone(), self.parts.reach() / width),
                BufferArg::from_raw_parts(self.stats.handle.clone(), self.stats.reach() / 2),
                BufferArg::from_raw_parts(out.handle.clone(), vectors),
                BufferArg::from_raw_parts(lse.handle.clone(), lse.reach()),
                plan.splits as u32,
                lse.reach() as u32,
                (val_dim / width) as u32,
                match plan.scale {
                    ScaleKind::Folded => problem.scale * core::f32::consts::LOG2_E,
                    ScaleKind::Before => 1.0,
                },
                plan.isa,
            );
        }
        Ok(())
    }
}
