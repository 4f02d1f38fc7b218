//! What a gradient does with the elements of its products where they are.
//!
//! A function of elements is given their row and column, and what it reads besides must be values: it
//! cannot read memory. So what belongs to a query comes as a matrix of equal rows or columns, which is
//! loaded with a stride of 0, and a bool mask cannot come at all.

use cubecl::{cmma, prelude::*};

use crate::{
    kernel::{
        mask::{Mask, Side},
        math::exp2,
        unit::{
            mapped::{broadcast, subtract},
            visible::{CmmaAcc, plane_row},
        },
    },
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
            lse: Shared::<[f32]>::new_slice(comptime!(plan.stats_len())),
            minus_delta: Shared::<[f32]>::new_slice(comptime!(plan.stats_len())),
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

    /// `s = exp2(c·s - lse)`, and 0 where the query does not see the key. `at` is the place of the first
    /// query.
    #[allow(clippy::too_many_arguments)]
    pub fn probabilities<M: Int>(
        &self,
        s: &mut CmmaAcc,
        mask: &Mask<M>,
        corner: &Corner,
        at: u32,
        scale_log2: f32,
        #[comptime] masked: bool,
        #[comptime] plan: Plan,
    ) {
        let side = comptime!(corner.side);
        let cells = comptime!(plan.rows / 16 * plan.tile.block_n / 16);
        #[unroll]
        for i in 0..cells {
            let cell = s.cells.index(i);
            cmma::execute_elementwise_op(cell, cell, |_row, _col, x| x * scale_log2);
        }
        let lse = broadcast(&self.lse, at as usize, side, plan);
        subtract(s, &lse, plan);
        #[unroll]
        for i in 0..cells {
            let cell = s.cells.index(i);
            let isa = comptime!(plan.isa);
            if masked {
                let (q, k) = corner.of(i, plan);
                cmma::execute_elementwise_op(cell, cell, |row, col, x| {
                    let keep = seen::<M>(mask, q, k, row, col, side);
                    select(keep, exp2(x, isa), f32::new(0.0))
                });
            } else {
                cmma::execute_elementwise_op(cell, cell, |_row, _col, x| exp2(x, isa));
            }
        }
    }

    /// `-delta` of each pair, to which `dp` is added.
    pub fn start(&self, at: u32, #[comptime] side: Side, #[comptime] plan: Plan) -> CmmaAcc {
        broadcast(&self.minus_delta, at as usize, side, plan)
    }
}

/// `x = 0` where the query does not see the key.
#[cube]
pub fn drop_unseen<M: Int>(
    x: &mut CmmaAcc,
    mask: &Mask<M>,
    corner: &Corner,
    #[comptime] plan: Plan,
) {
    let side = comptime!(corner.side);
    #[unroll]
    for i in 0..comptime!(plan.rows / 16 * plan.tile.block_n / 16) {
        let cell = x.cells.index(i);
        let (q, k) = corner.of(i, plan);
        cmma::execute_elementwise_op(cell, cell, |row, col, x| {
            select(seen::<M>(mask, q, k, row, col, side), x, f32::new(0.0))
        });
    }
}

/// Does the query see the key of element `(row, col)`, in a cell whose first ones are `q` and `k`?
#[cube]
fn seen<M: Int>(
    mask: &Mask<M>,
    q: u32,
    k: u32,
    row: u32,
    col: u32,
    #[comptime] side: Side,
) -> bool {
    match comptime!(side) {
        Side::Queries => mask.keep(q + row, k + col),
        Side::Keys => mask.keep(q + col, k + row),
    }
}

/// The query and the key of a plane's first element, and which of them its rows are.
#[derive(CubeType, Clone, Copy)]
pub struct Corner {
    query: u32,
    key: u32,
    #[cube(comptime)]
    side: Side,
}

#[cube]
impl Corner {
    /// That of this unit's plane, in the tile that begins at `query` and `key`.
    pub fn new(query: u32, key: u32, #[comptime] side: Side, #[comptime] plan: Plan) -> Corner {
        let row = plane_row(plan);
        let (query, key) = match comptime!(side) {
            Side::Queries => (query + row, key),
            Side::Keys => (query, key + row),
        };
        Corner { query, key, side }
    }

    /// The query and the key of the first element of cell `i`.
    fn of(&self, #[comptime] i: usize, #[comptime] plan: Plan) -> (u32, u32) {
        let n_tiles = comptime!(plan.tile.block_n / 16);
        let (row, col) = comptime!(((i / n_tiles * 16) as u32, (i % n_tiles * 16) as u32));
        match comptime!(self.side) {
            Side::Queries => (self.query + row, self.key + col),
            Side::Keys => (self.query + col, self.key + row),
        }
    }
}
