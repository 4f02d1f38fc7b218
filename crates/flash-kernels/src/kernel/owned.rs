//! The rows that a cube owns, on their way to become a left operand.

use cubecl::prelude::*;

use super::{
    rows::Rows,
    tile::{SharedTile, load_tile},
    unit::{MatrixUnit, ptx},
};
use crate::plan::{CopyKind, Plan};

/// The rows `[first, first + block_m)` of a head, and the tile in shared memory by which they come.
#[derive(CubeType)]
pub struct Owned<U: MatrixUnit> {
    rows: Rows,
    first: u32,
    tile: SharedTile<U::Stage, U::Width>,
    #[cube(comptime)]
    cols: usize,
}

#[cube]
impl<U: MatrixUnit> Owned<U> {
    /// Allocates the tile for `cols` (padded) columns, or the place of `QueryOperand::Lent`.
    pub fn new(
        rows: Rows,
        first: u32,
        #[comptime] cols: usize,
        #[comptime] plan: Plan,
    ) -> Owned<U> {
        let len = comptime!(if plan.lends() {
            plan.place_len()
        } else {
            plan.owned_len(cols)
        });
        let data = Shared::<[Vector<U::Stage, U::Width>]>::new_aligned_slice(
            comptime!(len / plan.vector_elems()),
            16usize,
        );
        Owned::<U> {
            rows,
            first,
            tile: tile_in::<U>(data, cols, plan),
            cols,
        }
    }

    /// The same rows of another tensor, by a tile of their own; by the same one, if that is lent.
    pub fn beside(&self, rows: Rows, #[comptime] cols: usize, #[comptime] plan: Plan) -> Owned<U> {
        if comptime!(plan.lends()) {
            Owned::<U> {
                rows,
                first: self.first,
                tile: tile_in::<U>(self.place(), cols, plan),
                cols,
            }
        } else {
            Owned::<U>::new(rows, self.first, cols, plan)
        }
    }

    /// Where the tile lies.
    pub fn place(&self) -> Shared<[Vector<U::Stage, U::Width>]> {
        self.tile.data.clone()
    }

    /// Sends the rows `[block_m, cols]` of `src` on their way, zeros past their end. Visible after `own_wait`.
    pub fn send<L: Numeric, W: Size>(&self, src: &Tensor<Vector<L, W>>, #[comptime] plan: Plan) {
        let mut tile = self.tile.clone();
        let (block_m, cols) = comptime!((plan.tile.block_m, self.cols));
        load_tile::<U, L, W>(src, &self.rows, &mut tile, self.first, block_m, cols, plan);
        if comptime!(plan.copy == CopyKind::Async) {
            ptx::copy_commit();
        }
    }

    /// The left operand `[block_m, cols]`. The tile must be visible.
    pub fn left(&self, #[comptime] plan: Plan) -> U::Left {
        U::left(&self.tile, comptime!(self.cols), plan)
    }

    /// The left operand `[block_m, cols]` by way of a tile that is lent: no unit reads it on return.
    pub fn taken<L: Numeric, W: Size>(
        &self,
        src: &Tensor<Vector<L, W>>,
        #[comptime] plan: Plan,
    ) -> U::Left {
        self.send(src, plan);
        // The tile was written by other units than those that read it.
        sync_cube();
        let left = self.left(plan);
        // What comes next overwrites it.
        sync_cube();
        left
    }
}

#[cube]
fn tile_in<U: MatrixUnit>(
    data: Shared<[Vector<U::Stage, U::Width>]>,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> SharedTile<U::Stage, U::Width> {
    SharedTile::<U::Stage, U::Width> {
        data,
        base: 0usize.runtime(),
        stride: comptime!(plan.row_stride(cols) / plan.vector_elems()),
    }
}

/// Makes what was sent visible to the cube, while the first step's may still travel.
#[cube]
pub fn own_wait(#[comptime] plan: Plan) {
    if comptime!(plan.copy == CopyKind::Async) {
        // All groups but the first step's.
        ptx::copy_wait(1u32);
    }
    // The tiles were written by other units than those that read them.
    sync_cube();
}
