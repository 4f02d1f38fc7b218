//! What a caller may ask for, and the one place where it is checked.

use burn::backend::{Backend, DTypeUsage, Dispatch};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Tensor};
use flash_kernels::{AttentionError, AttentionShape, Causality, GradientOrder, Precision};

/// Whether the log-sum-exp of each row is returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LseRequest {
    /// Not returned.
    #[default]
    Omit,
    /// Returned as [`FlashOutput::lse`](crate::FlashOutput::lse).
    Return,
}

/// Everything [`flash_attention`](crate::flash_attention) can be asked for besides q, k and v.
///
/// Scores pass through `scale`, `softcap`, `mask`, causality and `bias`, in this order, and then
/// through the softmax.
///
/// ```
/// use burn_flash_attention::FlashOptions;
///
/// let options = FlashOptions::new().causal().with_scale(0.125).with_lse();
/// assert_eq!(options.scale, Some(0.125));
/// ```
#[derive(Clone, Debug, Default)]
pub struct FlashOptions {
    /// `true` = drop the score. Any shape that broadcasts to
    /// `[batch, num_heads, seqlen_q, seqlen_k]`: each dimension is that size or 1, so a padding
    /// mask is `[batch, 1, 1, seqlen_k]`.
    pub mask: Option<Tensor<4, Bool>>,
    /// Added to the scores, broadcast as the mask is; same element type as the query.
    pub bias: Option<Tensor<4>>,
    /// Factor on `q·k`; `None` is `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Replaces a score `s` by `softcap * tanh(s / softcap)`; positive.
    pub softcap: Option<f64>,
    /// Which keys a query may see by position.
    pub causality: Causality,
    /// Whether to return the log-sum-exp.
    pub lse: LseRequest,
    /// In which order a gradient of the query is summed. [`GradientOrder::Fused`] is faster where it
    /// can run, but its bits differ from run to run;
    /// [`AttentionReport::gradient`](crate::AttentionReport::gradient) tells which order it will be.
    pub gradient: GradientOrder,
    /// What may become of products of f32, those of a gradient included. [`Precision::Tf32`] permits
    /// kernels to round their operands to tf32, which tensor cores multiply: CUDA from sm_80 on.
    /// Elsewhere, and for other element types, it changes nothing: a result is never less exact than
    /// asked for.
    /// [`AttentionReport::precision`](crate::AttentionReport::precision) tells which it will be. Composed
    /// operations multiply as Burn does, whatever is asked for here.
    pub precision: Precision,
}

impl FlashOptions {
    /// Plain attention: no mask, no bias, `scale = 1 / sqrt(head_dim)`, every key visible.
    pub fn new() -> Self {
        Self::default()
    }

    /// Query `i` sees key `j` iff `j - (seqlen_k - seqlen_q) <= i` (bottom-right aligned).
    pub fn causal(mut self) -> Self {
        self.causality = Causality::Causal;
        self
    }

    /// Drops the scores where `mask` is `true`; see [`FlashOptions::mask`] for its shape.
    pub fn with_mask(mut self, mask: Tensor<4, Bool>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Adds `bias` to the scores; see [`FlashOptions::bias`] for its shape.
    pub fn with_bias(mut self, bias: Tensor<4>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Multiplies `q·k` by `scale` instead of `1 / sqrt(head_dim)`.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps the scores smoothly to `(-softcap, softcap)`.
    pub fn with_softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Returns the log-sum-exp besides the output. Where a kernel runs no gradient flows through it.
    pub fn with_lse(mut self) -> Self {
        self.lse = LseRequest::Return;
        self
    }

    /// Sums the gradient of the query in this order; see [`FlashOptions::gradient`].
    pub fn with_gradient_order(mut self, order: GradientOrder) -> Self {
        self.gradient = order;
        self
    }

    /// Computes products of f32 as exactly as this; see [`FlashOptions::precision`].
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// The arguments of Burn's own `attention`.
    pub(crate) fn from_burn(
        mask: Option<Tensor<4, Bool>>,
        bias: Option<Tensor<4>>,
        options: AttentionModuleOptions,
    ) -> Self {
        Self {
            mask,
            bias,
            scale: options.scale,
            softcap: options.softcap,
            causality: if options.is_causal {
                Causality::Causal
            } else {
                Causality::Full
            },
            lse: LseRequest::Omit,
            gradient: GradientOrder::Deterministic,
            precision: Precision::Full,
        }
    }
}

/// A call whose arguments agree with each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) shape: AttentionShape,
    /// The caller's scale or the default.
    pub(crate) scale: f64,
}

impl Request {
    /// Checks every argument against the others.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Argument`] naming the first argument that is out of range or disagrees.
    pub(crate) fn check(
        query: &Tensor<4>,
        key: &Tensor<4>,
        value: &Tensor<4>,
        options: &FlashOptions,
    ) -> Result<Self, AttentionError> {
        let shape = AttentionShape::new(query.dims(), key.dims(), value.dims())?;
        positive("query head_dim", shape.head_dim)?;
        positive("value val_dim", shape.val_dim)?;
        let dtype = query.dtype();
        computable("query dtype", dtype)?;
        let device = query.device();
        storable("query dtype", dtype, &device)?;
        same_dtype("key dtype", key.dtype(), dtype)?;
        same_dtype("value dtype", value.dtype(), dtype)?;
        same_device("key device", &key.device(), &device)?;
        same_device("value device", &value.device(), &device)?;
        let scores = [shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k];
        if let Some(mask) = &options.mask {
            broadcastable("mask shape", mask.dims(), scores)?;
            same_device("mask device", &mask.device(), &device)?;
        }
        if let Some(bias) = &options.bias {
            broadcastable("bias shape", bias.dims(), scores)?;
            same_dtype("bias dtype", bias.dtype(), dtype)?;
            same_device("bias device", &bias.device(), &device)?;
        }
        if let Some(softcap) = options.softcap {
            let capped = softcap as f32;
            if !(capped.is_finite() && capped > 0.0) {
                let allowed = "a positive finite f32";
                return Err(AttentionError::new("softcap", softcap, allowed));
            }
        }
        let scale = options
            .scale
            .unwrap_or_else(|| 1.0 / (shape.head_dim as f64).sqrt());
        if !(scale as f32).is_finite() {
            return Err(AttentionError::new("scale", scale, "a finite f32"));
        }
        Ok(Self { shape, scale })
    }
}

/// Whether there is no output to write or no key to read: no kernel is launched then.
pub(crate) fn has_no_scores(shape: &AttentionShape) -> bool {
    shape.out().contains(&0) || shape.seqlen_k == 0
}

fn positive(argument: &'static str, value: usize) -> Result<(), AttentionError> {
    match value {
        0 => Err(AttentionError::new(argument, 0, "1 or more")),
        _ => Ok(()),
    }
}

fn computable(argument: &'static str, dtype: DType) -> Result<(), AttentionError> {
    match dtype {
        DType::F64 | DType::F32 | DType::Flex32 | DType::F16 | DType::BF16 => Ok(()),
        other => Err(AttentionError::new(
            argument,
            other.name(),
            "f64, f32, flex32, f16 or bf16",
        )),
    }
}

/// Burn copies any bytes to a device, and reads garbage where the device lacks their type.
fn storable(argument: &'static str, dtype: DType, device: &Device) -> Result<(), AttentionError> {
    let usage = Dispatch::dtype_usage(device.as_dispatch(), dtype);
    if usage.contains(DTypeUsage::Storage) {
        return Ok(());
    }
    let allowed = "an element type that the device can store and convert";
    Err(AttentionError::new(argument, dtype.name(), allowed))
}

fn same_dtype(argument: &'static str, value: DType, query: DType) -> Result<(), AttentionError> {
    if value == query {
        return Ok(());
    }
    Err(AttentionError::new(
        argument,
        value.name(),
        format!("{}, as the query has", query.name()),
    ))
}

/// Autodiff association does not count: a constant may be attended to by a tracked query.
fn same_device(
    argument: &'static str,
    value: &Device,
    query: &Device,
) -> Result<(), AttentionError> {
    if value == query {
        return Ok(());
    }
    Err(AttentionError::new(
        argument,
        format!("{value:?}"),
        format!("{query:?}, as the query has"),
    ))
}

fn broadcastable(
    argument: &'static str,
    value: [usize; 4],
    scores: [usize; 4],
) -> Result<(), AttentionError> {
    let fits = |(&size, &score): (&usize, &usize)| size == 1 || size == score;
    if value.iter().zip(&scores).all(fits) {
        return Ok(());
    }
    Err(AttentionError::new(
        argument,
        format!("{value:?}"),
        format!("{scores:?}, each dimension that size or 1"),
    ))
}
