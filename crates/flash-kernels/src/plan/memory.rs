//! What a plan's kernel has in shared memory.

use super::{
    BOX_COLS, CopyKind, Pass, Plan, QueryOperand, ROW_PAD_BYTES, Reduction, UnitKind, ValueBuffer,
    WARPGROUP_ROWS,
};

// What is hidden here is how kernels use a plan: for their tests and inspection.
impl Plan {
    /// Elements between rows of a shared tile of `cols` columns, or what they take where it is cut
    /// into boxes.
    pub(crate) const fn row_stride(&self, cols: usize) -> usize {
        match self.copy {
            CopyKind::Boxes => cols.next_multiple_of(BOX_COLS),
            _ => cols + ROW_PAD_BYTES / self.stage_bytes,
        }
    }

    /// Elements of one stage of a walked buffer with `cols` columns.
    pub(crate) const fn walked_len(&self, cols: usize) -> usize {
        let cols = match self.values {
            ValueBuffer::Own => cols,
            ValueBuffer::OfKeys => max(self.tile.head_pad, self.tile.val_pad),
        };
        self.tile.block_n * self.row_stride(cols)
    }

    /// Elements of both walked buffers, or of the one they share, in so many stages.
    const fn walked_total(&self, head_stages: usize, val_stages: usize) -> usize {
        let head = head_stages * self.walked_len(self.tile.head_pad);
        match self.values {
            ValueBuffer::Own => head + val_stages * self.walked_len(self.tile.val_pad),
            ValueBuffer::OfKeys => head,
        }
    }

    /// Elements of an owned buffer with `cols` columns.
    pub(crate) const fn owned_len(&self, cols: usize) -> usize {
        self.tile.block_m * self.row_stride(cols)
    }

    /// Elements of the owned buffers: Q; Q and dO; K and V.
    const fn owned_total(&self) -> usize {
        let head = self.owned_len(self.tile.head_pad);
        match self.pass {
            Pass::Forward => head,
            Pass::Dq | Pass::Dkv | Pass::Fused => head + self.owned_len(self.tile.val_pad),
        }
    }

    /// Elements of the larger owned buffer.
    const fn owned_most(&self) -> usize {
        let head = self.owned_len(self.tile.head_pad);
        match self.pass {
            Pass::Forward => head,
            Pass::Dq | Pass::Dkv | Pass::Fused => max(head, self.owned_len(self.tile.val_pad)),
        }
    }

    /// Elements of the place of [`QueryOperand::Lent`], by which the owned operands come and in which the
    /// walked tiles lie.
    pub(crate) const fn place_len(&self) -> usize {
        max(self.owned_most(), self.walked_total(1, 1))
    }

    /// Stages of the statistics of the walked queries: two, or those of a divided walk's tiles.
    pub(crate) const fn stats_stages(&self) -> usize {
        if self.is_divided() { self.stages() } else { 2 }
    }

    /// (log-sum-exp, delta) pairs of the walked queries in shared memory; of the owned ones in dq by
    /// functions of elements.
    #[doc(hidden)]
    pub const fn stats_len(&self) -> usize {
        self.stats_in(self.stats_stages())
    }

    const fn stats_in(&self, stages: usize) -> usize {
        match self.pass {
            Pass::Dq if self.is_mapped() => self.tile.block_m,
            Pass::Forward | Pass::Dq => 0,
            Pass::Dkv | Pass::Fused => stages * self.tile.block_n,
        }
    }

    /// Shared memory of a cube in bytes: operands, then what the unit needs for itself.
    pub const fn shared_bytes(&self) -> usize {
        self.bytes_with(self.owned_stages(), self.head_stages(), self.stages())
            + 8 * self.barriers()
    }

    /// `shared_bytes` without barriers, for so many stages of the owned buffers and of the walked.
    pub(super) const fn bytes_with(
        &self,
        owned: usize,
        head_stages: usize,
        val_stages: usize,
    ) -> usize {
        let stats = self.stats_in(if self.is_divided() { head_stages } else { 2 });
        let (owned, walked) = (
            owned * self.owned_total(),
            self.walked_total(head_stages, val_stages),
        );
        let elems = match self.queries {
            QueryOperand::Lent => self.place_len(),
            QueryOperand::Resident | QueryOperand::Reread => owned + walked,
        };
        elems * self.stage_bytes + stats * 8 + self.scratch_bytes() + self.exchange_bytes()
    }

    /// Elements of the probabilities in [`UnitKind::Scalar`]'s scratch.
    pub(crate) const fn prob_len(&self) -> usize {
        match self.unit {
            UnitKind::Scalar => self.tile.block_n * (self.tile.block_m + 4),
            UnitKind::Cmma | UnitKind::Mma | UnitKind::Wgmma => 0,
        }
    }

    /// f32 of scratch besides: row reductions (Scalar) or visible scores (Cmma), in whose place
    /// the probabilities come.
    #[doc(hidden)]
    pub const fn scratch_len(&self) -> usize {
        match (self.unit, self.reduction) {
            (UnitKind::Scalar, Reduction::Shared) => self.tile.block_m * self.across(),
            (UnitKind::Scalar, Reduction::Plane) => 4,
            (UnitKind::Cmma, _) => self.tile.block_m * self.score_stride(),
            _ => 0,
        }
    }

    /// Columns of `Cmma`'s visible scores; where only what leaves the cube is made visible, those of a
    /// matrix.
    pub(crate) const fn visible_cols(&self) -> usize {
        if self.is_mapped() {
            16
        } else {
            self.tile.block_n
        }
    }

    /// Lanes that share a row of `Cmma`'s visible scores.
    pub(crate) const fn row_parts(&self) -> usize {
        if self.plane_size > self.rows {
            self.plane_size / self.rows
        } else {
            1
        }
    }

    /// f32 between rows of `Cmma`'s visible scores. Lanes that read beside each other, and the
    /// planes' stores of whole matrices, then fall on different banks.
    pub(crate) const fn score_stride(&self) -> usize {
        self.visible_cols()
            + if self.row_parts() > 1 && self.visible_cols() > 16 {
                8
            } else {
                4
            }
    }

    const fn scratch_bytes(&self) -> usize {
        self.prob_len() * self.stage_bytes + self.scratch_len() * 4
    }

    /// Bytes of `exchange_stages` and, of [`Pass::Fused`], of a tile of dq in f32.
    pub(super) const fn exchange_bytes(&self) -> usize {
        let tile = self.tile.block_m * self.tile.block_n * self.stage_bytes;
        let addend = match self.pass {
            Pass::Fused => 4 * self.pieces() * WARPGROUP_ROWS * BOX_COLS,
            Pass::Forward | Pass::Dq | Pass::Dkv => 0,
        };
        self.exchange_stages() * tile + addend
    }
}

const fn max(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}
