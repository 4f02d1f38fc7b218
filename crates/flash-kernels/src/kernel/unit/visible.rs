//! How lanes see cooperative matrices: through the plane's own shared memory.
//!
//! The plane stores 16×16 blocks as a whole and its lanes read (part of) rows, or the other way
//! round; a plane barrier lies between the two.

use cubecl::{
    cmma::{self, Matrix, MatrixIdent, MatrixLayout},
    prelude::*,
};

use crate::plan::Plan;

/// What a lane sees of a product: `rows` rows, of each the groups of four columns
/// `part + i·parts`.
#[derive(CubeType)]
pub struct CmmaFrag {
    pub cells: Array<Vector<f32, Const<4>>>,
    #[cube(comptime)]
    pub rows: usize,
    #[cube(comptime)]
    pub groups: usize,
}

/// Visible scores `[block_m, block_n]` in f32 and probabilities in the element type.
#[derive(CubeType)]
pub struct CmmaScratch<E: Float> {
    pub scores: Shared<[Vector<f32, Const<4>>]>,
    pub probs: Shared<[Vector<E, Const<4>>]>,
}

/// Left operands `[m16, k16]`.
#[derive(CubeType)]
pub struct CmmaLeft<E: Float> {
    pub cells: Sequence<Matrix<E>>,
}

/// Accumulators `[m16, n16]`.
#[derive(CubeType)]
pub struct CmmaAcc {
    pub cells: Sequence<Matrix<f32>>,
    /// Columns in all.
    #[cube(comptime)]
    pub cols: usize,
}

/// Lanes that share a row.
pub const fn parts(plan: Plan) -> usize {
    if plan.plane_size > plan.rows {
        plan.plane_size / plan.rows
    } else {
        1
    }
}

/// Rows of a lane.
pub const fn lane_rows(plan: Plan) -> usize {
    if plan.rows > plan.plane_size {
        plan.rows / plan.plane_size
    } else {
        1
    }
}

/// Columns of the running sum that fit the visible scores, and are whole matrices.
pub const fn part_width(cols: usize, plan: Plan) -> usize {
    let mut width = plan.tile.block_n;
    while !cols.is_multiple_of(width) {
        width -= 16;
    }
    width
}

pub const fn score_stride(plan: Plan) -> usize {
    plan.tile.block_n + 4
}

#[cube]
pub fn lane(#[comptime] plan: Plan) -> u32 {
    UNIT_POS % comptime!(plan.plane_size as u32)
}

#[cube]
pub fn plane_row(#[comptime] plan: Plan) -> u32 {
    (UNIT_POS / comptime!(plan.plane_size as u32)) * comptime!(plan.rows as u32)
}

#[cube]
pub fn lane_row(#[comptime] r: usize, #[comptime] plan: Plan) -> u32 {
    plane_row(plan)
        + lane(plan) / comptime!(parts(plan) as u32)
        + comptime!((r * plan.plane_size) as u32)
}

/// First f32 vector of this plane's visible block of 16 rows `m` and columns `col`.
#[cube]
pub fn score_at(#[comptime] m: usize, #[comptime] col: usize, #[comptime] plan: Plan) -> usize {
    (plane_row(plan) as usize + comptime!(16 * m)) * comptime!(score_stride(plan) / 4)
        + comptime!(col / 4)
}

#[cube]
pub fn accumulator() -> Matrix<f32> {
    Matrix::<f32>::from_value(
        MatrixIdent::Accumulator,
        16usize,
        16usize,
        16usize,
        MatrixLayout::Undefined,
        0.0f32,
    )
}

/// The operand whose 16×16 block begins at vector `at`, rows `stride` elements apart.
#[cube]
pub fn operand<E: Float>(
    data: &Shared<[Vector<E, Const<4>>]>,
    at: usize,
    #[comptime] stride: usize,
    #[comptime] ident: MatrixIdent,
    #[comptime] layout: MatrixLayout,
) -> Matrix<E> {
    let mut matrix =
        unsafe { Matrix::<E>::uninitialized(ident, 16usize, 16usize, 16usize, layout) };
    let end = data.len();
    cmma::load(&mut matrix, data.slice(at, end), comptime!(stride as u32));
    matrix
}

/// Puts accumulator `matrix` into the visible block that begins at vector `at`.
#[cube]
pub fn show<E: Float>(
    scratch: &mut CmmaScratch<E>,
    matrix: &Matrix<f32>,
    at: usize,
    #[comptime] plan: Plan,
) {
    let end = scratch.scores.len();
    cmma::store(
        scratch.scores.slice_mut(at, end),
        matrix,
        comptime!(score_stride(plan) as u32),
        MatrixLayout::RowMajor,
    );
}

/// Shows `cols` columns of accumulators, which the plane has stored, to its lanes.
#[cube]
pub fn visible<E: Float>(
    scratch: &CmmaScratch<E>,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> CmmaFrag {
    let rows = comptime!(lane_rows(plan));
    let groups = comptime!(cols / 4 / parts(plan));
    let mut cells = Array::<Vector<f32, Const<4>>>::new(comptime!(rows * groups));
    let part = (lane(plan) % comptime!(parts(plan) as u32)) as usize;
    #[unroll]
    for r in 0..rows {
        let line = lane_row(r, plan) as usize * comptime!(score_stride(plan) / 4) + part;
        #[unroll]
        for g in 0..groups {
            cells[comptime!(r * groups + g)] = scratch.scores[line + comptime!(g * parts(plan))];
        }
    }
    CmmaFrag {
        cells,
        rows,
        groups,
    }
}

/// Stores the columns of `part` of the running sum where the lanes can see them.
#[cube]
pub fn show_part<E: Float>(
    acc: &CmmaAcc,
    scratch: &mut CmmaScratch<E>,
    #[comptime] part: usize,
    #[comptime] plan: Plan,
) {
    let n_tiles = comptime!(acc.cols / 16);
    let per_part = comptime!(part_width(acc.cols, plan) / 16);
    // The lanes may still be reading what was visible before.
    sync_plane();
    #[unroll]
    for m in 0..comptime!(plan.rows / 16) {
        #[unroll]
        for n in 0..per_part {
            let matrix = acc
                .cells
                .index(comptime!(m * n_tiles + part * per_part + n));
            show(scratch, matrix, score_at(m, comptime!(16 * n), plan), plan);
        }
    }
    // Stored by the plane as a whole, read lane by lane.
    sync_plane();
}

/// Takes the columns of `part` back from where the lanes have changed them.
#[cube]
pub fn take_part<E: Float>(
    acc: &mut CmmaAcc,
    scratch: &CmmaScratch<E>,
    #[comptime] part: usize,
    #[comptime] plan: Plan,
) {
    let n_tiles = comptime!(acc.cols / 16);
    let per_part = comptime!(part_width(acc.cols, plan) / 16);
    // Written lane by lane, loaded by the plane as a whole.
    sync_plane();
    let end = scratch.scores.len();
    #[unroll]
    for m in 0..comptime!(plan.rows / 16) {
        #[unroll]
        for n in 0..per_part {
            let at = score_at(m, comptime!(16 * n), plan);
            cmma::load_with_layout(
                acc.cells
                    .index_mut(comptime!(m * n_tiles + part * per_part + n)),
                scratch.scores.slice(at, end),
                comptime!(score_stride(plan) as u32),
                MatrixLayout::RowMajor,
            );
        }
    }
}
