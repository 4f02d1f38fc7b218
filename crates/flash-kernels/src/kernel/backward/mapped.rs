//! What the gradients by functions of elements share.

use cubecl::prelude::*;

use crate::{
    kernel::{mask::Side, unit::MappedUnit},
    plan::Plan,
};

/// Log-sum-exp and negated delta of queries in shared memory, a value to a query.
#[derive(CubeType, Clone)]
#[expand(derive(Clone))]
pub struct Statistics {
    lse: Shared<[f32]>,
    minus_delta: Shared<[f32]>,
}

#[cube]
impl Statistics {
    /// Room for `plan.stats_len()` queries.
    pub fn new(#[comptime] plan: Plan) -> Statistics {
        Statistics {
            // Matrices are loaded from here, for which Vulkan wants multiples of 16 bytes.
            lse: Shared::<[f32]>::new_aligned_slice(comptime!(plan.stats_len()), 16usize),
            minus_delta: Shared::<[f32]>::new_aligned_slice(comptime!(plan.stats_len()), 16usize),
        }
    }

    /// Loads `stats[line + i]` of the `count` queries `i` from `query` on to place `at`; zeros past the
    /// end, where q and dO are zero too, so that nothing is added. Visible after a cube barrier.
    #[allow(clippy::too_many_arguments)]
    pub fn load(
        &self,
        stats: &[Vector<f32, Const<2>>],
        line: usize,
        seqlen_q: u32,
        query: u32,
        at: u32,
        #[comptime] count: usize,
        #[comptime] plan: Plan,
    ) {
        let (mut lse, mut minus_delta) = (self.lse.clone(), self.minus_delta.clone());
        let threads = comptime!(plan.threads as u32);
        #[unroll]
        for i in 0..comptime!(count.div_ceil(plan.threads) as u32) {
            let column = UNIT_POS + i * threads;
            if column < comptime!(count as u32) {
                let q = query + column;
                let mut pair = Vector::<f32, Const<2>>::new(0.0);
                if q < seqlen_q {
                    pair = stats[line + q as usize];
                }
                lse[(at + column) as usize] = pair.extract(0usize);
                minus_delta[(at + column) as usize] = -pair.extract(1usize);
            }
        }
    }

    /// `s = exp2(c·s - lse)` of the queries from place `at` on, `score::probability` of each element: `s`
    /// `[block_m, block_n]`, `side` says which of them are the queries.
    pub fn probabilities<U: MappedUnit>(
        &self,
        s: &mut U::Acc,
        at: u32,
        scale_log2: f32,
        #[comptime] side: Side,
        #[comptime] plan: Plan,
    ) {
        U::scale(s, scale_log2, plan);
        U::subtract(s, &U::of_queries(&self.lse, at, side, plan), plan);
        U::exp2(s, plan);
    }

    /// `-delta` of each pair, to which `dp` is added: `[block_m, block_n]`.
    pub fn start<U: MappedUnit>(
        &self,
        at: u32,
        #[comptime] side: Side,
        #[comptime] plan: Plan,
    ) -> U::Acc {
        U::of_queries(&self.minus_delta, at, side, plan)
    }
}
