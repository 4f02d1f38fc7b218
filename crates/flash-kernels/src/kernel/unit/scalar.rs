//! Register tiles of f32 on any device: no plane operations needed, no element type but f32.
//!
//! Units form a grid of `across` columns; the unit at `(y, x)` owns the rows
//! `y·rows .. (y+1)·rows`. Of a product it owns the columns `x + c·across` (neighbouring units
//! read neighbouring rows of the right operand, which lie on different banks); of an accumulator
//! the groups of four columns `x + g·across`.

use cubecl::prelude::*;

use super::{MatrixUnit, Right, stage_elements};
use crate::{
    kernel::{math::is_finite, tile::SharedTile},
    plan::{Plan, Reduction},
};

/// See the module.
pub struct Scalar;

/// This unit's `rows × cols` registers and which columns they are.
#[derive(CubeType)]
pub struct ScalarFrag {
    cells: Array<f32>,
    #[cube(comptime)]
    rows: usize,
    #[cube(comptime)]
    cols: usize,
    /// Neighbouring columns of a unit: 1 of a product, 4 of an accumulator.
    #[cube(comptime)]
    run: usize,
}

/// Probabilities, transposed `[block_n, block_m]`, and one f32 per unit and row for reductions.
#[derive(CubeType)]
pub struct ScalarScratch {
    probs: Shared<[Vector<f32, Const<4>>]>,
    reduce: Shared<[f32]>,
}

/// Probabilities in shared memory, `[block_n, block_m]`.
#[derive(CubeType)]
pub struct ScalarHeld {
    probs: Shared<[Vector<f32, Const<4>>]>,
}

#[cube]
fn unit_y(#[comptime] plan: Plan) -> u32 {
    UNIT_POS / comptime!(plan.across() as u32)
}

#[cube]
fn unit_x(#[comptime] plan: Plan) -> u32 {
    UNIT_POS % comptime!(plan.across() as u32)
}

/// Vectors between rows of the transposed probabilities.
const fn prob_stride(plan: Plan) -> usize {
    plan.tile.block_m / 4 + 1
}

#[cube]
impl MatrixUnit for Scalar {
    type Stage = f32;
    type Width = Const<4>;
    type Left = SharedTile<f32, Const<4>>;
    type Held = ScalarHeld;
    type Frag = ScalarFrag;
    type Acc = ScalarFrag;
    type Scratch = ScalarScratch;

    fn stage<L: Numeric, W: Size>(
        value: Vector<f32, Const<4>>,
        loaded: Vector<L, W>,
        #[comptime] j: usize,
        #[comptime] _plan: Plan,
    ) -> Vector<f32, Const<4>> {
        stage_elements::<f32, Const<4>, L, W>(value, loaded, j)
    }

    fn scratch(#[comptime] plan: Plan) -> ScalarScratch {
        ScalarScratch {
            probs: Shared::<[Vector<f32, Const<4>>]>::new_slice(comptime!(plan.prob_len() / 4)),
            reduce: Shared::<[f32]>::new_slice(comptime!(plan.scratch_len())),
        }
    }

    fn left(
        tile: &SharedTile<f32, Const<4>>,
        #[comptime] _depth: usize,
        #[comptime] _plan: Plan,
    ) -> SharedTile<f32, Const<4>> {
        tile.clone()
    }

    fn product(
        a: &SharedTile<f32, Const<4>>,
        b: &SharedTile<f32, Const<4>>,
        _scratch: &mut ScalarScratch,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) -> ScalarFrag {
        let rows = comptime!(plan.rows);
        let across = comptime!(plan.across());
        let cols = comptime!(plan.tile.block_n / across);
        let mut cells = zeros(comptime!(rows * cols));
        let a_row = a.base + (unit_y(plan) as usize) * comptime!(rows * a.stride);
        let b_row = b.base + (unit_x(plan) as usize) * comptime!(b.stride);
        for k in 0..comptime!(depth / 4) {
            let mut left = Array::<Vector<f32, Const<4>>>::new(rows);
            #[unroll]
            for r in 0..rows {
                left[r] = a.data[a_row + k + comptime!(r * a.stride)];
            }
            #[unroll]
            for c in 0..cols {
                let right = b.data[b_row + k + comptime!(c * across * b.stride)];
                #[unroll]
                for r in 0..rows {
                    let x = left[r];
                    let mut sum = cells[comptime!(r * cols + c)];
                    #[unroll]
                    for e in 0..4usize {
                        sum += x.extract(e) * right.extract(e);
                    }
                    cells[comptime!(r * cols + c)] = sum;
                }
            }
        }
        ScalarFrag {
            cells,
            rows,
            cols,
            run: 1usize,
        }
    }

    fn hold(frag: &ScalarFrag, scratch: &mut ScalarScratch, #[comptime] plan: Plan) -> ScalarHeld {
        let across = comptime!(plan.across());
        let at = (unit_x(plan) as usize) * comptime!(prob_stride(plan))
            + (unit_y(plan) as usize) * comptime!(plan.rows / 4);
        #[unroll]
        for c in 0..comptime!(frag.cols) {
            #[unroll]
            for quad in 0..comptime!(frag.rows / 4) {
                let mut p = Vector::<f32, Const<4>>::new(0.0);
                #[unroll]
                for e in 0..4usize {
                    p.insert(e, frag.cells[comptime!((4 * quad + e) * frag.cols + c)]);
                }
                scratch.probs[at + comptime!(c * across * prob_stride(plan) + quad)] = p;
            }
        }
        // The units that multiply with these rows are others than those that wrote them.
        sync_cube();
        ScalarHeld {
            probs: scratch.probs.clone(),
        }
    }

    fn reuse(#[comptime] _plan: Plan) {
        // The units that read the probabilities are others than those that overwrite them.
        sync_cube();
    }

    fn zero(#[comptime] cols: usize, #[comptime] plan: Plan) -> ScalarFrag {
        let cols = comptime!(cols / plan.across());
        ScalarFrag {
            cells: zeros(comptime!(plan.rows * cols)),
            rows: comptime!(plan.rows),
            cols,
            run: 4usize,
        }
    }

    fn accumulate(
        acc: &mut ScalarFrag,
        a: &ScalarHeld,
        b: &SharedTile<f32, Const<4>>,
        _scratch: &mut ScalarScratch,
        #[comptime] right: Right,
        #[comptime] plan: Plan,
    ) {
        let rows = comptime!(acc.rows);
        let cols = comptime!(acc.cols);
        let across = comptime!(plan.across());
        let a_col = (unit_y(plan) as usize) * comptime!(rows / 4);
        let b_col = b.base + unit_x(plan) as usize;
        for n in 0..comptime!(plan.tile.block_n) {
            let mut left = Array::<Vector<f32, Const<4>>>::new(comptime!(rows / 4));
            #[unroll]
            for quad in 0..comptime!(rows / 4) {
                left[quad] = a.probs[n * comptime!(prob_stride(plan)) + a_col + quad];
            }
            #[unroll]
            for g in 0..comptime!(cols / 4) {
                let mut cells = b.data[b_col + n * comptime!(b.stride) + comptime!(g * across)];
                if comptime!(right == Right::Finite) {
                    cells = finite(cells);
                }
                #[unroll]
                for r in 0..rows {
                    let p = left[comptime!(r / 4)].extract(comptime!(r % 4));
                    #[unroll]
                    for e in 0..4usize {
                        let i = comptime!(r * cols + 4 * g + e);
                        acc.cells[i] += p * cells.extract(e);
                    }
                }
            }
        }
    }

    fn rescale(
        acc: &mut ScalarFrag,
        alpha: &Array<f32>,
        _stale: bool,
        _scratch: &mut ScalarScratch,
        #[comptime] _plan: Plan,
    ) {
        #[unroll]
        for r in 0..comptime!(acc.rows) {
            #[unroll]
            for c in 0..comptime!(acc.cols) {
                let i = comptime!(r * acc.cols + c);
                acc.cells[i] *= alpha[r];
            }
        }
    }

    fn part_cols(#[comptime] cols: usize, #[comptime] _plan: Plan) -> comptime_type!(usize) {
        cols
    }

    fn read(
        acc: &ScalarFrag,
        _scratch: &mut ScalarScratch,
        #[comptime] _part: usize,
        #[comptime] _cols: usize,
        #[comptime] _plan: Plan,
    ) -> ScalarFrag {
        let len = comptime!(acc.rows * acc.cols);
        let mut cells = Array::<f32>::new(len);
        #[unroll]
        for i in 0..len {
            cells[i] = acc.cells[i];
        }
        ScalarFrag {
            cells,
            rows: comptime!(acc.rows),
            cols: comptime!(acc.cols),
            run: comptime!(acc.run),
        }
    }

    fn frag_rows(#[comptime] plan: Plan) -> comptime_type!(usize) {
        comptime!(plan.rows)
    }

    fn rows(frag: &ScalarFrag) -> comptime_type!(usize) {
        comptime!(frag.rows)
    }

    fn cols(frag: &ScalarFrag) -> comptime_type!(usize) {
        comptime!(frag.cols)
    }

    fn run(frag: &ScalarFrag) -> comptime_type!(usize) {
        comptime!(frag.run)
    }

    fn get(frag: &ScalarFrag, #[comptime] r: usize, #[comptime] c: usize) -> f32 {
        frag.cells[comptime!(r * frag.cols + c)]
    }

    fn set(frag: &mut ScalarFrag, #[comptime] r: usize, #[comptime] c: usize, value: f32) {
        let i = comptime!(r * frag.cols + c);
        frag.cells[i] = value;
    }

    fn row(frag: &ScalarFrag, #[comptime] r: usize, #[comptime] plan: Plan) -> u32 {
        unit_y(plan) * comptime!(frag.rows as u32) + comptime!(r as u32)
    }

    fn col(frag: &ScalarFrag, #[comptime] c: usize, #[comptime] plan: Plan) -> u32 {
        let run = comptime!(frag.run);
        (unit_x(plan) + comptime!((c / run * plan.across()) as u32)) * comptime!(run as u32)
            + comptime!((c % run) as u32)
    }

    fn reduce_max(values: &mut Array<f32>, scratch: &mut ScalarScratch, #[comptime] plan: Plan) {
        reduce(values, scratch, plan, Fold::Max);
    }

    fn any(_flag: bool) -> bool {
        true.runtime()
    }

    fn reduce_sum(values: &mut Array<f32>, scratch: &mut ScalarScratch, #[comptime] plan: Plan) {
        reduce(values, scratch, plan, Fold::Sum);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fold {
    Max,
    Sum,
}

#[cube]
fn fold(a: f32, b: f32, #[comptime] kind: Fold) -> f32 {
    if comptime!(kind == Fold::Max) {
        max(a, b)
    } else {
        a + b
    }
}

#[cube]
fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut cells = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        cells[i] = f32::new(0.0);
    }
    cells
}

/// Folds `values[r]` over the `across` units of a row, in a fixed order: every unit gets the
/// same bits.
#[cube]
fn reduce(
    values: &mut Array<f32>,
    scratch: &mut ScalarScratch,
    #[comptime] plan: Plan,
    #[comptime] kind: Fold,
) {
    if comptime!(plan.reduction == Reduction::Plane) {
        let steps = comptime!(plan.across().trailing_zeros());
        #[unroll]
        for r in 0..comptime!(plan.rows) {
            let mut x = values[r];
            #[unroll]
            for i in 0..steps {
                x = fold(x, plane_shuffle_xor(x, comptime!(1u32 << i)), kind);
            }
            values[r] = x;
        }
    } else {
        let across = comptime!(plan.across());
        let first = (unit_y(plan) as usize) * comptime!(plan.rows * across);
        let mine = first + unit_x(plan) as usize;
        #[unroll]
        for r in 0..comptime!(plan.rows) {
            scratch.reduce[mine + comptime!(r * across)] = values[r];
        }
        // Every unit reads what the others of its row wrote.
        sync_cube();
        #[unroll]
        for r in 0..comptime!(plan.rows) {
            let mut x = scratch.reduce[first + comptime!(r * across)];
            #[unroll]
            for i in 1..across {
                x = fold(x, scratch.reduce[first + comptime!(r * across + i)], kind);
            }
            values[r] = x;
        }
        // The next reduction writes the same places.
        sync_cube();
    }
}

/// `value` with 0 for each element that is not finite.
#[cube]
fn finite(value: Vector<f32, Const<4>>) -> Vector<f32, Const<4>> {
    let mut value = value;
    #[unroll]
    for e in 0..4usize {
        let x = value.extract(e);
        value.insert(e, select(is_finite(x), x, f32::new(0.0)));
    }
    value
}
