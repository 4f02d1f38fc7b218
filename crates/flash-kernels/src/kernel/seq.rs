//! Where this cube's problem lies: batch, head and query tile from the cube's position.

use cubecl::prelude::*;

use crate::Causality;

/// One query tile of one head.
#[derive(CubeType, Clone, Copy)]
pub struct Seq {
    /// Batch index.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// First query of the tile.
    pub query_start: u32,
}

/// Position of this cube in the order of launch. The grid is two-dimensional because WGPU
/// limits each axis to 65 535; it may be longer than the work.
#[cube]
pub fn position() -> u32 {
    CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X
}

impl Seq {
    /// Cubes that a forward launch needs: one per query tile of each head.
    pub fn count(batch: usize, heads: usize, seqlen_q: usize, block_m: usize) -> usize {
        batch * heads * seqlen_q.div_ceil(block_m)
    }
}

#[cube]
impl Seq {
    /// Tiles of a head are neighbours, so that its K and V stay in cache. Under a causal mask
    /// the last tile has the most keys and comes first: the short ones fill the tail.
    pub fn locate(
        position: u32,
        heads: usize,
        seqlen_q: u32,
        #[comptime] block_m: usize,
        #[comptime] causality: Causality,
    ) -> Seq {
        let tiles = seqlen_q.div_ceil(comptime!(block_m as u32));
        let line = (position / tiles) as usize;
        let index = position % tiles;
        let tile = if comptime!(causality == Causality::Causal) {
            tiles - 1u32 - index
        } else {
            index
        };
        Seq {
            batch: line / heads,
            head: line % heads,
            query_start: tile * comptime!(block_m as u32),
        }
    }
}
