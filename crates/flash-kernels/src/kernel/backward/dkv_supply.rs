//! The warpgroup that brings what the others multiply in dkv: tiles, and the statistics of queries.

use cubecl::prelude::*;

use super::overlapped::{GradientMaps, GradientProblem, REGISTERS};
use crate::{
    kernel::{
        mask::QueryRange,
        ring::{GradientRings, Place},
        seq::{Seq, position_again},
        unit::{hopper, ptx},
    },
    plan::Plan,
};

/// The query tiles of these keys, the same for each head. Keys that no query sees visit one tile,
/// masked.
#[cube]
pub(super) fn visited<M: Int>(
    problem: &GradientProblem<M>,
    seq: &Seq,
    #[comptime] plan: Plan,
) -> QueryRange {
    let head = seq.head * problem.group as usize;
    let range = problem
        .mask_of(seq.batch, head, plan)
        .q_range(seq.start, plan);
    QueryRange {
        begin: min(range.begin, range.end - 1u32),
        inner_begin: range.inner_begin,
        end: range.end,
    }
}

/// The query tiles one after the other, head by head: where the walk is.
#[derive(CubeType)]
struct Walk {
    head: u32,
    step: u32,
    begin: u32,
    end: u32,
}

#[cube]
impl Walk {
    fn new<M: Int>(problem: &GradientProblem<M>, seq: &Seq, range: &QueryRange) -> Walk {
        Walk {
            head: seq.head as u32 * problem.group,
            step: range.begin,
            begin: range.begin,
            end: range.end,
        }
    }

    /// The place of the tile.
    fn place(&self, seq: &Seq, #[comptime] plan: Plan) -> Place {
        Place {
            batch: seq.batch as u32,
            head: self.head,
            row: self.step * comptime!(plan.tile.block_n as u32),
        }
    }

    /// Goes on to the next tile.
    fn advance(&mut self) {
        let next = self.step + 1u32;
        let is_last = next == self.end;
        self.head += u32::cast_from(is_last);
        self.step = select(is_last, self.begin, next);
    }
}

/// The keys of this cube, found anew by each warpgroup, which has not the registers to keep them.
#[cube]
pub(super) fn owned<M: Int>(problem: &GradientProblem<M>, #[comptime] plan: Plan) -> Seq {
    let kv_heads = (problem.heads / problem.group) as usize;
    let position = position_again(comptime!(plan.isa));
    Seq::of_keys(position, kv_heads, problem.seqlen_k as usize, plan)
}

/// What the last warpgroup does: one unit has tiles copied, and another plane brings statistics.
#[cube]
pub(super) fn supply<M: Int>(
    rings: &GradientRings,
    problem: &GradientProblem<M>,
    maps: &GradientMaps,
    stats: &[Vector<f32, Const<2>>],
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    #[comptime] plan: Plan,
) {
    let first = comptime!(plan.consumers() as u32);
    hopper::release_registers(comptime!(REGISTERS.0));
    let plane = hopper::uniform(UNIT_POS / 32u32);
    if UNIT_POS == comptime!(128 * first) {
        produce::<M>(rings, problem, maps, &owned(problem, plan), plan);
    } else if plane == comptime!(4 * first + 1) {
        bring_pairs::<M>(rings, problem, &owned(problem, plan), stats, pairs, plan);
    }
}

/// Has the tiles copied in the order in which they are multiplied. One unit calls it.
#[cube]
fn produce<M: Int>(
    rings: &GradientRings,
    problem: &GradientProblem<M>,
    maps: &GradientMaps,
    seq: &Seq,
    #[comptime] plan: Plan,
) {
    let keys = Place {
        batch: seq.batch as u32,
        head: seq.head as u32,
        row: seq.start,
    };
    rings.own_head.fill(0u32, maps.k, maps.of(keys, 1u32));
    let range = visited(problem, seq, plan);
    let count = problem.group * (range.end - range.begin);
    let mut walk = Walk::new(problem, seq, &range);
    let mut at = 0u32.runtime();
    // Unrolled, the loop would need more registers than are left to it.
    while at < ptx::opaque(count) {
        let queries = walk.place(seq, plan);
        rings.head.fill(at, maps.q, maps.of(queries, 0u32));
        if at == 0u32 {
            rings.own_val.fill(0u32, maps.v, maps.of(keys, 2u32));
        }
        rings.val.fill(at, maps.d_out, maps.of(queries, 3u32));
        walk.advance();
        at += 1u32;
    }
}

/// Brings the statistics of the queries, in the order of their tiles; zeros past the end, where q and
/// dO are zero too, so that nothing is added. One plane calls it.
#[cube]
fn bring_pairs<M: Int>(
    rings: &GradientRings,
    problem: &GradientProblem<M>,
    seq: &Seq,
    stats: &[Vector<f32, Const<2>>],
    pairs: &Shared<[Vector<f32, Const<2>>]>,
    #[comptime] plan: Plan,
) {
    let block_n = comptime!(plan.tile.block_n as u32);
    let mut pairs = pairs.clone();
    let range = visited(problem, seq, plan);
    let count = problem.group * (range.end - range.begin);
    let mut walk = Walk::new(problem, seq, &range);
    let mut at = 0u32.runtime();
    // As in `produce`.
    while at < ptx::opaque(count) {
        let queries = walk.place(seq, plan);
        let line = problem.line(queries.batch as usize, queries.head as usize);
        rings.head.await_empty(at);
        #[unroll]
        for i in 0..comptime!(block_n.div_ceil(64)) {
            // Computed anew each time, rather than kept: the copying warpgroup has few registers.
            let two = ptx::opaque(UNIT_POS) % 32u32 + comptime!(32 * i);
            if 2u32 * two < block_n {
                let (x, y) = (queries.row + 2u32 * two, queries.row + 2u32 * two + 1u32);
                let x = pair_of(stats, line, x, problem.seqlen_q);
                let y = pair_of(stats, line, y, problem.seqlen_q);
                let stage = at % comptime!(plan.stats_stages() as u32);
                let to = stage * block_n + two;
                pairs[to as usize] = both(x, y, 0usize);
                pairs[(to + block_n / 2u32) as usize] = both(x, y, 1usize);
            }
        }
        // One unit arrives for the whole plane.
        sync_plane();
        rings.head.arrive_full(at);
        walk.advance();
        at += 1u32;
    }
}

/// The statistics of query `q`, zeros past the end.
#[cube]
fn pair_of(
    stats: &[Vector<f32, Const<2>>],
    line: usize,
    q: u32,
    seqlen_q: u32,
) -> Vector<f32, Const<2>> {
    let mut pair = Vector::<f32, Const<2>>::new(0.0);
    if q < seqlen_q {
        pair = stats[line + q as usize];
    }
    pair
}

/// The statistic `which` of two neighbours.
#[cube]
fn both(
    x: Vector<f32, Const<2>>,
    y: Vector<f32, Const<2>>,
    #[comptime] which: usize,
) -> Vector<f32, Const<2>> {
    let mut out = Vector::<f32, Const<2>>::empty();
    out.insert(0usize, x.extract(which));
    out.insert(1usize, y.extract(which));
    out
}
