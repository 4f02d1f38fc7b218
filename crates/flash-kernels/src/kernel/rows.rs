//! Rows of one head in global memory, and which key head a query head reads.

use cubecl::prelude::*;

/// The rows `[seqlen, dim]` of one head of one batch entry, by strides in elements.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Rows {
    /// First element.
    pub offset: usize,
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between columns; 1 whenever a load is wider than one element.
    pub col_stride: usize,
    /// Rows that exist.
    pub len: u32,
    /// Columns that exist.
    pub dim: u32,
}

#[cube]
impl Rows {
    /// The rows of `head` in `batch` of a tensor `[batch, heads, seqlen, dim]`.
    pub fn of<E: CubePrimitive>(tensor: &Tensor<E>, batch: usize, head: usize) -> Rows {
        Rows {
            offset: batch * tensor.stride(0) + head * tensor.stride(1),
            row_stride: tensor.stride(2),
            col_stride: tensor.stride(3),
            len: tensor.shape(2) as u32,
            dim: tensor.shape(3) as u32,
        }
    }
}

/// Key head of a query head: consecutive query heads share one.
#[cube]
pub fn key_head(head: usize, num_heads: usize, num_kv_heads: usize) -> usize {
    head / group_size(num_heads, num_kv_heads)
}

/// Query heads of a key head.
#[cube]
pub fn group_size(num_heads: usize, num_kv_heads: usize) -> usize {
    num_heads / num_kv_heads
}
