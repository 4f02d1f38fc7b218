//! What leaves the cube: the output and the log-sum-exp.

use cubecl::prelude::*;

use super::{seq::Seq, softmax::OnlineSoftmax, unit::MatrixUnit};
use crate::plan::Plan;

/// `out[q, :] = acc[q, :] / row_sum[q]`, `lse[q] = ln Σ exp(logit)`.
///
/// Shapes: `out` `[batch, heads, seqlen_q, val_dim]` packed, in vectors of `W`; `lse`
/// `[batch, heads, seqlen_q]` packed. `softmax` must be finished. Each unit writes the elements
/// it sees; nothing is synchronised.
#[cube]
pub fn store<U: MatrixUnit, E: Float, W: Size>(
    acc: &U::Acc,
    softmax: &OnlineSoftmax,
    out: &mut Tensor<Vector<E, W>>,
    lse: &mut [f32],
    seq: &Seq,
    scratch: &mut U::Scratch,
    #[comptime] plan: Plan,
) {
    let val_pad = comptime!(plan.tile.val_pad);
    let part_cols = U::part_cols(val_pad, plan);
    let heads = out.shape(1);
    let seqlen_q = out.shape(2);
    let val_dim = out.shape(3);
    let line = (seq.batch * heads + seq.head) * seqlen_q;
    #[unroll]
    for part in 0..comptime!(val_pad / part_cols) {
        let frag = U::read(acc, scratch, part, val_pad, plan);
        #[unroll]
        for r in 0..U::rows(&frag) {
            let q = (seq.query_start + U::row(&frag, r, plan)) as usize;
            if q < seqlen_q {
                store_row::<U, E, W>(
                    &frag,
                    softmax.inverse_sum(r),
                    out,
                    (line + q) * val_dim,
                    r,
                    comptime!(part * part_cols),
                    plan,
                );
                if comptime!(part == 0) && U::col(&frag, 0usize, plan) == 0u32 {
                    lse[line + q] = softmax.lse(r);
                }
            }
        }
    }
}

/// This unit's part of one row, in vectors as wide as its runs of columns allow.
#[cube]
fn store_row<U: MatrixUnit, E: Float, W: Size>(
    frag: &U::Frag,
    inverse_sum: f32,
    out: &mut Tensor<Vector<E, W>>,
    row_offset: usize,
    #[comptime] r: usize,
    #[comptime] first_col: usize,
    #[comptime] plan: Plan,
) {
    let width = out.vector_size();
    let val_dim = out.shape(3);
    let cols = U::cols(frag);
    #[unroll]
    for i in 0..comptime!(cols / width) {
        let col = U::col(frag, comptime!(i * width), plan) as usize + first_col;
        if col < val_dim {
            let mut value = Vector::<E, W>::empty();
            #[unroll]
            for e in 0..width {
                value.insert(
                    e,
                    E::cast_from(U::get(frag, r, comptime!(i * width + e)) * inverse_sum),
                );
            }
            out[(row_offset + col) / width] = value;
        }
    }
}
