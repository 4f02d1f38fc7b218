//! 16-bit elements as words of two, four words to a vector: eight elements, 16 bytes.

use cubecl::prelude::*;

use crate::{kernel::tile::SharedTile, plan::Plan};

/// 16-bit floats that matrix units multiply.
pub trait HalfFloat: Float {
    /// Their name in PTX.
    const PTX: &'static str;
    /// The bits of the exponent, all set in what is not finite.
    const EXPONENT: u32;
    /// The bits of the largest number, in both halves of a word.
    const LARGEST: u32;
}

impl HalfFloat for half::f16 {
    const PTX: &'static str = "f16";
    const EXPONENT: u32 = 0x7c00;
    const LARGEST: u32 = 0x7bff_7bff;
}

impl HalfFloat for half::bf16 {
    const PTX: &'static str = "bf16";
    const EXPONENT: u32 = 0x7f80;
    const LARGEST: u32 = 0x7f7f_7f7f;
}

/// `value` with the elements of `loaded` from its element `j·narrow` on; `loaded` has `narrow` of
/// them, or is a whole vector of words if that is 8.
#[cube]
pub fn stage_words<L: Numeric, W: Size>(
    value: Vector<u32, Const<4>>,
    loaded: Vector<L, W>,
    #[comptime] j: usize,
    #[comptime] narrow: usize,
) -> Vector<u32, Const<4>> {
    let mut value = value;
    if comptime!(narrow == 8) {
        value = Vector::<u32, Const<4>>::reinterpret(loaded);
    } else if comptime!(narrow == 4) {
        let words = Vector::<u32, Const<2>>::reinterpret(loaded);
        value.insert(comptime!(2 * j), words.extract(0usize));
        value.insert(comptime!(2 * j + 1), words.extract(1usize));
    } else if comptime!(narrow == 2) {
        value.insert(j, u32::reinterpret(loaded));
    } else {
        let mut pair = Vector::<L, Const<2>>::new(L::from_int(0));
        pair.insert(comptime!(j % 2), loaded.extract(0usize));
        // The other half is zero bits on both sides.
        let word = value.extract(comptime!(j / 2)) | u32::reinterpret(pair);
        value.insert(comptime!(j / 2), word);
    }
    value
}

/// `value` with 0 for each of its eight elements whose `exponent` bits are all set.
#[cube]
fn finite_words(value: Vector<u32, Const<4>>, #[comptime] exponent: u32) -> Vector<u32, Const<4>> {
    let high = comptime!(exponent << 16);
    let mut value = value;
    #[unroll]
    for i in 0..4usize {
        let word = value.extract(i);
        let low_half = select(word & exponent == exponent, 0u32, 0xffffu32);
        let high_half = select(word & high == high, 0u32, 0xffff_0000u32);
        value.insert(i, word & (low_half | high_half));
    }
    value
}

/// Replaces what is not finite in a walked tile by 0. Visible to the cube on return.
#[cube]
pub fn drop_non_finite(
    tile: &SharedTile<u32, Const<4>>,
    #[comptime] cols: usize,
    #[comptime] exponent: u32,
    #[comptime] plan: Plan,
) {
    let mut data = tile.data.clone();
    let per_row = comptime!(cols / 8);
    let total = comptime!(plan.tile.block_n * per_row);
    // No unit may still multiply by what is replaced.
    sync_cube();
    for i in 0..comptime!(total.div_ceil(plan.threads)) {
        let slot = UNIT_POS as usize + i * comptime!(plan.threads);
        if comptime!(total % plan.threads == 0) || slot < total {
            let at = tile.base + slot / per_row * comptime!(tile.stride) + slot % per_row;
            data[at] = finite_words(data[at], exponent);
        }
    }
    // Replaced by other units than those that multiply by it.
    sync_cube();
}
