//! Cooperative matrices 16×16×16 of 16-bit floats with an opaque layout (Vulkan, CUDA wmma).
//!
//! A plane owns `plan.rows` rows. Since nobody may look into an accumulator, a product goes
//! through the plane's own shared memory: each lane then sees (part of) a row. The running sum
//! stays in cooperative matrices; it passes through the same memory only when the softmax moves
//! its maximum far enough, which is rare, and at the end.

use core::marker::PhantomData;

use cubecl::{
    cmma::{self, Matrix, MatrixIdent, MatrixLayout},
    prelude::*,
};

use super::{
    MatrixUnit,
    visible::{
        CmmaAcc, CmmaFrag, CmmaLeft, CmmaScratch, accumulator, lane, lane_row, lane_rows, operand,
        part_width, parts, plane_row, score_at, score_stride, show, show_part, take_part, visible,
    },
};
use crate::{kernel::tile::SharedTile, plan::Plan};

/// See the module.
pub struct Cmma<E: Float> {
    _element: PhantomData<E>,
}

#[cube]
impl<E: Float> MatrixUnit for Cmma<E> {
    type Stage = E;
    type Width = Const<4>;
    type Left = CmmaLeft<E>;
    type Held = ();
    type Frag = CmmaFrag;
    type Acc = CmmaAcc;
    type Scratch = CmmaScratch<E>;

    fn scratch(#[comptime] plan: Plan) -> CmmaScratch<E> {
        CmmaScratch::<E> {
            scores: Shared::<[Vector<f32, Const<4>>]>::new_slice(comptime!(plan.scratch_len() / 4)),
            probs: Shared::<[Vector<E, Const<4>>]>::new_slice(comptime!(plan.prob_len() / 4)),
        }
    }

    fn left(
        tile: &SharedTile<E, Const<4>>,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) -> CmmaLeft<E> {
        let mut cells = Sequence::<Matrix<E>>::new();
        let first = tile.base + plane_row(plan) as usize * comptime!(tile.stride);
        #[unroll]
        for m in 0..comptime!(plan.rows / 16) {
            #[unroll]
            for k in 0..comptime!(depth / 16) {
                let at = first + comptime!(16 * m * tile.stride + 4 * k);
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
        b: &SharedTile<E, Const<4>>,
        scratch: &mut CmmaScratch<E>,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) -> CmmaFrag {
        let k_tiles = comptime!(depth / 16);
        #[unroll]
        for n in 0..comptime!(plan.tile.block_n / 16) {
            let mut sums = Sequence::<Matrix<f32>>::new();
            #[unroll]
            for _m in 0..comptime!(plan.rows / 16) {
                sums.push(accumulator());
            }
            #[unroll]
            for k in 0..k_tiles {
                let at = b.base + comptime!(16 * n * b.stride + 4 * k);
                let right = operand::<E>(
                    &b.data,
                    at,
                    comptime!(4 * b.stride),
                    MatrixIdent::B,
                    MatrixLayout::ColMajor,
                );
                #[unroll]
                for m in 0..comptime!(plan.rows / 16) {
                    let sum = sums.index(m);
                    cmma::execute(a.cells.index(comptime!(m * k_tiles + k)), &right, sum, sum);
                }
            }
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

    fn hold(frag: &CmmaFrag, scratch: &mut CmmaScratch<E>, #[comptime] plan: Plan) {
        let stride = comptime!(plan.row_stride(plan.tile.block_n) / 4);
        let part = (lane(plan) % comptime!(parts(plan) as u32)) as usize;
        #[unroll]
        for r in 0..comptime!(frag.rows) {
            let line = lane_row(r, plan) as usize * stride + part;
            #[unroll]
            for g in 0..comptime!(frag.groups) {
                let p = frag.cells[comptime!(r * frag.groups + g)];
                scratch.probs[line + comptime!(g * parts(plan))] =
                    Vector::<E, Const<4>>::cast_from(p);
            }
        }
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
        b: &SharedTile<E, Const<4>>,
        scratch: &mut CmmaScratch<E>,
        #[comptime] plan: Plan,
    ) {
        let n_tiles = comptime!(acc.cols / 16);
        let stride = comptime!(plan.row_stride(plan.tile.block_n));
        let first = plane_row(plan) as usize * comptime!(stride / 4);
        #[unroll]
        for k in 0..comptime!(plan.tile.block_n / 16) {
            let mut left = Sequence::<Matrix<E>>::new();
            #[unroll]
            for m in 0..comptime!(plan.rows / 16) {
                let at = first + comptime!(16 * m * stride / 4 + 4 * k);
                left.push(operand::<E>(
                    &scratch.probs,
                    at,
                    stride,
                    MatrixIdent::A,
                    MatrixLayout::RowMajor,
                ));
            }
            #[unroll]
            for n in 0..n_tiles {
                let at = b.base + comptime!(16 * k * b.stride + 4 * n);
                let right = operand::<E>(
                    &b.data,
                    at,
                    comptime!(4 * b.stride),
                    MatrixIdent::B,
                    MatrixLayout::RowMajor,
                );
                #[unroll]
                for m in 0..comptime!(plan.rows / 16) {
                    let sum = acc.cells.index(comptime!(m * n_tiles + n));
                    cmma::execute(left.index(m), &right, sum, sum);
                }
            }
        }
    }

    fn rescale(
        acc: &mut CmmaAcc,
        alpha: &Array<f32>,
        stale: bool,
        scratch: &mut CmmaScratch<E>,
        #[comptime] plan: Plan,
    ) {
        if plane_any(stale) {
            let lane_part = (lane(plan) % comptime!(parts(plan) as u32)) as usize;
            #[unroll]
            for part in 0..comptime!(acc.cols / part_width(acc.cols, plan)) {
                show_part(&*acc, scratch, part, plan);
                #[unroll]
                for r in 0..comptime!(lane_rows(plan)) {
                    let line =
                        lane_row(r, plan) as usize * comptime!(score_stride(plan) / 4) + lane_part;
                    #[unroll]
                    for g in 0..comptime!(part_width(acc.cols, plan) / 4 / parts(plan)) {
                        let at = line + comptime!(g * parts(plan));
                        let seen = scratch.scores[at];
                        scratch.scores[at] = seen * Vector::<f32, Const<4>>::new(alpha[r]);
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
        scratch: &mut CmmaScratch<E>,
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
        (lane(plan) % comptime!(parts(plan) as u32) + comptime!((c / 4 * parts(plan)) as u32))
            * 4u32
            + comptime!((c % 4) as u32)
    }

    fn reduce_max(values: &mut Array<f32>, _scratch: &mut CmmaScratch<E>, #[comptime] plan: Plan) {
        #[unroll]
        for r in 0..comptime!(lane_rows(plan)) {
            let mut x = values[r];
            #[unroll]
            for i in 0..comptime!(parts(plan).trailing_zeros()) {
                x = max(x, plane_shuffle_xor(x, comptime!(1u32 << i)));
            }
            values[r] = x;
        }
    }

    fn reduce_sum(values: &mut Array<f32>, _scratch: &mut CmmaScratch<E>, #[comptime] plan: Plan) {
        #[unroll]
        for r in 0..comptime!(lane_rows(plan)) {
            let mut x = values[r];
            #[unroll]
            for i in 0..comptime!(parts(plan).trailing_zeros()) {
                x += plane_shuffle_xor(x, comptime!(1u32 << i));
            }
            values[r] = x;
        }
    }
}
