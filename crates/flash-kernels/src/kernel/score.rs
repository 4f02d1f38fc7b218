//! From `q·k` to a logit, and the gradient of each step beside it: scale (softcap and bias go
//! through the composed path).

use cubecl::prelude::*;

use super::{math::exp2, unit::MatrixUnit};
use crate::{
    Isa,
    plan::{Plan, ScaleKind},
};

/// `s = c·s` where the softmax cannot fold `c = scale·log2(e)` into its exponent.
///
/// Shapes: `s` `[rows, cols]` of this unit. Nothing is shared, nothing is synchronised.
#[cube]
pub fn apply<U: MatrixUnit>(s: &mut U::Frag, scale_log2: f32, #[comptime] plan: Plan) {
    if comptime!(plan.scale == ScaleKind::Before) {
        let rows = U::rows(&*s);
        let cols = U::cols(&*s);
        #[unroll]
        for r in 0..rows {
            #[unroll]
            for c in 0..cols {
                let x = U::get(&*s, r, c) * scale_log2;
                U::set(s, r, c, x);
            }
        }
    }
}

/// `p = exp2(c·s - lse)`, recomputed from the score: `c = scale·log2(e)`, `lse` in base 2.
#[cube]
pub fn probability(s: f32, lse_log2: f32, scale_log2: f32, #[comptime] isa: Isa) -> f32 {
    exp2(s * scale_log2 - lse_log2, isa)
}

/// `ds = p·(dp - delta)`, the gradient of a logit; exactly 0 where `p` is, whatever `dp`.
#[cube]
pub fn gradient(p: f32, dp: f32, delta: f32) -> f32 {
    select(
        p == f32::new(0.0),
        f32::new(0.0),
        gradient_of_seen(p, dp, delta),
    )
}

/// `gradient` of a pair that is known to be seen, for which `dp` is a number.
#[cube]
pub fn gradient_of_seen(p: f32, dp: f32, delta: f32) -> f32 {
    p * (dp - delta)
}
