//! Which part of a query tile's keys a cube walks, and what it leaves of it.

use cubecl::prelude::*;

use super::{
    mask::KeyRange,
    seq::{Schedule, Seq},
    softmax::OnlineSoftmax,
};
use crate::plan::Plan;

/// A query tile and a part of its keys: what a cube does.
///
/// Parts of a tile are neighbours in the order of launch, so that tiles keep the order of [`Seq`].
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Share {
    /// The query tile.
    pub seq: Seq,
    /// Which part, of `splits`.
    pub part: u32,
}

#[cube]
impl Share {
    /// Part `part` of the keys of the query tile `seq`.
    pub fn new(seq: Seq, part: u32) -> Share {
        Share { seq, part }
    }

    /// What the cube at `position` does.
    pub fn of_queries(
        position: u32,
        splits: u32,
        heads: usize,
        seqlen_q: usize,
        #[comptime] plan: Plan,
    ) -> Share {
        if comptime!(plan.is_split()) {
            Share {
                seq: Seq::of_queries(position / splits, heads, seqlen_q, plan),
                part: position % splits,
            }
        } else {
            Share {
                seq: Seq::of_queries(position, heads, seqlen_q, plan),
                part: 0u32.runtime(),
            }
        }
    }

    /// What a cube that stays does at `position` of `schedule`.
    pub fn of_schedule(
        schedule: &Schedule,
        position: u32,
        splits: u32,
        #[comptime] plan: Plan,
    ) -> Share {
        if comptime!(plan.is_split()) {
            Share {
                seq: schedule.seq(position / splits, plan),
                part: position % splits,
            }
        } else {
            Share {
                seq: schedule.seq(position, plan),
                part: 0u32.runtime(),
            }
        }
    }

    /// This part of the key tiles `range`; parts differ by at most a tile, and may be empty.
    pub fn keys(&self, range: KeyRange, splits: u32, #[comptime] plan: Plan) -> KeyRange {
        if comptime!(plan.is_split()) {
            range.part(self.part, splits)
        } else {
            range
        }
    }

    /// Where the tile's rows go: part `p` of batch entry `b` of `batch` lies at `p·batch + b`.
    pub fn target(&self, batch: usize, #[comptime] plan: Plan) -> Seq {
        if comptime!(plan.is_split()) {
            Seq {
                batch: self.part as usize * batch + self.seq.batch,
                head: self.seq.head,
                start: self.seq.start,
            }
        } else {
            self.seq
        }
    }
}

/// What row `r` of the accumulator is multiplied by before it leaves the cube. A part leaves as it
/// is: `combine` divides by the sum of all parts.
#[cube]
pub fn factor(softmax: &OnlineSoftmax, #[comptime] r: usize, #[comptime] plan: Plan) -> f32 {
    if comptime!(plan.is_split()) {
        f32::new(1.0)
    } else {
        softmax.inverse_sum(r)
    }
}

/// Leaves the log-sum-exp of row `r` at `at`, or of a part its maximum and sum, at `2·at`: a
/// difference of maxima is exact, one of two logarithms has the rounding error of both.
#[cube]
pub fn store_row(
    softmax: &OnlineSoftmax,
    stats: &mut [f32],
    at: usize,
    #[comptime] r: usize,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.is_split()) {
        let (peak, sum) = softmax.state(r);
        stats[2 * at] = peak;
        stats[2 * at + 1] = sum;
    } else {
        stats[at] = softmax.lse(r);
    }
}
