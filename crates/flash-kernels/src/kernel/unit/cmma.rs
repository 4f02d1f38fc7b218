//! Cooperative matrices 16×16×16 of 16-bit floats with an opaque layout (Vulkan).
//!
//! A plane owns `plan.rows` rows. Since nobody may look into an accumulator, a product goes
//! through the plane's own shared memory: each lane then sees (part of) a row. The running sum
//! stays in cooperative matrices; it passes through the same memory only when the softmax moves
//! its maximum far enough, which is rare, and at the end.

use core::marker::PhantomData;

use cubecl::{
    cmma::{Matrix, MatrixIdent, MatrixLayout},
    prelude::*,
};

use super::{
    MatrixUnit, Right,
    visible::{
        CmmaAcc, CmmaFrag, CmmaLeft, CmmaScratch, accumulator, add_column, add_depth, hold_words,
        lane, lane_row, lane_rows, operand, part_width, plane_row, score_at, show, show_part,
        take_part, visible,
    },
    words::{HalfFloat, drop_non_finite, stage_words},
};
use crate::{kernel::tile::SharedTile, plan::Plan};

/// See the module.
pub struct Cmma<E: HalfFloat> {
    _element: PhantomData<E>,
}

#[cube]
impl<E: HalfFloat> MatrixUnit for Cmma<E> {
    type Stage = u32;
    type Width = Const<4>;
    type Left = CmmaLeft<E>;
    type Held = ();
    type Frag = CmmaFrag;
    type Acc = CmmaAcc;
    type Scratch = CmmaScratch;

    fn stage<L: Numeric, W: Size>(
        value: Vector<u32, Const<4>>,
        loaded: Vector<L, W>,
        #[comptime] j: usize,
        #[comptime] plan: Plan,
    ) -> Vector<u32, Const<4>> {
        stage_words::<L, W>(value, loaded, j, comptime!(plan.load_width))
    }

    fn scratch(#[comptime] plan: Plan) -> CmmaScratch {
        CmmaScratch {
            words: Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
                comptime!(plan.scratch_len() / 4),
                16usize,
            ),
        }
    }

    fn left(
        tile: &SharedTile<u32, Const<4>>,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) -> CmmaLeft<E> {
        let mut cells = Sequence::<Matrix<E>>::new();
        let first = tile.base + plane_row(plan) as usize * comptime!(tile.stride);
        #[unroll]
        for m in 0..comptime!(plan.rows / 16) {
            #[unroll]
            for k in 0..comptime!(depth / 16) {
                let at = first + comptime!(16 * m * tile.stride + 2 * k);
                cells.push(operand::<E>(
                    &tile.data,
                    at,
                    comptime!(4 * tile.stride),
                    MatrixIdent::A,
                    MatrixLayout::RowMajor,
                ));
            }
        }
        CmmaLeft::<E> { cells }
    }

    fn product(
        a: &CmmaLeft<E>,
        b: &SharedTile<u32, Const<4>>,
        scratch: &mut CmmaScratch,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) -> CmmaFrag {
        #[unroll]
        for n in 0..comptime!(plan.tile.block_n / 16) {
            let mut sums = Sequence::<Matrix<f32>>::new();
            #[unroll]
            for _m in 0..comptime!(plan.rows / 16) {
                sums.push(accumulator());
            }
            add_column::<E>(&sums, a, b, n, depth, plan);
            #[unroll]
            for m in 0..comptime!(plan.rows / 16) {
                show(
                    scratch,
                    sums.index(m),
                    score_at(m, comptime!(16 * n), plan),
                    plan,
                );
            }
        }
        // Stored by the plane as a whole, read lane by lane.
        sync_plane();
        visible(&*scratch, comptime!(plan.tile.block_n), plan)
    }

    fn hold(frag: &CmmaFrag, scratch: &mut CmmaScratch, #[comptime] plan: Plan) {
        // The probabilities come where the scores are: all lanes have read those.
        sync_plane();
        hold_words::<E>(frag, scratch, plan);
        // Written lane by lane, loaded by the plane as a whole.
        sync_plane();
    }

    fn reuse(#[comptime] _plan: Plan) {
        // The plane may still be loading the probabilities that its lanes overwrite.
        sync_plane();
    }

    fn zero(#[comptime] cols: usize, #[comptime] plan: Plan) -> CmmaAcc {
        let mut cells = Sequence::<Matrix<f32>>::new();
        #[unroll]
        for _i in 0..comptime!(plan.rows / 16 * cols / 16) {
            cells.push(accumulator());
        }
        CmmaAcc { cells, cols }
    }

    fn accumulate(
        acc: &mut CmmaAcc,
        _a: &(),
        b: &SharedTile<u32, Const<4>>,
        scratch: &mut CmmaScratch,
        #[comptime] right: Right,
        #[comptime] plan: Plan,
    ) {
        if comptime!(right == Right::Finite) {
            let cols = comptime!(acc.cols);
            drop_non_finite(b, cols, comptime!(E::EXPONENT), plan);
        }
        let stride = comptime!(plan.score_stride() / 4);
        let first = plane_row(plan) as usize * comptime!(stride);
        #[unroll]
        for k in 0..comptime!(plan.tile.block_n / 16) {
            let mut left = Sequence::<Matrix<E>>::new();
            #[unroll]
            for m in 0..comptime!(plan.rows / 16) {
                let at = first + comptime!(16 * m * stride + 2 * k);
                left.push(operand::<E>(
                    &scratch.words,
                    at,
                    comptime!(4 * stride),
                    MatrixIdent::A,
                    MatrixLayout::RowMajor,
                ));
            }
            add_depth::<E>(acc, &left, b, k, plan);
        }
    }

    fn rescale(
        acc: &mut CmmaAcc,
        alpha: &Array<f32>,
        stale: bool,
        scratch: &mut CmmaScratch,
        #[comptime] plan: Plan,
    ) {
        if plane_any(stale) {
            let lane_part = (lane(plan) % comptime!(plan.row_parts() as u32)) as usize;
            #[unroll]
            for part in 0..comptime!(acc.cols / part_width(acc.cols, plan)) {
                show_part(&*acc, scratch, part, plan);
                #[unroll]
                for r in 0..comptime!(lane_rows(plan)) {
                    let line =
                        lane_row(r, plan) as usize * comptime!(plan.score_stride() / 4) + lane_part;
                    #[unroll]
                    for g in 0..comptime!(part_width(acc.cols, plan) / 4 / plan.row_parts()) {
                        let at = line + comptime!(g * plan.row_parts());
                        let seen = Vector::<f32, Const<4>>::reinterpret(scratch.words[at]);
                        let scaled = seen * Vector::<f32, Const<4>>::new(alpha[r]);
                        scratch.words[at] = Vector::<u32, Const<4>>::reinterpret(scaled);
                    }
                }
                take_part(acc, &*scratch, part, plan);
            }
        }
    }

    fn part_cols(#[comptime] cols: usize, #[comptime] plan: Plan) -> comptime_type!(usize) {
        comptime!(part_width(cols, plan))
    }

    fn read(
        acc: &CmmaAcc,
        scratch: &mut CmmaScratch,
        #[comptime] part: usize,
        #[comptime] cols: usize,
        #[comptime] plan: Plan,
    ) -> CmmaFrag {
        show_part(acc, scratch, part, plan);
        visible(&*scratch, comptime!(part_width(cols, plan)), plan)
    }

    fn frag_rows(#[comptime] plan: Plan) -> comptime_type!(usize) {
        comptime!(lane_rows(plan))
    }

    fn rows(frag: &CmmaFrag) -> comptime_type!(usize) {
        comptime!(frag.rows)
    }

    fn cols(frag: &CmmaFrag) -> comptime_type!(usize) {
        comptime!(4 * frag.groups)
    }

    fn run(frag: &CmmaFrag) -> comptime_type!(usize) {
        let _ = comptime!(frag.groups);
        4usize
    }

    fn get(frag: &CmmaFrag, #[comptime] r: usize, #[comptime] c: usize) -> f32 {
        frag.cells[comptime!(r * frag.groups + c / 4)].extract(comptime!(c % 4))
    }

    fn set(frag: &mut CmmaFrag, #[comptime] r: usize, #[comptime] c: usize, value: f32) {
        let i = comptime!(r * frag.groups + c / 4);
        let mut cell = frag.cells[i];
        cell.insert(comptime!(c % 4), value);
        frag.cells[i] = cell;
    }

    fn row(frag: &CmmaFrag, #[comptime] r: usize, #[comptime] plan: Plan) -> u32 {
        let _ = comptime!(frag.rows);
        lane_row(r, plan)
    }

    fn col(frag: &CmmaFrag, #[comptime] c: usize, #[comptime] plan: Plan) -> u32 {
        let _ = comptime!(frag.groups);
        (lane(plan) % comptime!(plan.row_parts() as u32)
            + comptime!((c / 4 * plan.row_parts()) as u32))
            * 4u32
            + comptime!((c % 4) as u32)
    }

    fn reduce_max(values: &mut Array<f32>, _scratch: &mut CmmaScratch, #[comptime] plan: Plan) {
        #[unroll]
        for r in 0..comptime!(lane_rows(plan)) {
            let mut x = values[r];
            #[unroll]
            for i in 0..comptime!(plan.row_parts().trailing_zeros()) {
                x = max(x, plane_shuffle_xor(x, comptime!(1u32 << i)));
            }
            values[r] = x;
        }
    }

    fn any(_flag: bool) -> bool {
        true.runtime()
    }

    fn reduce_sum(values: &mut Array<f32>, _scratch: &mut CmmaScratch, #[comptime] plan: Plan) {
        #[unroll]
        for r in 0..comptime!(lane_rows(plan)) {
            let mut x = values[r];
            #[unroll]
            for i in 0..comptime!(plan.row_parts().trailing_zeros()) {
                x += plane_shuffle_xor(x, comptime!(1u32 << i));
            }
            values[r] = x;
        }
    }
}
