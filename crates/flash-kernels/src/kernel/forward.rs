//! The forward pass: one body for every unit.

use cubecl::prelude::*;

use super::{
    epilogue,
    mask::Mask,
    pipeline::Pipeline,
    rows::{Rows, key_head},
    score,
    seq::{Seq, position},
    softmax::OnlineSoftmax,
    tile::{SharedTile, load_tile},
    unit::{MatrixUnit, ptx},
};
use crate::plan::{CopyKind, Plan, ScaleKind};

/// `out = softmax(scale·q·kᵀ, masked)·v` and `lse = ln Σ exp(logit)` of each row.
///
/// FlashAttention-2 (Dao 2023), algorithm 1.
///
/// Shapes: q `[batch, heads, seqlen_q, head_dim]`, k `[batch, kv_heads, seqlen_k, head_dim]`,
/// v `[batch, kv_heads, seqlen_k, val_dim]`, by strides; mask `[batch, heads, seqlen_q, seqlen_k]`,
/// nonzero = drop, by strides; out and lse packed. `scale_log2 = scale·log2(e)`.
///
/// A cube owns `block_m` queries of one head and walks the keys they see. Nothing is shared
/// between cubes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<U: MatrixUnit, E: Float, M: Int, W: Size, O: Size>(
    q: &Tensor<Vector<E, W>>,
    k: &Tensor<Vector<E, W>>,
    v: &Tensor<Vector<E, W>>,
    mask: ComptimeOption<OwnedTensor<M>>,
    out: &mut Tensor<Vector<E, O>>,
    lse: &mut [f32],
    cubes: u32,
    scale_log2: f32,
    #[comptime] plan: Plan,
    #[define(M)] _mask_type: ElemType,
) {
    let position = position();
    if position < cubes {
        let seq = Seq::locate(
            position,
            q.shape(1),
            q.shape(2) as u32,
            comptime!(plan.tile.block_m),
            comptime!(plan.causality),
        );
        let kv_head = key_head(seq.head, q.shape(1), k.shape(1));
        let q_rows = Rows::of(q, seq.batch, seq.head);
        let k_rows = Rows::of(k, seq.batch, kv_head);
        let v_rows = Rows::of(v, seq.batch, kv_head);
        let mask = Mask::<M>::new(
            q_rows.len,
            k_rows.len,
            &mask,
            &seq,
            comptime!(plan.causality),
        );
        let range = mask.k_range(seq.query_start, plan);

        let mut scratch = U::scratch(plan);
        let pipeline = Pipeline::<U>::new(k_rows, v_rows, plan);
        let q_tile = load_queries::<U, E, W>(q, &q_rows, seq.query_start, plan);
        pipeline.start(k, v, range.begin, plan);
        let a = queries::<U>(&q_tile, plan);
        let folded = folded_scale(scale_log2, plan);
        let mut softmax = OnlineSoftmax::new(folded, U::frag_rows(plan), comptime!(plan.isa));
        let mut acc = U::zero(plan);

        #[unroll]
        for phase in 0..2u32 {
            let masked = comptime!(phase == 1);
            let (from, to) = phase_range(range.begin, range.inner_end, range.end, phase);
            for step in from..to {
                let keys = pipeline.keys(k, v, step, range.end, plan);
                let mut s = U::product(&a, &keys, &mut scratch, plan);
                score::apply::<U>(&mut s, scale_log2, plan);
                if masked {
                    let key_start = step * comptime!(plan.tile.block_n as u32);
                    mask.apply::<U>(&mut s, seq.query_start, key_start, plan);
                }
                softmax.step::<U>(&mut s, &mut acc, &mut scratch, plan);
                let p = U::hold(&s, &mut scratch, plan);
                let values = pipeline.values(v, step, plan);
                U::accumulate(&mut acc, &p, &values, &mut scratch, plan);
                pipeline.release(plan);
            }
        }
        softmax.finish::<U>(&mut scratch, plan);
        epilogue::store::<U, E, O>(&acc, &softmax, out, lse, &seq, &mut scratch, plan);
    }
}

/// Inner steps first, then those that need a mask.
#[cube]
fn phase_range(begin: u32, inner_end: u32, end: u32, #[comptime] phase: u32) -> (u32, u32) {
    // More queries than keys can leave nothing to walk, and less than one inner tile.
    let inner = min(inner_end, end);
    if comptime!(phase == 0) {
        (begin, inner)
    } else {
        (inner, end)
    }
}

/// What the softmax multiplies scores by.
#[cube]
fn folded_scale(scale_log2: f32, #[comptime] plan: Plan) -> f32 {
    if comptime!(plan.scale == ScaleKind::Folded) {
        scale_log2
    } else {
        f32::new(1.0)
    }
}

/// Sends the query tile on its way to shared memory.
#[cube]
fn load_queries<U: MatrixUnit, E: Float, W: Size>(
    q: &Tensor<Vector<E, W>>,
    rows: &Rows,
    query_start: u32,
    #[comptime] plan: Plan,
) -> SharedTile<U::Stage, U::Width> {
    let width = comptime!(<U::Width as Size>::value());
    let mut tile = SharedTile::<U::Stage, U::Width> {
        data: Shared::<[Vector<U::Stage, U::Width>]>::new_aligned_slice(
            comptime!(plan.query_len() / width),
            16usize,
        ),
        base: 0usize.runtime(),
        stride: comptime!(plan.row_stride(plan.tile.head_pad) / width),
    };
    let (block_m, cols) = comptime!((plan.tile.block_m, plan.tile.head_pad));
    load_tile(q, rows, &mut tile, query_start, block_m, cols, plan);
    if comptime!(plan.copy == CopyKind::Async) {
        ptx::copy_commit();
    }
    tile
}

/// The query operand, once its tile has landed.
#[cube]
fn queries<U: MatrixUnit>(
    tile: &SharedTile<U::Stage, U::Width>,
    #[comptime] plan: Plan,
) -> U::Left {
    if comptime!(plan.copy == CopyKind::Async) {
        // All groups but the first step's.
        ptx::copy_wait(1u32);
    }
    // The tile was written by other units than those that read it.
    sync_cube();
    U::left(tile, plan)
}
