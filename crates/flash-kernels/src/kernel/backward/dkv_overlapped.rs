//! The gradients of keys and values where matrix products run by themselves: the scores of the next
//! queries are on their way during the last sum of these.

use cubecl::prelude::*;

use super::{
    dkv_divided::{sum_keys, sum_values},
    dkv_supply::{owned, supply, visited},
    overlapped::{GradientMaps, GradientProblem, REGISTERS, gradient_of},
};
use crate::{
    kernel::{
        epilogue::{Place as Rows, store_scaled_pieces},
        mask::query_phase,
        ring::GradientRings,
        score,
        seq::{Seq, position},
        unit::{
            HalfFloat, MatrixUnit, hopper,
            wgmma::{self, Seen, SeenFrag},
            wgmma_ops::one_cube,
        },
    },
    plan::Plan,
};

/// As `super::dkv`, for 16-bit elements.
///
/// Shapes: q, k, v and d_out behind tensor maps `[batch, heads, seqlen, dim]`; `walked` as in
/// [`GradientMaps`]; stats of `super::delta`; d_kv as in `dkv`, `dv_offset` a multiple of 8.
///
/// A cube owns `block_m` keys of one key head, 64 to a warpgroup, and walks the queries of its group
/// that see them; the last warpgroup copies. Rows of the products are keys: they are left operands
/// of the sums without leaving registers. Where registers do not hold dk and dv of 64 keys, two
/// warpgroups divide the products: `super::dkv_divided`. `S`, `P`, `A` and `B` hold a unit's part of the scores, of
/// what is made of them, of dk and of dv.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dkv_overlapped<E: HalfFloat, M: Int, S: Size, P: Size, A: Size, B: Size>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    d_out: &TensorMap<E, Tiled>,
    stats: &[Vector<f32, Const<2>>],
    mask: ComptimeOption<OwnedTensor<M>>,
    d_kv: &mut [Vector<u32, Const<4>>],
    cubes: u32,
    dv_offset: usize,
    heads: u32,
    group: u32,
    walked: u32,
    seqlen_q: u32,
    seqlen_k: u32,
    head_dim: u32,
    val_dim: u32,
    scale: f32,
    scale_log2: f32,
    #[comptime] plan: Plan,
    #[define(M)] _mask_type: ElemType,
) {
    one_cube();
    let position = position();
    if position < cubes {
        let problem = GradientProblem::<M> {
            mask,
            heads,
            group,
            seqlen_q,
            seqlen_k,
            head_dim,
            val_dim,
            scale,
            scale_log2,
        };
        let rings = GradientRings::new(plan);
        let pairs = Shared::<[Vector<f32, Const<2>>]>::new_slice(comptime!(plan.stats_len()));
        let consumers = comptime!(plan.consumers() as u32);
        let warpgroup = hopper::uniform(UNIT_POS / 128u32);
        if warpgroup == consumers {
            let maps = GradientMaps::new(q, k, v, d_out, walked);
            supply::<M>(&rings, &problem, &maps, stats, &pairs, plan);
        } else {
            hopper::claim_registers(comptime!(REGISTERS.1));
            if comptime!(plan.is_divided()) {
                let (rings, problem) = (&rings, &problem);
                if warpgroup == 0u32 {
                    sum_values::<E, M, S, P, B>(rings, problem, &pairs, d_kv, dv_offset, plan);
                } else {
                    sum_keys::<E, M, S, P, A>(rings, problem, &pairs, d_kv, plan);
                }
            } else {
                let seq = owned(&problem, plan);
                let (dk, dv) =
                    consume::<E, M, S, P, A, B>(&rings, &problem, warpgroup, &seq, &pairs, plan);
                let seq = owned(&problem, plan);
                store::<E, M>(&dk, &dv, &problem, &seq, d_kv, dv_offset, plan);
            }
        }
    }
}

/// Multiplies the tiles, 64 rows of the key tile: dk, not scaled yet, and dv.
#[cube]
fn consume<E: HalfFloat, M: Int, S: Size, P: Size, A: Size, B: Size>(
    rings: &GradientRings,
    problem: &GradientProblem<M>,
    warpgroup: u32,
    seq: &Seq,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    #[comptime] plan: Plan,
) -> (SeenFrag, SeenFrag) {
    let (block_n, head_pad, val_pad) =
        comptime!((plan.tile.block_n, plan.tile.head_pad, plan.tile.val_pad));
    let range = visited(problem, seq, plan);
    let last = problem.group * (range.end - range.begin) - 1u32;
    let mut dk = wgmma::zeros(head_pad);
    let mut dv = wgmma::zeros(val_pad);
    let mut at = 0u32.runtime();
    rings.own_head.await_full(0u32);
    let first = scores::<E, S>(rings, warpgroup, 0u32, plan);
    let mut s = wgmma::settled::<S>(first, 0usize, block_n);
    rings.own_val.await_full(0u32);
    for member in 0..problem.group {
        let head = seq.head * problem.group as usize + member as usize;
        let mask = problem.mask_of(seq.batch, head, plan);
        #[unroll]
        for phase in 0..2u32 {
            let masked = comptime!(phase == 0);
            let (from, to) = query_phase(range.begin, range.inner_begin, range.end, phase);
            for step in from..to {
                if masked {
                    rings.head.make_finite::<E>(at, plan);
                    // Before the next product, whose registers a mask needs.
                    probabilities::<E>(&mut s, pairs, at, problem.scale_log2, plan);
                    let queries = step * comptime!(plan.tile.block_n as u32);
                    mask.hide_transposed::<Seen<E>>(
                        &mut s,
                        queries,
                        seq.start,
                        f32::new(0.0),
                        plan,
                    );
                }
                let dp = value_products::<E, S>(rings, warpgroup, at, plan);
                if comptime!(!masked) {
                    probabilities::<E>(&mut s, pairs, at, problem.scale_log2, plan);
                }
                let p = wgmma::packed::<E, P>(&s);
                let (q_tile, d_out_tile) = (rings.head.tile(at), rings.val.tile(at));
                let dv_sum = wgmma::start_accumulate::<E, B, P>(&dv, p, d_out_tile, val_pad, plan);
                let mut dp = wgmma::settled::<S>(dp, 1usize, block_n);
                gradients::<E>(&mut dp, &s, pairs, at, masked, plan);
                let ds = wgmma::packed::<E, P>(&dp);
                let dk_sum = wgmma::start_accumulate::<E, A, P>(&dk, ds, q_tile, head_pad, plan);
                wgmma::settle::<B>(&mut dv, dv_sum, 1usize, val_pad);
                rings.val.release(at);
                // Not earlier: its registers are those of `p`. The last scores are computed again
                // instead of none: no branch around a product.
                let next = scores::<E, S>(rings, warpgroup, min(at + 1u32, last), plan);
                wgmma::settle::<A>(&mut dk, dk_sum, 1usize, head_pad);
                rings.head.release(at);
                wgmma::settle::<S>(&mut s, next, 0usize, block_n);
                at += 1u32;
            }
        }
    }
    (dk, dv)
}

/// Starts the scores of query tile `at`, keys by queries.
#[cube]
pub(super) fn scores<E: HalfFloat, S: Size>(
    rings: &GradientRings,
    warpgroup: u32,
    at: u32,
    #[comptime] plan: Plan,
) -> Vector<f32, S> {
    rings.head.await_full(at);
    let (keys, queries) = (rings.own_head.tile(0u32), rings.head.tile(at));
    let depth = comptime!(plan.tile.head_pad);
    wgmma::start_product::<E, S>(keys, queries, warpgroup, depth, plan)
}

/// Starts `v·dOᵀ` of query tile `at`.
#[cube]
pub(super) fn value_products<E: HalfFloat, S: Size>(
    rings: &GradientRings,
    warpgroup: u32,
    at: u32,
    #[comptime] plan: Plan,
) -> Vector<f32, S> {
    rings.val.await_full(at);
    let (values, d_outs) = (rings.own_val.tile(0u32), rings.val.tile(at));
    let depth = comptime!(plan.tile.val_pad);
    wgmma::start_product::<E, S>(values, d_outs, warpgroup, depth, plan)
}

/// Stores dk, scaled, and dv.
#[cube]
pub(super) fn store<E: HalfFloat, M: Int>(
    dk: &SeenFrag,
    dv: &SeenFrag,
    problem: &GradientProblem<M>,
    seq: &Seq,
    d_kv: &mut [Vector<u32, Const<4>>],
    dv_offset: usize,
    #[comptime] plan: Plan,
) {
    store_keys::<E, M>(dk, problem, seq, d_kv, plan);
    store_values::<E, M>(dv, problem, seq, d_kv, dv_offset, plan);
}

/// Stores dk, scaled.
#[cube]
pub(super) fn store_keys<E: HalfFloat, M: Int>(
    dk: &SeenFrag,
    problem: &GradientProblem<M>,
    seq: &Seq,
    d_kv: &mut [Vector<u32, Const<4>>],
    #[comptime] plan: Plan,
) {
    let place = rows_of(problem, seq, 0usize, problem.head_dim as usize);
    let cols = comptime!(plan.tile.head_pad);
    store_scaled_pieces::<E>(dk, problem.scale, d_kv, &place, cols, plan);
}

/// Stores dv.
#[cube]
pub(super) fn store_values<E: HalfFloat, M: Int>(
    dv: &SeenFrag,
    problem: &GradientProblem<M>,
    seq: &Seq,
    d_kv: &mut [Vector<u32, Const<4>>],
    dv_offset: usize,
    #[comptime] plan: Plan,
) {
    let place = rows_of(problem, seq, dv_offset, problem.val_dim as usize);
    let cols = comptime!(plan.tile.val_pad);
    store_scaled_pieces::<E>(dv, f32::new(1.0), d_kv, &place, cols, plan);
}

/// The rows of these keys in a gradient of `dim` columns that begins at element `offset`.
#[cube]
fn rows_of<M: Int>(problem: &GradientProblem<M>, seq: &Seq, offset: usize, dim: usize) -> Rows {
    let kv_heads = (problem.heads / problem.group) as usize;
    let line = (seq.batch * kv_heads + seq.head) * problem.seqlen_k as usize + seq.start as usize;
    Rows {
        first: offset + line * dim,
        rows: problem.seqlen_k - seq.start,
        dim,
    }
}

/// The statistic `which` of this unit's columns `2·c` and `2·c + 1`, which are neighbours.
#[cube]
fn two_of<E: HalfFloat>(
    frag: &SeenFrag,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    at: u32,
    #[comptime] which: u32,
    #[comptime] c: usize,
    #[comptime] plan: Plan,
) -> Vector<f32, Const<2>> {
    let block_n = comptime!(plan.tile.block_n as u32);
    let stage = at % comptime!(plan.stats_stages() as u32);
    let first = stage * block_n + Seen::<E>::col(frag, 0usize, plan) / 2u32;
    // The next two are 8 columns on: an offset that is known, rather than an address of its own.
    pairs[(first + comptime!(which * block_n / 2 + 4 * c as u32)) as usize]
}

/// `s = p`, for columns that are queries.
#[cube]
pub(super) fn probabilities<E: HalfFloat>(
    s: &mut SeenFrag,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    at: u32,
    scale_log2: f32,
    #[comptime] plan: Plan,
) {
    let rows = Seen::<E>::rows(&*s);
    let cols = Seen::<E>::cols(&*s);
    #[unroll]
    for c in 0..comptime!(cols / 2) {
        let lse = two_of::<E>(&*s, pairs, at, 0u32, c, plan);
        #[unroll]
        for r in 0..rows {
            #[unroll]
            for e in 0..2usize {
                let x = Seen::<E>::get(&*s, r, comptime!(2 * c + e));
                let p = score::probability(x, lse.extract(e), scale_log2, comptime!(plan.isa));
                Seen::<E>::set(s, r, comptime!(2 * c + e), p);
            }
        }
    }
}

/// `dp = ds`, for columns that are queries.
#[cube]
pub(super) fn gradients<E: HalfFloat>(
    dp: &mut SeenFrag,
    p: &SeenFrag,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    at: u32,
    #[comptime] masked: bool,
    #[comptime] plan: Plan,
) {
    let rows = Seen::<E>::rows(p);
    let cols = Seen::<E>::cols(p);
    #[unroll]
    for c in 0..comptime!(cols / 2) {
        let delta = two_of::<E>(p, pairs, at, 1u32, c, plan);
        #[unroll]
        for r in 0..rows {
            #[unroll]
            for e in 0..2usize {
                let x = Seen::<E>::get(&*dp, r, comptime!(2 * c + e));
                let p = Seen::<E>::get(p, r, comptime!(2 * c + e));
                let ds = gradient_of(p, x, delta.extract(e), masked);
                Seen::<E>::set(dp, r, comptime!(2 * c + e), ds);
            }
        }
    }
}
