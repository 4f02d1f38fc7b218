//! The gradient: three short kernels without atomics, so equal bits from run to run; and, where it is
//! asked for, one that does the work of two and adds to dq in any order (`fused_overlapped`).
//!
//! FlashAttention-2 (Dao 2023), algorithm 2, split as Metal FlashAttention does: `delta`, then
//! `dq` (owns queries, walks keys) and `dkv` (owns keys, walks queries). `p` is recomputed from
//! q, k and the log-sum-exp; no `[seqlen_q, seqlen_k]` matrix exists.

pub(crate) mod delta;
pub(crate) mod dkv;
mod dkv_divided;
pub(crate) mod dkv_mapped;
pub(crate) mod dkv_overlapped;
mod dkv_supply;
pub(crate) mod dq;
pub(crate) mod dq_mapped;
pub(crate) mod dq_overlapped;
pub(crate) mod fused_overlapped;
pub(crate) mod fused_sums;
pub(crate) mod mapped;
pub(crate) mod overlapped;
