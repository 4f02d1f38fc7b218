//! The gradient of the queries where matrix products run by themselves: the sum over the last keys
//! is on its way during the exponentials of these.

use cubecl::prelude::*;

use super::overlapped::{GradientMaps, GradientProblem, REGISTERS, gradient_of};
use crate::{
    kernel::{
        epilogue::{Place as Rows, store_scaled_pieces},
        mask::{KeyRange, Mask, phase_range},
        ring::{GradientRings, Place},
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

/// As `super::dq`, for 16-bit elements.
///
/// Shapes: q, k, v and d_out behind tensor maps `[batch, heads, seqlen, dim]`; `walked` as in
/// [`GradientMaps`]; stats of `super::delta`; d_q `[batch, heads, seqlen_q, head_dim]` packed.
///
/// A cube owns `block_m` queries of one head, 64 to a warpgroup; the last warpgroup copies. `S`, `P`
/// and `A` hold a unit's part of the scores, of their gradients and of dq.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dq_overlapped<E: HalfFloat, M: Int, S: Size, P: Size, A: Size>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    d_out: &TensorMap<E, Tiled>,
    stats: &[Vector<f32, Const<2>>],
    mask: ComptimeOption<OwnedTensor<M>>,
    d_q: &mut [Vector<u32, Const<4>>],
    cubes: u32,
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
        let seq = Seq::of_queries(position, heads as usize, seqlen_q as usize, plan);
        let consumers = comptime!(plan.consumers() as u32);
        let warpgroup = hopper::uniform(UNIT_POS / 128u32);
        if warpgroup == consumers {
            hopper::release_registers(comptime!(REGISTERS.0));
            if UNIT_POS == comptime!(128 * consumers) {
                let maps = GradientMaps::new(q, k, v, d_out, walked);
                produce::<M>(&rings, &problem, &maps, &seq, plan);
            }
        } else {
            hopper::claim_registers(comptime!(REGISTERS.1));
            consume::<E, M, S, P, A>(&rings, &problem, warpgroup, &seq, stats, d_q, plan);
        }
    }
}

/// Has the tiles copied in the order in which they are multiplied.
#[cube]
fn produce<M: Int>(
    rings: &GradientRings,
    problem: &GradientProblem<M>,
    maps: &GradientMaps,
    seq: &Seq,
    #[comptime] plan: Plan,
) {
    let queries = Place {
        batch: seq.batch as u32,
        head: seq.head as u32,
        row: seq.start,
    };
    rings.own_head.fill(0u32, maps.q, maps.of(queries, 0u32));
    let mask = problem.mask_of(seq.batch, seq.head, plan);
    for step in 0..visited(&mask, seq, plan).end {
        let keys = Place {
            batch: seq.batch as u32,
            head: seq.head as u32 / problem.group,
            row: step * comptime!(plan.tile.block_n as u32),
        };
        rings.head.fill(step, maps.k, maps.of(keys, 1u32));
        if step == 0u32 {
            rings.own_val.fill(0u32, maps.d_out, maps.of(queries, 3u32));
        }
        rings.val.fill(step, maps.v, maps.of(keys, 2u32));
    }
}

/// The key tiles of these queries. Those that see no key at all visit one tile, masked.
#[cube]
fn visited<M: Int>(mask: &Mask<M>, seq: &Seq, #[comptime] plan: Plan) -> KeyRange {
    let range = mask.k_range(seq.start, comptime!(plan.tile.block_m), plan);
    KeyRange {
        begin: range.begin,
        inner_end: range.inner_end,
        end: max(range.end, 1u32),
    }
}

/// Multiplies the tiles, 64 rows of the query tile.
#[cube]
#[allow(clippy::too_many_arguments)]
fn consume<E: HalfFloat, M: Int, S: Size, P: Size, A: Size>(
    rings: &GradientRings,
    problem: &GradientProblem<M>,
    warpgroup: u32,
    seq: &Seq,
    stats: &[Vector<f32, Const<2>>],
    d_q: &mut [Vector<u32, Const<4>>],
    #[comptime] plan: Plan,
) {
    let (block_n, head_pad) = comptime!((plan.tile.block_n, plan.tile.head_pad));
    let mask = problem.mask_of(seq.batch, seq.head, plan);
    let range = visited(&mask, seq, plan);
    let line = problem.line(seq.batch, seq.head);
    let mut acc = wgmma::zeros(head_pad);
    let pairs = pairs_of::<E>(&acc, stats, line, seq.start, problem.seqlen_q, plan);
    let rows = problem.seqlen_q - seq.start;
    let stored = Seen::<E>::any(Seen::<E>::row(&acc, 0usize, plan) < rows);
    rings.own_head.await_full(0u32);
    let s = scores::<E, S>(rings, warpgroup, 0u32, plan);
    rings.own_val.await_full(0u32);
    let dp = value_products::<E, S>(rings, warpgroup, 0u32, plan);
    let mut s = wgmma::settled::<S>(s, 1usize, block_n);
    let masked = range.inner_end == 0u32;
    probabilities::<E>(&mut s, &pairs, problem.scale_log2, stored, plan);
    if masked {
        mask.hide::<Seen<E>>(&mut s, seq.start, 0u32, f32::new(0.0), plan);
    }
    let mut dp = wgmma::settled::<S>(dp, 0usize, block_n);
    rings.val.release(0u32);
    gradients::<E>(&mut dp, &s, &pairs, true, plan);
    if masked {
        rings.head.make_finite::<E>(0u32, plan);
    }
    // The gradients of the scores of the step before.
    let mut ds = wgmma::packed::<E, P>(&dp);
    #[unroll]
    for phase in 0..2u32 {
        let masked = comptime!(phase == 1);
        let inner_end = max(range.inner_end, 1u32);
        let (from, to) = phase_range(1u32, inner_end, range.end, phase);
        for step in from..to {
            let s = scores::<E, S>(rings, warpgroup, step, plan);
            let sum = sums::<E, A, P>(rings, &acc, ds, step - 1u32, plan);
            let dp = value_products::<E, S>(rings, warpgroup, step, plan);
            let mut s = wgmma::settled::<S>(s, 2usize, block_n);
            probabilities::<E>(&mut s, &pairs, problem.scale_log2, stored, plan);
            if masked {
                let keys = step * comptime!(plan.tile.block_n as u32);
                mask.hide::<Seen<E>>(&mut s, seq.start, keys, f32::new(0.0), plan);
            }
            wgmma::settle::<A>(&mut acc, sum, 1usize, head_pad);
            rings.head.release(step - 1u32);
            let mut dp = wgmma::settled::<S>(dp, 0usize, block_n);
            rings.val.release(step);
            gradients::<E>(&mut dp, &s, &pairs, masked, plan);
            if masked {
                rings.head.make_finite::<E>(step, plan);
            }
            ds = wgmma::packed::<E, P>(&dp);
        }
    }
    let sum = sums::<E, A, P>(rings, &acc, ds, range.end - 1u32, plan);
    wgmma::settle::<A>(&mut acc, sum, 0usize, head_pad);
    let dim = problem.head_dim as usize;
    let place = Rows {
        first: (line + seq.start as usize) * dim,
        rows: problem.seqlen_q - seq.start,
        dim,
    };
    store_scaled_pieces::<E>(&acc, problem.scale, d_q, &place, head_pad, plan);
}

/// Starts the scores of key tile `at`.
#[cube]
fn scores<E: HalfFloat, S: Size>(
    rings: &GradientRings,
    warpgroup: u32,
    at: u32,
    #[comptime] plan: Plan,
) -> Vector<f32, S> {
    rings.head.await_full(at);
    let (queries, keys) = (rings.own_head.tile(0u32), rings.head.tile(at));
    let depth = comptime!(plan.tile.head_pad);
    wgmma::start_product::<E, S>(queries, keys, warpgroup, depth, plan)
}

/// Starts `dO·vᵀ` of value tile `at`.
#[cube]
fn value_products<E: HalfFloat, S: Size>(
    rings: &GradientRings,
    warpgroup: u32,
    at: u32,
    #[comptime] plan: Plan,
) -> Vector<f32, S> {
    rings.val.await_full(at);
    let (d_outs, values) = (rings.own_val.tile(0u32), rings.val.tile(at));
    let depth = comptime!(plan.tile.val_pad);
    wgmma::start_product::<E, S>(d_outs, values, warpgroup, depth, plan)
}

/// Starts adding to `acc` the key tile `at`, weighed by `ds`.
#[cube]
fn sums<E: HalfFloat, A: Size, P: Size>(
    rings: &GradientRings,
    acc: &SeenFrag,
    ds: Vector<u32, P>,
    at: u32,
    #[comptime] plan: Plan,
) -> Vector<f32, A> {
    let keys = rings.head.tile(at);
    wgmma::start_accumulate::<E, A, P>(acc, ds, keys, comptime!(plan.tile.head_pad), plan)
}

/// The statistics of this unit's rows. A row past the end has the last one's; it is not stored.
#[cube]
fn pairs_of<E: HalfFloat>(
    frag: &SeenFrag,
    stats: &[Vector<f32, Const<2>>],
    line: usize,
    query_start: u32,
    seqlen_q: u32,
    #[comptime] plan: Plan,
) -> Array<Vector<f32, Const<2>>> {
    let rows = Seen::<E>::rows(frag);
    let mut pairs = Array::<Vector<f32, Const<2>>>::new(rows);
    #[unroll]
    for r in 0..rows {
        let q = min(query_start + Seen::<E>::row(frag, r, plan), seqlen_q - 1u32);
        pairs[r] = stats[line + q as usize];
    }
    pairs
}

/// `s = p`, for rows that are queries; left as it is in a plane of which no row is `stored`.
///
/// The branch does more than save those: without one around the exponentials ptxas moves the waits for
/// the products that run meanwhile before them, and they begin when all products are done.
#[cube]
fn probabilities<E: HalfFloat>(
    s: &mut SeenFrag,
    pairs: &Array<Vector<f32, Const<2>>>,
    scale_log2: f32,
    stored: bool,
    #[comptime] plan: Plan,
) {
    if stored {
        #[unroll]
        for r in 0..Seen::<E>::rows(&*s) {
            let lse = pairs[r].extract(0usize);
            #[unroll]
            for c in 0..Seen::<E>::cols(&*s) {
                let x = Seen::<E>::get(&*s, r, c);
                let p = score::probability(x, lse, scale_log2, comptime!(plan.isa));
                Seen::<E>::set(s, r, c, p);
            }
        }
    }
}

/// `dp = ds`, for rows that are queries.
#[cube]
fn gradients<E: HalfFloat>(
    dp: &mut SeenFrag,
    p: &SeenFrag,
    pairs: &Array<Vector<f32, Const<2>>>,
    #[comptime] masked: bool,
    #[comptime] _plan: Plan,
) {
    #[unroll]
    for r in 0..Seen::<E>::rows(p) {
        let delta = pairs[r].extract(1usize);
        #[unroll]
        for c in 0..Seen::<E>::cols(p) {
            let x = Seen::<E>::get(&*dp, r, c);
            let ds = gradient_of(Seen::<E>::get(p, r, c), x, delta, masked);
            Seen::<E>::set(dp, r, c, ds);
        }
    }
}
