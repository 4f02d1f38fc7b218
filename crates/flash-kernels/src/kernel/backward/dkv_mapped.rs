//! The gradients of keys and values by matrices whose elements a function changes where they are.

use cubecl::prelude::*;

use super::mapped::Statistics;
use crate::{
    kernel::{
        epilogue::{Place, store_scaled},
        mask::{Mask, Side, query_phase},
        owned::Owned,
        pipeline::Pipeline,
        rows::{Rows, group_size},
        seq::{Seq, position},
        unit::{MappedUnit, Right, right_of},
    },
    plan::Plan,
};

/// As `super::dkv::dkv`, whose shapes and owners these are. Products stay where they are.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dkv_mapped<U: MappedUnit, L: Numeric, E: Float, M: Int, W: Size, O: Size>(
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
        let (a, b) = (keys.taken(k, plan), values.taken(v, plan));
        let statistics = Statistics::new(plan);
        let q_rows = Rows::of(q, seq.batch, seq.head * group);
        let o_rows = Rows::of(d_out, seq.batch, seq.head * group);
        let lent = keys.place();
        let stages = Pipeline::<U>::new(&lent, q_rows, o_rows, head_pad, val_pad, plan);
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
                &statistics,
                &a,
                &b,
                &mut dk,
                &mut dv,
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
fn walk<U: MappedUnit, L: Numeric, M: Int, W: Size>(
    q: &Tensor<Vector<L, W>>,
    d_out: &Tensor<Vector<L, W>>,
    stats: &[Vector<f32, Const<2>>],
    mask: &ComptimeOption<OwnedTensor<M>>,
    stages: &Pipeline<U>,
    statistics: &Statistics,
    a: &U::Left,
    b: &U::Left,
    dk: &mut U::Acc,
    dv: &mut U::Acc,
    batch: usize,
    head: usize,
    key_start: u32,
    seqlen_k: u32,
    scale_log2: f32,
    #[comptime] plan: Plan,
) {
    let (head_pad, val_pad) = comptime!((plan.tile.head_pad, plan.tile.val_pad));
    let block_n = comptime!(plan.tile.block_n);
    let q_rows = Rows::of(q, batch, head);
    let mut pipeline = stages.toward(q_rows, Rows::of(d_out, batch, head), plan);
    let causality = comptime!(plan.causality);
    let mask = Mask::<M>::new(q_rows.len, seqlen_k, mask, batch, head, causality);
    let range = mask.q_range(key_start, plan);
    let line = (batch * q.shape(1) + head) * q.shape(2);
    pipeline.start(q, d_out, range.begin, plan);
    load_statistics(statistics, stats, line, q_rows.len, range.begin, plan);
    #[unroll]
    for phase in 0..2u32 {
        let (from, to) = query_phase(range.begin, range.inner_begin, range.end, phase);
        for step in from..to {
            let queries = pipeline.first(q, d_out, step, range.end, plan);
            load_statistics(statistics, stats, line, q_rows.len, step + 1u32, plan);
            let masked = comptime!(phase == 0);
            let query = step * block_n as u32;
            let at = step % 2u32 * block_n as u32;
            let mut p = U::zero(block_n, plan);
            U::add_product(&mut p, a, &queries, head_pad, plan);
            statistics.probabilities::<U>(&mut p, at, scale_log2, Side::Keys, plan);
            if masked {
                U::keep_seen::<M>(&mut p, &mask, query, key_start, Side::Keys, plan);
            }
            let d_outs = pipeline.second(d_out, step, plan);
            U::add_held(dv, &U::held(&p, plan), &d_outs, Right::Given, plan);
            let mut ds = statistics.start::<U>(at, Side::Keys, plan);
            U::add_product(&mut ds, b, &d_outs, val_pad, plan);
            if masked {
                // `dp` may be no number there, which is none of `p`'s zeros.
                U::keep_seen::<M>(&mut ds, &mask, query, key_start, Side::Keys, plan);
            }
            U::multiply(&mut ds, &p, plan);
            let queries = pipeline.again(q, step, plan);
            let right = comptime!(right_of(masked));
            U::add_held(dk, &U::held(&ds, plan), &queries, right, plan);
            pipeline.release(step, plan);
        }
    }
    // The next head overwrites the tiles.
    sync_cube();
}

/// Those of the queries of `step`: steps alternate between two stages.
#[cube]
fn load_statistics(
    statistics: &Statistics,
    stats: &[Vector<f32, Const<2>>],
    line: usize,
    seqlen_q: u32,
    step: u32,
    #[comptime] plan: Plan,
) {
    let count = comptime!(plan.tile.block_n);
    let (query, at) = (step * count as u32, step % 2u32 * count as u32);
    statistics.load(stats, line, seqlen_q, query, at, count, plan);
}
