//! What a query sees. Answers both questions: which key tiles, and this very score.

use cubecl::prelude::*;

use super::unit::MatrixUnit;
use crate::{Causality, Masking, plan::Plan};

/// Key tiles of a query tile: `[begin, inner_end)` need no mask, `[inner_end, end)` do.
/// Tiles outside are never visited.
#[derive(CubeType, Clone, Copy)]
pub struct KeyRange {
    /// First tile.
    pub begin: u32,
    /// First tile that needs masking.
    pub inner_end: u32,
    /// One past the last tile.
    pub end: u32,
}

#[cube]
impl KeyRange {
    /// Part `part` of `count` about equal ones. Their sizes differ by at most one tile.
    pub fn part(&self, part: u32, count: u32) -> KeyRange {
        // More queries than keys can leave nothing to walk.
        let tiles = saturating(self.end, self.begin);
        let (each, rest) = (tiles / count, tiles % count);
        let begin = self.begin + part * each + min(part, rest);
        let end = begin + each + u32::cast_from(part < rest);
        KeyRange {
            begin,
            inner_end: max(begin, min(self.inner_end, end)),
            end,
        }
    }

    /// What is in `whole` too, from its beginning.
    pub fn within(&self, whole: &KeyRange) -> KeyRange {
        let begin = whole.begin;
        KeyRange {
            begin,
            inner_end: max(begin, min(self.inner_end, whole.end)),
            end: max(begin, min(self.end, whole.end)),
        }
    }
}

/// Query tiles of a key tile: `[begin, inner_begin)` need a mask, `[inner_begin, end)` do not.
#[derive(CubeType, Clone, Copy)]
pub struct QueryRange {
    /// First tile.
    pub begin: u32,
    /// First tile that needs no masking.
    pub inner_begin: u32,
    /// One past the last tile.
    pub end: u32,
}

/// What the rows of a product are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Queries, and the columns keys.
    Queries,
    /// Keys, and the columns queries.
    Keys,
}

/// Lengths against which positions are compared, and the bool mask of this head.
#[derive(CubeType)]
pub struct Mask<M: Int> {
    seqlen_q: u32,
    seqlen_k: u32,
    dense: ComptimeOption<DenseMask<M>>,
    #[cube(comptime)]
    causality: Causality,
}

/// One bool per score, nonzero = drop, by strides (0 where broadcast).
#[derive(CubeType)]
pub struct DenseMask<M: Int> {
    buffer: OwnedTensor<M>,
    offset: usize,
    row_stride: usize,
    col_stride: usize,
}

#[cube]
impl<M: Int> Mask<M> {
    /// The mask of query head `head` in `dense` `[batch, heads, seqlen_q, seqlen_k]`.
    pub fn new(
        seqlen_q: u32,
        seqlen_k: u32,
        dense: &ComptimeOption<OwnedTensor<M>>,
        batch: usize,
        head: usize,
        #[comptime] causality: Causality,
    ) -> Mask<M> {
        #[comptime]
        let dense = match dense {
            ComptimeOption::Some(buffer) => ComptimeOption::new_Some(DenseMask::<M> {
                buffer: buffer.clone(),
                offset: batch * buffer.stride(0) + head * buffer.stride(1),
                row_stride: buffer.stride(2),
                col_stride: buffer.stride(3),
            }),
            ComptimeOption::None => ComptimeOption::new_None(),
        };
        Mask::<M> {
            seqlen_q,
            seqlen_k,
            dense,
            causality,
        }
    }

    /// Does query `q` see key `k`? False past either sequence's end.
    pub fn keep(&self, q: u32, k: u32) -> bool {
        let mut keep = k < self.seqlen_k;
        if comptime!(self.causality == Causality::Causal) {
            keep = keep && k + self.seqlen_q <= q + self.seqlen_k;
        }
        #[comptime]
        match &self.dense {
            ComptimeOption::Some(dense) => {
                // No query past the end sees a key: its zeros times a NaN key would be none.
                keep = keep && q < self.seqlen_q;
                if keep {
                    let at = dense.offset
                        + q as usize * dense.row_stride
                        + k as usize * dense.col_stride;
                    keep = dense.buffer.as_slice()[at] == M::from_int(0);
                }
            }
            ComptimeOption::None => {}
        }
        keep
    }

    /// Key tiles that the queries `[query_start, query_start + rows)` visit.
    pub fn k_range(
        &self,
        query_start: u32,
        #[comptime] rows: usize,
        #[comptime] plan: Plan,
    ) -> KeyRange {
        let block_n = comptime!(plan.tile.block_n as u32);
        let mut end = self.seqlen_k;
        // Keys that every one of the queries sees.
        let mut common = self.seqlen_k;
        if comptime!(self.causality == Causality::Causal) {
            let last = min(query_start + comptime!(rows as u32), self.seqlen_q);
            end = min(end, saturating(last + self.seqlen_k, self.seqlen_q));
            common = min(
                common,
                saturating(query_start + 1u32 + self.seqlen_k, self.seqlen_q),
            );
        }
        let mut inner_end = common / block_n;
        if comptime!(!has_inner(plan)) {
            inner_end = 0u32.runtime();
        }
        KeyRange {
            begin: 0u32.runtime(),
            inner_end,
            end: end.div_ceil(block_n),
        }
    }

    /// Query tiles that see any of the keys `[key_start, key_start + block_m)`.
    pub fn q_range(&self, key_start: u32, #[comptime] plan: Plan) -> QueryRange {
        let block_n = comptime!(plan.tile.block_n as u32);
        let end = self.seqlen_q.div_ceil(block_n);
        let mut begin = 0u32.runtime();
        let mut inner_begin = 0u32.runtime();
        if comptime!(self.causality == Causality::Causal) {
            let last = min(
                key_start + comptime!(plan.tile.block_m as u32),
                self.seqlen_k,
            );
            begin = saturating(key_start + self.seqlen_q, self.seqlen_k) / block_n;
            // The first query that sees every key of the tile.
            let all = saturating(last + self.seqlen_q, self.seqlen_k + 1u32);
            inner_begin = all.div_ceil(block_n);
        }
        if comptime!(plan.masking == Masking::Dense) {
            inner_begin = end;
        }
        QueryRange {
            begin: min(begin, end),
            inner_begin: min(inner_begin, end),
            end,
        }
    }

    /// `s = dropped` wherever the query does not see the key. A NaN there is dropped with it.
    ///
    /// Shapes: `s` `[rows, cols]` of this unit, of queries from `query_start` on and keys from
    /// `key_start` on; `side` says which of them the rows are.
    pub fn apply<U: MatrixUnit>(
        &self,
        s: &mut U::Frag,
        query_start: u32,
        key_start: u32,
        dropped: f32,
        #[comptime] side: Side,
        #[comptime] plan: Plan,
    ) {
        let rows = U::rows(&*s);
        let cols = U::cols(&*s);
        #[unroll]
        for r in 0..rows {
            let row = U::row(&*s, r, plan);
            #[unroll]
            for c in 0..cols {
                let col = U::col(&*s, c, plan);
                let keep = if comptime!(side == Side::Queries) {
                    self.keep(query_start + row, key_start + col)
                } else {
                    self.keep(query_start + col, key_start + row)
                };
                let x = select(keep, U::get(&*s, r, c), dropped);
                U::set(s, r, c, x);
            }
        }
    }

    /// `Self::apply` at the least cost: where position alone decides, a comparison for each score.
    pub fn hide<U: MatrixUnit>(
        &self,
        s: &mut U::Frag,
        query_start: u32,
        key_start: u32,
        dropped: f32,
        #[comptime] plan: Plan,
    ) {
        if comptime!(plan.masking == Masking::Dense) {
            self.apply::<U>(s, query_start, key_start, dropped, Side::Queries, plan);
        } else {
            self.apply_end::<U>(s, query_start, key_start, dropped, plan);
        }
    }

    /// `Self::apply` where position alone decides: what a row sees ends somewhere.
    fn apply_end<U: MatrixUnit>(
        &self,
        s: &mut U::Frag,
        query_start: u32,
        key_start: u32,
        dropped: f32,
        #[comptime] plan: Plan,
    ) {
        let rows = U::rows(&*s);
        let cols = U::cols(&*s);
        #[unroll]
        for r in 0..rows {
            let mut end = self.seqlen_k;
            if comptime!(self.causality == Causality::Causal) {
                let q = query_start + U::row(&*s, r, plan);
                end = min(end, saturating(q + self.seqlen_k + 1u32, self.seqlen_q));
            }
            let seen = saturating(end, key_start);
            #[unroll]
            for c in 0..cols {
                let keep = U::col(&*s, c, plan) < seen;
                let x = select(keep, U::get(&*s, r, c), dropped);
                U::set(s, r, c, x);
            }
        }
    }

    /// `Self::apply` at the least cost where rows are keys and columns queries.
    pub fn hide_transposed<U: MatrixUnit>(
        &self,
        s: &mut U::Frag,
        query_start: u32,
        key_start: u32,
        dropped: f32,
        #[comptime] plan: Plan,
    ) {
        if comptime!(plan.masking == Masking::Dense) {
            self.apply::<U>(s, query_start, key_start, dropped, Side::Keys, plan);
        } else {
            self.apply_begin::<U>(s, query_start, key_start, dropped, plan);
        }
    }

    /// `Self::apply` of rows that are keys, where position alone decides: the queries that see a key
    /// begin somewhere, those of a key past the end nowhere.
    fn apply_begin<U: MatrixUnit>(
        &self,
        s: &mut U::Frag,
        query_start: u32,
        key_start: u32,
        dropped: f32,
        #[comptime] plan: Plan,
    ) {
        let rows = U::rows(&*s);
        let cols = U::cols(&*s);
        #[unroll]
        for r in 0..rows {
            let k = key_start + U::row(&*s, r, plan);
            let mut blind = 0u32.runtime();
            if comptime!(self.causality == Causality::Causal) {
                let begin = saturating(k + self.seqlen_q, self.seqlen_k);
                blind = saturating(begin, query_start);
            }
            blind = select(k < self.seqlen_k, blind, u32::MAX);
            #[unroll]
            for c in 0..cols {
                let keep = U::col(&*s, c, plan) >= blind;
                let x = select(keep, U::get(&*s, r, c), dropped);
                U::set(s, r, c, x);
            }
        }
    }
}

/// Are there key tiles that need no mask?
pub const fn has_inner(plan: Plan) -> bool {
    matches!(plan.masking, Masking::None)
}

/// May a step of `plan` drop pairs of queries and keys that exist?
pub const fn drops_pairs(plan: Plan) -> bool {
    matches!(plan.causality, Causality::Causal) || matches!(plan.masking, Masking::Dense)
}

/// The phases of a walk over keys: inner steps first, then those that need a mask.
#[cube]
pub fn phase_range(begin: u32, inner_end: u32, end: u32, #[comptime] phase: u32) -> (u32, u32) {
    // More queries than keys can leave nothing to walk, and less than one inner tile.
    let inner = min(inner_end, end);
    if comptime!(phase == 0) {
        (begin, inner)
    } else {
        (inner, end)
    }
}

/// The phases of a walk over queries: those that need a mask first, then inner steps.
#[cube]
pub fn query_phase(begin: u32, inner_begin: u32, end: u32, #[comptime] phase: u32) -> (u32, u32) {
    let inner = max(inner_begin, begin);
    if comptime!(phase == 0) {
        (begin, inner)
    } else {
        (inner, end)
    }
}

/// `max(a - b, 0)` of unsigned values.
#[cube]
fn saturating(a: u32, b: u32) -> u32 {
    select(a > b, a - b, 0u32)
}
