//! What leaves the cube: rows of an accumulator, and the log-sum-exp.

use cubecl::prelude::*;

use super::{
    seq::Seq,
    softmax::OnlineSoftmax,
    split,
    unit::{
        HalfFloat, MatrixUnit, hopper,
        wgmma::{self, Seen, SeenFrag},
    },
};
use crate::plan::Plan;

/// `out[q, :] = acc[q, :] / row_sum[q]`, `lse[q] = ln Σ exp(logit)`; where the keys are split
/// `acc[q, :]`, and in place of each `lse[q]` a pair `(row_max[q], row_sum[q])`.
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
    let (seqlen_q, val_dim) = (out.shape(2), out.shape(3));
    let line = (seq.batch * out.shape(1) + seq.head) * seqlen_q + seq.start as usize;
    let rows = seqlen_q as u32 - seq.start;
    let factor = store_lse::<U>(acc, softmax, lse, line, rows, scratch, plan);
    let place = Place {
        first: line * val_dim,
        rows,
        dim: val_dim,
    };
    let out = out.as_mut_slice();
    store_rows::<U, E, W>(acc, &factor, out, &place, scratch, val_pad, plan);
}

/// `lse[line + row]` of the first `rows` rows; returns what the rows of `acc` are to be multiplied
/// by.
#[cube]
#[allow(clippy::too_many_arguments)]
fn store_lse<U: MatrixUnit>(
    acc: &U::Acc,
    softmax: &OnlineSoftmax,
    lse: &mut [f32],
    line: usize,
    rows: u32,
    scratch: &mut U::Scratch,
    #[comptime] plan: Plan,
) -> Array<f32> {
    let frag_rows = U::frag_rows(plan);
    let mut factor = Array::<f32>::new(frag_rows);
    let frag = U::read(acc, scratch, 0usize, comptime!(plan.tile.val_pad), plan);
    #[unroll]
    for r in 0..frag_rows {
        factor[r] = split::factor(softmax, r, plan);
        let row = U::row(&frag, r, plan);
        if row < rows && U::col(&frag, 0usize, plan) == 0u32 {
            split::store_row(softmax, lse, line + row as usize, r, plan);
        }
    }
    factor
}

/// `store` in pieces of 16 bytes, for a warpgroup's accumulator: without a branch, so that the
/// exchanges between lanes overlap.
///
/// `out` `[lines, dim]` in 16-bit elements, packed, `dim` a multiple of 8; in f32 where the keys are
/// split.
#[cube]
#[allow(clippy::too_many_arguments, clippy::let_unit_value)]
pub fn store_pieces<E: HalfFloat>(
    acc: &SeenFrag,
    softmax: &OnlineSoftmax,
    out: &mut [Vector<u32, Const<4>>],
    lse: &mut [f32],
    line: usize,
    rows: u32,
    dim: u32,
    #[comptime] plan: Plan,
) {
    let place = Place {
        first: line * dim as usize,
        rows,
        dim: dim as usize,
    };
    let val_pad = comptime!(plan.tile.val_pad);
    if comptime!(plan.is_split()) {
        let mut scratch = Seen::<E>::scratch(plan);
        store_lse::<Seen<E>>(acc, softmax, lse, line, rows, &mut scratch, plan);
        store_quads::<E>(acc, out, &place, val_pad, plan);
    } else {
        let frag_rows = Seen::<E>::rows(acc);
        let mut factor = Array::<f32>::new(frag_rows);
        let first_lane = Seen::<E>::col(acc, 0usize, plan) == 0u32;
        #[unroll]
        for r in 0..frag_rows {
            factor[r] = split::factor(softmax, r, plan);
            let row = Seen::<E>::row(acc, r, plan);
            let is_due = u32::cast_from(row < rows && first_lane);
            let to = unsafe { lse.as_ptr_unchecked() };
            hopper::store_global_f32(to, line + row as usize, softmax.lse(r), is_due);
        }
        store_row_pieces::<E>(acc, &factor, out, &place, val_pad, plan);
    }
}

/// `out[place(row, col)] = acc[row, col]` in f32, in pieces of 16 bytes.
#[cube]
fn store_quads<E: HalfFloat>(
    acc: &SeenFrag,
    out: &mut [Vector<u32, Const<4>>],
    place: &Place,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let dim = place.dim as u32;
    #[unroll]
    for r in 0..Seen::<E>::rows(acc) {
        let row = Seen::<E>::row(acc, r, plan);
        let first = place.first + row as usize * place.dim;
        #[unroll]
        for part in 0..comptime!(cols / 16) {
            let value = wgmma::quad(acc, r, part);
            let at = wgmma::quad_at(part);
            if row < place.rows && at < dim {
                out[(first + at as usize) / 4] = value;
            }
        }
    }
}

/// `store_pieces` of `cols` columns with the same factor for each row.
#[cube]
pub fn store_scaled_pieces<E: HalfFloat>(
    acc: &SeenFrag,
    factor: f32,
    out: &mut [Vector<u32, Const<4>>],
    place: &Place,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let rows = Seen::<E>::rows(acc);
    let mut factors = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        factors[r] = factor;
    }
    store_row_pieces::<E>(acc, &factors, out, place, cols, plan);
}

/// `out[place(row, col)] = factor[row] · acc[row, col]` in pieces of 16 bytes.
#[cube]
fn store_row_pieces<E: HalfFloat>(
    acc: &SeenFrag,
    factor: &Array<f32>,
    out: &mut [Vector<u32, Const<4>>],
    place: &Place,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let dim = place.dim as u32;
    #[unroll]
    for r in 0..Seen::<E>::rows(acc) {
        let row = Seen::<E>::row(acc, r, plan);
        let first = (place.first + row as usize * place.dim) / 8;
        #[unroll]
        for part in 0..comptime!(cols.div_ceil(wgmma::PIECE_COLS)) {
            let value = wgmma::piece::<E>(acc, factor[r], r, part);
            let at = wgmma::piece_at(part);
            let is_due = u32::cast_from(row < place.rows && 8u32 * at < dim);
            let to = unsafe { out.as_ptr_unchecked() };
            hopper::store_global(to, first + at as usize, value, is_due);
        }
    }
}

/// Where the rows of an accumulator go: row `r` to the `dim` elements from `first + r·dim`, for the
/// first `rows` rows.
#[derive(CubeType, Clone, Copy)]
pub struct Place {
    /// First element.
    pub first: usize,
    /// Rows that exist.
    pub rows: u32,
    /// Columns that exist.
    pub dim: usize,
}

#[cube]
impl Place {
    /// The rows from `seq.start` on of a packed tensor with the shape of `like`
    /// `[batch, heads, seqlen, dim]`, behind `offset` elements.
    pub fn of<E: CubePrimitive>(like: &Tensor<E>, seq: &Seq, offset: usize) -> Place {
        let line = (seq.batch * like.shape(1) + seq.head) * like.shape(2) + seq.start as usize;
        Place {
            first: offset + line * like.shape(3),
            rows: like.shape(2) as u32 - seq.start,
            dim: like.shape(3),
        }
    }
}

/// `store_rows` with the same factor for each row.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn store_scaled<U: MatrixUnit, E: Float, W: Size>(
    acc: &U::Acc,
    factor: f32,
    out: &mut [Vector<E, W>],
    place: &Place,
    scratch: &mut U::Scratch,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let frag_rows = U::frag_rows(plan);
    let mut factors = Array::<f32>::new(frag_rows);
    #[unroll]
    for r in 0..frag_rows {
        factors[r] = factor;
    }
    store_rows::<U, E, W>(acc, &factors, out, place, scratch, cols, plan);
}

/// `out[place(row, col)] = factor[row] · acc[row, col]` for an accumulator of `cols` columns.
///
/// Each unit writes the elements it sees; nothing is synchronised.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn store_rows<U: MatrixUnit, E: Float, W: Size>(
    acc: &U::Acc,
    factor: &Array<f32>,
    out: &mut [Vector<E, W>],
    place: &Place,
    scratch: &mut U::Scratch,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) {
    let part_cols = U::part_cols(cols, plan);
    #[unroll]
    for part in 0..comptime!(cols / part_cols) {
        let frag = U::read(acc, scratch, part, cols, plan);
        #[unroll]
        for r in 0..U::rows(&frag) {
            let row = U::row(&frag, r, plan);
            if row < place.rows {
                let line = place.first + row as usize * place.dim;
                let first_col = comptime!(part * part_cols);
                store_row::<U, E, W>(&frag, factor[r], out, line, place.dim, r, first_col, plan);
            }
        }
    }
}

/// This unit's part of one row, in vectors as wide as its runs of columns allow.
#[cube]
#[allow(clippy::too_many_arguments)]
fn store_row<U: MatrixUnit, E: Float, W: Size>(
    frag: &U::Frag,
    factor: f32,
    out: &mut [Vector<E, W>],
    line: usize,
    dim: usize,
    #[comptime] r: usize,
    #[comptime] first_col: usize,
    #[comptime] plan: Plan,
) {
    let width = comptime!(plan.store_width);
    let cols = U::cols(frag);
    #[unroll]
    for i in 0..comptime!(cols / width) {
        let col = U::col(frag, comptime!(i * width), plan) as usize + first_col;
        if col < dim {
            let mut value = Vector::<E, W>::empty();
            #[unroll]
            for e in 0..width {
                value.insert(
                    e,
                    E::cast_from(U::get(frag, r, comptime!(i * width + e)) * factor),
                );
            }
            out[(line + col) / width] = value;
        }
    }
}
