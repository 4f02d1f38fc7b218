//! 16-bit elements as words of two, four words to a vector: eight elements, 16 bytes.

use cubecl::prelude::*;

use crate::kernel::math::is_finite;

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

/// `value` with 0 for each of its eight `E` that is not finite.
#[cube]
pub fn finite_words<E: Float>(value: Vector<u32, Const<4>>) -> Vector<u32, Const<4>> {
    let mut value = value;
    #[unroll]
    for i in 0..4usize {
        let pair = Vector::<E, Const<2>>::reinterpret(value.extract(i));
        let low = is_finite(f32::cast_from(pair.extract(0usize)));
        let high = is_finite(f32::cast_from(pair.extract(1usize)));
        let mask = select(low, 0xffffu32, 0u32) | select(high, 0xffff_0000u32, 0u32);
        value.insert(i, value.extract(i) & mask);
    }
    value
}
