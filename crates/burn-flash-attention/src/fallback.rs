//! Attention composed of Burn's own operations: what runs where there is no kernel, and what
//! autodiff differentiates.
//!
//! Unlike Burn's `attention_fallback` it takes grouped heads and broadcast masks, sums in f32,
//! returns the log-sum-exp, and gives a row that sees nothing zeros and zero gradients.

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{FloatDType, Shape};
use flash_kernels::{AttentionShape, Causality};

use crate::options::{LseRequest, has_no_scores};

/// The tensors of one attention; shapes as in
/// [`FlashBackend::flash_forward`](crate::FlashBackend::flash_forward).
pub(crate) struct Inputs<B: Backend> {
    pub(crate) query: FloatTensor<B>,
    pub(crate) key: FloatTensor<B>,
    pub(crate) value: FloatTensor<B>,
    /// Broadcasts to `[batch, num_heads, seqlen_q, seqlen_k]`; `true` = drop.
    pub(crate) mask: Option<BoolTensor<B>>,
    /// Broadcasts likewise.
    pub(crate) bias: Option<FloatTensor<B>>,
}

impl<B: Backend> Inputs<B> {
    /// # Panics
    ///
    /// When q, k and v disagree; the public functions have checked that they do not.
    pub(crate) fn attention_shape(&self) -> AttentionShape {
        attention_shape(&self.query, &self.key, &self.value)
    }
}

/// The sizes of three float primitives.
///
/// # Panics
///
/// When they disagree.
pub(crate) fn attention_shape<T: TensorMetadata>(query: &T, key: &T, value: &T) -> AttentionShape {
    let dims = |tensor: &T| tensor.shape().dims::<4>();
    AttentionShape::new(dims(query), dims(key), dims(value))
        .unwrap_or_else(|error| panic!("{error}"))
}

/// What to compute from them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Composition {
    pub(crate) causality: Causality,
    pub(crate) scale: f64,
    pub(crate) softcap: Option<f64>,
    pub(crate) lse: LseRequest,
}

/// The output `[batch, num_heads, seqlen_q, val_dim]` in the query's type and, when requested, the
/// natural log-sum-exp `[batch, num_heads, seqlen_q, 1]` in f32.
///
/// A key that no query may see has no influence, NaN included, on values or gradients. A NaN in the
/// *value* of a key that some queries may see reaches the others too, as `0 * NaN`.
pub(crate) fn composed<B: Backend>(
    inputs: Inputs<B>,
    composition: Composition,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let shape = inputs.attention_shape();
    let dtype: FloatDType = inputs.query.dtype().into();
    if has_no_scores(&shape) {
        let (out, lse) = no_scores::<B>(&shape, &inputs.query);
        return match composition.lse {
            LseRequest::Return => (out, Some(lse)),
            LseRequest::Omit => (out, None),
        };
    }
    let sums = sum_dtype(dtype);
    let query = cast::<B>(inputs.query, sums);
    let mut key = cast::<B>(inputs.key, sums);
    let mut value = cast::<B>(inputs.value, sums);
    let unseen = inputs
        .mask
        .clone()
        .map(|mask| unseen_keys::<B>(mask, &shape, composition.causality));
    if let Some(unseen) = unseen {
        key = zero_keys::<B>(key, unseen.clone());
        value = zero_keys::<B>(value, unseen);
    }

    let mut scores = scores::<B>(query, key, &shape, composition.scale);
    if let Some(softcap) = composition.softcap {
        scores = B::float_div_scalar(scores, softcap.into());
        scores = B::float_mul_scalar(B::float_tanh(scores), softcap.into());
    }
    // The bias comes before the mask: the order only matters for a bias that is not finite, and a
    // dropped score must stay dropped whatever is added to it.
    if let Some(bias) = inputs.bias {
        scores = B::float_add(scores, cast::<B>(bias, sums));
    }
    if let Some(dropped) = dropped::<B>(inputs.mask, &scores, &shape, composition.causality) {
        scores = B::float_mask_fill(scores, dropped, f64::NEG_INFINITY.into());
    }

    let softmax = softmax::<B>(scores, sums, composition.lse);
    let out = weighted_values::<B>(softmax.weights, value, &shape);
    let lse = softmax.lse.map(|lse| cast::<B>(lse, FloatDType::F32));
    (cast::<B>(out, dtype), lse)
}

/// The answer when no key exists or no output element does.
pub(crate) fn no_scores<B: Backend>(
    shape: &AttentionShape,
    query: &FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (device, dtype) = (query.device(), query.dtype().into());
    let filled = |dims: [usize; 4], value: f64, dtype| {
        let dims = Shape::new(dims);
        // A fill of no elements would be a launch of no threads, which runtimes may refuse.
        match dims.num_elements() {
            0 => B::float_empty(dims, &device, dtype),
            _ => B::float_full(dims, value.into(), &device, dtype),
        }
    };
    let out = filled(shape.out(), 0.0, dtype);
    let lse = filled(shape.lse(), f64::NEG_INFINITY, FloatDType::F32);
    (out, lse)
}

/// The type to compute in: f32 unless the inputs are wider. The sums of a softmax over thousands of
/// keys need it, and some devices can store f16 or bf16 without computing in it.
pub(crate) fn sum_dtype(dtype: FloatDType) -> FloatDType {
    match dtype {
        FloatDType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    }
}

pub(crate) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if tensor.dtype() == dtype.into() {
        return tensor;
    }
    B::float_cast(tensor, dtype)
}

/// `scale * q·kᵀ`, `[batch, num_heads, seqlen_q, seqlen_k]`.
///
/// The query heads that share a key head are stacked as its rows, so that key and value are neither
/// copied nor, in the backward pass, summed apart.
pub(crate) fn scores<B: Backend>(
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    shape: &AttentionShape,
    scale: f64,
) -> FloatTensor<B> {
    let stacked = [
        shape.batch,
        shape.num_kv_heads,
        shape.group() * shape.seqlen_q,
        shape.head_dim,
    ];
    let all = [shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k];
    let query = reshape::<B>(query, stacked);
    let scores = B::float_matmul(query, B::float_transpose(key));
    B::float_mul_scalar(reshape::<B>(scores, all), scale.into())
}

/// `weights · value`, `[batch, num_heads, seqlen_q, val_dim]`.
fn weighted_values<B: Backend>(
    weights: FloatTensor<B>,
    value: FloatTensor<B>,
    shape: &AttentionShape,
) -> FloatTensor<B> {
    let stacked = [
        shape.batch,
        shape.num_kv_heads,
        shape.group() * shape.seqlen_q,
        shape.seqlen_k,
    ];
    let out = B::float_matmul(reshape::<B>(weights, stacked), value);
    reshape::<B>(out, shape.out())
}

pub(crate) struct Softmax<B: Backend> {
    pub(crate) weights: FloatTensor<B>,
    pub(crate) lse: Option<FloatTensor<B>>,
}

/// Softmax over the last dimension; a row of `-∞` gives zeros.
pub(crate) fn softmax<B: Backend>(
    scores: FloatTensor<B>,
    dtype: FloatDType,
    lse: LseRequest,
) -> Softmax<B> {
    let bools = get_or_init_device_settings::<B>(&scores.device()).bool_dtype;
    // The maximum cancels out of value and gradient alike. In a row of -∞ it is replaced by a
    // finite number, since -∞ - -∞ is NaN; no sum starts from it.
    let max = B::float_max_dim(B::float_detach(scores.clone()), 3);
    let max = B::float_clamp_min(max, dtype.finfo().min.into());
    let exps = B::float_exp(B::float_sub(scores, max.clone()));
    let sum = B::float_sum_dim(exps.clone(), 3);
    // Filled, not clamped to a tiny number: the gradient divides by it.
    let empty = B::float_equal_elem(B::float_detach(sum.clone()), 0.0.into(), bools);
    let sum = B::float_mask_fill(sum, empty.clone(), 1.0.into());
    let lse = match lse {
        LseRequest::Omit => None,
        LseRequest::Return => {
            let lse = B::float_add(B::float_log(sum.clone()), max);
            Some(B::float_mask_fill(lse, empty, f64::NEG_INFINITY.into()))
        }
    };
    Softmax {
        weights: B::float_div(exps, sum),
        lse,
    }
}

/// Which scores are dropped, as large as `scores`; `None` when none is.
pub(crate) fn dropped<B: Backend>(
    mask: Option<BoolTensor<B>>,
    scores: &FloatTensor<B>,
    shape: &AttentionShape,
    causality: Causality,
) -> Option<BoolTensor<B>> {
    let device = scores.device();
    let dropped = match (mask, causality) {
        (None, Causality::Full) => return None,
        (Some(mask), Causality::Full) => mask,
        (None, Causality::Causal) => future_keys::<B>(shape, &device),
        (Some(mask), Causality::Causal) => both::<B>(mask, future_keys::<B>(shape, &device)),
    };
    Some(B::bool_expand(dropped, scores.shape()))
}

/// `true` where key `j` is ahead of query `i`: `j - (seqlen_k - seqlen_q) > i`;
/// `[1, 1, seqlen_q, seqlen_k]`.
fn future_keys<B: Backend>(shape: &AttentionShape, device: &B::Device) -> BoolTensor<B> {
    let settings = get_or_init_device_settings::<B>(device);
    let (seqlen_q, seqlen_k) = (shape.seqlen_q, shape.seqlen_k);
    let index = |end: usize, dims: [usize; 2]| {
        let range = B::int_arange(0..end as i64, device, settings.int_dtype);
        B::int_reshape(range, Shape::new(dims))
    };
    let last_seen = B::int_add_scalar(
        index(seqlen_q, [seqlen_q, 1]),
        (seqlen_k as i64 - seqlen_q as i64).into(),
    );
    let future = B::int_lower(
        last_seen,
        index(seqlen_k, [1, seqlen_k]),
        settings.bool_dtype,
    );
    B::bool_reshape(future, Shape::new([1, 1, seqlen_q, seqlen_k]))
}

/// Logical or of two masks that broadcast to each other.
fn both<B: Backend>(a: BoolTensor<B>, b: BoolTensor<B>) -> BoolTensor<B> {
    let (a_dims, b_dims) = (a.shape().dims::<4>(), b.shape().dims::<4>());
    let mut dims = a_dims;
    for (dim, b_dim) in dims.iter_mut().zip(b_dims) {
        *dim = (*dim).max(b_dim);
    }
    B::bool_or(
        B::bool_expand(a, Shape::new(dims)),
        B::bool_expand(b, Shape::new(dims)),
    )
}

/// Keys that no query sees, `[1 or batch, 1 or num_kv_heads, seqlen_k, 1]`.
///
/// Causality matters besides the mask: a key that the mask shows only to queries before it is
/// seen by none.
pub(crate) fn unseen_keys<B: Backend>(
    mask: BoolTensor<B>,
    shape: &AttentionShape,
    causality: Causality,
) -> BoolTensor<B> {
    let mask = match causality {
        Causality::Full => mask,
        Causality::Causal => {
            let future = future_keys::<B>(shape, &mask.device());
            both::<B>(mask, future)
        }
    };
    let [batch, heads, rows, keys] = mask.shape().dims();
    // A mask of one head drops the same keys in every group.
    let (groups, group) = match heads {
        1 => (1, 1),
        _ => (shape.num_kv_heads, shape.group()),
    };
    let queries = group * rows;
    let mut unseen = B::bool_reshape(mask, Shape::new([batch, groups, queries, keys]));
    if queries > 1 {
        unseen = B::bool_all_dim(unseen, 2);
    }
    let unseen = B::bool_swap_dims(unseen, 2, 3);
    match keys {
        1 => B::bool_expand(unseen, Shape::new([batch, groups, shape.seqlen_k, 1])),
        _ => unseen,
    }
}

/// Zeros the rows of a key or value `[batch, num_kv_heads, seqlen_k, dim]` that no query sees.
/// Their weight is 0 anyway, but `0 * NaN` is not.
pub(crate) fn zero_keys<B: Backend>(
    tensor: FloatTensor<B>,
    unseen: BoolTensor<B>,
) -> FloatTensor<B> {
    let unseen = B::bool_expand(unseen, tensor.shape());
    B::float_mask_fill(tensor, unseen, 0.0.into())
}

pub(crate) fn reshape<B: Backend>(tensor: FloatTensor<B>, dims: [usize; 4]) -> FloatTensor<B> {
    let dims = Shape::new(dims);
    if tensor.shape() == dims {
        return tensor;
    }
    B::float_reshape(tensor, dims)
}
