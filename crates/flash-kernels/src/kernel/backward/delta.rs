//! Per query, what both gradient kernels need of the row as a whole.

use cubecl::prelude::*;

use crate::kernel::{
    math::{neg_infinity, widen},
    rows::Rows,
    seq::position,
};
use crate::plan::Isa;

/// Units of a cube.
pub const THREADS: usize = 128;

/// `stats[row] = (lse·log2(e), Σ dO∘O)`, with `+inf` for the lse of a row that saw nothing: its
/// probabilities are then recomputed as 0.
///
/// Shapes: out `[batch, heads, seqlen_q, val_dim]` packed, d_out the same by strides, lse
/// `[batch, heads, seqlen_q]` packed, stats likewise in pairs. One unit per row; nothing is
/// shared. Sums in f32, in the order of the columns.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn delta<E: Float, W: Size>(
    out: &Tensor<Vector<E, W>>,
    d_out: &Tensor<Vector<E, W>>,
    lse: &[f32],
    stats: &mut [f32],
    rows: u32,
    #[comptime] isa: Isa,
) {
    let row = position() * comptime!(THREADS as u32) + UNIT_POS;
    if row < rows {
        let line = row as usize;
        let seqlen = out.shape(2);
        let heads = out.shape(1);
        let q = line % seqlen;
        let head = (line / seqlen) % heads;
        let batch = line / seqlen / heads;
        let o = Rows::of(out, batch, head);
        let g = Rows::of(d_out, batch, head);
        let width = out.vector_size();
        let mut sum = f32::new(0.0);
        for c in 0..out.shape(3) / width {
            let x = out[(o.offset + q * o.row_stride + c * width * o.col_stride) / width];
            let y = d_out[(g.offset + q * g.row_stride + c * width * g.col_stride) / width];
            #[unroll]
            for e in 0..width {
                sum += widen::<E>(x.extract(e)) * widen::<E>(y.extract(e));
            }
        }
        let empty = lse[line] == neg_infinity(isa);
        stats[2 * line] = select(
            empty,
            -neg_infinity(isa),
            lse[line] * comptime!(core::f32::consts::LOG2_E),
        );
        stats[2 * line + 1] = sum;
    }
}
