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
/// All units of the cube share the work. Nothing is synchronised: under `CopyKind::Vector` a
/// cube barrier makes the tile visible, under `CopyKind::Async` the wait for the group that
/// the caller commits, and then a barrier.
#[cube]
pub fn load_tile<E: Float, W: Size, S: Float, V: Size>(
    src: &Tensor<Vector<E, W>>,
    rows: &Rows,
    dst: &mut SharedTile<S, V>,
    first: u32,
    #[comptime] tile_rows: usize,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let width = dst.data.vector_size();
    let per_row = comptime!(cols / width);
    let total = comptime!(tile_rows * per_row);
    let rounds = comptime!(total.div_ceil(plan.threads));
    #[unroll(rounds <= 16)]
    for i in 0..rounds {
        let slot = UNIT_POS as usize + i * comptime!(plan.threads);
        // The first comparison is comptime: where the slots come out even, so is the whole test.
        if comptime!(total % plan.threads == 0) || slot < total {
            load_slot(src, rows, dst, first, slot, per_row, plan);
        }
    }
}

/// One vector of the tile.
#[cube]
fn load_slot<E: Float, W: Size, S: Float, V: Size>(
    src: &Tensor<Vector<E, W>>,
    rows: &Rows,
    dst: &mut SharedTile<S, V>,
    first: u32,
    slot: usize,
    #[comptime] per_row: usize,
    #[comptime] plan: Plan,
) {
    let width = dst.data.vector_size();
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
        dst.data[at] = gather(src, rows, row, c * width);
    }
}

/// The elements `[row, col .. col + V]` of `src`, 0 where there are none, converted to `S`.
#[cube]
fn gather<E: Float, W: Size, S: Float, V: Size>(
    src: &Tensor<Vector<E, W>>,
    rows: &Rows,
    row: u32,
    col: usize,
) -> Vector<S, V> {
    let mut value = Vector::<S, V>::new(S::from_int(0));
    let wide = value.vector_size();
    let narrow = src.vector_size();
    #[unroll]
    for j in 0..comptime!(wide / narrow) {
        let at = col + comptime!(j * narrow);
        if row < rows.len && (at as u32) < rows.dim {
            let from = rows.offset + row as usize * rows.row_stride + at * rows.col_stride;
            let x = src[from / narrow];
            #[unroll]
            for e in 0..narrow {
                value.insert(comptime!(j * narrow + e), S::cast_from(x.extract(e)));
            }
        }
    }
    value
}

/// Sends the rows `[first, first + block_m)`, which the cube owns, to shared memory of their own.
/// Visible after `own_wait`.
#[cube]
pub fn own<U: MatrixUnit, E: Float, W: Size>(
    src: &Tensor<Vector<E, W>>,
    rows: &Rows,
    first: u32,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> SharedTile<U::Stage, U::Width> {
    let width = comptime!(<U::Width as Size>::value());
    let mut tile = SharedTile::<U::Stage, U::Width> {
        data: Shared::<[Vector<U::Stage, U::Width>]>::new_aligned_slice(
            comptime!(plan.owned_len(cols) / width),
            16usize,
        ),
        base: 0usize.runtime(),
        stride: comptime!(plan.row_stride(cols) / width),
    };
    load_tile(
        src,
        rows,
        &mut tile,
        first,
        comptime!(plan.tile.block_m),
        cols,
        plan,
    );
    if comptime!(plan.copy == CopyKind::Async) {
        ptx::copy_commit();
    }
    tile
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
