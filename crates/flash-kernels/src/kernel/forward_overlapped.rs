//! The forward pass where matrix products run by themselves: the scores of the next keys are on
//! their way during the softmax of these.
//!
//! FlashAttention-3 (Shah et al. 2024): one warpgroup has tiles copied, the others multiply them;
//! the product of a query tile's last keys overlaps with that of the next tile's first.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::{
    epilogue,
    forward::folded_scale,
    mask::phase_range,
    math::neg_infinity,
    ring::{Ring, Rings},
    score,
    seq::Schedule,
    softmax::OnlineSoftmax,
    split::Share,
    supply::{Maps, produce},
    unit::{
        HalfFloat, MatrixUnit, hopper,
        wgmma::{self, Seen, SeenFrag},
        wgmma_ops::one_cube,
    },
    walk::{Problem, SAVED, Walk},
};
use crate::{Causality, plan::Plan};

/// As `super::forward`, for 16-bit elements.
///
/// Shapes: q, k and v behind tensor maps `[batch, heads, seqlen, dim]`; `group` query heads share a
/// key head. `walked` as in [`Maps`]. Cubes stay and take query tiles by [`Schedule`]; the last warpgroup copies.
///
/// `S`, `P` and `A` hold a unit's part of the scores, of the probabilities and of the output:
/// lengths are powers of two, of which the first `block_n / 2`, `block_n / 4`, `val_pad / 2` count.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward_overlapped<E: HalfFloat, M: Int, S: Size, P: Size, A: Size>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    mask: ComptimeOption<OwnedTensor<M>>,
    out: &mut [Vector<u32, Const<4>>],
    lse: &mut [f32],
    lines: u32,
    heads: u32,
    group: u32,
    walked: u32,
    section: u32,
    seqlen_q: u32,
    seqlen_k: u32,
    val_dim: u32,
    splits: u32,
    scale_log2: f32,
    #[comptime] plan: Plan,
    #[define(M)] _mask_type: ElemType,
) {
    one_cube();
    let schedule = Schedule {
        lines,
        heads,
        section,
        seqlen_q,
    };
    let rings = Rings::new(plan);
    let consumers = comptime!(plan.consumers() as u32);
    let warpgroup = hopper::uniform(UNIT_POS / 128u32);
    let problem = Problem::<M> {
        schedule,
        mask,
        seqlen_k,
        val_dim,
        splits,
        scale_log2,
    };
    if warpgroup == consumers {
        hopper::release_registers(comptime!(registers(plan).0));
        if UNIT_POS == comptime!(128 * consumers) {
            let maps = Maps {
                q: tensor_map_address(q),
                k: tensor_map_address(k),
                v: tensor_map_address(v),
                group,
                walked,
            };
            produce::<M>(&rings, &problem, &maps, plan);
        }
    } else {
        hopper::claim_registers(comptime!(registers(plan).1));
        consume::<E, M, S, P, A>(&rings, &problem, warpgroup, out, lse, plan);
    }
}

/// Registers of a unit that has tiles copied, and of one that multiplies: together what 64 K
/// registers give.
const fn registers(plan: Plan) -> (u32, u32) {
    match plan.consumers() {
        2 => (40, 232),
        3 => (32, 160),
        _ => (24, 112),
    }
}

/// Multiplies the tiles, 64 rows of each query tile.
#[cube]
#[allow(clippy::too_many_arguments, clippy::let_unit_value)]
fn consume<E: HalfFloat, M: Int, S: Size, P: Size, A: Size>(
    rings: &Rings,
    problem: &Problem<M>,
    warpgroup: u32,
    out: &mut [Vector<u32, Const<4>>],
    lse: &mut [f32],
    #[comptime] plan: Plan,
) {
    let (block_n, val_pad) = comptime!((plan.tile.block_n, plan.tile.val_pad));
    let mut scratch = Seen::<E>::scratch(plan);
    let mut round = 0u32.runtime();
    // The key tile whose probabilities are in `p`.
    let mut at = 0u32.runtime();
    let mut acc = wgmma::zeros(val_pad);
    let mut softmax = nothing::<M>(problem, plan);
    rings.queries.await_full(round);
    let s = scores::<E, S>(rings, warpgroup, round, at, plan);
    let mut s = wgmma::settled::<S>(s, 0usize, block_n);
    rings.keys.release(at);
    let walk = problem.part(round, warpgroup, plan);
    first::<E, M>(&mut s, &mut softmax, problem, &walk, &mut scratch, plan);
    let mut saved = Array::<u32>::new(SAVED);
    walk.save(&mut saved);
    let mut p = wgmma::packed::<E, P>(&s);
    while problem.goes_on(round, plan) {
        let walk = problem.saved(&saved, plan);
        // The first step is done: it was the last round's business.
        let second = walk.range.begin + 1u32;
        let inner_end = max(walk.range.inner_end, second);
        early(rings, round, second, walk.range.end, plan);
        #[unroll]
        for phase in 0..2u32 {
            let (from, to) = phase_range(second, inner_end, walk.range.end, phase);
            for step in from..to {
                let s = scores::<E, S>(rings, warpgroup, round, at + 1u32, plan);
                let o = outputs::<E, A, P>(rings, &acc, p, at, plan);
                let mut s = wgmma::settled::<S>(s, 1usize, block_n);
                rings.keys.release(at + 1u32);
                early(rings, round, step + 1u32, walk.range.end, plan);
                let masked = comptime!(phase == 1);
                logits::<E, M>(&mut s, problem, &walk, step, masked, plan);
                let rescale = softmax.advance::<Seen<E>>(&mut s, &mut scratch, plan);
                wgmma::settle::<A>(&mut acc, o, 0usize, val_pad);
                rings.values.release(at);
                p = wgmma::packed::<E, P>(&s);
                Seen::<E>::rescale(&mut acc, &rescale.alpha, rescale.stale, &mut scratch, plan);
                at += 1u32;
            }
        }
        if comptime!(plan.owned_stages() > 1) {
            rings.queries.release(round);
        }
        round += 1u32;
        let next_at = at + walk.rest + 1u32;
        pass(&rings.keys, at + 1u32, next_at, plan);
        if problem.goes_on(round, plan) {
            rings.queries.await_full(round);
            let s = scores::<E, S>(rings, warpgroup, round, next_at, plan);
            let o = outputs::<E, A, P>(rings, &acc, p, at, plan);
            let mut s = wgmma::settled::<S>(s, 1usize, block_n);
            rings.keys.release(next_at);
            let mut next = nothing::<M>(problem, plan);
            let begun = problem.part(round, warpgroup, plan);
            first::<E, M>(&mut s, &mut next, problem, &begun, &mut scratch, plan);
            begun.save(&mut saved);
            wgmma::settle::<A>(&mut acc, o, 0usize, val_pad);
            pass_values(rings, at, next_at, plan);
            p = wgmma::packed::<E, P>(&s);
            finish::<E, M>(&acc, &mut softmax, problem, &walk.share, out, lse, plan);
            wgmma::clear(&mut acc);
            softmax.succeed(&next);
        } else {
            let o = outputs::<E, A, P>(rings, &acc, p, at, plan);
            wgmma::settle::<A>(&mut acc, o, 0usize, val_pad);
            pass_values(rings, at, next_at, plan);
            finish::<E, M>(&acc, &mut softmax, problem, &walk.share, out, lse, plan);
        }
        at = next_at;
    }
}

/// Lets the tiles `from..to` pass that other warpgroups see: they are waited for, since a stage is
/// released once in each turn.
#[cube]
fn pass(ring: &Ring, from: u32, to: u32, #[comptime] plan: Plan) {
    if comptime!(plan.causality == Causality::Causal) {
        for at in from..to {
            ring.await_full(at);
            ring.release(at);
        }
    }
}

/// Releases the value tile `at`, which was multiplied, and lets those before `to` pass.
#[cube]
fn pass_values(rings: &Rings, at: u32, to: u32, #[comptime] plan: Plan) {
    rings.values.release(at);
    pass(&rings.values, at + 1u32, to, plan);
}

/// Stores a query tile whose last product is done.
#[cube]
#[allow(clippy::too_many_arguments, clippy::let_unit_value)]
fn finish<E: HalfFloat, M: Int>(
    acc: &SeenFrag,
    softmax: &mut OnlineSoftmax,
    problem: &Problem<M>,
    share: &Share,
    out: &mut [Vector<u32, Const<4>>],
    lse: &mut [f32],
    #[comptime] plan: Plan,
) {
    let mut scratch = Seen::<E>::scratch(plan);
    softmax.finish::<Seen<E>>(&mut scratch, plan);
    let heads = problem.schedule.heads as usize;
    let seq = share.target(problem.schedule.lines as usize / heads, plan);
    let head = seq.batch * heads + seq.head;
    let line = head * problem.schedule.seqlen_q as usize + seq.start as usize;
    let rows = problem.schedule.seqlen_q - seq.start;
    epilogue::store_pieces::<E>(acc, &*softmax, out, lse, line, rows, problem.val_dim, plan);
}

/// The softmax of rows that have seen no key yet.
#[cube]
fn nothing<M: Int>(problem: &Problem<M>, #[comptime] plan: Plan) -> OnlineSoftmax {
    let rows = comptime!(plan.rows / 8);
    OnlineSoftmax::new(
        folded_scale(problem.scale_log2, plan),
        rows,
        comptime!(plan.isa),
    )
}

/// Where queries have one stage, it is free as soon as the last of their `end` products is `done`,
/// and the next ones are waited for: they travel during the last softmax.
#[cube]
fn early(rings: &Rings, round: u32, done: u32, end: u32, #[comptime] plan: Plan) {
    if comptime!(plan.owned_stages() == 1) {
        rings.queries.release_if(round, done == end);
    }
}

/// Starts the scores of key tile `at` for the query tile of `round`, which must be there.
#[cube]
fn scores<E: HalfFloat, S: Size>(
    rings: &Rings,
    warpgroup: u32,
    round: u32,
    at: u32,
    #[comptime] plan: Plan,
) -> Vector<f32, S> {
    rings.keys.await_full(at);
    wgmma::start_product::<E, S>(
        rings.queries.tile(round),
        rings.keys.tile(at),
        warpgroup,
        comptime!(plan.tile.head_pad),
        plan,
    )
}

/// Starts adding to `acc` the value tile `at`, weighed by the probabilities `p`.
#[cube]
fn outputs<E: HalfFloat, A: Size, P: Size>(
    rings: &Rings,
    acc: &SeenFrag,
    p: Vector<u32, P>,
    at: u32,
    #[comptime] plan: Plan,
) -> Vector<f32, A> {
    rings.values.await_full(at);
    let tile = rings.values.tile(at);
    wgmma::start_accumulate::<E, A, P>(acc, p, tile, comptime!(plan.tile.val_pad), plan)
}

/// Scores of the key tile `step` become logits, and masked ones -inf.
#[cube]
fn logits<E: HalfFloat, M: Int>(
    s: &mut SeenFrag,
    problem: &Problem<M>,
    walk: &Walk<M>,
    step: u32,
    #[comptime] masked: bool,
    #[comptime] plan: Plan,
) {
    score::apply::<Seen<E>>(s, problem.scale_log2, plan);
    if masked {
        hide::<E, M>(s, walk, step, plan);
    }
}

/// Scores of the key tile `step` that its mask drops become -inf.
#[cube]
fn hide<E: HalfFloat, M: Int>(s: &mut SeenFrag, walk: &Walk<M>, step: u32, #[comptime] plan: Plan) {
    let dropped = neg_infinity(comptime!(plan.isa));
    let queries = walk.seq.start;
    let keys = step * comptime!(plan.tile.block_n as u32);
    walk.mask.hide::<Seen<E>>(s, queries, keys, dropped, plan);
}

/// The first step of `walk`: `s` becomes probabilities, `softmax` begins.
#[cube]
fn first<E: HalfFloat, M: Int>(
    s: &mut SeenFrag,
    softmax: &mut OnlineSoftmax,
    problem: &Problem<M>,
    walk: &Walk<M>,
    scratch: &mut (),
    #[comptime] plan: Plan,
) {
    score::apply::<Seen<E>>(s, problem.scale_log2, plan);
    let begin = walk.range.begin;
    if walk.range.inner_end <= begin {
        hide::<E, M>(s, walk, begin, plan);
    }
    softmax.advance::<Seen<E>>(s, scratch, plan);
}
