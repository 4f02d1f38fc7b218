//! The op as Burn's backends see it.

// Burn marks the whole NdArray backend as deprecated; it stays supported here while Burn has it.
#![cfg_attr(feature = "ndarray", allow(deprecated))]

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
#[cfg(feature = "fusion")]
use burn::tensor::DType;
use flash_kernels::Causality;

use crate::fallback::{Composition, Inputs, composed};
use crate::options::LseRequest;

/// The bool mask of an attention, `true` = drop, each dimension of
/// `[batch, num_heads, seqlen_q, seqlen_k]` that size or 1.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
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
pub struct ForwardOptions {
    /// Positional mask.
    pub causality: Causality,
    /// Factor on `q·k`.
    pub scale: f64,
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
