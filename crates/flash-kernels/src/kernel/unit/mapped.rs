//! Cooperative matrices whose elements a function may change where they are: between two products
//! nothing goes through shared memory (VK_NV_cooperative_matrix2).
//!
//! A function is given the row and column of an element, and what it reads besides must be values:
//! it cannot read memory. So what belongs to a query comes as a matrix of equal rows or columns, and a
//! bool mask cannot come at all.

use cubecl::{
    cmma::{self, Matrix, MatrixIdent, MatrixLayout},
    ir::dialect::{
        math::{FMulOp, FSubOp},
        memory::{LoadOp, StoreOp},
    },
    prelude::*,
};
use pliron::{
    irbuild::inserter::OpInsertionPoint,
    linked_list::{ContainsLinkedList, LinkedList},
    operation::Operation,
};

use super::{
    Cmma, MatrixUnit, Right,
    visible::{CmmaAcc, CmmaLeft, accumulator, add_column, add_depth, plane_row},
    words::{HalfFloat, drop_non_finite},
};
use crate::{
    kernel::{
        mask::{Mask, Side},
        math,
        tile::SharedTile,
    },
    plan::Plan,
};

/// A `MatrixUnit` whose products can stay where they are: here a product is a `Self::Acc` of `block_n` columns.
#[cube]
pub trait MappedUnit: MatrixUnit {
    /// `acc += a·bᵀ`: `a` `[block_m, depth]`, `b` `[block_n, depth]`, `acc` `[block_m, block_n]`.
    fn add_product(
        acc: &mut Self::Acc,
        a: &Self::Left,
        b: &SharedTile<Self::Stage, Self::Width>,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    );

    /// `acc += a·b`: `a` `[block_m, block_n]`, `b` `[block_n, cols]`, `acc` `[block_m, cols]`. `b` may
    /// change on the way, as `right` says.
    fn add_held(
        acc: &mut Self::Acc,
        a: &Self::Left,
        b: &SharedTile<Self::Stage, Self::Width>,
        #[comptime] right: Right,
        #[comptime] plan: Plan,
    );

    /// A product `[block_m, block_n]` as a left operand, rounded to the element type.
    fn held(product: &Self::Acc, #[comptime] plan: Plan) -> Self::Left;

    /// `[block_m, block_n]` with a value of each query in all that belongs to the query: in row `r`
    /// `values[first + r]` where rows are queries, else in column `c` `values[first + c]`. The values
    /// must be visible to the plane.
    fn of_queries(
        values: &Shared<[f32]>,
        first: u32,
        #[comptime] side: Side,
        #[comptime] plan: Plan,
    ) -> Self::Acc;

    /// `a = a ∘ b`, element by element: here and below all are `[block_m, block_n]`.
    fn multiply(a: &mut Self::Acc, b: &Self::Acc, #[comptime] plan: Plan);
    /// `a -= b`.
    fn subtract(a: &mut Self::Acc, b: &Self::Acc, #[comptime] plan: Plan);
    /// `x *= factor`.
    fn scale(x: &mut Self::Acc, factor: f32, #[comptime] plan: Plan);
    /// `x = 2^x`.
    fn exp2(x: &mut Self::Acc, #[comptime] plan: Plan);
    /// `x = 0`, whatever it was, where the query does not see the key; the tile begins at `query` and
    /// `key`.
    fn keep_seen<M: Int>(
        x: &mut Self::Acc,
        mask: &Mask<M>,
        query: u32,
        key: u32,
        #[comptime] side: Side,
        #[comptime] plan: Plan,
    );
}

#[cube]
impl<E: HalfFloat> MappedUnit for Cmma<E> {
    fn add_product(
        acc: &mut CmmaAcc,
        a: &CmmaLeft<E>,
        b: &SharedTile<u32, Const<4>>,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) {
        let n_tiles = comptime!(plan.tile.block_n / 16);
        #[unroll]
        for n in 0..n_tiles {
            let sums = every::<f32>(&acc.cells, n, n_tiles, plan);
            add_column::<E>(&sums, a, b, n, depth, plan);
        }
    }

    fn add_held(
        acc: &mut CmmaAcc,
        a: &CmmaLeft<E>,
        b: &SharedTile<u32, Const<4>>,
        #[comptime] right: Right,
        #[comptime] plan: Plan,
    ) {
        if comptime!(right == Right::Finite) {
            let cols = comptime!(acc.cols);
            drop_non_finite(b, cols, comptime!(E::EXPONENT), plan);
        }
        let k_tiles = comptime!(plan.tile.block_n / 16);
        #[unroll]
        for k in 0..k_tiles {
            let left = every::<E>(&a.cells, k, k_tiles, plan);
            add_depth::<E>(acc, &left, b, k, plan);
        }
    }

    fn held(product: &CmmaAcc, #[comptime] plan: Plan) -> CmmaLeft<E> {
        let mut cells = Sequence::<Matrix<E>>::new();
        #[unroll]
        for i in 0..comptime!(cells_of(product.cols, plan)) {
            let rounded = cmma::cast::<f32, E, cmma::Plane>(product.cells.index(i));
            cells.push(left_of::<E>(rounded));
        }
        CmmaLeft::<E> { cells }
    }

    fn of_queries(
        values: &Shared<[f32]>,
        first: u32,
        #[comptime] side: Side,
        #[comptime] plan: Plan,
    ) -> CmmaAcc {
        let cols = comptime!(plan.tile.block_n);
        let n_tiles = comptime!(cols / 16);
        let (layout, first) = match comptime!(side) {
            Side::Queries => (MatrixLayout::ColMajor, first + plane_row(plan)),
            Side::Keys => (MatrixLayout::RowMajor, first),
        };
        let mut cells = Sequence::<Matrix<f32>>::new();
        #[unroll]
        for i in 0..comptime!(cells_of(cols, plan)) {
            let at = first as usize
                + comptime!(match side {
                    Side::Queries => i / n_tiles * 16,
                    Side::Keys => i % n_tiles * 16,
                });
            let mut matrix = accumulator();
            let end = values.len();
            // A stride of 0: each row, or column, is the same.
            cmma::load_with_layout(&mut matrix, values.slice(at, end), 0u32, layout);
            cells.push(matrix);
        }
        CmmaAcc { cells, cols }
    }

    fn multiply(a: &mut CmmaAcc, b: &CmmaAcc, #[comptime] plan: Plan) {
        combine(a, b, comptime!(Elements::Product), plan);
    }

    fn subtract(a: &mut CmmaAcc, b: &CmmaAcc, #[comptime] plan: Plan) {
        combine(a, b, comptime!(Elements::Difference), plan);
    }

    fn scale(x: &mut CmmaAcc, factor: f32, #[comptime] plan: Plan) {
        #[unroll]
        for i in 0..comptime!(cells_of(x.cols, plan)) {
            let cell = x.cells.index(i);
            cmma::execute_elementwise_op(cell, cell, |_row, _col, x| x * factor);
        }
    }

    fn exp2(x: &mut CmmaAcc, #[comptime] plan: Plan) {
        #[unroll]
        for i in 0..comptime!(cells_of(x.cols, plan)) {
            let cell = x.cells.index(i);
            let isa = comptime!(plan.isa);
            cmma::execute_elementwise_op(cell, cell, |_row, _col, x| math::exp2(x, isa));
        }
    }

    fn keep_seen<M: Int>(
        x: &mut CmmaAcc,
        mask: &Mask<M>,
        query: u32,
        key: u32,
        #[comptime] side: Side,
        #[comptime] plan: Plan,
    ) {
        let n_tiles = comptime!(x.cols / 16);
        let first = plane_row(plan);
        #[unroll]
        for i in 0..comptime!(cells_of(x.cols, plan)) {
            let cell = x.cells.index(i);
            let (m, n) = comptime!(((i / n_tiles * 16) as u32, (i % n_tiles * 16) as u32));
            cmma::execute_elementwise_op(cell, cell, |row, col, x| {
                let (row, col) = (first + m + row, n + col);
                let keep = match comptime!(side) {
                    Side::Queries => mask.keep(query + row, key + col),
                    Side::Keys => mask.keep(query + col, key + row),
                };
                select(keep, x, f32::new(0.0))
            });
        }
    }
}

/// Matrices of a plane's rows by `cols` columns, row by row.
const fn cells_of(cols: usize, plan: Plan) -> usize {
    plan.rows / 16 * cols / 16
}

/// One of `cells` to each 16 rows of a plane: `first` and those `step` apart.
#[cube]
// CubeCL expands no dereference of a matrix.
#[allow(clippy::clone_on_copy)]
fn every<C: Float>(
    cells: &Sequence<Matrix<C>>,
    #[comptime] first: usize,
    #[comptime] step: usize,
    #[comptime] plan: Plan,
) -> Sequence<Matrix<C>> {
    let mut found = Sequence::<Matrix<C>>::new();
    #[unroll]
    for m in 0..comptime!(plan.rows / 16) {
        found.push(cells.index(comptime!(m * step + first)).clone());
    }
    found
}

/// An accumulator as a left operand.
#[cube]
#[allow(unused_variables)]
fn left_of<E: HalfFloat>(matrix: Matrix<E>) -> Matrix<E> {
    // What `cast_with_ident` takes is not what it says.
    intrinsic!(|scope| {
        cmma::cast_with_ident::expand::<E, E, cmma::Plane>(scope, matrix, MatrixIdent::A)
    })
}

/// `a = a ∘ b` or `a = a - b`, element by element.
#[cube]
fn combine(a: &mut CmmaAcc, b: &CmmaAcc, #[comptime] elements: Elements, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime!(cells_of(a.cols, plan)) {
        let (x, y) = (a.cells.index(i), b.cells.index(i));
        // Makes way for what CubeCL has not.
        cmma::execute(x, y, x, x);
        in_place_of_last(elements);
    }
}

/// What `in_place_of_last` makes of two matrices, element by element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Elements {
    Product,
    Difference,
}

/// Replaces `d = a·b + c` of matrices, the operation just written, by `d = a ∘ b` or `d = a - b`: CubeCL
/// has neither, and tells nobody but its own operations where a matrix is.
#[cube]
#[allow(unused_variables)]
fn in_place_of_last(#[comptime] elements: Elements) {
    intrinsic!(|scope| {
        let ctx = scope.ctx_mut();
        let last = match scope.inserter().get_insertion_point() {
            OpInsertionPoint::AfterOperation(op) => op,
            OpInsertionPoint::AtBlockEnd(block) => block.deref(ctx).get_tail().unwrap(),
            point => unreachable!("behind an operation: {point:?}"),
        };
        let operands: Vec<_> = last.deref(ctx).operands().collect();
        let before = last.deref(ctx).get_prev();
        let block = last.deref(ctx).get_parent_block().unwrap();
        Operation::erase(last, ctx);
        scope.inserter().set_insertion_point(match before {
            Some(op) => OpInsertionPoint::AfterOperation(op),
            None => OpInsertionPoint::AtBlockStart(block),
        });
        let a = scope.register_with_result(&LoadOp::new(ctx, operands[0]));
        let b = scope.register_with_result(&LoadOp::new(ctx, operands[1]));
        let result = match elements {
            Elements::Product => scope.register_with_result(&FMulOp::new(ctx, a, b)),
            Elements::Difference => scope.register_with_result(&FSubOp::new(ctx, a, b)),
        };
        scope.register(&StoreOp::new(ctx, operands[3], result));
    })
}
