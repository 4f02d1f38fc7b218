//! The gradient: three short kernels without atomics, so equal bits from run to run; and, where it is
//! asked for, one that does the work of two and adds to dq in any order (`fused_overlapped`).
//!
//! FlashAttention-2 (Dao 2023), algorithm 2, split as Metal FlashAttention does: `delta`, then
//! `dq` (owns queries, walks keys) and `dkv` (owns keys, walks queries). `p` is recomputed from
//! q, k and the log-sum-exp; no `[seqlen_q, seqlen_k]` matrix exists.

pub mod delta;
pub mod dkv;
mod dkv_divided;
pub mod dkv_mapped;
pub mod dkv_overlapped;
mod dkv_supply;
pub mod dq;
pub mod dq_mapped;
pub mod dq_overlapped;
pub mod fused_overlapped;
pub mod fused_sums;
pub mod mapped;
pub mod overlapped;
