//! The op as Burn's backends see it.

// Burn marks the whole NdArray backend as deprecated; it stays supported here while Burn has it.
#![cfg_attr(feature = "ndarray", allow(deprecated))]

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
#[cfg(feature = "fusion")]
use burn::tensor::DType;
use flash_kernels::{Causality, GradientOrder, Precision};

use crate::fallback::{Composition, Inputs, composed};
use crate::gradient::composed_gradient;
use crate::options::LseRequest;

/// The bool mask of an attention, `true` = drop, each dimension of
/// `[batch, num_heads, seqlen_q, seqlen_k]` that size or 1.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub enum Mask<B: Backend> {
    /// Nothing is dropped.
    None,
    /// One bool per score, broadcast.
    Dense(BoolTensor<B>),
}

impl<B: Backend> Mask<B> {
    pub(crate) fn from_option(mask: Option<BoolTensor<B>>) -> Self {
        match mask {
            Some(mask) => Self::Dense(mask),
            None => Self::None,
        }
    }

    pub(crate) fn into_option(self) -> Option<BoolTensor<B>> {
        match self {
            Self::Dense(mask) => Some(mask),
            Self::None => None,
        }
    }
}

/// The part of an attention that is no tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ForwardOptions {
    /// Positional mask.
    pub causality: Causality,
    /// Factor on `q·k`.
    pub scale: f64,
    /// Order of the sums of the gradient, where the backend has a choice.
    pub gradient: GradientOrder,
    /// What may become of products of f32, where the backend has a choice.
    pub precision: Precision,
}

/// What a gradient is computed from.
#[derive(Clone, Debug)]
pub(crate) struct BackwardTensors<B: Backend> {
    /// `[batch, num_heads, seqlen_q, head_dim]`.
    pub(crate) query: FloatTensor<B>,
    /// `[batch, num_kv_heads, seqlen_k, head_dim]`.
    pub(crate) key: FloatTensor<B>,
    /// `[batch, num_kv_heads, seqlen_k, val_dim]`.
    pub(crate) value: FloatTensor<B>,
    /// The mask of the forward pass.
    pub(crate) mask: Mask<B>,
    /// What the forward pass returned, `[batch, num_heads, seqlen_q, val_dim]`.
    pub(crate) out: FloatTensor<B>,
    /// Likewise, `[batch, num_heads, seqlen_q, 1]` in f32.
    pub(crate) lse: FloatTensor<B>,
    /// The gradient of the output.
    pub(crate) d_out: FloatTensor<B>,
}

/// Backends that compute attention as one operation.
///
/// [`flash_attention`](crate::flash_attention) is the checked way in; these functions expect
/// arguments that agree.
#[backend_extension(
    Cube: cfg(feature = "cubecl"),
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion")
)]
pub trait FlashBackend: Backend {
    /// `softmax(scale * query · keyᵀ) · value` and its log-sum-exp.
    ///
    /// # Arguments
    ///
    /// - `query`: `[batch, num_heads, seqlen_q, head_dim]`
    /// - `key`: `[batch, num_kv_heads, seqlen_k, head_dim]`, `num_kv_heads` divides `num_heads`
    /// - `value`: `[batch, num_kv_heads, seqlen_k, val_dim]`
    /// - `mask`: see [`Mask`]
    ///
    /// # Returns
    ///
    /// - the output `[batch, num_heads, seqlen_q, val_dim]` in the query's type, 0 in rows that
    ///   see nothing;
    /// - the natural log-sum-exp `[batch, num_heads, seqlen_q, 1]` in f32, -∞ in those rows.
    ///
    /// # Panics
    ///
    /// When the shapes disagree.
    #[fusion(meta = forward_specs)]
    fn flash_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] mask: Mask<Self>,
        options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed_forward::<Self>(query, key, value, mask, options)
    }

    /// The gradient of a loss with respect to the query, of the query's shape and type.
    ///
    /// # Panics
    ///
    /// When the shapes disagree.
    #[fusion(meta = query_spec)]
    fn flash_backward_query(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] mask: Mask<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        options: ForwardOptions,
    ) -> FloatTensor<Self> {
        let tensors = BackwardTensors {
            query,
            key,
            value,
            mask,
            out,
            lse,
            d_out,
        };
        let [d_query, _, _] = composed_gradient::<Self>(tensors, options);
        d_query
    }

    /// The gradients with respect to key and value, of their shapes and type, summed over the
    /// query heads of each key head.
    ///
    /// # Panics
    ///
    /// When the shapes disagree.
    #[fusion(meta = key_value_specs)]
    fn flash_backward_key_value(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] mask: Mask<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let tensors = BackwardTensors {
            query,
            key,
            value,
            mask,
            out,
            lse,
            d_out,
        };
        let [_, d_key, d_value] = composed_gradient::<Self>(tensors, options);
        (d_key, d_value)
    }

    /// All three gradients: those of [`Self::flash_backward_query`] and
    /// [`Self::flash_backward_key_value`].
    ///
    /// # Panics
    ///
    /// When the shapes disagree.
    #[fusion(meta = gradient_specs)]
    fn flash_backward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] mask: Mask<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let tensors = BackwardTensors {
            query,
            key,
            value,
            mask,
            out,
            lse,
            d_out,
        };
        let [d_query, d_key, d_value] = composed_gradient::<Self>(tensors, options);
        (d_query, d_key, d_value)
    }
}

#[cfg(feature = "flex")]
impl FlashBackend for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl FlashBackend for burn::backend::NdArray {}

/// [`FlashBackend::flash_forward`] from the backend's own operations.
pub(crate) fn composed_forward<B: Backend>(
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    value: FloatTensor<B>,
    mask: Mask<B>,
    options: ForwardOptions,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let inputs = Inputs {
        query,
        key,
        value,
        mask: mask.into_option(),
        bias: None,
    };
    let composition = Composition {
        causality: options.causality,
        scale: options.scale,
        softcap: None,
        lse: LseRequest::Return,
    };
    let (out, lse) = composed::<B>(inputs, composition);
    (out, lse.expect("the log-sum-exp was requested"))
}

/// Shapes and types of what [`FlashBackend::flash_forward`] returns, for Fusion.
#[cfg(feature = "fusion")]
fn forward_specs(
    query: &TensorSpec,
    _key: &TensorSpec,
    value: &TensorSpec,
    _mask: &MaskMetadata,
    _options: &ForwardOptions,
) -> (TensorSpec, TensorSpec) {
    let mut out = query.shape.clone();
    let mut lse = query.shape.clone();
    out[3] = value.shape[3];
    lse[3] = 1;
    (
        TensorSpec::new(out, query.dtype),
        TensorSpec::new(lse, DType::F32),
    )
}

/// Shapes and types of what a gradient returns, for Fusion.
#[cfg(feature = "fusion")]
#[allow(clippy::too_many_arguments)]
fn query_spec(
    query: &TensorSpec,
    _key: &TensorSpec,
    _value: &TensorSpec,
    _mask: &MaskMetadata,
    _out: &TensorSpec,
    _lse: &TensorSpec,
    _d_out: &TensorSpec,
    _options: &ForwardOptions,
) -> TensorSpec {
    query.clone()
}

/// Shapes and types of what a gradient returns, for Fusion.
#[cfg(feature = "fusion")]
#[allow(clippy::too_many_arguments)]
fn key_value_specs(
    _query: &TensorSpec,
    key: &TensorSpec,
    value: &TensorSpec,
    _mask: &MaskMetadata,
    _out: &TensorSpec,
    _lse: &TensorSpec,
    _d_out: &TensorSpec,
    _options: &ForwardOptions,
) -> (TensorSpec, TensorSpec) {
    (key.clone(), value.clone())
}

/// Shapes and types of what a gradient returns, for Fusion.
#[cfg(feature = "fusion")]
#[allow(clippy::too_many_arguments)]
fn gradient_specs(
    query: &TensorSpec,
    key: &TensorSpec,
    value: &TensorSpec,
    _mask: &MaskMetadata,
    _out: &TensorSpec,
    _lse: &TensorSpec,
    _d_out: &TensorSpec,
    _options: &ForwardOptions,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    (query.clone(), key.clone(), value.clone())
}
