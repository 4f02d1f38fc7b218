//! The warpgroup that has tiles copied for the others.

use cubecl::prelude::*;

use super::{
    ring::{Place, Rings},
    walk::Problem,
};
use crate::plan::Plan;

/// Where the tiles come from.
#[derive(CubeType)]
pub struct Maps {
    /// Tensor map of the queries.
    pub q: u64,
    /// Of the keys.
    pub k: u64,
    /// Of the values.
    pub v: u64,
    /// Query heads that share a key head.
    pub group: u32,
    /// Bit `2·i`: tensor `i` (q, k, v) has batch entries of its own; bit `2·i + 1`: heads.
    pub walked: u32,
}

#[cube]
impl Maps {
    /// `place` in the map of `tensor`, which counts q, k and v: 0 along a dimension that is
    /// broadcast and has one element there.
    fn of(&self, place: Place, #[comptime] tensor: u32) -> Place {
        place_of(self.walked, place, tensor)
    }
}

/// `place` in the map of `tensor`, by `walked` of [`Maps`].
#[cube]
pub fn place_of(walked: u32, place: Place, #[comptime] tensor: u32) -> Place {
    Place {
        batch: place.batch * ((walked >> comptime!(2 * tensor)) & 1u32),
        head: place.head * ((walked >> comptime!(2 * tensor + 1)) & 1u32),
        row: place.row,
    }
}

/// Has all tiles copied in the order in which they are multiplied: keys a step ahead of values.
#[cube]
pub fn produce<M: Int>(rings: &Rings, problem: &Problem<M>, maps: &Maps, #[comptime] plan: Plan) {
    let block_n = comptime!(plan.tile.block_n as u32);
    let mut round = 0u32.runtime();
    // Key tiles so far, and where the last of them was.
    let mut at = 0u32.runtime();
    let mut batch = 0u32.runtime();
    let mut head = 0u32.runtime();
    let mut row = 0u32.runtime();
    while problem.goes_on(round, plan) {
        if at > 0u32 {
            // First, since the queries' stage may be busy until the last keys are done.
            let last = Place { batch, head, row };
            rings.values.fill(at - 1u32, maps.v, maps.of(last, 2u32));
        }
        let walk = problem.walk(round, plan);
        batch = walk.seq.batch as u32;
        let line = walk.seq.head as u32;
        head = line / maps.group;
        let queries = Place {
            batch,
            head: line,
            row: walk.seq.start,
        };
        rings.queries.fill(round, maps.q, maps.of(queries, 0u32));
        let keys = Place {
            batch,
            head,
            row: walk.range.begin * block_n,
        };
        rings.keys.fill(at, maps.k, maps.of(keys, 1u32));
        at += 1u32;
        for step in walk.range.begin + 1u32..walk.range.end {
            // Rows of their own: a mutable variable in a structure is not copied, the place of the
            // values would move on with that of the keys.
            let keys = Place {
                batch,
                head,
                row: step * block_n,
            };
            let values = Place {
                batch,
                head,
                row: (step - 1u32) * block_n,
            };
            rings.keys.fill(at, maps.k, maps.of(keys, 1u32));
            rings.values.fill(at - 1u32, maps.v, maps.of(values, 2u32));
            at += 1u32;
        }
        row = (walk.range.end - 1u32) * block_n;
        round += 1u32;
    }
    let last = Place { batch, head, row };
    rings.values.fill(at - 1u32, maps.v, maps.of(last, 2u32));
}
