//! The online softmax: the recurrence, once, for every unit.
//!
//! Milakov & Gimelshein 2018, algorithm 3; FlashAttention-2 (Dao 2023), algorithm 1. `p` and
//! `alpha` are both in base 2, `exp2(c·(s - m))` with `c = scale·log2(e)`.
//!
//! A large `c·m` has a large rounding error. In `c·(s - m)` it does not appear, since the difference
//! is exact (`Exponent::Exact`). `c·s - c·m` as one fused multiply-add saves an instruction per
//! score (`Exponent::Fused`), has the rounding error of `c·m` in it, and is used by plans for 16 bits and
//! for tf32, in rows where that error is far below theirs.

use cubecl::prelude::*;

use super::{
    math::{exp2, finite_or_zero, neg_infinity, reciprocal},
    unit::MatrixUnit,
};
use crate::{
    Isa,
    plan::{Exponent, Plan},
};

/// How far, in powers of two, the running maximum may lag behind the true one before `acc` is
/// rescaled. `p` then stays below 2^8, exactly representable growth in f16 and bf16.
const LAZY_LIMIT: f32 = 8.0;

/// Up to which `|c·m|` the fused exponent is used: its rounding error is below 2^-15 there, and a
/// probability is off by less than 2^-15 of itself, an eighth of what f16 resolves.
const FUSED_LIMIT: f32 = 512.0;

/// The bits of a NaN.
const NO_NUMBER: u32 = 0x7fc0_0000;

/// What a step asks of everything that was summed up before it, a factor for each row.
#[derive(CubeType)]
pub struct Rescale {
    /// `exp2(m - m')`.
    pub alpha: Array<f32>,
    /// False if all of them are 1, in all units of the group where it votes (`MatrixUnit::any`).
    pub stale: bool,
}

/// Running maximum and sum of the rows that this unit sees.
#[derive(CubeType)]
pub struct OnlineSoftmax {
    /// `max(s)` so far, equal in all units that share the row.
    row_max: Array<f32>,
    /// This unit's part of `Σ exp2(s - row_max)`; reduced over the row in `Self::finish`.
    row_sum: Array<f32>,
    /// Largest score with which a row keeps its maximum and may use `Exponent::Fused`; NaN if none.
    ceiling: Array<f32>,
    /// What is folded into the exponent: `scale·log2(e)`, or 1 if it is in `s` already.
    scale: f32,
    #[cube(comptime)]
    rows: usize,
    #[cube(comptime)]
    isa: Isa,
}

#[cube]
impl OnlineSoftmax {
    /// No key seen: maximum -inf, sum 0.
    pub fn new(scale: f32, #[comptime] rows: usize, #[comptime] isa: Isa) -> OnlineSoftmax {
        let mut row_max = Array::<f32>::new(rows);
        let mut row_sum = Array::<f32>::new(rows);
        let mut ceiling = Array::<f32>::new(rows);
        #[unroll]
        for r in 0..rows {
            row_max[r] = neg_infinity(isa);
            ceiling[r] = neg_infinity(isa);
            row_sum[r] = f32::new(0.0);
        }
        OnlineSoftmax {
            row_max,
            row_sum,
            ceiling,
            scale,
            rows,
            isa,
        }
    }

    /// `m' = max(m, max s)`, `p = exp2(s - m')`, `alpha = exp2(m - m')`,
    /// `l = alpha·l + Σp`, `acc = alpha·acc`.
    ///
    /// Shapes: `s` `[rows, cols]` becomes `p`; `acc` has the same rows. The units of a row agree
    /// on its maximum when this returns; what `U` needs for that is synchronised by `U`.
    /// `m'` may lag behind by `LAZY_LIMIT` so that `acc` is rarely touched; the result is the
    /// same, since `p`, `l` and `acc` share the base.
    pub fn step<U: MatrixUnit>(
        &mut self,
        s: &mut U::Frag,
        acc: &mut U::Acc,
        scratch: &mut U::Scratch,
        #[comptime] plan: Plan,
    ) {
        let rescale = self.advance::<U>(s, scratch, plan);
        U::rescale(acc, &rescale.alpha, rescale.stale, scratch, plan);
    }

    /// `step` but for `acc`, which the caller rescales: it may still be growing meanwhile.
    ///
    /// With `Exponent::Fused` units learn the maximum of a row only in a step in which one of them
    /// has a score beyond `ceiling`.
    pub fn advance<U: MatrixUnit>(
        &mut self,
        s: &mut U::Frag,
        scratch: &mut U::Scratch,
        #[comptime] plan: Plan,
    ) -> Rescale {
        let rows = comptime!(self.rows);
        let mut peak = row_peaks::<U>(&*s, rows, plan);
        let mut alpha = Array::<f32>::new(rows);
        let mut sum = Array::<f32>::new(rows);
        let stale = if comptime!(plan.exponent == Exponent::Exact) {
            self.raise::<U>(s, &mut peak, &mut alpha, &mut sum, scratch, plan)
        } else {
            let mut due = false.runtime();
            #[unroll]
            for r in 0..rows {
                // Not a `>`: what is no number is due.
                let within = peak[r] <= self.ceiling[r];
                due = due || !within;
                alpha[r] = f32::new(1.0);
            }
            let due = U::any(due);
            if due {
                self.raise::<U>(s, &mut peak, &mut alpha, &mut sum, scratch, plan);
            } else {
                exponentials::<U>(s, self.scale, &self.base(), &mut sum, plan);
            }
            due
        };
        #[unroll]
        for r in 0..rows {
            self.row_sum[r] = self.row_sum[r] * alpha[r] + sum[r];
        }
        Rescale { alpha, stale }
    }

    /// What is subtracted from scores.
    fn base(&self) -> Array<f32> {
        let mut base = Array::<f32>::new(comptime!(self.rows));
        #[unroll]
        for r in 0..comptime!(self.rows) {
            base[r] = finite_or_zero(self.row_max[r], comptime!(self.isa));
        }
        base
    }

    /// `s` becomes `p`, with a new maximum of each row for which the old one is too small, given each
    /// unit's own `peak`. Returns whether an `alpha` is not 1.
    fn raise<U: MatrixUnit>(
        &mut self,
        s: &mut U::Frag,
        peak: &mut Array<f32>,
        alpha: &mut Array<f32>,
        sum: &mut Array<f32>,
        scratch: &mut U::Scratch,
        #[comptime] plan: Plan,
    ) -> bool {
        let isa = comptime!(self.isa);
        U::reduce_max(peak, scratch, plan);
        let mut stale = false.runtime();
        #[unroll]
        for r in 0..comptime!(self.rows) {
            let old = self.row_max[r];
            let new = max(old, peak[r]);
            let keep = self.keeps(old, new, r, plan);
            let now = select(keep, old, new);
            stale = stale || !keep;
            let lag = exp2((old - finite_or_zero(now, isa)) * self.scale, isa);
            alpha[r] = select(keep, f32::new(1.0), lag);
            self.row_max[r] = now;
            if comptime!(plan.exponent == Exponent::Fused) {
                // No number, and so below no peak, in a far row: also a tile of which it sees
                // nothing must not meet a `c·m` that may be infinite.
                let near = now + f32::new(LAZY_LIMIT) / self.scale;
                let seen = select(self.is_far(now), f32::reinterpret(NO_NUMBER), near);
                self.ceiling[r] = select(now == neg_infinity(isa), now, seen);
            }
        }
        let mut base = self.base();
        if comptime!(plan.exponent == Exponent::Fused) {
            self.draw_near::<U>(s, &mut base);
        }
        exponentials::<U>(s, self.scale, &base, sum, plan);
        stale
    }

    /// May row `r` keep `old` where `new` is the maximum? Where units compare with the ceiling, it
    /// decides here too: whether a row is raised must not depend on other rows.
    fn keeps(&self, old: f32, new: f32, #[comptime] r: usize, #[comptime] plan: Plan) -> bool {
        // The difference of two -inf is no number: the first comparison answers then.
        let near = new <= old || (new - old) * self.scale <= LAZY_LIMIT;
        if comptime!(plan.exponent == Exponent::Exact) {
            near
        } else {
            new <= self.ceiling[r] || (near && self.is_far(old))
        }
    }

    /// Is the rounding error of `c·m` too large to be in an exponent?
    fn is_far(&self, peak: f32) -> bool {
        (peak * self.scale).abs() > FUSED_LIMIT
    }

    /// Subtracts a base that is far from `s` at once, exactly, and leaves 0 to subtract. Other rows stay
    /// as they are: their bits do not depend on what else a plane sees.
    fn draw_near<U: MatrixUnit>(&self, s: &mut U::Frag, base: &mut Array<f32>) {
        let (rows, cols) = (U::rows(&*s), U::cols(&*s));
        #[unroll]
        for r in 0..rows {
            let far = self.is_far(base[r]);
            let now = select(far, base[r], f32::new(0.0));
            base[r] = select(far, f32::new(0.0), base[r]);
            #[unroll]
            for c in 0..cols {
                let x = U::get(&*s, r, c) - now;
                U::set(s, r, c, x);
            }
        }
    }

    /// Goes on with the rows of `next`, and forgets its own.
    pub fn succeed(&mut self, next: &OnlineSoftmax) {
        #[unroll]
        for r in 0..comptime!(self.rows) {
            self.row_max[r] = next.row_max[r];
            self.row_sum[r] = next.row_sum[r];
            self.ceiling[r] = next.ceiling[r];
        }
    }

    /// Reduces the sums: afterwards `row_sum` is the whole row's in each of its units.
    pub fn finish<U: MatrixUnit>(&mut self, scratch: &mut U::Scratch, #[comptime] plan: Plan) {
        U::reduce_sum(&mut self.row_sum, scratch, plan);
    }

    /// `1 / l`, or 0 for a row that saw nothing, whose output is exactly 0.
    pub fn inverse_sum(&self, #[comptime] r: usize) -> f32 {
        inverse(self.row_sum[r], comptime!(self.isa))
    }

    /// Natural logarithm of `Σ exp(logit)`; -inf for a row that saw nothing.
    pub fn lse(&self, #[comptime] r: usize) -> f32 {
        let isa = comptime!(self.isa);
        log_sum(self.row_max[r], self.row_sum[r], self.scale, isa)
    }

    /// Maximum of the scores, which may lag behind, and sum in that base.
    pub fn state(&self, #[comptime] r: usize) -> (f32, f32) {
        (self.row_max[r], self.row_sum[r])
    }
}

/// `1 / sum`, or 0 for a row that saw nothing.
#[cube]
pub fn inverse(sum: f32, #[comptime] isa: Isa) -> f32 {
    select(sum == f32::new(0.0), f32::new(0.0), reciprocal(sum, isa))
}

/// Natural logarithm of `sum·2^(scale·peak)`; -inf for a row that saw nothing.
#[cube]
pub fn log_sum(peak: f32, sum: f32, scale: f32, #[comptime] isa: Isa) -> f32 {
    let lse = peak * scale * comptime!(core::f32::consts::LN_2) + sum.ln();
    select(sum == f32::new(0.0), neg_infinity(isa), lse)
}

/// Partial results of a row, so that an instruction need not wait for the last one's.
const fn chains(plan: Plan, cols: usize) -> usize {
    match plan.exponent {
        Exponent::Fused if cols > 1 => 2,
        Exponent::Fused | Exponent::Exact => 1,
    }
}

/// This unit's maximum of each of its rows of `s`.
#[cube]
fn row_peaks<U: MatrixUnit>(
    s: &U::Frag,
    #[comptime] rows: usize,
    #[comptime] plan: Plan,
) -> Array<f32> {
    let cols = U::cols(s);
    let chains = comptime!(chains(plan, cols));
    let mut peak = Array::<f32>::new(rows);
    let mut part = Array::<f32>::new(chains);
    #[unroll]
    for r in 0..rows {
        #[unroll]
        for c in 0..cols {
            let x = U::get(s, r, c);
            let i = comptime!(c % chains);
            part[i] = if comptime!(c < chains) {
                x
            } else {
                max(part[i], x)
            };
        }
        peak[r] = part[0];
        #[unroll]
        for i in 1..chains {
            peak[r] = max(peak[r], part[i]);
        }
    }
    peak
}

/// `s[r, :] = exp2(scale·(s[r, :] - base[r]))`; `sum` is this unit's part of each row's sum.
#[cube]
fn exponentials<U: MatrixUnit>(
    s: &mut U::Frag,
    scale: f32,
    base: &Array<f32>,
    sum: &mut Array<f32>,
    #[comptime] plan: Plan,
) {
    let (rows, cols) = (U::rows(&*s), U::cols(&*s));
    let chains = comptime!(chains(plan, cols));
    let mut part = Array::<f32>::new(chains);
    #[unroll]
    for r in 0..rows {
        let scaled = base[r] * scale;
        #[unroll]
        for c in 0..cols {
            let x = U::get(&*s, r, c);
            let exponent = if comptime!(plan.exponent == Exponent::Exact) {
                (x - base[r]) * scale
            } else {
                x * scale - scaled
            };
            let p = exp2(exponent, comptime!(plan.isa));
            U::set(s, r, c, p);
            let i = comptime!(c % chains);
            part[i] = if comptime!(c < chains) {
                p
            } else {
                part[i] + p
            };
        }
        sum[r] = part[0];
        #[unroll]
        for i in 1..chains {
            sum[r] += part[i];
        }
    }
}
