//! Merges what cubes leave that each walked a part of the keys.

use cubecl::prelude::*;

use super::{
    math::{exp2, finite_or_zero, neg_infinity},
    seq::position,
    softmax::{inverse, log_sum},
    unit::wgmma_ops::one_cube,
};
use crate::Isa;

/// Units of a cube.
pub const THREADS: usize = 128;

/// Parts that are loaded together, so that their latencies overlap: a row may have a hundred.
const BATCH: usize = 8;

/// `out = Σ wᵢ·accᵢ / Σ wᵢ·sumᵢ` and `lse = ln Σ exp(logit)` of each row, with
/// `wᵢ = exp2(scale·(peakᵢ - peak))` and `peak` the largest of `peakᵢ`.
///
/// Shapes, all packed: parts `[splits, rows, per_row]` in vectors of `W`, stats `[splits, rows]` in
/// pairs (peak, sum); out `[rows, per_row]`, lse `[rows]`. `scale` is what the softmax multiplied
/// scores by. A part that saw nothing has the peak -inf and weighs exactly 0; a row of which no part
/// saw anything gives 0 and -inf.
///
/// One unit per vector of the output; nothing is shared. Sums in f32, in the order of the parts.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn combine<E: Float, W: Size>(
    parts: &[Vector<f32, W>],
    stats: &[Vector<f32, Const<2>>],
    out: &mut [Vector<E, W>],
    lse: &mut [f32],
    splits: u32,
    rows: u32,
    per_row: u32,
    scale: f32,
    #[comptime] isa: Isa,
) {
    if comptime!(isa == Isa::Ptx) {
        // Registers for a batch: with as few as let most cubes run, parts are loaded one by one.
        one_cube();
    }
    let at = position() as usize * THREADS + UNIT_POS as usize;
    let (rows, per_row) = (rows as usize, per_row as usize);
    if at < rows * per_row {
        let row = at / per_row;
        let mut peak = neg_infinity(isa);
        for part in 0..splits as usize {
            peak = max(peak, stats[part * rows + row].extract(0usize));
        }
        let base = finite_or_zero(peak, isa);
        let mut sum = f32::new(0.0);
        let mut acc = Vector::<f32, W>::new(0.0);
        let splits = splits as usize;
        for batch in 0..splits.div_ceil(BATCH) {
            let mut peaks = Array::<f32>::new(BATCH);
            let mut sums = Array::<f32>::new(BATCH);
            let mut values = Array::<Vector<f32, W>>::new(BATCH);
            #[unroll]
            for i in 0..BATCH {
                // Past the last part: one that saw nothing.
                peaks[i] = neg_infinity(isa);
                sums[i] = f32::new(0.0);
                values[i] = Vector::<f32, W>::new(0.0);
                let part = batch * BATCH + i;
                if part < splits {
                    let state = stats[part * rows + row];
                    peaks[i] = state.extract(0usize);
                    sums[i] = state.extract(1usize);
                    values[i] = parts[part * rows * per_row + at];
                }
            }
            #[unroll]
            for i in 0..BATCH {
                let weight = exp2((peaks[i] - base) * scale, isa);
                sum += weight * sums[i];
                acc += values[i] * Vector::<f32, W>::new(weight);
            }
        }
        let factor = inverse(sum, isa);
        let mut value = Vector::<E, W>::empty();
        #[unroll]
        for e in 0..value.vector_size() {
            value.insert(e, E::cast_from(acc.extract(e) * factor));
        }
        out[at] = value;
        let column = at % per_row;
        if column == 0usize {
            lse[row] = log_sum(peak, sum, scale, isa);
        }
    }
}
