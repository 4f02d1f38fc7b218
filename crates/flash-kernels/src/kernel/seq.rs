//! Where this cube's problem lies: batch, head and query tile from the cube's position.

use cubecl::prelude::*;

use super::unit::ptx;
use crate::{Causality, Isa, plan::Plan};

/// One tile of the rows of one head.
#[derive(CubeType, Clone, Copy)]
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
