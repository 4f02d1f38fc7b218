//! How lanes see cooperative matrices: through the plane's own shared memory.
//!
//! The plane stores 16×16 blocks as a whole and its lanes read (part of) rows, or the other way
//! round; a plane barrier lies between the two.

use cubecl::{
    cmma::{self, Matrix, MatrixIdent, MatrixLayout},
    prelude::*,
};

use crate::{kernel::tile::SharedTile, plan::Plan};

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

/// Visible scores `[block_m, plan.visible_cols()]`, the bits of f32; then, in the same rows, probabilities
/// as words of two.
#[derive(CubeType)]
pub struct CmmaScratch {
    pub words: Shared<[Vector<u32, Const<4>>]>,
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
    let mut width = plan.visible_cols();
    while !cols.is_multiple_of(width) {
        width -= 16;
    }
    width
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
        + lane(plan) / comptime!(plan.row_parts() as u32)
        + comptime!((r * plan.plane_size) as u32)
}

/// First f32 vector of this plane's visible block of 16 rows `m` and columns `col`.
#[cube]
pub fn score_at(#[comptime] m: usize, #[comptime] col: usize, #[comptime] plan: Plan) -> usize {
    (plane_row(plan) as usize + comptime!(16 * m)) * comptime!(plan.score_stride() / 4)
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

/// The operand whose 16×16 block begins at vector `at`, rows `stride` words apart.
#[cube]
pub fn operand<E: Float>(
    data: &Shared<[Vector<u32, Const<4>>]>,
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

/// `sums[m] += a·bᵀ` of the 16 rows of `b` from `16·n` on: column `n` of a product of matrices.
///
/// `a` `[rows, depth]`, `sums` a matrix to 16 rows. Each right operand is loaded once.
#[cube]
pub fn add_column<E: Float>(
    sums: &Sequence<Matrix<f32>>,
    a: &CmmaLeft<E>,
    b: &SharedTile<u32, Const<4>>,
    #[comptime] n: usize,
    #[comptime] depth: usize,
    #[comptime] plan: Plan,
) {
    let k_tiles = comptime!(depth / 16);
    #[unroll]
    for k in 0..k_tiles {
        let at = b.base + comptime!(16 * n * b.stride + 2 * k);
        let right = operand::<E>(
            &b.data,
            at,
            comptime!(4 * b.stride),
            MatrixIdent::B,
            MatrixLayout::ColMajor,
        );
        #[unroll]
        for m in 0..comptime!(plan.rows / 16) {
            let sum = sums.index(m);
            cmma::execute(a.cells.index(comptime!(m * k_tiles + k)), &right, sum, sum);
        }
    }
}

/// `acc += left·b` of the 16 rows of `b` from `16·k` on, `left` a matrix to 16 rows.
#[cube]
pub fn add_depth<E: Float>(
    acc: &mut CmmaAcc,
    left: &Sequence<Matrix<E>>,
    b: &SharedTile<u32, Const<4>>,
    #[comptime] k: usize,
    #[comptime] plan: Plan,
) {
    let n_tiles = comptime!(acc.cols / 16);
    #[unroll]
    for n in 0..n_tiles {
        let at = b.base + comptime!(16 * k * b.stride + 2 * n);
        let block = operand::<E>(
            &b.data,
            at,
            comptime!(4 * b.stride),
            MatrixIdent::B,
            MatrixLayout::RowMajor,
        );
        #[unroll]
        for m in 0..comptime!(plan.rows / 16) {
            let sum = acc.cells.index(comptime!(m * n_tiles + n));
            cmma::execute(left.index(m), &block, sum, sum);
        }
    }
}

/// Puts accumulator `matrix` into the visible block that begins at vector `at`.
#[cube]
pub fn show(scratch: &mut CmmaScratch, matrix: &Matrix<f32>, at: usize, #[comptime] plan: Plan) {
    let end = scratch.words.len();
    cmma::store(
        scratch.words.slice_mut(at, end),
        matrix,
        comptime!(plan.score_stride() as u32),
        MatrixLayout::RowMajor,
    );
}

/// Shows `cols` columns of accumulators, which the plane has stored, to its lanes.
#[cube]
pub fn visible(scratch: &CmmaScratch, #[comptime] cols: usize, #[comptime] plan: Plan) -> CmmaFrag {
    let rows = comptime!(lane_rows(plan));
    let groups = comptime!(cols / 4 / plan.row_parts());
    let mut cells = Array::<Vector<f32, Const<4>>>::new(comptime!(rows * groups));
    let part = (lane(plan) % comptime!(plan.row_parts() as u32)) as usize;
    #[unroll]
    for r in 0..rows {
        let line = lane_row(r, plan) as usize * comptime!(plan.score_stride() / 4) + part;
        #[unroll]
        for g in 0..groups {
            let bits = scratch.words[line + comptime!(g * plan.row_parts())];
            cells[comptime!(r * groups + g)] = Vector::<f32, Const<4>>::reinterpret(bits);
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
pub fn show_part(
    acc: &CmmaAcc,
    scratch: &mut CmmaScratch,
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
pub fn take_part(
    acc: &mut CmmaAcc,
    scratch: &CmmaScratch,
    #[comptime] part: usize,
    #[comptime] plan: Plan,
) {
    let n_tiles = comptime!(acc.cols / 16);
    let per_part = comptime!(part_width(acc.cols, plan) / 16);
    // Written lane by lane, loaded by the plane as a whole.
    sync_plane();
    let end = scratch.words.len();
    #[unroll]
    for m in 0..comptime!(plan.rows / 16) {
        #[unroll]
        for n in 0..per_part {
            let at = score_at(m, comptime!(16 * n), plan);
            cmma::load_with_layout(
                acc.cells
                    .index_mut(comptime!(m * n_tiles + part * per_part + n)),
                scratch.words.slice(at, end),
                comptime!(plan.score_stride() as u32),
                MatrixLayout::RowMajor,
            );
        }
    }
}

/// Puts the probabilities that this lane sees, rounded to `E`, where the plane loads them. A vector
/// of words is eight columns: two groups of this lane or, where two lanes share a row, one of each.
/// Those exchange: the first lane gets the pair on the left.
#[cube]
pub fn hold_words<E: Float>(frag: &CmmaFrag, scratch: &mut CmmaScratch, #[comptime] plan: Plan) {
    let stride = comptime!(plan.score_stride() / 4);
    let parts = comptime!(plan.row_parts());
    let part = lane(plan) % comptime!(parts as u32);
    #[unroll]
    for r in 0..comptime!(frag.rows) {
        let line = lane_row(r, plan) as usize * stride + part as usize;
        #[unroll]
        for i in 0..comptime!(frag.groups / 2) {
            let first = frag.cells[comptime!(r * frag.groups + 2 * i)];
            let second = frag.cells[comptime!(r * frag.groups + 2 * i + 1)];
            let mut left = packed::<E>(first);
            let mut right = packed::<E>(second);
            if comptime!(parts == 2) {
                let theirs = select(part == 0u32, right, left);
                let x = plane_shuffle_xor(theirs.extract(0usize), 1u32);
                let y = plane_shuffle_xor(theirs.extract(1usize), 1u32);
                let mut received = Vector::<u32, Const<2>>::empty();
                received.insert(0usize, x);
                received.insert(1usize, y);
                left = select(part == 0u32, left, received);
                right = select(part == 0u32, received, right);
            }
            let mut words = Vector::<u32, Const<4>>::empty();
            words.insert(0usize, left.extract(0usize));
            words.insert(1usize, left.extract(1usize));
            words.insert(2usize, right.extract(0usize));
            words.insert(3usize, right.extract(1usize));
            scratch.words[line + comptime!(i * parts)] = words;
        }
    }
}

/// Four probabilities, rounded to `E`, as two words.
#[cube]
fn packed<E: Float>(p: Vector<f32, Const<4>>) -> Vector<u32, Const<2>> {
    Vector::<u32, Const<2>>::reinterpret(Vector::<E, Const<4>>::cast_from(p))
}
