//! What is compiled: one plain value that is a kernel's whole comptime configuration.
//!
//! Lengths, strides, scale and head sizes below the padded ones are run-time values: a new one
//! does not recompile.

use crate::{Causality, Masking, Precision};

mod check;

mod choice;
mod memory;
mod split;

pub use choice::{
    CopyKind, Exponent, Isa, Pass, QueryOperand, Reduction, Rounding, ScaleKind, UnitKind,
    ValueBuffer,
};

/// Sizes of the tiles of one cube. All are comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Rows of a cube: queries, or keys in [`Pass::Dkv`] and [`Pass::Fused`].
    pub block_m: usize,
    /// Rows of a step: keys, or queries where a cube owns keys.
    pub block_n: usize,
    /// `head_dim` rounded up to what the unit multiplies in.
    pub head_pad: usize,
    /// `val_dim` rounded up likewise.
    pub val_pad: usize,
}

/// The comptime configuration of a kernel.
///
/// [`select`](crate::select::select) makes one whose sizes fit each other. A field changed by hand is
/// for tests and measurements: [`Plan::check`] tells whether a device has what the plan needs, and of
/// its sizes only part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Which kernel.
    pub pass: Pass,
    /// Who multiplies.
    pub unit: UnitKind,
    /// Which instructions are allowed.
    pub isa: Isa,
    /// Tile sizes.
    pub tile: TileShape,
    /// Units of a cube.
    pub threads: usize,
    /// Units of a plane, where the unit works by planes.
    pub plane_size: usize,
    /// Rows of a tile that one unit ([`UnitKind::Scalar`]) or one plane owns.
    pub rows: usize,
    /// Global to shared memory.
    pub copy: CopyKind,
    /// Elements of one global load.
    pub load_width: usize,
    /// Elements of one global store.
    pub store_width: usize,
    /// Where the owned operands are.
    pub queries: QueryOperand,
    /// Reduction over a row.
    pub reduction: Reduction,
    /// Where V lies.
    pub values: ValueBuffer,
    /// How exponents are computed.
    pub exponent: Exponent,
    /// When the scale is applied.
    pub scale: ScaleKind,
    /// Positional mask.
    pub causality: Causality,
    /// Bool mask.
    pub masking: Masking,
    /// Bytes of an element in shared memory.
    pub stage_bytes: usize,
    /// How operands of f32 are multiplied; [`Precision::Full`] for all others.
    pub precision: Precision,
    /// How those of [`Precision::Tf32`] are rounded.
    pub rounding: Rounding,
    /// Parts of the keys of a query tile, each walked by a cube of its own. Only whether there is
    /// more than one is compiled: see [`Plan::compiled`].
    pub splits: usize,
}

/// Elements by which rows in shared memory are apart beyond their length, in bytes: one 16-byte
/// access, so that the rows of an 8-row matrix fall on different banks.
pub(crate) const ROW_PAD_BYTES: usize = 16;

/// Columns of a box of [`CopyKind::Boxes`]: 128 bytes of 16-bit elements, the span of the swizzle.
pub(crate) const BOX_COLS: usize = 64;

/// Rows of a warpgroup of [`UnitKind::Wgmma`].
pub(crate) const WARPGROUP_ROWS: usize = 64;

/// Shared memory of a cube on sm_90, in bytes, as far as [`UnitKind::Wgmma`] plans for it.
const SM90_SHARED_BYTES: usize = 227 * 1024;

// What is hidden here is how kernels use a plan: for their tests and inspection.
impl Plan {
    /// Stages of the K/V pipeline. Boxes of the forward pass travel into four where those fit, or three;
    /// those of a divided one into three.
    #[doc(hidden)]
    pub const fn stages(&self) -> usize {
        match (self.copy, self.pass) {
            (CopyKind::Vector | CopyKind::Ahead, _) => 1,
            (CopyKind::Boxes, Pass::Forward) if self.fits(2, 4, 4) => 4,
            (CopyKind::Boxes, Pass::Forward) if self.fits(2, 3, 3) => 3,
            // V is left a step before K: what is scarce goes to `head_stages`.
            (CopyKind::Boxes, Pass::Dq) if !self.fits(1, 3, 2) => 1,
            // A step is over only when both warpgroups are done with its tiles.
            (CopyKind::Boxes, _) if self.is_divided() && self.fits(1, 3, 3) => 3,
            (CopyKind::Async | CopyKind::Boxes, _) => 2,
        }
    }

    /// Stages of the walked tiles of `head_dim` columns: `stages`, and one more where the sum of a step
    /// needs its keys until the next: with two, a warpgroup would wait for keys that can be asked for
    /// only when the other is through with that sum.
    #[doc(hidden)]
    pub const fn head_stages(&self) -> usize {
        match (self.copy, self.pass) {
            (CopyKind::Boxes, Pass::Dq) => 3,
            _ => self.stages(),
        }
    }

    /// Do so many stages of the owned buffers, of K and of V fit a cube of sm_90?
    const fn fits(&self, owned_stages: usize, head_stages: usize, val_stages: usize) -> bool {
        self.bytes_with(owned_stages, head_stages, val_stages) <= SM90_SHARED_BYTES
    }

    /// Key tiles that the last warpgroup of a query tile may see after the last of the first one.
    #[doc(hidden)]
    pub const fn lag(&self) -> usize {
        (self.tile.block_m - WARPGROUP_ROWS).div_ceil(self.tile.block_n)
    }

    /// Does a warpgroup wait for the next queries while others still need values? Those queries come
    /// after the last values, for which there must be a stage besides the ones it has not released.
    pub(crate) const fn must_not_lag(&self) -> bool {
        matches!(
            (self.unit, self.pass, self.causality),
            (UnitKind::Wgmma, Pass::Forward, Causality::Causal)
        )
    }

    /// Elements of a vector of a shared tile: 16 bytes, which are four words of two elements for
    /// [`UnitKind::Cmma`].
    pub(crate) const fn vector_elems(&self) -> usize {
        16 / self.stage_bytes
    }

    /// Are whole vectors of words loaded from global memory? Else elements are, and packed.
    #[doc(hidden)]
    pub const fn loads_words(&self) -> bool {
        matches!(self.unit, UnitKind::Cmma) && self.load_width == self.vector_elems()
    }

    /// Components of one global load.
    #[doc(hidden)]
    pub const fn load_components(&self) -> usize {
        if self.loads_words() {
            self.load_width / 2
        } else {
            self.load_width
        }
    }

    /// Vectors of a walked tile of `cols` columns that each unit carries.
    pub(crate) const fn carried(&self, cols: usize) -> usize {
        (self.tile.block_n * cols / self.vector_elems()).div_ceil(self.threads)
    }

    /// Stages of the owned buffers: two where the next query tile of a cube may travel while this
    /// one is computed, and both fit.
    pub(crate) const fn owned_stages(&self) -> usize {
        match (self.copy, self.pass) {
            (CopyKind::Boxes, Pass::Forward) if self.fits(2, self.head_stages(), self.stages()) => {
                2
            }
            _ => 1,
        }
    }

    /// Do the walked tiles lie where the owned ones were?
    pub(crate) const fn lends(&self) -> bool {
        matches!(self.queries, QueryOperand::Lent)
    }

    /// Do functions change the elements of its products where they are?
    #[doc(hidden)]
    pub const fn is_mapped(&self) -> bool {
        matches!((self.unit, self.isa), (UnitKind::Cmma, Isa::Mapped))
    }

    /// Do two warpgroups have the same 64 keys, and divide the products among them? One has the scores
    /// and dv, the other dk: what one has no registers for together.
    #[doc(hidden)]
    pub const fn is_divided(&self) -> bool {
        matches!((self.pass, self.unit), (Pass::Dkv, UnitKind::Wgmma))
            && self.tile.block_m == WARPGROUP_ROWS
    }

    /// Warpgroups that multiply, beside the one that copies.
    #[doc(hidden)]
    pub const fn consumers(&self) -> usize {
        if self.is_divided() {
            2
        } else {
            self.tile.block_m / WARPGROUP_ROWS
        }
    }

    /// Owned buffers: Q; Q and dO; K and V.
    const fn owned_buffers(&self) -> usize {
        match self.pass {
            Pass::Forward => 1,
            Pass::Dq | Pass::Dkv | Pass::Fused => 2,
        }
    }

    /// Tiles in shared memory of what warpgroups exchange: gradients of scores, where each multiplies
    /// those of all, or probabilities.
    pub(crate) const fn exchange_stages(&self) -> usize {
        match self.pass {
            Pass::Fused => 2,
            Pass::Dkv if self.is_divided() => 2,
            Pass::Forward | Pass::Dq | Pass::Dkv => 0,
        }
    }

    /// Boxes side by side in a tile of `head_pad` columns.
    pub(crate) const fn head_boxes(&self) -> usize {
        self.tile.head_pad.div_ceil(BOX_COLS)
    }

    /// Pieces of 64 × 64 of a tile of dq, each the work of a warpgroup of [`Pass::Fused`].
    pub(crate) const fn pieces(&self) -> usize {
        self.tile.block_n / WARPGROUP_ROWS * self.head_boxes()
    }

    /// Barriers in shared memory by which [`CopyKind::Boxes`] tells that a stage is full or empty.
    #[doc(hidden)]
    pub const fn barriers(&self) -> usize {
        match self.copy {
            CopyKind::Boxes => {
                let owned = self.owned_buffers() * self.owned_stages();
                2 * (owned + self.head_stages() + self.stages() + self.exchange_stages())
            }
            _ => 0,
        }
    }

    /// Lengths of the vectors that hold a unit's scores, probabilities in pairs, and sums over
    /// `head_pad` and `val_pad` columns of [`UnitKind::Wgmma`]: powers of two, since a vector is
    /// aligned to its size.
    pub(crate) const fn held(&self) -> [usize; 4] {
        let scores = self.tile.block_n / 2;
        [
            scores.next_power_of_two(),
            (scores / 2).next_power_of_two(),
            (self.tile.head_pad / 2).next_power_of_two(),
            (self.tile.val_pad / 2).next_power_of_two(),
        ]
    }

    /// Units that share a row of [`UnitKind::Scalar`]'s register tiles.
    pub(crate) const fn across(&self) -> usize {
        self.threads * self.rows / self.tile.block_m
    }
}
