//! From `q·k` to a logit: scale (softcap and bias go through the composed path).

use cubecl::prelude::*;

use super::unit::MatrixUnit;
use crate::plan::{Plan, ScaleKind};

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
