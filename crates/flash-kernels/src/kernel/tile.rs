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

/// Shared memory for an owned tile of `cols` columns, or the place of `QueryOperand::Lent`.
#[cube]
pub fn own_place<U: MatrixUnit>(
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> Shared<[Vector<U::Stage, U::Width>]> {
    let len = comptime!(if plan.lends() {
        plan.place_len()
    } else {
        plan.owned_len(cols)
    });
    Shared::<[Vector<U::Stage, U::Width>]>::new_aligned_slice(
        comptime!(len / plan.vector_elems()),
        16usize,
    )
}

/// The place of a second owned tile: the first one's, if that is lent.
#[cube]
pub fn second_place<U: MatrixUnit>(
    first: &Shared<[Vector<U::Stage, U::Width>]>,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> Shared<[Vector<U::Stage, U::Width>]> {
    if comptime!(plan.lends()) {
        first.clone()
    } else {
        own_place::<U>(cols, plan)
    }
}

/// A tile of `cols` columns at the beginning of `place`.
#[cube]
pub fn own_tile<U: MatrixUnit>(
    place: &Shared<[Vector<U::Stage, U::Width>]>,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> SharedTile<U::Stage, U::Width> {
    SharedTile::<U::Stage, U::Width> {
        data: place.clone(),
        base: 0usize.runtime(),
        stride: comptime!(plan.row_stride(cols) / plan.vector_elems()),
    }
}

/// Sends the rows `[first, first + block_m)`, which the cube owns, to `tile`. Visible after `own_wait`.
#[cube]
pub fn own<U: MatrixUnit, L: Numeric, W: Size>(
    src: &Tensor<Vector<L, W>>,
    rows: &Rows,
    tile: &SharedTile<U::Stage, U::Width>,
    first: u32,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let mut tile = tile.clone();
    let block_m = comptime!(plan.tile.block_m);
    load_tile::<U, L, W>(src, rows, &mut tile, first, block_m, cols, plan);
    if comptime!(plan.copy == CopyKind::Async) {
        ptx::copy_commit();
    }
}

/// `own` as a left operand in registers, for `QueryOperand::Lent`: no unit reads `tile` on return.
#[cube]
pub fn own_left<U: MatrixUnit, L: Numeric, W: Size>(
    src: &Tensor<Vector<L, W>>,
    rows: &Rows,
    tile: &SharedTile<U::Stage, U::Width>,
    first: u32,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> U::Left {
    own::<U, L, W>(src, rows, tile, first, cols, plan);
    // The tile was written by other units than those that read it.
    sync_cube();
    let left = U::left(tile, cols, plan);
    // What comes next overwrites it.
    sync_cube();
    left
}

/// Makes the tiles of `own` visible to the cube, while the first step's may still travel.
#[cube]
pub fn own_wait(#[comptime] plan: Plan) {
    if comptime!(plan.copy == CopyKind::Async) {
        // All groups but the first step's.
        ptx::copy_wait(1u32);
    }
    // The tiles were written by other units than those that read them.
    sync_cube();
}
