//! The gradient of queries by matrices whose elements a function changes where they are.

use cubecl::prelude::*;

use super::mapped::Statistics;
use crate::{
    kernel::{
        epilogue::{Place, store_scaled},
        mask::{Mask, Side, phase_range},
        owned::Owned,
        pipeline::Pipeline,
        rows::{Rows, key_head},
        seq::{Seq, position},
        unit::{MappedUnit, right_of},
    },
    plan::Plan,
};

/// As `super::dq::dq`, whose shapes and owners these are. Products stay where they are; the statistics
/// of the owned queries lie in shared memory.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dq_mapped<U: MappedUnit, L: Numeric, E: Float, M: Int, W: Size, O: Size>(
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
        let block_n = comptime!(plan.tile.block_n);

        let mut scratch = U::scratch(plan);
        let queries = Owned::<U>::new(q_rows, seq.start, head_pad, plan);
        let d_outs = queries.beside(o_rows, val_pad, plan);
        let (a, b) = (queries.taken(q, plan), d_outs.taken(d_out, plan));
        let lent = queries.place();
        let mut pipeline = Pipeline::<U>::new(&lent, v_rows, k_rows, val_pad, head_pad, plan);
        let statistics = Statistics::new(plan);
        let line = (seq.batch * q.shape(1) + seq.head) * q.shape(2);
        let block_m = comptime!(plan.tile.block_m);
        statistics.load(stats, line, q_rows.len, seq.start, 0u32, block_m, plan);
        pipeline.start(v, k, range.begin, plan);
        let mut acc = U::zero(head_pad, plan);

        #[unroll]
        for phase in 0..2u32 {
            let masked = comptime!(phase == 1);
            let (from, to) = phase_range(range.begin, range.inner_end, range.end, phase);
            for step in from..to {
                let values = pipeline.first(v, k, step, range.end, plan);
                let key = step * block_n as u32;
                let mut ds = statistics.start::<U>(0u32, Side::Queries, plan);
                U::add_product(&mut ds, &b, &values, val_pad, plan);
                let keys = pipeline.second(k, step, plan);
                let mut p = U::zero(block_n, plan);
                U::add_product(&mut p, &a, &keys, head_pad, plan);
                statistics.probabilities::<U>(&mut p, 0u32, scale_log2, Side::Queries, plan);
                if masked {
                    U::keep_seen::<M>(&mut p, &mask, seq.start, key, Side::Queries, plan);
                    // `dp` may be no number there, which is none of `p`'s zeros.
                    U::keep_seen::<M>(&mut ds, &mask, seq.start, key, Side::Queries, plan);
                }
                U::multiply(&mut ds, &p, plan);
                let right = comptime!(right_of(masked));
                U::add_held(&mut acc, &U::held(&ds, plan), &keys, right, plan);
                pipeline.release(step, plan);
            }
        }
        let place = Place::of(q, &seq, 0usize);
        let d_q = d_q.as_mut_slice();
        store_scaled::<U, E, O>(&acc, scale, d_q, &place, &mut scratch, head_pad, plan);
    }
}
