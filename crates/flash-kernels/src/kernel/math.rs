//! Elementary functions: one instruction where the target has it.

use cubecl::prelude::*;

use super::unit::ptx;
use crate::Isa;

/// `2^x`; `2^(-inf) = 0` exactly.
///
/// PTX: `ex2.approx.ftz`, relative error below 2^-22. Elsewhere `exp(x·ln 2)`, which drivers
/// lower to their own exp2.
#[cube]
pub fn exp2(x: f32, #[comptime] isa: Isa) -> f32 {
    if comptime!(isa == Isa::Ptx) {
        ptx::ex2(x)
    } else {
        (x * comptime!(core::f32::consts::LN_2)).exp()
    }
}

/// -inf.
///
/// WGSL cannot write an infinity, and refuses a constant expression that is one: there it is
/// made of a value that only the device knows to be 0.
#[cube]
pub fn neg_infinity(#[comptime] isa: Isa) -> f32 {
    if comptime!(isa == Isa::Ptx) {
        f32::new(f32::NEG_INFINITY)
    } else {
        f32::reinterpret(0xff80_0000u32 | (UNIT_POS >> 31u32))
    }
}

/// `x`, or 0 where `x = -inf`: the value to subtract from scores of which none may be finite.
/// Without it an empty row computes `-inf - (-inf) = NaN`.
#[cube]
pub fn finite_or_zero(x: f32, #[comptime] isa: Isa) -> f32 {
    select(x == neg_infinity(isa), f32::new(0.0), x)
}

/// Is `x` neither infinite nor NaN? By its bits: drivers may assume that there is no NaN.
#[cube]
pub fn is_finite(x: f32) -> bool {
    u32::reinterpret(x) & 0x7f80_0000u32 != 0x7f80_0000u32
}

/// `1 / x`, on PTX within an ulp; `x` is not subnormal.
#[cube]
pub fn reciprocal(x: f32, #[comptime] isa: Isa) -> f32 {
    if comptime!(isa == Isa::Ptx) {
        ptx::rcp(x)
    } else {
        f32::new(1.0) / x
    }
}
