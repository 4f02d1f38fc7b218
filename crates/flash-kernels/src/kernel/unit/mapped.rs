//! Cooperative matrices whose elements a function may change where they are: between two products
//! nothing goes through shared memory (VK_NV_cooperative_matrix2).

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
    Right,
    visible::{CmmaAcc, CmmaLeft, accumulator, operand},
    words::{HalfFloat, drop_non_finite},
};
use crate::{
    kernel::{mask::Side, tile::SharedTile},
    plan::Plan,
};

/// `acc += a·bᵀ`: `a` `[rows, depth]`, `b` `[block_n, depth]`, `acc` `[rows, block_n]` of each plane.
#[cube]
pub fn product<E: HalfFloat>(
    acc: &mut CmmaAcc,
    a: &CmmaLeft<E>,
    b: &SharedTile<u32, Const<4>>,
    #[comptime] depth: usize,
    #[comptime] plan: Plan,
) {
    let (k_tiles, n_tiles) = comptime!((depth / 16, plan.tile.block_n / 16));
    #[unroll]
    for n in 0..n_tiles {
        #[unroll]
        for k in 0..k_tiles {
            let at = b.base + comptime!(16 * n * b.stride + 2 * k);
            let right = operand::<E>(
                &b.data,
                at,
                comptime!(4 * b.stride),
                MatrixIdent::B,
                MatrixLayout::ColMajor,
            );
            #[unroll]
            for m in 0..comptime!(plan.rows / 16) {
                let sum = acc.cells.index(comptime!(m * n_tiles + n));
                cmma::execute(a.cells.index(comptime!(m * k_tiles + k)), &right, sum, sum);
            }
        }
    }
}

/// A product as the left operand of the next one, rounded to `E`.
#[cube]
pub fn held<E: HalfFloat>(acc: &CmmaAcc, #[comptime] plan: Plan) -> CmmaLeft<E> {
    let mut cells = Sequence::<Matrix<E>>::new();
    #[unroll]
    for i in 0..comptime!(plan.rows / 16 * acc.cols / 16) {
        let rounded = cmma::cast::<f32, E, cmma::Plane>(acc.cells.index(i));
        cells.push(left_of::<E>(rounded));
    }
    CmmaLeft::<E> { cells }
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

/// `acc += a·b`: `a` `[rows, block_n]`, `b` `[block_n, cols]`, `acc` `[rows, cols]`.
#[cube]
pub fn accumulate<E: HalfFloat>(
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
    let (k_tiles, n_tiles) = comptime!((plan.tile.block_n / 16, acc.cols / 16));
    #[unroll]
    for k in 0..k_tiles {
        #[unroll]
        for n in 0..n_tiles {
            let at = b.base + comptime!(16 * k * b.stride + 2 * n);
            let block = operand::<E>(
                &b.data,
                at,
                comptime!(4 * b.stride),
                MatrixIdent::B,
                MatrixLayout::RowMajor,
            );
            #[unroll]
            for m in 0..comptime!(plan.rows / 16) {
                let sum = acc.cells.index(comptime!(m * n_tiles + n));
                cmma::execute(a.cells.index(comptime!(m * k_tiles + k)), &block, sum, sum);
            }
        }
    }
}

/// A matrix `[rows, block_n]` with `values[first + i]` in each element of row `i` (`Side::Queries`) or of column
/// `i` (`Side::Keys`). The values must be visible to the plane.
#[cube]
pub fn broadcast(
    values: &Shared<[f32]>,
    first: usize,
    #[comptime] side: Side,
    #[comptime] plan: Plan,
) -> CmmaAcc {
    let cols = comptime!(plan.tile.block_n);
    let n_tiles = comptime!(cols / 16);
    let layout = comptime!(match side {
        Side::Queries => MatrixLayout::ColMajor,
        Side::Keys => MatrixLayout::RowMajor,
    });
    let mut cells = Sequence::<Matrix<f32>>::new();
    #[unroll]
    for i in 0..comptime!(plan.rows / 16 * n_tiles) {
        let at = comptime!(match side {
            Side::Queries => i / n_tiles * 16,
            Side::Keys => i % n_tiles * 16,
        });
        let mut matrix = accumulator();
        let end = values.len();
        // A stride of 0: each row, or column, is the same.
        cmma::load_with_layout(&mut matrix, values.slice(first + at, end), 0u32, layout);
        cells.push(matrix);
    }
    CmmaAcc { cells, cols }
}

/// `a = a ∘ b`, element by element.
#[cube]
pub fn multiply(a: &mut CmmaAcc, b: &CmmaAcc, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime!(plan.rows / 16 * a.cols / 16) {
        let (x, y) = (a.cells.index(i), b.cells.index(i));
        // Makes way for the product of elements, which CubeCL has not.
        cmma::execute(x, y, x, x);
        in_place_of_last(comptime!(Elements::Product));
    }
}

/// `a -= b`.
#[cube]
pub fn subtract(a: &mut CmmaAcc, b: &CmmaAcc, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime!(plan.rows / 16 * a.cols / 16) {
        let (x, y) = (a.cells.index(i), b.cells.index(i));
        // Makes way for the difference, which CubeCL has not.
        cmma::execute(x, y, x, x);
        in_place_of_last(comptime!(Elements::Difference));
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
