//! What cubes that stay walk, in each round: a query tile and the keys, or the part of them, that it
//! sees.

use cubecl::prelude::*;

use super::{
    mask::{KeyRange, Mask, has_inner},
    seq::{Schedule, Seq},
    split::Share,
    unit::hopper,
};
use crate::{
    Causality,
    plan::{Plan, WARPGROUP_ROWS},
};

/// What is asked, as far as it is not comptime.
#[derive(CubeType)]
pub struct Problem<M: Int> {
    /// Which query tiles, in which order.
    pub schedule: Schedule,
    /// The bool mask.
    pub mask: ComptimeOption<OwnedTensor<M>>,
    /// Keys of a head.
    pub seqlen_k: u32,
    /// Columns of the output.
    pub val_dim: u32,
    /// Parts of the keys of a query tile.
    pub splits: u32,
    /// `scale·log2(e)`.
    pub scale_log2: f32,
}

/// A query tile and the keys that it sees.
#[derive(CubeType)]
pub struct Walk<M: Int> {
    /// Its place.
    pub seq: Seq,
    /// Its place, and which part of its keys.
    pub share: Share,
    /// What its queries see.
    pub mask: Mask<M>,
    /// Its key tiles, or this cube's part of them.
    pub range: KeyRange,
    /// Key tiles after those, which other warpgroups see.
    pub rest: u32,
}

#[cube]
impl<M: Int> Problem<M> {
    /// The walk of this cube in `round`.
    pub fn walk(&self, round: u32, #[comptime] plan: Plan) -> Walk<M> {
        let position = self.schedule.position(round, plan);
        let share = Share::of_schedule(&self.schedule, position, self.splits, plan);
        let seq = share.seq;
        let mask = self.mask_of(&seq, plan);
        let range = mask.k_range(seq.start, comptime!(plan.tile.block_m), plan);
        let range = busy(share.keys(range, self.splits, plan));
        let rest = 0u32.runtime();
        Walk::<M> {
            seq,
            share,
            mask,
            range,
            rest,
        }
    }

    fn mask_of(&self, seq: &Seq, #[comptime] plan: Plan) -> Mask<M> {
        Mask::<M>::new(
            self.schedule.seqlen_q,
            self.seqlen_k,
            &self.mask,
            seq.batch,
            seq.head,
            comptime!(plan.causality),
        )
    }

    /// `walk` as far as the rows of `warpgroup` go.
    pub fn part(&self, round: u32, warpgroup: u32, #[comptime] plan: Plan) -> Walk<M> {
        let walk = self.walk(round, plan);
        let end = walk.range.end;
        let range = if comptime!(plan.causality == Causality::Causal) {
            let first = walk.seq.start + comptime!(WARPGROUP_ROWS as u32) * warpgroup;
            let own = walk.mask.k_range(first, WARPGROUP_ROWS, plan);
            if comptime!(plan.is_split()) {
                busy(own.within(&walk.range))
            } else {
                busy(own)
            }
        } else {
            walk.range
        };
        let rest = end - range.end;
        Walk::<M> {
            seq: walk.seq,
            share: walk.share,
            mask: walk.mask,
            range,
            rest,
        }
    }

    /// The walk that `Walk::save` left in `saved`. Its values are known to be the same in all units of a
    /// plane, as those of the first one were: what a loop carries is not (see [`Schedule`]).
    pub fn saved(&self, saved: &Array<u32>, #[comptime] plan: Plan) -> Walk<M> {
        let seq = Seq {
            batch: hopper::uniform(saved[0]) as usize,
            head: hopper::uniform(saved[1]) as usize,
            start: hopper::uniform(saved[2]),
        };
        // Where there are none the compiler is to know.
        let inner_end = if comptime!(has_inner(plan)) {
            hopper::uniform(saved[4])
        } else {
            0u32.runtime()
        };
        let range = KeyRange {
            begin: hopper::uniform(saved[3]),
            inner_end,
            end: hopper::uniform(saved[5]),
        };
        let rest = hopper::uniform(saved[6]);
        let share = Share::new(seq, hopper::uniform(saved[7]));
        let mask = self.mask_of(&seq, plan);
        Walk::<M> {
            seq,
            share,
            mask,
            range,
            rest,
        }
    }

    /// Is there a tile for this cube in `round`?
    pub fn goes_on(&self, round: u32, #[comptime] plan: Plan) -> bool {
        let mut len = self.schedule.len(plan);
        if comptime!(plan.is_split()) {
            len *= self.splits;
        }
        self.schedule.position(round, plan) < len
    }
}

/// Words that a walk is saved in.
pub const SAVED: usize = 8;

#[cube]
impl<M: Int> Walk<M> {
    /// Leaves this walk in `saved`, for [`Problem::saved`]: to find a tile takes several divisions.
    pub fn save(&self, saved: &mut Array<u32>) {
        saved[0] = self.seq.batch as u32;
        saved[1] = self.seq.head as u32;
        saved[2] = self.seq.start;
        saved[3] = self.range.begin;
        saved[4] = self.range.inner_end;
        saved[5] = self.range.end;
        saved[6] = self.rest;
        saved[7] = self.share.part;
    }
}

/// Queries that see no key at all visit one tile, masked: the pipeline never stands still. So do empty
/// parts, whose tile is past the last that is seen.
#[cube]
fn busy(range: KeyRange) -> KeyRange {
    KeyRange {
        begin: range.begin,
        inner_end: range.inner_end,
        end: max(range.end, range.begin + 1u32),
    }
}
