//! The gradient of the queries.

use cubecl::prelude::*;

use crate::{
    kernel::{
        epilogue::{Place, store_scaled},
        mask::{Mask, Side, phase_range},
        owned::Owned,
        pipeline::Pipeline,
        rows::{Rows, key_head},
        score,
        seq::{Seq, position},
        unit::{MatrixUnit, right_of},
    },
    plan::Plan,
};

/// `dq = scale · ds·k`, `ds = p∘(dO·vᵀ - delta)`, `p = exp2(c·q·kᵀ - lse)`.
///
/// Shapes: q, k, v, d_out by strides; stats of `super::delta`; mask as in the forward pass; d_q
/// `[batch, heads, seqlen_q, head_dim]` packed. `scale_log2 = scale·log2(e)`.
///
/// A cube owns `block_m` queries of one head and walks the keys they see. Nothing is shared
/// between cubes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dq<U: MatrixUnit, L: Numeric, E: Float, M: Int, W: Size, O: Size>(
    q: &Tensor<Vector<L, W>>,
    k: &Tensor<Vector<L, W>>,
    v: &Tensor<Vector<L, W>>,
    d_out: &Tensor<Vector<L, W>>,
    stats: &[Vector<f32, Const<2>>],
    mask: ComptimeOption<OwnedTensor<M>>,
    d_q: &mut Tensor<Vector<E, O>>,
    cubes: u32,
    scale: f32,
    scale_log2: f32,
    #[comptime] plan: Plan,
    #[define(M)] _mask_type: ElemType,
) {
    let position = position();
    if position < cubes {
        let seq = Seq::of_queries(position, q.shape(1), q.shape(2), plan);
        let kv_head = key_head(seq.head, q.shape(1), k.shape(1));
        let q_rows = Rows::of(q, seq.batch, seq.head);
        let o_rows = Rows::of(d_out, seq.batch, seq.head);
        let k_rows = Rows::of(k, seq.batch, kv_head);
        let v_rows = Rows::of(v, seq.batch, kv_head);
        let causality = comptime!(plan.causality);
        let mask = Mask::<M>::new(
            q_rows.len, k_rows.len, &mask, seq.batch, seq.head, causality,
        );
        let range = mask.k_range(seq.start, comptime!(plan.tile.block_m), plan);
        let (head_pad, val_pad) = comptime!((plan.tile.head_pad, plan.tile.val_pad));

        let mut scratch = U::scratch(plan);
        let queries = Owned::<U>::new(q_rows, seq.start, head_pad, plan);
        let d_outs = queries.beside(o_rows, val_pad, plan);
        let lent = queries.place();
        let mut pipeline = Pipeline::<U>::new(&lent, v_rows, k_rows, val_pad, head_pad, plan);
        let (a, b) =
            pipeline.start_behind_two(&queries, &d_outs, q, d_out, v, k, range.begin, plan);
        let line = (seq.batch * q.shape(1) + seq.head) * q.shape(2);
        let mut acc = U::zero(head_pad, plan);

        #[unroll]
        for phase in 0..2u32 {
            let masked = comptime!(phase == 1);
            let (from, to) = phase_range(range.begin, range.inner_end, range.end, phase);
            for step in from..to {
                let values = pipeline.first(v, k, step, range.end, plan);
                let dp = U::product(&b, &values, &mut scratch, val_pad, plan);
                let keys = pipeline.second(k, step, plan);
                let mut s = U::product(&a, &keys, &mut scratch, head_pad, plan);
                let key_start = step * comptime!(plan.tile.block_n as u32);
                gradients::<U>(
                    &mut s, &dp, stats, line, seq.start, q_rows.len, scale_log2, plan,
                );
                if masked {
                    let zero = f32::new(0.0);
                    mask.apply::<U>(&mut s, seq.start, key_start, zero, Side::Queries, plan);
                }
                let ds = U::hold(&s, &mut scratch, plan);
                let right = comptime!(right_of(masked));
                U::accumulate(&mut acc, &ds, &keys, &mut scratch, right, plan);
                pipeline.release(step, plan);
            }
        }
        let place = Place::of(q, &seq, 0usize);
        let d_q = d_q.as_mut_slice();
        store_scaled::<U, E, O>(&acc, scale, d_q, &place, &mut scratch, head_pad, plan);
    }
}

/// `s = ds`: the gradient of each score, from the score and `dp`, for rows that are queries.
#[cube]
fn gradients<U: MatrixUnit>(
    s: &mut U::Frag,
    dp: &U::Frag,
    stats: &[Vector<f32, Const<2>>],
    line: usize,
    query_start: u32,
    seqlen_q: u32,
    scale_log2: f32,
    #[comptime] plan: Plan,
) {
    let rows = U::rows(&*s);
    let cols = U::cols(&*s);
    #[unroll]
    for r in 0..rows {
        // A row past the end reads the last one's; it is not stored.
        let q = min(query_start + U::row(&*s, r, plan), seqlen_q - 1u32);
        let pair = stats[line + q as usize];
        #[unroll]
        for c in 0..cols {
            let p = score::probability(
                U::get(&*s, r, c),
                pair.extract(0usize),
                scale_log2,
                comptime!(plan.isa),
            );
            U::set(
                s,
                r,
                c,
                score::gradient(p, U::get(dp, r, c), pair.extract(1usize)),
            );
        }
    }
}
