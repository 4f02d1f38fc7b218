//! FlashAttention as one operation of Burn's backends.
//!
//! [`attention`] takes the arguments of Burn's own `attention` and is a drop-in for it;
//! [`flash_attention`] takes [`FlashOptions`] and also returns the log-sum-exp and a report of what
//! ran. Both take grouped heads (`num_kv_heads` dividing `num_heads`), any strides, masks that
//! broadcast, and every backend.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_flash_attention::{FlashOptions, flash_attention};
//!
//! let device = Device::flex();
//! let random = |heads| Tensor::<4>::random([2, heads, 16, 8], Distribution::Default, &device);
//! let (query, key, value) = (random(4), random(2), random(2));
//!
//! let output = flash_attention(query, key, value, FlashOptions::new().causal().with_lse());
//! assert_eq!(output.out.dims(), [2, 4, 16, 8]);
//! assert_eq!(output.lse.unwrap().dims(), [2, 4, 16]);
//! println!("{}", output.report);
//! ```
//!
//! # What runs
//!
//! On a CubeCL device (CUDA, WGPU, Vulkan) one fused kernel, of which the scores never leave the
//! chip. Composed of Burn's operations instead, with the scores in memory:
//!
//! - with a bias or a softcap;
//! - on the CPU backends, and for f64;
//! - on a device that has room for no plan.
//!
//! [`FlashOutput::report`] says which it was and why, and [`attention_report`] says it without
//! running anything. Attention dropout is not supported.
//!
//! # Meaning
//!
//! - Causality is aligned bottom-right: query `i` sees key `j` iff
//!   `j - (seqlen_k - seqlen_q) <= i`.
//! - A `true` in the mask drops the score.
//! - A row that sees nothing is 0, with a log-sum-exp of -∞ and zero gradients.
//! - A masked key has no influence on the output through K, NaN included; nor, in kernels, on a
//!   gradient, and likewise Q there. Its row of V, and for a gradient the query's row of dO, must be
//!   finite: they are multiplied by a weight of 0, and `0 * NaN` is NaN. Composed operations
//!   multiply K likewise where another query sees the key.

// A backend extension takes its tensors one by one: Burn rewrites each argument.
#![allow(clippy::too_many_arguments)]

#[cfg(feature = "autodiff")]
mod autodiff;
mod backend;
#[cfg(feature = "cubecl")]
mod cube;
mod fallback;
mod gradient;
pub mod nn;
mod options;
mod report;
#[cfg(all(test, feature = "flex", feature = "autodiff"))]
mod tests;

use burn::backend::Dispatch;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Tensor};

// Hidden: Burn's derive makes it, and names it in the interface of `Mask`.
#[cfg(feature = "fusion")]
#[doc(hidden)]
pub use backend::MaskMetadata;
pub use backend::{FlashBackend, ForwardOptions, Mask};
pub use flash_kernels::{AttentionError, Causality, GradientOrder, Plan, Precision, UnitKind};
pub use options::{FlashOptions, LseRequest};
pub use report::{AttentionPath, AttentionReport};

use fallback::{Composition, Inputs, composed};
use options::{Request, has_no_scores};
use report::{is_tracked, route};

/// What [`flash_attention`] returns.
#[derive(Clone, Debug)]
pub struct FlashOutput {
    /// `[batch, num_heads, seqlen_q, val_dim]`, in the query's element type.
    pub out: Tensor<4>,
    /// Natural log of the sum of `exp(score)` over the keys a query sees, f32
    /// `[batch, num_heads, seqlen_q]`; -∞ where it sees none. `None` unless
    /// [requested](FlashOptions::with_lse).
    pub lse: Option<Tensor<3>>,
    /// What computed it.
    pub report: AttentionReport,
}

/// Scaled dot-product attention with the signature of Burn's own
/// [`attention`](burn::tensor::module::attention).
///
/// # Arguments
///
/// - `query`: `[batch, num_heads, seqlen_q, head_dim]`
/// - `key`: `[batch, num_kv_heads, seqlen_k, head_dim]`; query head `h` reads head
///   `h / (num_heads / num_kv_heads)`
/// - `value`: `[batch, num_kv_heads, seqlen_k, val_dim]`
/// - `mask`, `attn_bias`: broadcast to `[batch, num_heads, seqlen_q, seqlen_k]`; `true` drops
/// - `options`: Burn's options
///
/// # Returns
///
/// `[batch, num_heads, seqlen_q, val_dim]`
///
/// # Panics
///
/// With the message of [`try_attention`]'s error.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Tensor<4> {
    try_attention(query, key, value, mask, attn_bias, options)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// [`attention`], returning what is wrong with its arguments.
///
/// # Errors
///
/// As [`try_flash_attention`].
pub fn try_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Result<Tensor<4>, AttentionError> {
    let options = FlashOptions::from_burn(mask, attn_bias, options);
    try_flash_attention(query, key, value, options).map(|output| output.out)
}

/// Scaled dot-product attention.
///
/// # Arguments
///
/// - `query`: `[batch, num_heads, seqlen_q, head_dim]`
/// - `key`: `[batch, num_kv_heads, seqlen_k, head_dim]`; query head `h` reads head
///   `h / (num_heads / num_kv_heads)`
/// - `value`: `[batch, num_kv_heads, seqlen_k, val_dim]`
/// - `options`: see [`FlashOptions`]
///
/// # Panics
///
/// With the message of [`try_flash_attention`]'s error.
pub fn flash_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: FlashOptions,
) -> FlashOutput {
    try_flash_attention(query, key, value, options).unwrap_or_else(|error| panic!("{error}"))
}

/// [`flash_attention`], returning what is wrong with its arguments.
///
/// # Errors
///
/// [`AttentionError::Argument`] with the argument, its value and what is allowed: shapes, element
/// types or devices that disagree, a `head_dim` or `val_dim` of 0, a mask or bias that does not
/// broadcast, a scale that is not finite, a softcap that is not positive and finite.
pub fn try_flash_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: FlashOptions,
) -> Result<FlashOutput, AttentionError> {
    let request = Request::check(&query, &key, &value, &options)?;
    let tracked = is_tracked(&query, &key, &value);
    let report = route(&query, &request, &options, tracked);
    log::debug!("{report}");
    // A tracked attention without scores needs the op's own zero gradients.
    let as_op = report.plan.is_some() || (tracked && has_no_scores(&request.shape));
    let (out, lse) = match as_op {
        true => run_op(query, key, value, options, &request),
        false => run_composed(query, key, value, options, &request),
    };
    let [batch, num_heads, seqlen_q, _] = out.dims();
    let lse = lse.map(|lse| lse.reshape([batch, num_heads, seqlen_q]));
    Ok(FlashOutput { out, lse, report })
}

/// What [`flash_attention`] would run for these arguments, without running it.
///
/// # Errors
///
/// As [`try_flash_attention`].
pub fn attention_report(
    query: &Tensor<4>,
    key: &Tensor<4>,
    value: &Tensor<4>,
    options: &FlashOptions,
) -> Result<AttentionReport, AttentionError> {
    let request = Request::check(query, key, value, options)?;
    let tracked = is_tracked(query, key, value);
    Ok(route(query, &request, options, tracked))
}

type OutAndLse = (Tensor<4>, Option<Tensor<4>>);

/// One operation of the backend.
fn run_op(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: FlashOptions,
    request: &Request,
) -> OutAndLse {
    let (out, lse) = <Dispatch as FlashBackend>::flash_forward(
        query.into_dispatch(),
        key.into_dispatch(),
        value.into_dispatch(),
        Mask::from_option(options.mask.map(Tensor::into_dispatch)),
        ForwardOptions {
            causality: options.causality,
            scale: request.scale,
            gradient: options.gradient,
            precision: options.precision,
        },
    );
    let lse = match options.lse {
        LseRequest::Return => Some(Tensor::from_dispatch(lse)),
        LseRequest::Omit => None,
    };
    (Tensor::from_dispatch(out), lse)
}

/// Burn's operations, each visible to autodiff and Fusion.
fn run_composed(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: FlashOptions,
    request: &Request,
) -> OutAndLse {
    let inputs = Inputs {
        query: query.into_dispatch(),
        key: key.into_dispatch(),
        value: value.into_dispatch(),
        mask: options.mask.map(Tensor::into_dispatch),
        bias: options.bias.map(Tensor::into_dispatch),
    };
    let composition = Composition {
        causality: options.causality,
        scale: request.scale,
        softcap: options.softcap,
        lse: options.lse,
    };
    let (out, lse) = composed::<Dispatch>(inputs, composition);
    (Tensor::from_dispatch(out), lse.map(Tensor::from_dispatch))
}
