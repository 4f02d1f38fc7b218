//! K and V on their way into shared memory, one step ahead where the device can.

use cubecl::prelude::*;

use super::{
    rows::Rows,
    tile::{SharedTile, load_tile},
    unit::{MatrixUnit, ptx},
};
use crate::plan::{CopyKind, Plan, ValueBuffer};

/// The tiles of one head's keys and values.
///
/// Under [`CopyKind::Async`] there are two stages: [`Self::keys`] waits for this step's tiles and
/// sends off the next one's. Under [`CopyKind::Vector`] there is one and the loads are made when
/// the tile is asked for.
#[derive(CubeType)]
pub struct Pipeline<U: MatrixUnit> {
    keys: Shared<[Vector<U::Stage, U::Width>]>,
    values: Shared<[Vector<U::Stage, U::Width>]>,
    k_rows: Rows,
    v_rows: Rows,
}

#[cube]
impl<U: MatrixUnit> Pipeline<U> {
    /// Allocates the stages.
    pub fn new(k_rows: Rows, v_rows: Rows, #[comptime] plan: Plan) -> Pipeline<U> {
        let width = comptime!(<U::Width as Size>::value());
        let keys = Shared::<[Vector<U::Stage, U::Width>]>::new_aligned_slice(
            comptime!(plan.stages() * plan.key_stage_len() / width),
            16usize,
        );
        let values = if comptime!(plan.values == ValueBuffer::Own) {
            Shared::<[Vector<U::Stage, U::Width>]>::new_aligned_slice(
                comptime!(plan.stages() * plan.value_stage_len() / width),
                16usize,
            )
        } else {
            keys.clone()
        };
        Pipeline::<U> {
            keys,
            values,
            k_rows,
            v_rows,
        }
    }

    fn key_tile(&self, step: u32, #[comptime] plan: Plan) -> SharedTile<U::Stage, U::Width> {
        let width = comptime!(<U::Width as Size>::value());
        SharedTile::<U::Stage, U::Width> {
            data: self.keys.clone(),
            base: stage(step, plan) * comptime!(plan.key_stage_len() / width),
            stride: comptime!(plan.row_stride(plan.tile.head_pad) / width),
        }
    }

    fn value_tile(&self, step: u32, #[comptime] plan: Plan) -> SharedTile<U::Stage, U::Width> {
        let width = comptime!(<U::Width as Size>::value());
        let len = comptime!(match plan.values {
            ValueBuffer::Own => plan.value_stage_len(),
            ValueBuffer::OfKeys => plan.key_stage_len(),
        });
        SharedTile::<U::Stage, U::Width> {
            data: self.values.clone(),
            base: stage(step, plan) * comptime!(len / width),
            stride: comptime!(plan.row_stride(plan.tile.val_pad) / width),
        }
    }

    fn load_keys<E: Float, W: Size>(
        &self,
        k: &Tensor<Vector<E, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) {
        let mut tile = self.key_tile(step, plan);
        let first = step * comptime!(plan.tile.block_n as u32);
        let (rows, cols) = comptime!((plan.tile.block_n, plan.tile.head_pad));
        load_tile(k, &self.k_rows, &mut tile, first, rows, cols, plan);
    }

    fn load_values<E: Float, W: Size>(
        &self,
        v: &Tensor<Vector<E, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) {
        let mut tile = self.value_tile(step, plan);
        let first = step * comptime!(plan.tile.block_n as u32);
        let (rows, cols) = comptime!((plan.tile.block_n, plan.tile.val_pad));
        load_tile(v, &self.v_rows, &mut tile, first, rows, cols, plan);
    }

    /// Sends off the tiles of `step`, the first one, behind whatever was issued before.
    pub fn start<E: Float, W: Size>(
        &self,
        k: &Tensor<Vector<E, W>>,
        v: &Tensor<Vector<E, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) {
        if comptime!(plan.copy == CopyKind::Async) {
            self.load_keys(k, step, plan);
            self.load_values(v, step, plan);
            ptx::copy_commit();
        }
    }

    /// K's tile of `step`, visible to the cube. All units have left the step before.
    pub fn keys<E: Float, W: Size>(
        &self,
        k: &Tensor<Vector<E, W>>,
        v: &Tensor<Vector<E, W>>,
        step: u32,
        end: u32,
        #[comptime] plan: Plan,
    ) -> SharedTile<U::Stage, U::Width> {
        if comptime!(plan.copy == CopyKind::Async) {
            ptx::copy_wait(0u32);
            // Every unit's copies have landed, and no unit reads the other stage any more.
            sync_cube();
            if step + 1u32 < end {
                self.load_keys(k, step + 1u32, plan);
                self.load_values(v, step + 1u32, plan);
            }
            ptx::copy_commit();
        } else {
            self.load_keys(k, step, plan);
            if comptime!(plan.values == ValueBuffer::Own) {
                self.load_values(v, step, plan);
            }
            // The tiles were written by other units than those that read them.
            sync_cube();
        }
        self.key_tile(step, plan)
    }

    /// V's tile of `step`, visible to the cube; K's is gone if the two share a buffer.
    pub fn values<E: Float, W: Size>(
        &self,
        v: &Tensor<Vector<E, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) -> SharedTile<U::Stage, U::Width> {
        if comptime!(plan.values == ValueBuffer::OfKeys) {
            // No unit may still read K, over which V is written.
            sync_cube();
            self.load_values(v, step, plan);
            // V was written by other units than those that read it.
            sync_cube();
        }
        self.value_tile(step, plan)
    }

    /// Ends a step: with a single stage, no unit may still read what the next one overwrites.
    pub fn release(&self, #[comptime] plan: Plan) {
        if comptime!(plan.copy == CopyKind::Vector) {
            // The next step overwrites both tiles.
            sync_cube();
        }
    }
}

/// Stage of a step: steps alternate between two, or share one.
#[cube]
fn stage(step: u32, #[comptime] plan: Plan) -> usize {
    if comptime!(plan.stages() == 1) {
        0usize.runtime()
    } else {
        (step % comptime!(plan.stages() as u32)) as usize
    }
}
