//! Where this cube's problem lies: batch, head and query tile from the cube's position.

use cubecl::prelude::*;

use super::unit::ptx;
use crate::{Causality, Isa, plan::Plan};

/// In which order cubes that stay take the query tiles of all heads, one in each round.
///
/// All values are the same in all units. Nothing is carried from round to round without a shuffle: a bound of a loop
/// that is computed from the round's number is known to be the same in all units, one that was
/// carried is not, and then every address of a matrix product takes a detour.
#[derive(CubeType, Clone, Copy)]
pub struct Schedule {
    /// Query heads of all batch entries.
    pub lines: u32,
    /// Query heads of a batch entry.
    pub heads: u32,
    /// Heads whose tiles are taken together under a causal mask, so that their keys and values stay
    /// in cache.
    pub section: u32,
    /// Queries of a head.
    pub seqlen_q: u32,
}

#[cube]
impl Schedule {
    /// What this cube takes in `round`. Cubes that came last in a round come first in the next,
    /// since under a causal mask later is less.
    pub fn position(&self, round: u32, #[comptime] plan: Plan) -> u32 {
        let first = round * CUBE_COUNT_X;
        if comptime!(plan.causality == Causality::Causal) {
            // Arithmetic rather than a branch: see the type.
            let back = CUBE_COUNT_X - 1u32 - 2u32 * CUBE_POS_X;
            first + CUBE_POS_X + (round & 1u32) * back
        } else {
            first + CUBE_POS_X
        }
    }

    /// How many query tiles there are.
    pub fn len(&self, #[comptime] plan: Plan) -> u32 {
        self.lines * self.seqlen_q.div_ceil(comptime!(plan.tile.block_m as u32))
    }

    /// The query tile at `position`. Tiles of a head are neighbours, so that its K and V stay in
    /// cache. Under a causal mask equal tiles of the heads of a section are neighbours, since what
    /// cubes take in a round must be equal work; from section to section the tiles with the most
    /// keys come first and last in turn, first in the last section.
    pub fn seq(&self, position: u32, #[comptime] plan: Plan) -> Seq {
        let block_m = comptime!(plan.tile.block_m as u32);
        let tiles = self.seqlen_q.div_ceil(block_m);
        if comptime!(plan.causality == Causality::Causal) {
            let first = position / (self.section * tiles) * self.section;
            let within = position - first * tiles;
            let width = min(self.section, self.lines - first);
            let line = first + within % width;
            let index = within / width;
            let after = (self.lines - first - width).div_ceil(self.section);
            let tile = select(after & 1u32 == 0u32, tiles - 1u32 - index, index);
            Seq {
                batch: (line / self.heads) as usize,
                head: (line % self.heads) as usize,
                start: tile * block_m,
            }
        } else {
            let line = position / tiles;
            Seq {
                batch: (line / self.heads) as usize,
                head: (line % self.heads) as usize,
                start: (position % tiles) * block_m,
            }
        }
    }
}

/// One tile of the rows of one head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Seq {
    /// Batch index.
    pub batch: usize,
    /// Query head, or key head of `Self::of_keys`.
    pub head: usize,
    /// First row of the tile: a query, or a key of `Self::of_keys`.
    pub start: u32,
}

/// Position of this cube in the order of launch. The grid is two-dimensional because WGPU
/// limits each axis to 65 535; it may be longer than the work.
#[cube]
pub fn position() -> u32 {
    CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X
}

/// `position` once more, for after a long loop: on PTX nothing that was derived from the first one
/// has to stay in registers until then.
#[cube]
pub fn position_again(#[comptime] isa: Isa) -> u32 {
    if comptime!(isa == Isa::Ptx) {
        ptx::opaque(position())
    } else {
        position()
    }
}

impl Seq {
    /// Cubes that a launch needs: one per tile of owned rows of each head.
    pub fn count(batch: usize, heads: usize, seqlen: usize, block_m: usize) -> usize {
        batch * heads * seqlen.div_ceil(block_m)
    }
}

#[cube]
impl Seq {
    /// The query tile of a cube. Tiles of a head are neighbours, so that its K and V stay in cache.
    /// Under a causal mask the last tile has the most keys and comes first: the short ones fill the
    /// tail.
    pub fn of_queries(position: u32, heads: usize, seqlen_q: usize, #[comptime] plan: Plan) -> Seq {
        let block_m = comptime!(plan.tile.block_m as u32);
        let tiles = (seqlen_q as u32).div_ceil(block_m);
        let line = (position / tiles) as usize;
        let index = position % tiles;
        let tile = if comptime!(plan.causality == Causality::Causal) {
            tiles - 1u32 - index
        } else {
            index
        };
        Seq {
            batch: line / heads,
            head: line % heads,
            start: tile * block_m,
        }
    }

    /// The key tile of a cube. The first tile has the most queries under a causal mask, and comes
    /// first anyway.
    pub fn of_keys(position: u32, kv_heads: usize, seqlen_k: usize, #[comptime] plan: Plan) -> Seq {
        let block_m = comptime!(plan.tile.block_m as u32);
        let tiles = (seqlen_k as u32).div_ceil(block_m);
        let line = (position / tiles) as usize;
        Seq {
            batch: line / kv_heads,
            head: line % kv_heads,
            start: (position % tiles) * block_m,
        }
    }
}
