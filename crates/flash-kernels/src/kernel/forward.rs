//! The forward pass: one body for every unit.

use cubecl::prelude::*;

use super::{
    epilogue,
    mask::{Mask, Side, phase_range},
    math::neg_infinity,
    owned::Owned,
    pipeline::Pipeline,
    rows::{Rows, key_head},
    score,
    seq::{position, position_again},
    softmax::OnlineSoftmax,
    split::Share,
    unit::{MatrixUnit, Right},
};
use crate::plan::{Plan, ScaleKind};

/// `out = softmax(scale·q·kᵀ, masked)·v` and `lse = ln Σ exp(logit)` of each row.
///
/// FlashAttention-2 (Dao 2023), algorithm 1.
///
/// Shapes: q `[batch, heads, seqlen_q, head_dim]`, k `[batch, kv_heads, seqlen_k, head_dim]`,
/// v `[batch, kv_heads, seqlen_k, val_dim]`, by strides; mask `[batch, heads, seqlen_q, seqlen_k]`,
/// nonzero = drop, by strides; out and lse packed. `scale_log2 = scale·log2(e)`.
///
/// A cube owns `block_m` queries of one head and walks the keys they see, or one of `splits` parts
/// of them: then out and lse are the workspace of `combine`. Nothing is shared between cubes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<U: MatrixUnit, L: Numeric, E: Float, M: Int, W: Size, O: Size>(
    q: &Tensor<Vector<L, W>>,
    k: &Tensor<Vector<L, W>>,
    v: &Tensor<Vector<L, W>>,
    mask: ComptimeOption<OwnedTensor<M>>,
    out: &mut Tensor<Vector<E, O>>,
    lse: &mut [f32],
    cubes: u32,
    splits: u32,
    scale_log2: f32,
    #[comptime] plan: Plan,
    #[define(M)] _mask_type: ElemType,
) {
    let position = position();
    if position < cubes {
        let share = Share::of_queries(position, splits, q.shape(1), q.shape(2), plan);
        let seq = share.seq;
        let kv_head = key_head(seq.head, q.shape(1), k.shape(1));
        let q_rows = Rows::of(q, seq.batch, seq.head);
        let k_rows = Rows::of(k, seq.batch, kv_head);
        let v_rows = Rows::of(v, seq.batch, kv_head);
        let causality = comptime!(plan.causality);
        let mask = Mask::<M>::new(
            q_rows.len, k_rows.len, &mask, seq.batch, seq.head, causality,
        );
        let range = mask.k_range(seq.start, comptime!(plan.tile.block_m), plan);
        let range = share.keys(range, splits, plan);

        let mut scratch = U::scratch(plan);
        let (head_pad, val_pad) = comptime!((plan.tile.head_pad, plan.tile.val_pad));
        let queries = Owned::<U>::new(q_rows, seq.start, head_pad, plan);
        let lent = queries.place();
        let mut pipeline = Pipeline::<U>::new(&lent, k_rows, v_rows, head_pad, val_pad, plan);
        let a = pipeline.start_behind(&queries, q, k, v, range.begin, plan);
        let folded = folded_scale(scale_log2, plan);
        let mut softmax = OnlineSoftmax::new(folded, U::frag_rows(plan), comptime!(plan.isa));
        let mut acc = U::zero(val_pad, plan);
        let dropped = neg_infinity(comptime!(plan.isa));

        #[unroll]
        for phase in 0..2u32 {
            let masked = comptime!(phase == 1);
            let (from, to) = phase_range(range.begin, range.inner_end, range.end, phase);
            for step in from..to {
                let keys = pipeline.first(k, v, step, range.end, plan);
                let mut s = U::product(&a, &keys, &mut scratch, head_pad, plan);
                score::apply::<U>(&mut s, scale_log2, plan);
                if masked {
                    let key_start = step * comptime!(plan.tile.block_n as u32);
                    mask.apply::<U>(&mut s, seq.start, key_start, dropped, Side::Queries, plan);
                }
                softmax.step::<U>(&mut s, &mut acc, &mut scratch, plan);
                let p = U::hold(&s, &mut scratch, plan);
                let values = pipeline.second(v, step, plan);
                U::accumulate(&mut acc, &p, &values, &mut scratch, Right::Given, plan);
                pipeline.release(step, plan);
            }
        }
        softmax.finish::<U>(&mut scratch, plan);
        let position = position_again(comptime!(plan.isa));
        let share = Share::of_queries(position, splits, q.shape(1), q.shape(2), plan);
        let seq = share.target(q.shape(0), plan);
        epilogue::store::<U, E, O>(&acc, &softmax, out, lse, &seq, &mut scratch, plan);
    }
}

/// What the softmax multiplies scores by.
#[cube]
pub(super) fn folded_scale(scale_log2: f32, #[comptime] plan: Plan) -> f32 {
    if comptime!(plan.scale == ScaleKind::Folded) {
        scale_log2
    } else {
        f32::new(1.0)
    }
}
