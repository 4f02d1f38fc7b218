//! `super::dkv_overlapped` where a warpgroup has no registers for dk and dv of its keys: two have the
//! same 64 keys and divide the products.
//!
//! The first has the scores and dv, the second `v·dOᵀ` and dk, which needs the probabilities of the
//! first, rounded as dv takes them. While one computes exponentials or gradients, the other multiplies.

use cubecl::prelude::*;

use super::{
    dkv_overlapped::{gradients, probabilities, scores, store_keys, store_values, value_products},
    dkv_supply::{owned, visited},
    overlapped::GradientProblem,
};
use crate::{
    kernel::{
        mask::query_phase,
        ring::GradientRings,
        unit::{
            HalfFloat,
            wgmma::{self, Seen, SeenFrag},
        },
    },
    plan::Plan,
};

/// The first warpgroup: multiplies the tiles, and stores dv.
#[cube]
pub(super) fn sum_values<E: HalfFloat, M: Int, S: Size, P: Size, B: Size>(
    rings: &GradientRings,
    problem: &GradientProblem<M>,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    d_kv: &mut [Vector<u32, Const<4>>],
    dv_offset: usize,
    #[comptime] plan: Plan,
) {
    let (block_n, val_pad) = comptime!((plan.tile.block_n, plan.tile.val_pad));
    let seq = owned(problem, plan);
    let range = visited(problem, &seq, plan);
    let last = problem.group * (range.end - range.begin) - 1u32;
    let mut dv = wgmma::zeros(val_pad);
    let mut at = 0u32.runtime();
    rings.own_head.await_full(0u32);
    let first = scores::<E, S>(rings, 0u32, 0u32, plan);
    let mut s = wgmma::settled::<S>(first, 0usize, block_n);
    for member in 0..problem.group {
        let head = seq.head * problem.group as usize + member as usize;
        let mask = problem.mask_of(seq.batch, head, plan);
        #[unroll]
        for phase in 0..2u32 {
            let masked = comptime!(phase == 0);
            let (from, to) = query_phase(range.begin, range.inner_begin, range.end, phase);
            for step in from..to {
                if masked {
                    // For the other warpgroup, which has it from here only with the probabilities.
                    rings.head.make_finite_if::<E>(at, wgmma::suspect(&s));
                }
                probabilities::<E>(&mut s, pairs, at, problem.scale_log2, plan);
                if masked {
                    let queries = step * comptime!(block_n as u32);
                    let zero = f32::new(0.0);
                    mask.hide_transposed::<Seen<E>>(&mut s, queries, seq.start, zero, plan);
                }
                let p = wgmma::packed::<E, P>(&s);
                give::<P>(rings, p, at, plan);
                rings.val.await_full(at);
                let d_outs = rings.val.tile(at);
                let sum = wgmma::start_accumulate::<E, B, P>(&dv, p, d_outs, val_pad, plan);
                // The last scores are computed again instead of none: no branch around a product.
                let next = scores::<E, S>(rings, 0u32, min(at + 1u32, last), plan);
                wgmma::settle::<B>(&mut dv, sum, 1usize, val_pad);
                rings.val.release(at);
                wgmma::settle::<S>(&mut s, next, 0usize, block_n);
                at += 1u32;
            }
        }
    }
    let seq = owned(problem, plan);
    store_values::<E, M>(&dv, problem, &seq, d_kv, dv_offset, plan);
}

/// The second warpgroup: multiplies the tiles, and stores dk.
#[cube]
pub(super) fn sum_keys<E: HalfFloat, M: Int, S: Size, P: Size, A: Size>(
    rings: &GradientRings,
    problem: &GradientProblem<M>,
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    d_kv: &mut [Vector<u32, Const<4>>],
    #[comptime] plan: Plan,
) {
    let (block_n, head_pad) = comptime!((plan.tile.block_n, plan.tile.head_pad));
    let seq = owned(problem, plan);
    let range = visited(problem, &seq, plan);
    let last = problem.group * (range.end - range.begin) - 1u32;
    let mut dk = wgmma::zeros(head_pad);
    let mut at = 0u32.runtime();
    rings.own_val.await_full(0u32);
    let first = value_products::<E, S>(rings, 0u32, 0u32, plan);
    let mut dp = wgmma::settled::<S>(first, 0usize, block_n);
    for _member in 0..problem.group {
        #[unroll]
        for phase in 0..2u32 {
            let masked = comptime!(phase == 0);
            let (from, to) = query_phase(range.begin, range.inner_begin, range.end, phase);
            for _step in from..to {
                rings.val.release(at);
                // With the tile of Q come the statistics.
                rings.head.await_full(at);
                let p = take::<E>(rings, at, plan);
                gradients::<E>(&mut dp, &p, pairs, at, masked, plan);
                let ds = wgmma::packed::<E, P>(&dp);
                let queries = rings.head.tile(at);
                let sum = wgmma::start_accumulate::<E, A, P>(&dk, ds, queries, head_pad, plan);
                // As the last scores.
                let next = value_products::<E, S>(rings, 0u32, min(at + 1u32, last), plan);
                wgmma::settle::<A>(&mut dk, sum, 1usize, head_pad);
                rings.head.release(at);
                wgmma::settle::<S>(&mut dp, next, 0usize, block_n);
                at += 1u32;
            }
        }
    }
    let seq = owned(problem, plan);
    store_keys::<E, M>(&dk, problem, &seq, d_kv, plan);
}

/// Gives the probabilities of tile `at` to the second warpgroup.
#[cube]
fn give<P: Size>(rings: &GradientRings, p: Vector<u32, P>, at: u32, #[comptime] plan: Plan) {
    rings.exchange.await_empty(at);
    wgmma::store_packed::<P>(p, rings.exchange.tile(at), comptime!(plan.tile.block_n));
    // One unit arrives for the whole plane.
    sync_plane();
    rings.exchange.arrive_full(at);
}

/// Takes the probabilities of tile `at` from the first warpgroup.
#[cube]
fn take<E: HalfFloat>(rings: &GradientRings, at: u32, #[comptime] plan: Plan) -> SeenFrag {
    rings.exchange.await_full(at);
    let p = wgmma::load_packed::<E>(rings.exchange.tile(at), comptime!(plan.tile.block_n));
    // One unit arrives for the whole plane.
    sync_plane();
    rings.exchange.release(at);
    p
}
