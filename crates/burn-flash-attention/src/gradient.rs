//! The gradient composed of Burn's own operations: what runs where there is no kernel for it.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use flash_kernels::AttentionShape;

use crate::backend::{BackwardTensors, ForwardOptions};
use crate::fallback::{
    attention_shape, cast, dropped, reshape, scores, softmax, sum_dtype, unseen_keys, zero_keys,
};
use crate::options::{LseRequest, has_no_scores};

/// The gradients of q, k and v, in their shapes and type.
///
/// `p = softmax(scale·q·kᵀ)`, `dv = pᵀ·dO`, `ds = p∘(dO·vᵀ - Σ dO∘O)`, `dq = scale·ds·k`,
/// `dk = scale·dsᵀ·q`, in f32 or wider. The query heads of a key head are stacked as rows, so the
/// products sum over them.
pub(crate) fn composed_gradient<B: Backend>(
    tensors: BackwardTensors<B>,
    options: ForwardOptions,
) -> [FloatTensor<B>; 3] {
    let shape = attention_shape(&tensors.query, &tensors.key, &tensors.value);
    let dtype: FloatDType = tensors.query.dtype().into();
    let shapes = [&tensors.query, &tensors.key, &tensors.value].map(|x| x.shape());
    if has_no_scores(&shape) {
        return shapes.map(|shape| zeros::<B>(shape, &tensors.query));
    }
    let sums = sum_dtype(dtype);
    let mut key = cast::<B>(tensors.key, sums);
    let mut value = cast::<B>(tensors.value, sums);
    let mask = tensors.mask.into_option();
    if let Some(mask) = mask.clone() {
        let unseen = unseen_keys::<B>(mask, &shape, options.causality);
        key = zero_keys::<B>(key, unseen.clone());
        value = zero_keys::<B>(value, unseen);
    }
    let query = cast::<B>(tensors.query, sums);
    let mut logits = scores::<B>(query.clone(), key.clone(), &shape, options.scale);
    let drop = dropped::<B>(mask, &logits, &shape, options.causality);
    if let Some(drop) = drop {
        logits = B::float_mask_fill(logits, drop, f64::NEG_INFINITY.into());
    }
    let weights = softmax::<B>(logits, sums, LseRequest::Omit).weights;
    let weights = stacked::<B>(weights, &shape, shape.seqlen_k);
    let query = stacked::<B>(query, &shape, shape.head_dim);
    let d_out = stacked::<B>(cast::<B>(tensors.d_out, sums), &shape, shape.val_dim);

    let out = B::float_matmul(weights.clone(), value.clone());
    let delta = B::float_sum_dim(B::float_mul(d_out.clone(), out), 3);
    let d_value = B::float_matmul(B::float_transpose(weights.clone()), d_out.clone());
    let d_weights = B::float_matmul(d_out, B::float_transpose(value));
    let d_logits = B::float_mul(weights, B::float_sub(d_weights, delta));
    let d_logits = B::float_mul_scalar(d_logits, options.scale.into());
    let d_query = B::float_matmul(d_logits.clone(), key);
    let d_key = B::float_matmul(B::float_transpose(d_logits), query);
    let queries = [shape.batch, shape.num_heads, shape.seqlen_q, shape.head_dim];
    let d_query = reshape::<B>(d_query, queries);
    [d_query, d_key, d_value].map(|gradient| cast::<B>(gradient, dtype))
}

/// Exact zeros of a shape, in the type and on the device of `like`.
pub(crate) fn zeros<B: Backend>(shape: Shape, like: &FloatTensor<B>) -> FloatTensor<B> {
    let (device, dtype) = (like.device(), like.dtype().into());
    // A fill of no elements would be a launch of no threads, which runtimes may refuse.
    match shape.num_elements() {
        0 => B::float_empty(shape, &device, dtype),
        _ => B::float_zeros(shape, &device, dtype),
    }
}

fn stacked<B: Backend>(
    tensor: FloatTensor<B>,
    shape: &AttentionShape,
    dim: usize,
) -> FloatTensor<B> {
    let rows = shape.group() * shape.seqlen_q;
    reshape::<B>(tensor, [shape.batch, shape.num_kv_heads, rows, dim])
}
