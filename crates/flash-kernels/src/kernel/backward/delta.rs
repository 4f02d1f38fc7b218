//! Per query, what both gradient kernels need of the row as a whole.

use cubecl::prelude::*;

use crate::kernel::{math::neg_infinity, rows::Rows, seq::position};
use crate::plan::Isa;

/// Units of a cube.
pub const THREADS: usize = 128;

/// Units that share a row of so many vectors, on a device with planes of `plane_size`.
pub fn lanes(plane_size: Option<usize>, vectors: usize) -> usize {
    let most = plane_size.filter(|size| size.is_power_of_two());
    let most = most.map_or(1, |size| size.min(THREADS));
    vectors.max(1).next_power_of_two().min(most)
}

/// `stats[row] = (lse·log2(e), Σ dO∘O)`, with `+inf` for the lse of a row that saw nothing: its
/// probabilities are then recomputed as 0.
///
/// Shapes: out `[batch, heads, seqlen_q, val_dim]` packed, d_out the same by strides, lse
/// `[batch, heads, seqlen_q]` packed, stats likewise in pairs. `lanes` units beside each other share a
/// row, so that they read what lies beside each other; a power of two, 1 without plane operations.
/// Nothing is shared between planes. Sums in f32, in an order that depends on `lanes` alone.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn delta<E: Float, W: Size>(
    out: &Tensor<Vector<E, W>>,
    d_out: &Tensor<Vector<E, W>>,
    lse: &[f32],
    stats: &mut [f32],
    rows: u32,
    #[comptime] isa: Isa,
    #[comptime] lanes: usize,
) {
    let row = position() * comptime!((THREADS / lanes) as u32) + UNIT_POS / comptime!(lanes as u32);
    let lane = (UNIT_POS % comptime!(lanes as u32)) as usize;
    // Units past the end repeat the last row: a plane adds up as a whole.
    let line = min(row, rows - 1u32) as usize;
    let seqlen = out.shape(2);
    let heads = out.shape(1);
    let q = line % seqlen;
    let head = (line / seqlen) % heads;
    let batch = line / seqlen / heads;
    let o = Rows::of(out, batch, head);
    let g = Rows::of(d_out, batch, head);
    let width = out.vector_size();
    let vectors = out.shape(3) / width;
    let mut sum = f32::new(0.0);
    for i in 0..vectors.div_ceil(lanes) {
        let c = i * lanes + lane;
        // No branch: CubeCL's shuffle is among the units that are active together.
        let at = min(c, vectors - 1) * width;
        let x = out[(o.offset + q * o.row_stride + at * o.col_stride) / width];
        let y = d_out[(g.offset + q * g.row_stride + at * g.col_stride) / width];
        let mut part = f32::new(0.0);
        #[unroll]
        for e in 0..width {
            part += f32::cast_from(x.extract(e)) * f32::cast_from(y.extract(e));
        }
        sum += select(c < vectors, part, f32::new(0.0));
    }
    #[unroll]
    for i in 0..comptime!(lanes.trailing_zeros()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << i));
    }
    if row < rows && lane == 0 {
        let empty = lse[line] == neg_infinity(isa);
        stats[2 * line] = select(
            empty,
            -neg_infinity(isa),
            lse[line] * comptime!(core::f32::consts::LOG2_E),
        );
        stats[2 * line + 1] = sum;
    }
}
