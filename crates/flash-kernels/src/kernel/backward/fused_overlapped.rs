//! All three gradients in one walk, where matrix products run by themselves: five products, and what
//! each key tile gives to dq is added up in global memory, in the order in which cubes come to it.

use cubecl::prelude::*;

use super::{
    dkv_overlapped::{gradients, probabilities, scores, store, value_products},
    dkv_supply::{owned, supply, visited},
    overlapped::{GradientMaps, GradientProblem, REGISTERS},
};
use crate::{
    kernel::{
        mask::{QueryRange, drops_pairs, query_phase},
        ring::GradientRings,
        seq::{Seq, position},
        unit::{
            HalfFloat, hopper,
            wgmma::{self, Seen, SeenFrag},
            wgmma_ops::one_cube,
        },
    },
    plan::Plan,
};

/// As `super::dkv_overlapped`, and adds to `sums` what these keys give to dq, not scaled yet.
///
/// Shapes: as there; `sums` f32 in pieces as `super::fused_sums` has them, zeros before the first
/// cube. dk and dv have equal bits from run to run, `sums` has not.
///
/// The gradients of the scores, which the sum over queries takes as they lie in registers, are
/// written to shared memory as well, queries by keys: for the sum over keys each warpgroup multiplies
/// those of all of them. It does so a step later, during the exponentials, when the others' are there.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn fused_overlapped<E: HalfFloat, M: Int, S: Size, P: Size, A: Size, B: Size>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    d_out: &TensorMap<E, Tiled>,
    stats: &[Vector<f32, Const<2>>],
    mask: ComptimeOption<OwnedTensor<M>>,
    d_kv: &mut [Vector<u32, Const<4>>],
    sums: &mut [f32],
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
    if position() < cubes {
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
            let seq = owned(&problem, plan);
            let (dk, dv) =
                consume::<E, M, S, P, A, B>(&rings, &problem, warpgroup, &seq, &pairs, sums, plan);
            let seq = owned(&problem, plan);
            store::<E, M>(&dk, &dv, &problem, &seq, d_kv, dv_offset, plan);
            // Shared memory goes with its cube.
            hopper::await_reads();
        }
    }
}

/// The query tiles of these keys. Past the last key a probability is anything, also infinite, and its
/// key of zeros does not make 0 of it: a tile that has such rows is masked in all steps.
#[cube]
fn walked<M: Int>(problem: &GradientProblem<M>, seq: &Seq, #[comptime] plan: Plan) -> QueryRange {
    let range = visited(problem, seq, plan);
    let is_last = seq.start + comptime!(plan.tile.block_m as u32) > problem.seqlen_k;
    QueryRange {
        begin: range.begin,
        inner_begin: select(is_last, range.end, range.inner_begin),
        end: range.end,
    }
}

/// Multiplies the tiles, 64 rows of the key tile: dk, not scaled yet, and dv.
#[cube]
#[allow(clippy::too_many_arguments)]
fn consume<E: HalfFloat, M: Int, S: Size, P: Size, A: Size, B: Size>(
    rings: &GradientRings,
    problem: &GradientProblem<M>,
    warpgroup: u32,
    seq: &Seq,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    sums: &mut [f32],
    #[comptime] plan: Plan,
) -> (SeenFrag, SeenFrag) {
    let (block_n, head_pad, val_pad) =
        comptime!((plan.tile.block_n, plan.tile.head_pad, plan.tile.val_pad));
    let range = walked(problem, seq, plan);
    let last = problem.group * (range.end - range.begin) - 1u32;
    let mut dk = wgmma::zeros(head_pad);
    let mut dv = wgmma::zeros(val_pad);
    let mut at = 0u32.runtime();
    rings.own_head.await_full(0u32);
    if comptime!(drops_pairs(plan)) {
        // A key that is not finite meets gradients of 0. Who sees it has it in the log-sum-exp.
        rings.own_head.make_finite::<E>(0u32, plan);
    }
    let first = scores::<E, S>(rings, warpgroup, 0u32, plan);
    let mut s = wgmma::settled::<S>(first, 0usize, block_n);
    rings.own_val.await_full(0u32);
    for member in 0..problem.group {
        let head = seq.head * problem.group as usize + member as usize;
        let mask = problem.mask_of(seq.batch, head, plan);
        let pieces = first_piece(problem, seq.batch, head, plan);
        #[unroll]
        for phase in 0..2u32 {
            let masked = comptime!(phase == 0);
            let (from, to) = query_phase(range.begin, range.inner_begin, range.end, phase);
            for step in from..to {
                if masked {
                    if comptime!(drops_pairs(plan)) {
                        rings.head.make_finite::<E>(at, plan);
                    }
                    // Before the next product, whose registers a mask needs.
                    probabilities::<E>(&mut s, pairs, at, problem.scale_log2, plan);
                    let queries = step * comptime!(block_n as u32);
                    let zero = f32::new(0.0);
                    mask.hide_transposed::<Seen<E>>(&mut s, queries, seq.start, zero, plan);
                }
                let dq = query_piece::<E>(rings, warpgroup, at - 1u32, plan);
                if comptime!(!masked) {
                    probabilities::<E>(&mut s, pairs, at, problem.scale_log2, plan);
                }
                // Query tile 0 of a head is next to the last one of the head before.
                let tile = select(step == range.begin, 0u32, step);
                let piece = pieces + (tile - 1u32) * comptime!(plan.consumers() as u32) + warpgroup;
                add(rings, dq, sums, piece, u32::cast_from(at > 0u32));
                // Not earlier: its registers are those of dq.
                let dp = value_products::<E, S>(rings, warpgroup, at, plan);
                let p = wgmma::packed::<E, P>(&s);
                let (q_tile, d_out_tile) = (rings.head.tile(at), rings.val.tile(at));
                let dv_sum = wgmma::start_accumulate::<E, B, P>(&dv, p, d_out_tile, val_pad, plan);
                let mut dp = wgmma::settled::<S>(dp, 1usize, block_n);
                gradients::<E>(&mut dp, &s, pairs, at, masked, plan);
                let ds = wgmma::packed::<E, P>(&dp);
                share::<P>(rings, ds, warpgroup, at, plan);
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
    let dq = query_piece::<E>(rings, warpgroup, at - 1u32, plan);
    let behind = (seq.head + 1) * problem.group as usize;
    let pieces = first_piece(problem, seq.batch, behind, plan);
    let piece = pieces - comptime!(plan.consumers() as u32) + warpgroup;
    add(rings, dq, sums, piece, 1u32.runtime());
    (dk, dv)
}

/// Where the pieces of query head `head` begin among all pieces of dq.
#[cube]
fn first_piece<M: Int>(
    problem: &GradientProblem<M>,
    batch: usize,
    head: usize,
    #[comptime] plan: Plan,
) -> u32 {
    let tiles = problem
        .seqlen_q
        .div_ceil(comptime!(plan.tile.block_n as u32));
    let line = batch as u32 * problem.heads + head as u32;
    line * tiles * comptime!(plan.consumers() as u32)
}

/// Shows the gradients of the scores of tile `at` to all warpgroups. Of two tiles, the one that is
/// written over was multiplied before the last one was complete.
#[cube]
fn share<P: Size>(
    rings: &GradientRings,
    ds: Vector<u32, P>,
    warpgroup: u32,
    at: u32,
    #[comptime] plan: Plan,
) {
    let box_bytes = comptime!((plan.tile.block_n * 128) as u32);
    let to = rings.exchange.tile(at) + warpgroup * box_bytes;
    wgmma::store_transposed::<P>(ds, to, comptime!(plan.tile.block_n));
    hopper::async_fence();
    // One unit arrives for the whole plane.
    sync_plane();
    rings.exchange.arrive_full(at);
}

/// Starts this warpgroup's piece of `ds·k` of tile `at`: rows, or columns where a tile has but 64
/// rows. Before the first tile it is anything.
#[cube]
fn query_piece<E: HalfFloat>(
    rings: &GradientRings,
    warpgroup: u32,
    at: u32,
    #[comptime] plan: Plan,
) -> Vector<f32, Const<32>> {
    // The phase before the first counts as done.
    rings.exchange.await_full(at);
    let boxes = comptime!(plan.head_boxes() as u32);
    let row_bytes = comptime!((wgmma::PIECE * 128) as u32);
    let col_bytes = comptime!((plan.tile.block_m * 128) as u32);
    let ds = rings.exchange.tile(at) + warpgroup / boxes * row_bytes;
    let keys = rings.own_head.tile(0u32) + warpgroup % boxes * col_bytes;
    wgmma::start_piece::<E>(ds, keys, plan)
}

/// Waits for a piece of dq, the only product on its way, and has it added to `sums`.
#[cube]
fn add(
    rings: &GradientRings,
    dq: Vector<f32, Const<32>>,
    sums: &mut [f32],
    piece: u32,
    is_due: u32,
) {
    let dq = wgmma::settled::<Const<32>>(dq, 0usize, wgmma::PIECE);
    let plane = UNIT_POS / 32u32;
    let from = rings.addend + plane * wgmma::PLANE_BYTES;
    hopper::await_reads();
    // What one unit had read is written by all of the plane.
    sync_plane();
    wgmma::store_piece(&dq, from);
    hopper::async_fence();
    // One unit has the whole plane's part read.
    sync_plane();
    let at = piece * comptime!(4 * wgmma::PLANE_BYTES / 16)
        + plane % 4u32 * comptime!(wgmma::PLANE_BYTES / 16);
    let to = unsafe { sums.as_ptr_unchecked() };
    hopper::add_to_global(to, at, from, is_due, comptime!(wgmma::PLANE_BYTES));
}
