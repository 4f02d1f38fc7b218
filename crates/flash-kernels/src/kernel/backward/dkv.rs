//! The gradients of keys and values.

use cubecl::prelude::*;

use crate::{
    kernel::{
        epilogue::{Place, store_scaled},
        mask::{Mask, Side, query_phase},
        owned::{Owned, own_wait},
        pipeline::Pipeline,
        rows::{Rows, group_size},
        score,
        seq::{Seq, position},
        unit::{MatrixUnit, Right, ptx, right_of},
    },
    plan::{CopyKind, Plan},
};

/// `dv = pᵀ·dO`, `dk = scale · dsᵀ·q`, summed over the query heads of the key head.
///
/// Shapes: q, k, v, d_out by strides; stats of `super::delta`; mask as in the forward pass; d_kv
/// holds dk `[batch, kv_heads, seqlen_k, head_dim]` and, from element `dv_offset`, dv
/// `[batch, kv_heads, seqlen_k, val_dim]`, packed: one buffer, since WebGPU binds eight.
///
/// A cube owns `block_m` keys of one key head and walks the queries of its group that see them,
/// head by head. Rows of the products are keys, columns queries. Nothing is shared between cubes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dkv<U: MatrixUnit, L: Numeric, E: Float, M: Int, W: Size, O: Size>(
    q: &Tensor<Vector<L, W>>,
    k: &Tensor<Vector<L, W>>,
    v: &Tensor<Vector<L, W>>,
    d_out: &Tensor<Vector<L, W>>,
    stats: &[Vector<f32, Const<2>>],
    mask: ComptimeOption<OwnedTensor<M>>,
    d_kv: &mut [Vector<E, O>],
    cubes: u32,
    dv_offset: usize,
    scale: f32,
    scale_log2: f32,
    #[comptime] plan: Plan,
    #[define(M)] _mask_type: ElemType,
) {
    let position = position();
    if position < cubes {
        let seq = Seq::of_keys(position, k.shape(1), k.shape(2), plan);
        let key_start = seq.start;
        let group = group_size(q.shape(1), k.shape(1));
        let k_rows = Rows::of(k, seq.batch, seq.head);
        let v_rows = Rows::of(v, seq.batch, seq.head);
        let (head_pad, val_pad) = comptime!((plan.tile.head_pad, plan.tile.val_pad));

        let mut scratch = U::scratch(plan);
        let keys = Owned::<U>::new(k_rows, key_start, head_pad, plan);
        let values = keys.beside(v_rows, val_pad, plan);
        if comptime!(!plan.lends()) {
            keys.send(k, plan);
            values.send(v, plan);
        }
        let pairs = Shared::<[Vector<f32, Const<2>>]>::new_slice(comptime!(plan.stats_len()));
        let q_rows = Rows::of(q, seq.batch, seq.head * group);
        let o_rows = Rows::of(d_out, seq.batch, seq.head * group);
        let lent = keys.place();
        let stages = Pipeline::<U>::new(&lent, q_rows, o_rows, head_pad, val_pad, plan);
        let (a, b) = if comptime!(plan.lends()) {
            (keys.taken(k, plan), values.taken(v, plan))
        } else {
            own_wait_all(plan);
            (keys.left(plan), values.left(plan))
        };
        let mut dk = U::zero(head_pad, plan);
        let mut dv = U::zero(val_pad, plan);
        for member in 0..group {
            let head = seq.head * group + member;
            walk::<U, L, M, W>(
                q,
                d_out,
                stats,
                &mask,
                &stages,
                &pairs,
                &a,
                &b,
                &mut dk,
                &mut dv,
                &mut scratch,
                seq.batch,
                head,
                key_start,
                k_rows.len,
                scale_log2,
                plan,
            );
        }
        let dk_place = Place::of(k, &seq, 0usize);
        let dv_place = Place::of(v, &seq, dv_offset);
        let one = f32::new(1.0);
        store_scaled::<U, E, O>(&dk, scale, d_kv, &dk_place, &mut scratch, head_pad, plan);
        store_scaled::<U, E, O>(&dv, one, d_kv, &dv_place, &mut scratch, val_pad, plan);
    }
}

/// Adds what the queries of one head contribute. On return no unit reads a walked tile any more.
#[cube]
#[allow(clippy::too_many_arguments)]
fn walk<U: MatrixUnit, L: Numeric, M: Int, W: Size>(
    q: &Tensor<Vector<L, W>>,
    d_out: &Tensor<Vector<L, W>>,
    stats: &[Vector<f32, Const<2>>],
    mask: &ComptimeOption<OwnedTensor<M>>,
    stages: &Pipeline<U>,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    a: &U::Left,
    b: &U::Left,
    dk: &mut U::Acc,
    dv: &mut U::Acc,
    scratch: &mut U::Scratch,
    batch: usize,
    head: usize,
    key_start: u32,
    seqlen_k: u32,
    scale_log2: f32,
    #[comptime] plan: Plan,
) {
    let (head_pad, val_pad) = comptime!((plan.tile.head_pad, plan.tile.val_pad));
    let q_rows = Rows::of(q, batch, head);
    let mut pipeline = stages.toward(q_rows, Rows::of(d_out, batch, head), plan);
    let causality = comptime!(plan.causality);
    let mask = Mask::<M>::new(q_rows.len, seqlen_k, mask, batch, head, causality);
    let range = mask.q_range(key_start, plan);
    let line = (batch * q.shape(1) + head) * q.shape(2);
    pipeline.start(q, d_out, range.begin, plan);
    load_pairs(stats, line, q_rows.len, range.begin, pairs, plan);
    #[unroll]
    for phase in 0..2u32 {
        let (from, to) = query_phase(range.begin, range.inner_begin, range.end, phase);
        for step in from..to {
            let queries = pipeline.first(q, d_out, step, range.end, plan);
            load_pairs(stats, line, q_rows.len, step + 1u32, pairs, plan);
            let mut p = U::product(a, &queries, scratch, head_pad, plan);
            probabilities::<U>(&mut p, pairs, step, scale_log2, plan);
            let query_start = step * comptime!(plan.tile.block_n as u32);
            if comptime!(phase == 0) {
                let zero = f32::new(0.0);
                mask.apply::<U>(&mut p, query_start, key_start, zero, Side::Keys, plan);
            }
            let d_outs = pipeline.second(d_out, step, plan);
            let mut dp = U::product(b, &d_outs, scratch, val_pad, plan);
            let held = U::hold(&p, scratch, plan);
            U::accumulate(dv, &held, &d_outs, scratch, Right::Given, plan);
            gradients::<U>(&mut dp, &p, pairs, step, plan);
            U::reuse(plan);
            let held = U::hold(&dp, scratch, plan);
            let queries = pipeline.again(q, step, plan);
            U::accumulate(
                dk,
                &held,
                &queries,
                scratch,
                comptime!(right_of(phase == 0)),
                plan,
            );
            pipeline.release(step, plan);
        }
    }
    // The next head overwrites the tiles.
    sync_cube();
}

/// Makes the owned tiles visible; nothing else travels yet.
#[cube]
fn own_wait_all(#[comptime] plan: Plan) {
    if comptime!(plan.copy == CopyKind::Async) {
        ptx::copy_wait(0u32);
    }
    own_wait(plan);
}

/// `pairs[stage of step, column] = stats` of the queries of `step`; zeros past the end, where q and
/// dO are zero too, so that nothing is added. Visible after the pipeline's next barrier.
#[cube]
fn load_pairs(
    stats: &[Vector<f32, Const<2>>],
    line: usize,
    seqlen_q: u32,
    step: u32,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    #[comptime] plan: Plan,
) {
    let block_n = comptime!(plan.tile.block_n as u32);
    let mut pairs = pairs.clone();
    let stage = (step % 2u32) * block_n;
    let threads = comptime!(plan.threads as u32);
    #[unroll]
    for i in 0..comptime!(plan.tile.block_n.div_ceil(plan.threads) as u32) {
        let column = UNIT_POS + i * threads;
        if column < block_n {
            let q = step * block_n + column;
            let at = (stage + column) as usize;
            if comptime!(plan.copy == CopyKind::Async) {
                let inside = q < seqlen_q;
                let from = line + select(inside, q, 0u32) as usize;
                ptx::copy_async_8(&pairs, at, stats, from, select(inside, 8u32, 0u32));
            } else {
                let mut pair = Vector::<f32, Const<2>>::new(0.0);
                if q < seqlen_q {
                    pair = stats[line + q as usize];
                }
                pairs[at] = pair;
            }
        }
    }
    if comptime!(plan.copy == CopyKind::Async) {
        ptx::copy_commit();
    }
}

/// The pair of this unit's column `c`.
#[cube]
fn pair_of<U: MatrixUnit>(
    frag: &U::Frag,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    step: u32,
    #[comptime] c: usize,
    #[comptime] plan: Plan,
) -> Vector<f32, Const<2>> {
    let stage = (step % 2u32) * comptime!(plan.tile.block_n as u32);
    pairs[(stage + U::col(frag, c, plan)) as usize]
}

/// `s = p`, for columns that are queries.
#[cube]
fn probabilities<U: MatrixUnit>(
    s: &mut U::Frag,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    step: u32,
    scale_log2: f32,
    #[comptime] plan: Plan,
) {
    let rows = U::rows(&*s);
    let cols = U::cols(&*s);
    #[unroll]
    for c in 0..cols {
        let lse = pair_of::<U>(&*s, pairs, step, c, plan).extract(0usize);
        #[unroll]
        for r in 0..rows {
            let isa = comptime!(plan.isa);
            let p = score::probability(U::get(&*s, r, c), lse, scale_log2, isa);
            U::set(s, r, c, p);
        }
    }
}

/// `dp = ds`, for columns that are queries. Where `p` is 0 so is `ds`, whatever `dp`.
#[cube]
fn gradients<U: MatrixUnit>(
    dp: &mut U::Frag,
    p: &U::Frag,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    step: u32,
    #[comptime] plan: Plan,
) {
    let rows = U::rows(&*dp);
    let cols = U::cols(&*dp);
    #[unroll]
    for c in 0..cols {
        let delta = pair_of::<U>(&*dp, pairs, step, c, plan).extract(1usize);
        #[unroll]
        for r in 0..rows {
            let ds = score::gradient(U::get(p, r, c), U::get(&*dp, r, c), delta);
            U::set(dp, r, c, ds);
        }
    }
}
