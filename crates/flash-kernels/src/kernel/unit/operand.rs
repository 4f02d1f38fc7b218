//! What `Mma` multiplies: elements in shared memory, operands in registers, and the instruction.
//!
//! A block of an operand is 32 bytes wide, whatever its elements: 16 halves or 8 f32, the depth of one
//! instruction. `ldmatrix` moves bytes, so it serves both; only transposed it knows 16-bit elements alone.

use cubecl::prelude::*;

use super::{
    Right,
    mma::{MmaFrag, block_offset, lane, row_first},
    ptx,
    words::HalfFloat,
};
use crate::{
    kernel::tile::SharedTile,
    plan::{Plan, Rounding},
};

/// Elements that `mma.sync` multiplies. All verbs are those of one plane.
#[cube]
pub trait Operand: Send + Sync + 'static {
    /// Element of a tile in shared memory.
    type Stage: Numeric;
    /// Elements of a vector of 16 bytes.
    type Width: Size;

    /// What `ldmatrix` brought, as the instruction takes it.
    fn taken(words: Vector<u32, Const<4>>, #[comptime] plan: Plan) -> Vector<u32, Const<4>>;

    /// Makes the `plan.rows` rows from `first_row` on, of `depth` elements, what `Self::taken` would make
    /// of them. Only this plane reads them, and it may do so on return.
    fn take_rows(
        tile: &SharedTile<Self::Stage, Self::Width>,
        first_row: u32,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    );

    /// `c + a·b` for a left block `[m16, 32 bytes]` and a right one `[32 bytes, n8]`.
    fn multiply(
        a: Vector<u32, Const<4>>,
        b: Vector<u32, Const<2>>,
        c: Vector<f32, Const<4>>,
    ) -> Vector<f32, Const<4>>;

    /// The left block at (`m`, `k`) of a product.
    fn held(
        frag: &MmaFrag,
        #[comptime] m: usize,
        #[comptime] k: usize,
        #[comptime] plan: Plan,
    ) -> Vector<u32, Const<4>>;

    /// From where this lane reads right blocks whose depth is a tile's rows.
    fn right_address(tile: &SharedTile<Self::Stage, Self::Width>) -> u32;

    /// The right blocks of the rows of block `k` and the 16 columns of `pair`; `stride` is the tile's.
    fn right_pair(
        address: u32,
        #[comptime] k: usize,
        #[comptime] pair: usize,
        #[comptime] stride: usize,
        #[comptime] right: Right,
        #[comptime] plan: Plan,
    ) -> Vector<u32, Const<4>>;
}

#[cube]
impl<E: HalfFloat> Operand for E {
    type Stage = E;
    type Width = Const<8>;

    fn taken(words: Vector<u32, Const<4>>, #[comptime] _plan: Plan) -> Vector<u32, Const<4>> {
        words
    }

    fn take_rows(
        _tile: &SharedTile<E, Const<8>>,
        _first_row: u32,
        #[comptime] _depth: usize,
        #[comptime] _plan: Plan,
    ) {
    }

    fn multiply(
        a: Vector<u32, Const<4>>,
        b: Vector<u32, Const<2>>,
        c: Vector<f32, Const<4>>,
    ) -> Vector<f32, Const<4>> {
        ptx::mma_m16n8k16(a, b, c, comptime!(E::PTX))
    }

    /// Two accumulators side by side.
    fn held(
        frag: &MmaFrag,
        #[comptime] m: usize,
        #[comptime] k: usize,
        #[comptime] _plan: Plan,
    ) -> Vector<u32, Const<4>> {
        let mut block = Vector::<u32, Const<4>>::empty();
        #[unroll]
        for half in 0..2usize {
            let x = frag.cells[comptime!(m * frag.n_tiles + 2 * k + half)];
            let upper = ptx::pack(x.extract(0usize), x.extract(1usize), comptime!(E::PTX));
            let lower = ptx::pack(x.extract(2usize), x.extract(3usize), comptime!(E::PTX));
            block.insert(comptime!(2 * half), upper);
            block.insert(comptime!(2 * half + 1), lower);
        }
        block
    }

    fn right_address(tile: &SharedTile<E, Const<8>>) -> u32 {
        row_first::<E, Const<8>>(tile, 0u32)
    }

    fn right_pair(
        address: u32,
        #[comptime] k: usize,
        #[comptime] pair: usize,
        #[comptime] stride: usize,
        #[comptime] right: Right,
        #[comptime] _plan: Plan,
    ) -> Vector<u32, Const<4>> {
        let both = ptx::ldmatrix_trans(address, comptime!(block_offset(16 * k, pair, stride)));
        if comptime!(right == Right::Finite) {
            clamped::<E>(both)
        } else {
            both
        }
    }
}

/// f32 in memory, tf32 in the products: 8 bits of exponent and 10 of fraction, to the nearest.
pub struct Tf32;

/// The bits of the largest tf32.
const LARGEST_TF32: u32 = 0x7f7f_e000;

/// How PTX calls the plan's rounding.
const fn mode(plan: Plan) -> &'static str {
    match plan.rounding {
        Rounding::Away => "rna",
        Rounding::Even => "rn",
    }
}

/// Each of the words rounded.
#[cube]
fn rounded(words: Vector<u32, Const<4>>, #[comptime] plan: Plan) -> Vector<u32, Const<4>> {
    let mut words = words;
    #[unroll]
    for i in 0..4usize {
        let word = ptx::round_tf32(words.extract(i), comptime!(mode(plan)));
        words.insert(i, word);
    }
    words
}

#[cube]
impl Operand for Tf32 {
    type Stage = f32;
    type Width = Const<4>;

    fn taken(words: Vector<u32, Const<4>>, #[comptime] plan: Plan) -> Vector<u32, Const<4>> {
        rounded(words, plan)
    }

    fn take_rows(
        tile: &SharedTile<f32, Const<4>>,
        first_row: u32,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) {
        let mut data = tile.data.clone();
        let per_row = comptime!(depth / 4);
        let first = tile.base + first_row as usize * comptime!(tile.stride);
        // Rows are multiples of 16 and vectors of a row of 4: the lanes come out even.
        for i in 0..comptime!(plan.rows * per_row / 32) {
            let slot = lane() as usize + i * 32usize;
            let at = first + slot / per_row * comptime!(tile.stride) + slot % per_row;
            let words = rounded(Vector::<u32, Const<4>>::reinterpret(data[at]), plan);
            data[at] = Vector::<f32, Const<4>>::reinterpret(words);
        }
        // Rounded by other lanes than those that read.
        sync_plane();
    }

    fn multiply(
        a: Vector<u32, Const<4>>,
        b: Vector<u32, Const<2>>,
        c: Vector<f32, Const<4>>,
    ) -> Vector<f32, Const<4>> {
        ptx::mma_m16n8k8(a, b, c)
    }

    /// One accumulator: its columns `2t` and `2t + 1` are taken for `t` and `t + 4` of the depth, the
    /// order in which `Self::right_pair` reads rows. Nothing changes lanes.
    fn held(
        frag: &MmaFrag,
        #[comptime] m: usize,
        #[comptime] k: usize,
        #[comptime] plan: Plan,
    ) -> Vector<u32, Const<4>> {
        let x = frag.cells[comptime!(m * frag.n_tiles + k)];
        let mut block = Vector::<u32, Const<4>>::empty();
        #[unroll]
        for column in 0..2usize {
            let upper = u32::reinterpret(x.extract(column));
            let lower = u32::reinterpret(x.extract(comptime!(2 + column)));
            block.insert(
                comptime!(2 * column),
                ptx::round_tf32(upper, comptime!(mode(plan))),
            );
            block.insert(
                comptime!(2 * column + 1),
                ptx::round_tf32(lower, comptime!(mode(plan))),
            );
        }
        block
    }

    /// Rows `2t` and `2t + 1` of a block, column `g`: with rows 16 bytes longer than their data, no two
    /// lanes of an access meet on a bank.
    fn right_address(tile: &SharedTile<f32, Const<4>>) -> u32 {
        // Computed anew in each step, which leaves a register to what fills them.
        let lane = ptx::opaque(UNIT_POS) % 32u32;
        let (row, col) = (lane % 4u32 * 2u32, lane / 4u32);
        ptx::shared_address(&tile.data, tile.base)
            + row * comptime!(16 * tile.stride as u32)
            + col * 4u32
    }

    fn right_pair(
        address: u32,
        #[comptime] k: usize,
        #[comptime] pair: usize,
        #[comptime] stride: usize,
        #[comptime] right: Right,
        #[comptime] plan: Plan,
    ) -> Vector<u32, Const<4>> {
        let mut both = Vector::<u32, Const<4>>::empty();
        // 16 columns are two blocks of 32 bytes. Words, not pairs of columns: those would have to be moved
        // to where the instruction takes them.
        #[unroll]
        for row in 0..2usize {
            #[unroll]
            for half in 0..2usize {
                let offset = comptime!(block_offset(8 * k + row, 2 * pair + half, stride));
                both.insert(comptime!(2 * half + row), ptx::load_word(address, offset));
            }
        }
        if comptime!(right == Right::Finite) {
            #[unroll]
            for i in 0..4usize {
                let word = ptx::clamp_f32(both.extract(i), LARGEST_TF32);
                both.insert(i, word);
            }
        }
        rounded(both, plan)
    }
}

/// `words` with the largest number of `E` for NaN and infinities.
#[cube]
pub(crate) fn clamped<E: HalfFloat>(words: Vector<u32, Const<4>>) -> Vector<u32, Const<4>> {
    let mut words = words;
    #[unroll]
    for i in 0..4usize {
        let word = ptx::clamp(words.extract(i), comptime!(E::LARGEST), comptime!(E::PTX));
        words.insert(i, word);
    }
    words
}
