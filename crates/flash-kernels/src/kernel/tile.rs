//! A tile in shared memory, and its way there from global memory.

use cubecl::prelude::*;

use super::{
    rows::Rows,
    unit::{MatrixUnit, ptx},
};
use crate::plan::{CopyKind, Plan};

/// Row-major tile in shared memory: row `r` begins at `base + r·stride` (in vectors of `V`).
#[derive(CubeType, Clone)]
#[expand(derive(Clone))]
pub struct SharedTile<S: Scalar, V: Size> {
    /// The buffer in which the tile lies.
    pub data: Shared<[Vector<S, V>]>,
    /// First vector of the tile.
    pub base: usize,
    /// Vectors between rows.
    #[cube(comptime)]
    pub stride: usize,
}

/// `dst[r, c] = src[first + r, c]`, 0 past the last row or column, for `tile_rows × cols`.
///
/// All units of the cube share the work. Nothing is synchronised: under `CopyKind::Async` the
/// tile is visible after the wait for the group that the caller commits and a cube barrier,
/// otherwise after a cube barrier.
#[cube]
pub fn load_tile<U: MatrixUnit, L: Numeric, W: Size>(
    src: &Tensor<Vector<L, W>>,
    rows: &Rows,
    dst: &mut SharedTile<U::Stage, U::Width>,
    first: u32,
    #[comptime] tile_rows: usize,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let per_row = comptime!(cols / plan.vector_elems());
    let total = comptime!(tile_rows * per_row);
    let rounds = comptime!(total.div_ceil(plan.threads));
    #[unroll(rounds <= 16)]
    for i in 0..rounds {
        let slot = UNIT_POS as usize + i * comptime!(plan.threads);
        // The first comparison is comptime: where the slots come out even, so is the whole test.
        if comptime!(total % plan.threads == 0) || slot < total {
            load_slot::<U, L, W>(src, rows, dst, first, slot, per_row, plan);
        }
    }
}

/// One vector of the tile.
#[cube]
fn load_slot<U: MatrixUnit, L: Numeric, W: Size>(
    src: &Tensor<Vector<L, W>>,
    rows: &Rows,
    dst: &mut SharedTile<U::Stage, U::Width>,
    first: u32,
    slot: usize,
    #[comptime] per_row: usize,
    #[comptime] plan: Plan,
) {
    let width = comptime!(plan.vector_elems());
    let r = slot / per_row;
    let c = slot % per_row;
    let row = first + r as u32;
    let at = dst.base + r * dst.stride + c;
    if comptime!(plan.copy == CopyKind::Async) {
        let inside = row < rows.len && ((c * width) as u32) < rows.dim;
        let bytes = select(inside, 16u32, 0u32);
        // An outside address must still be a valid one.
        let line = select(inside, row, 0u32) as usize;
        let col = select(inside, c * width, 0usize);
        let from = (rows.offset + line * rows.row_stride + col) / width;
        ptx::copy_async(&dst.data, at, src, from, bytes);
    } else {
        dst.data[at] = gather::<U, L, W>(src, rows, row, c * width, plan);
    }
}

/// The elements `[row, col ..]` of `src` that make a vector of a tile, 0 where there are none.
#[cube]
fn gather<U: MatrixUnit, L: Numeric, W: Size>(
    src: &Tensor<Vector<L, W>>,
    rows: &Rows,
    row: u32,
    col: usize,
    #[comptime] plan: Plan,
) -> Vector<U::Stage, U::Width> {
    let mut value = Vector::<U::Stage, U::Width>::new(U::Stage::from_int(0));
    let narrow = comptime!(plan.load_width);
    #[unroll]
    for j in 0..comptime!(plan.vector_elems() / narrow) {
        let at = col + comptime!(j * narrow);
        if row < rows.len && (at as u32) < rows.dim {
            let from = rows.offset + row as usize * rows.row_stride + at * rows.col_stride;
            value = U::stage::<L, W>(value, src[from / narrow], j, plan);
        }
    }
    value
}

/// The vectors of a tile that this unit will put there: `CopyKind::Ahead`'s way, in two halves.
#[cube]
pub fn fetch_tile<U: MatrixUnit, L: Numeric, W: Size>(
    src: &Tensor<Vector<L, W>>,
    rows: &Rows,
    carried: &mut Array<Vector<U::Stage, U::Width>>,
    first: u32,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let per_row = comptime!(cols / plan.vector_elems());
    #[unroll]
    for i in 0..comptime!(plan.carried(cols)) {
        let slot = UNIT_POS as usize + comptime!(i * plan.threads);
        let row = first + (slot / per_row) as u32;
        let col = slot % per_row * comptime!(plan.vector_elems());
        carried[i] = gather::<U, L, W>(src, rows, row, col, plan);
    }
}

/// Puts what `fetch_tile` left into the tile. Visible after a cube barrier.
#[cube]
pub fn put_tile<U: MatrixUnit>(
    carried: &Array<Vector<U::Stage, U::Width>>,
    dst: &mut SharedTile<U::Stage, U::Width>,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let per_row = comptime!(cols / plan.vector_elems());
    let total = comptime!(plan.tile.block_n * per_row);
    #[unroll]
    for i in 0..comptime!(plan.carried(cols)) {
        let slot = UNIT_POS as usize + comptime!(i * plan.threads);
        // The first comparison is comptime: where the slots come out even, so is the whole test.
        if comptime!(total % plan.threads == 0) || slot < total {
            let at = dst.base + slot / per_row * dst.stride + slot % per_row;
            dst.data[at] = carried[i];
        }
    }
}
