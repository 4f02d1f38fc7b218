//! The border: what a device must be able to do with a tile.

use cubecl::prelude::*;

use super::tile::SharedTile;
use crate::plan::Plan;

pub(crate) mod cmma;
pub(crate) mod hopper;
pub(crate) mod mapped;
pub(crate) mod mma;
pub(crate) mod operand;
pub(crate) mod ptx;
pub(crate) mod scalar;
pub(crate) mod visible;
pub(crate) mod wgmma;
pub(crate) mod wgmma_ops;
pub(crate) mod words;

pub use cmma::Cmma;
pub use mapped::MappedUnit;
pub use mma::Mma;
pub use operand::{Operand, Tf32};
pub use scalar::Scalar;
pub use words::HalfFloat;

/// How the right operand of `MatrixUnit::accumulate` is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// As it is.
    Given,
    /// What is not finite as some finite number: for weights that are exactly 0 or NaN there.
    Finite,
}

/// K in dq, Q in dkv: a pair that is dropped in a masked step has a ds of 0, and 0 · NaN is none.
pub(crate) const fn right_of(masked: bool) -> Right {
    if masked { Right::Finite } else { Right::Given }
}

/// Multiplies tiles, and shows a product as rows × columns of f32 registers.
///
/// A cube's `block_m` rows are shared out among groups of units (the cube itself, or its planes).
/// Softmax, mask and score see only `(row, col, value)` of a `Self::Frag`. Every verb is called
/// by all units of the cube in uniform control flow and synchronises what it needs itself; where
/// a verb leaves something for the caller to synchronise, it says so.
#[cube]
pub trait MatrixUnit: Send + Sync + 'static {
    /// What tiles in shared memory are made of: elements, or words of two.
    type Stage: Numeric;
    /// Vector in which tiles are accessed.
    type Width: Size;
    /// Left operand read from a shared tile.
    type Left: CubeType;
    /// Left operand made of a product.
    type Held: CubeType;
    /// A product as the units see it.
    type Frag: CubeType;
    /// A running sum of products, `[block_m, cols]`.
    type Acc: CubeType;
    /// Shared memory of the unit's own.
    type Scratch: CubeType;

    /// `value`, a vector of a tile in shared memory, with `loaded` as its `j`-th part of
    /// `plan.load_width` elements.
    fn stage<L: Numeric, W: Size>(
        value: Vector<Self::Stage, Self::Width>,
        loaded: Vector<L, W>,
        #[comptime] j: usize,
        #[comptime] plan: Plan,
    ) -> Vector<Self::Stage, Self::Width>;

    /// Allocates the scratch, once per kernel.
    fn scratch(#[comptime] plan: Plan) -> Self::Scratch;

    /// Reads (or keeps a reference to) the left operand `[block_m, depth]`. The tile must be
    /// visible to the cube and stay unchanged as long as the operand is used.
    fn left(
        tile: &SharedTile<Self::Stage, Self::Width>,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) -> Self::Left;

    /// `s = a·bᵀ`: `a` `[block_m, depth]`, `b` `[block_n, depth]`, `s` `[block_m, block_n]`.
    fn product(
        a: &Self::Left,
        b: &SharedTile<Self::Stage, Self::Width>,
        scratch: &mut Self::Scratch,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) -> Self::Frag;

    /// Turns a product `[block_m, block_n]` into a left operand, rounded to the element type.
    fn hold(frag: &Self::Frag, scratch: &mut Self::Scratch, #[comptime] plan: Plan) -> Self::Held;

    /// To be called between the last use of a held operand and the next `Self::hold` where no
    /// cube barrier lies between them.
    fn reuse(#[comptime] plan: Plan);

    /// An accumulator of zeros, `[block_m, cols]`.
    fn zero(#[comptime] cols: usize, #[comptime] plan: Plan) -> Self::Acc;

    /// `acc += a·b`: `a` `[block_m, block_n]`, `b` `[block_n, cols]`, `acc` `[block_m, cols]`.
    /// `b` may change on the way, as `right` says.
    fn accumulate(
        acc: &mut Self::Acc,
        a: &Self::Held,
        b: &SharedTile<Self::Stage, Self::Width>,
        scratch: &mut Self::Scratch,
        #[comptime] right: Right,
        #[comptime] plan: Plan,
    );

    /// `acc[r, :] *= alpha[r]`, `alpha` indexed like a product's rows. `stale` is false in a unit
    /// whose `alpha` are all 1; a group may skip the work if it is false in all of its units, and
    /// where `Self::any` votes they must agree on it.
    fn rescale(
        acc: &mut Self::Acc,
        alpha: &Array<f32>,
        stale: bool,
        scratch: &mut Self::Scratch,
        #[comptime] plan: Plan,
    );

    /// Columns of an accumulator of `cols` that `Self::read` shows at a time; divides `cols`.
    fn part_cols(#[comptime] cols: usize, #[comptime] plan: Plan) -> comptime_type!(usize);

    /// Columns `[part·part_cols, (part+1)·part_cols)` of the accumulator as the units see them.
    fn read(
        acc: &Self::Acc,
        scratch: &mut Self::Scratch,
        #[comptime] part: usize,
        #[comptime] cols: usize,
        #[comptime] plan: Plan,
    ) -> Self::Frag;

    /// Rows that each unit sees, the same of a product and of an accumulator.
    fn frag_rows(#[comptime] plan: Plan) -> comptime_type!(usize);
    /// Rows of `frag` that this unit sees.
    fn rows(frag: &Self::Frag) -> comptime_type!(usize);
    /// Columns of `frag` that this unit sees.
    fn cols(frag: &Self::Frag) -> comptime_type!(usize);
    /// This unit's columns come in runs of so many neighbours.
    fn run(frag: &Self::Frag) -> comptime_type!(usize);
    /// The value at this unit's `(r, c)`.
    fn get(frag: &Self::Frag, #[comptime] r: usize, #[comptime] c: usize) -> f32;
    /// Replaces the value at this unit's `(r, c)`.
    fn set(frag: &mut Self::Frag, #[comptime] r: usize, #[comptime] c: usize, value: f32);
    /// Row of the tile at this unit's `r`.
    fn row(frag: &Self::Frag, #[comptime] r: usize, #[comptime] plan: Plan) -> u32;
    /// Column of the tile at this unit's `c`.
    fn col(frag: &Self::Frag, #[comptime] c: usize, #[comptime] plan: Plan) -> u32;

    /// Maximum of each of `values` (one per row) over the units that share the row.
    fn reduce_max(values: &mut Array<f32>, scratch: &mut Self::Scratch, #[comptime] plan: Plan);
    /// Sum of each of `values` (one per row) over the units that share the row.
    fn reduce_sum(values: &mut Array<f32>, scratch: &mut Self::Scratch, #[comptime] plan: Plan);
    /// Is `flag` true in any unit of a group that holds whole rows? All of them get the same answer.
    /// Where a vote would cost more than it saves: always.
    fn any(flag: bool) -> bool;
}

/// `value` with the elements of `loaded`, converted, from its component `j·W` on.
#[cube]
pub(crate) fn stage_elements<S: Numeric, V: Size, L: Numeric, W: Size>(
    value: Vector<S, V>,
    loaded: Vector<L, W>,
    #[comptime] j: usize,
) -> Vector<S, V> {
    let mut value = value;
    let narrow = loaded.vector_size();
    #[unroll]
    for e in 0..narrow {
        value.insert(comptime!(j * narrow + e), S::cast_from(loaded.extract(e)));
    }
    value
}
