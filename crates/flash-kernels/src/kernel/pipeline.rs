//! What a cube walks, on its way into shared memory: one step ahead where the device can.

use cubecl::prelude::*;

use super::{
    owned::{Owned, own_wait},
    rows::Rows,
    tile::{SharedTile, fetch_tile, load_tile, put_tile},
    unit::{MatrixUnit, ptx},
};
use crate::plan::{CopyKind, Plan, ValueBuffer};

/// The tiles of two tensors that are walked together (K and V, or Q and dO).
///
/// Under `CopyKind::Async` there are two stages: `Self::first` waits for this step's tiles and
/// sends off the next one's. Under `CopyKind::Vector` there is one and the loads are made when
/// the tile is asked for. Under `CopyKind::Ahead` there is one, `Self::first` loads the next step's
/// tiles into registers and `Self::release` moves them on. Under `ValueBuffer::OfKeys` the two share
/// a buffer, under `QueryOperand::Lent` they lie one behind the other where the owned tiles were.
#[derive(CubeType)]
pub struct Pipeline<U: MatrixUnit> {
    one: Shared<[Vector<U::Stage, U::Width>]>,
    two: Shared<[Vector<U::Stage, U::Width>]>,
    /// What travels under `CopyKind::Ahead`.
    one_ahead: Array<Vector<U::Stage, U::Width>>,
    two_ahead: Array<Vector<U::Stage, U::Width>>,
    one_rows: Rows,
    two_rows: Rows,
    #[cube(comptime)]
    one_cols: usize,
    #[cube(comptime)]
    two_cols: usize,
    /// First vector of the second tensor's tile, where both lie in one buffer.
    #[cube(comptime)]
    two_base: usize,
}

#[cube]
impl<U: MatrixUnit> Pipeline<U> {
    /// Stages for tensors of `one_cols` and `two_cols` (padded) columns: allocated, or in the `place` of
    /// owned tiles that lend it.
    pub fn new(
        place: &Shared<[Vector<U::Stage, U::Width>]>,
        one_rows: Rows,
        two_rows: Rows,
        #[comptime] one_cols: usize,
        #[comptime] two_cols: usize,
        #[comptime] plan: Plan,
    ) -> Pipeline<U> {
        let one = if comptime!(plan.lends()) {
            place.clone()
        } else {
            stages::<U>(one_cols, plan)
        };
        let two = if comptime!(!plan.lends() && plan.values == ValueBuffer::Own) {
            stages::<U>(two_cols, plan)
        } else {
            one.clone()
        };
        let two_base = comptime!(if plan.lends() {
            plan.walked_len(one_cols) / plan.vector_elems()
        } else {
            0
        });
        Pipeline::<U> {
            one,
            two,
            one_ahead: carried::<U>(one_cols, plan),
            two_ahead: carried::<U>(two_cols, plan),
            one_rows,
            two_rows,
            one_cols,
            two_cols,
            two_base,
        }
    }

    /// The same stages over other rows. No unit may still read a tile.
    pub fn toward(&self, one_rows: Rows, two_rows: Rows, #[comptime] plan: Plan) -> Pipeline<U> {
        Pipeline::<U> {
            one: self.one.clone(),
            two: self.two.clone(),
            one_ahead: carried::<U>(comptime!(self.one_cols), plan),
            two_ahead: carried::<U>(comptime!(self.two_cols), plan),
            one_rows,
            two_rows,
            one_cols: comptime!(self.one_cols),
            two_cols: comptime!(self.two_cols),
            two_base: comptime!(self.two_base),
        }
    }

    fn load_one<L: Numeric, W: Size>(
        &self,
        src: &Tensor<Vector<L, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) {
        let cols = comptime!(self.one_cols);
        let mut tile = tile_of::<U>(&self.one, step, cols, 0usize, plan);
        let first = step * comptime!(plan.tile.block_n as u32);
        load_tile::<U, L, W>(
            src,
            &self.one_rows,
            &mut tile,
            first,
            comptime!(plan.tile.block_n),
            cols,
            plan,
        );
    }

    fn load_two<L: Numeric, W: Size>(
        &self,
        src: &Tensor<Vector<L, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) {
        let cols = comptime!(self.two_cols);
        let mut tile = tile_of::<U>(&self.two, step, cols, comptime!(self.two_base), plan);
        let first = step * comptime!(plan.tile.block_n as u32);
        load_tile::<U, L, W>(
            src,
            &self.two_rows,
            &mut tile,
            first,
            comptime!(plan.tile.block_n),
            cols,
            plan,
        );
    }

    /// Sends off the tiles of `step`, the first one, behind whatever was issued before.
    pub fn start<L: Numeric, W: Size>(
        &self,
        one: &Tensor<Vector<L, W>>,
        two: &Tensor<Vector<L, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) {
        if comptime!(plan.copy != CopyKind::Vector) {
            self.load_one(one, step, plan);
            self.load_two(two, step, plan);
        }
        if comptime!(plan.copy == CopyKind::Async) {
            ptx::copy_commit();
        }
    }

    /// Sends off the tiles of `step`, the first one, and returns what is `owned` of `src` as a left
    /// operand `[block_m, cols]`.
    /// If its place is lent, the operand goes before; else they may travel together.
    pub fn start_behind<L: Numeric, W: Size>(
        &self,
        owned: &Owned<U>,
        src: &Tensor<Vector<L, W>>,
        one: &Tensor<Vector<L, W>>,
        two: &Tensor<Vector<L, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) -> U::Left {
        if comptime!(plan.lends()) {
            let left = owned.taken(src, plan);
            self.start(one, two, step, plan);
            left
        } else {
            owned.send(src, plan);
            self.start(one, two, step, plan);
            own_wait(plan);
            owned.left(plan)
        }
    }

    /// `start_behind` of two owned tensors.
    #[allow(clippy::too_many_arguments)]
    pub fn start_behind_two<L: Numeric, W: Size>(
        &self,
        owned_one: &Owned<U>,
        owned_two: &Owned<U>,
        src_one: &Tensor<Vector<L, W>>,
        src_two: &Tensor<Vector<L, W>>,
        one: &Tensor<Vector<L, W>>,
        two: &Tensor<Vector<L, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) -> (U::Left, U::Left) {
        if comptime!(plan.lends()) {
            let left = owned_one.taken(src_one, plan);
            let right = owned_two.taken(src_two, plan);
            self.start(one, two, step, plan);
            (left, right)
        } else {
            owned_one.send(src_one, plan);
            owned_two.send(src_two, plan);
            self.start(one, two, step, plan);
            own_wait(plan);
            (owned_one.left(plan), owned_two.left(plan))
        }
    }

    /// The first tensor's tile of `step`, visible to the cube. All units have left the step before.
    pub fn first<L: Numeric, W: Size>(
        &mut self,
        one: &Tensor<Vector<L, W>>,
        two: &Tensor<Vector<L, W>>,
        step: u32,
        end: u32,
        #[comptime] plan: Plan,
    ) -> SharedTile<U::Stage, U::Width> {
        if comptime!(plan.copy == CopyKind::Async) {
            ptx::copy_wait(0u32);
            // Every unit's copies have landed, and no unit reads the other stage any more.
            sync_cube();
            if step + 1u32 < end {
                self.load_one(one, step + 1u32, plan);
                self.load_two(two, step + 1u32, plan);
            }
            ptx::copy_commit();
        } else if comptime!(plan.copy == CopyKind::Ahead) {
            // The tiles were written by other units than those that read them.
            sync_cube();
            if step + 1u32 < end {
                let first = (step + 1u32) * comptime!(plan.tile.block_n as u32);
                let (one_cols, two_cols) = comptime!((self.one_cols, self.two_cols));
                fetch_tile::<U, L, W>(
                    one,
                    &self.one_rows,
                    &mut self.one_ahead,
                    first,
                    one_cols,
                    plan,
                );
                fetch_tile::<U, L, W>(
                    two,
                    &self.two_rows,
                    &mut self.two_ahead,
                    first,
                    two_cols,
                    plan,
                );
            }
        } else {
            self.load_one(one, step, plan);
            if comptime!(plan.values == ValueBuffer::Own) {
                self.load_two(two, step, plan);
            }
            // The tiles were written by other units than those that read them.
            sync_cube();
        }
        tile_of::<U>(&self.one, step, comptime!(self.one_cols), 0usize, plan)
    }

    /// The second tensor's tile, visible to the cube; the first's is gone if they share a buffer.
    pub fn second<L: Numeric, W: Size>(
        &self,
        two: &Tensor<Vector<L, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) -> SharedTile<U::Stage, U::Width> {
        if comptime!(plan.values == ValueBuffer::OfKeys) {
            // No unit may still read the tile that is overwritten.
            sync_cube();
            self.load_two(two, step, plan);
            // The tile was written by other units than those that read it.
            sync_cube();
        }
        tile_of::<U>(
            &self.two,
            step,
            comptime!(self.two_cols),
            comptime!(self.two_base),
            plan,
        )
    }

    /// The first tensor's tile once more, after `Self::second`.
    pub fn again<L: Numeric, W: Size>(
        &self,
        one: &Tensor<Vector<L, W>>,
        step: u32,
        #[comptime] plan: Plan,
    ) -> SharedTile<U::Stage, U::Width> {
        if comptime!(plan.values == ValueBuffer::OfKeys) {
            // No unit may still read the tile that is overwritten.
            sync_cube();
            self.load_one(one, step, plan);
            // The tile was written by other units than those that read it.
            sync_cube();
        }
        tile_of::<U>(&self.one, step, comptime!(self.one_cols), 0usize, plan)
    }

    /// Ends a step: with a single stage, no unit may still read what the next one overwrites.
    pub fn release(&self, step: u32, #[comptime] plan: Plan) {
        if comptime!(plan.copy != CopyKind::Async) {
            // The next step overwrites both tiles.
            sync_cube();
        }
        if comptime!(plan.copy == CopyKind::Ahead) {
            let (one_cols, two_cols) = comptime!((self.one_cols, self.two_cols));
            let mut tile = tile_of::<U>(&self.one, step, one_cols, 0usize, plan);
            put_tile::<U>(&self.one_ahead, &mut tile, one_cols, plan);
            let mut tile = tile_of::<U>(&self.two, step, two_cols, comptime!(self.two_base), plan);
            put_tile::<U>(&self.two_ahead, &mut tile, two_cols, plan);
        }
    }
}

/// Registers for the vectors of a tile that this unit carries, if it does.
#[cube]
fn carried<U: MatrixUnit>(
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> Array<Vector<U::Stage, U::Width>> {
    Array::new(comptime!(match plan.copy {
        CopyKind::Ahead => plan.carried(cols),
        CopyKind::Vector | CopyKind::Async | CopyKind::Boxes => 1,
    }))
}

#[cube]
fn stages<U: MatrixUnit>(
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> Shared<[Vector<U::Stage, U::Width>]> {
    let width = comptime!(plan.vector_elems());
    Shared::<[Vector<U::Stage, U::Width>]>::new_aligned_slice(
        comptime!(plan.stages() * plan.walked_len(cols) / width),
        16usize,
    )
}

/// The tile of `step`: steps alternate between two stages, or share one.
#[cube]
fn tile_of<U: MatrixUnit>(
    data: &Shared<[Vector<U::Stage, U::Width>]>,
    step: u32,
    #[comptime] cols: usize,
    #[comptime] first: usize,
    #[comptime] plan: Plan,
) -> SharedTile<U::Stage, U::Width> {
    let width = comptime!(plan.vector_elems());
    let base = if comptime!(plan.stages() == 1) {
        first.runtime()
    } else {
        (step % comptime!(plan.stages() as u32)) as usize * comptime!(plan.walked_len(cols) / width)
    };
    SharedTile::<U::Stage, U::Width> {
        data: data.clone(),
        base,
        stride: comptime!(plan.row_stride(cols) / width),
    }
}
