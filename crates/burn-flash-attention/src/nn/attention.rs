//! Multi-head attention whose scores never leave the chip.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Tensor};

use crate::{
    AttentionError, Causality, FlashOptions, GradientOrder, Precision, try_flash_attention,
};

/// Configuration of [`FlashMultiHeadAttention`]; fields as in Burn's `MultiHeadAttentionConfig`.
///
/// Burn's `min_float` and `quiet_softmax` do not exist here: a dropped score counts as -∞, and the
/// softmax is the plain one.
#[derive(Config, Debug)]
pub struct FlashMultiHeadAttentionConfig {
    /// Features of the input and the output.
    pub d_model: usize,
    /// Heads of the query; divides `d_model`.
    pub n_heads: usize,
    /// Heads of key and value, dividing `n_heads`: grouped-query attention, or multi-query
    /// attention for 1. Default: `n_heads`.
    pub num_kv_heads: Option<usize>,
    /// Attention dropout. Default: 0. Anything else only works outside of training, where it has no
    /// effect: it exists so that a configuration made for Burn's module can be used for inference.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// How the parameters are initialized.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Whether the query layer has a bias.
    #[config(default = true)]
    pub query_bias: bool,
    /// Whether the key layer has a bias.
    #[config(default = true)]
    pub key_bias: bool,
    /// Whether the value layer has a bias.
    #[config(default = true)]
    pub value_bias: bool,
    /// Whether the output layer has a bias.
    #[config(default = true)]
    pub output_bias: bool,
}

/// Multi-head attention as in [Attention Is All You Need](https://arxiv.org/abs/1706.03762), on
/// [`flash_attention`](crate::flash_attention).
///
/// The parameters have the names and shapes of Burn's `MultiHeadAttention`, so records of one load
/// into the other (with `num_kv_heads = n_heads`). Two things differ: the attention weights are not
/// returned, since they never exist, and a query that may see no key yields the output layer's bias
/// rather than the mean of all values.
///
/// **Attention dropout is not supported.** With a `dropout` other than 0 a forward pass in training
/// is refused.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct FlashMultiHeadAttention {
    /// `[.., d_model]` to `[.., n_heads * d_k]`.
    pub query: Linear,
    /// `[.., d_model]` to `[.., num_kv_heads * d_k]`.
    pub key: Linear,
    /// `[.., d_model]` to `[.., num_kv_heads * d_k]`.
    pub value: Linear,
    /// `[.., n_heads * d_k]` to `[.., d_model]`.
    pub output: Linear,
    /// Refused in training unless its probability is 0.
    pub dropout: Dropout,
    /// Features of the input and the output.
    pub d_model: usize,
    /// Heads of the query.
    pub n_heads: usize,
    /// Heads of key and value.
    pub num_kv_heads: usize,
    /// Features of one head.
    pub d_k: usize,
}

impl ModuleDisplay for FlashMultiHeadAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("d_model", &self.d_model)
            .add("n_heads", &self.n_heads)
            .add("num_kv_heads", &self.num_kv_heads)
            .add("d_k", &self.d_k)
            .add("dropout", &self.dropout.prob)
            .optional()
    }
}

/// What [`FlashMultiHeadAttention::forward`] attends to what, and with which masks.
#[derive(Clone, Debug)]
pub struct FlashMhaInput {
    query: Tensor<3>,
    key: Tensor<3>,
    value: Tensor<3>,
    mask_pad: Option<Tensor<2, Bool>>,
    mask_attn: Option<Tensor<3, Bool>>,
    causality: Causality,
    gradient: GradientOrder,
    precision: Precision,
}

impl FlashMhaInput {
    /// A sequence `[batch, seqlen, d_model]` attending to itself.
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self::new(tensor.clone(), tensor.clone(), tensor)
    }

    /// `query` `[batch, seqlen_q, d_model]` attending to `key` and `value`
    /// `[batch, seqlen_k, d_model]`.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self {
            query,
            key,
            value,
            mask_pad: None,
            mask_attn: None,
            causality: Causality::Full,
            gradient: GradientOrder::Deterministic,
            precision: Precision::Full,
        }
    }

    /// Keys that are padding, `[batch, seqlen_k]`, `true` = padding.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask_pad);
        self
    }

    /// Scores to drop in every head, `[batch, seqlen_q, seqlen_k]`, `true` = drop.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask_attn);
        self
    }

    /// Query `i` sees key `j` iff `j - (seqlen_k - seqlen_q) <= i`, without a mask in memory.
    pub fn causal(mut self) -> Self {
        self.causality = Causality::Causal;
        self
    }

    /// Sums the gradient of the query in this order; see [`FlashOptions::gradient`].
    pub fn gradient_order(mut self, order: GradientOrder) -> Self {
        self.gradient = order;
        self
    }

    /// Computes products of f32 as exactly as this; see [`FlashOptions::precision`]. The linear layers
    /// are Burn's.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Both masks as one, broadcasting to `[batch, n_heads, seqlen_q, seqlen_k]`.
    fn mask(&self) -> Result<Option<Tensor<4, Bool>>, AttentionError> {
        let [batch, seqlen_q, _] = self.query.dims();
        let seqlen_k = self.key.dims()[1];
        if let Some(mask) = &self.mask_pad {
            expect_shape("mask_pad", mask.dims(), [batch, seqlen_k])?;
        }
        if let Some(mask) = &self.mask_attn {
            expect_shape("mask_attn", mask.dims(), [batch, seqlen_q, seqlen_k])?;
        }
        let pad = self.mask_pad.clone();
        let pad = pad.map(|mask| mask.reshape([batch, 1, 1, seqlen_k]));
        let attn = self.mask_attn.clone();
        let attn = attn.map(|mask| mask.reshape([batch, 1, seqlen_q, seqlen_k]));
        Ok(match (pad, attn) {
            (Some(pad), Some(attn)) => {
                let pad = pad.expand([batch, 1, seqlen_q, seqlen_k]);
                Some(pad.bool_or(attn))
            }
            (pad, attn) => pad.or(attn),
        })
    }
}

impl FlashMultiHeadAttentionConfig {
    /// Creates the module.
    ///
    /// # Panics
    ///
    /// With the message of [`Self::try_init`]'s error.
    pub fn init(&self, device: &Device) -> FlashMultiHeadAttention {
        self.try_init(device)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Creates the module.
    ///
    /// # Errors
    ///
    /// When `n_heads` does not divide `d_model`, `num_kv_heads` does not divide `n_heads`, or
    /// `dropout` is outside of `[0, 1)`.
    pub fn try_init(&self, device: &Device) -> Result<FlashMultiHeadAttention, AttentionError> {
        let num_kv_heads = self.num_kv_heads.unwrap_or(self.n_heads);
        divides("n_heads", self.n_heads, "d_model", self.d_model)?;
        divides("num_kv_heads", num_kv_heads, "n_heads", self.n_heads)?;
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(AttentionError::new(
                "dropout",
                self.dropout,
                "0 <= dropout < 1",
            ));
        }
        let d_k = self.d_model / self.n_heads;
        let linear = |d_output: usize, bias: bool| {
            LinearConfig::new(self.d_model, d_output)
                .with_initializer(self.initializer.clone())
                .with_bias(bias)
                .init(device)
        };
        Ok(FlashMultiHeadAttention {
            query: linear(self.d_model, self.query_bias),
            key: linear(num_kv_heads * d_k, self.key_bias),
            value: linear(num_kv_heads * d_k, self.value_bias),
            output: linear(self.d_model, self.output_bias),
            dropout: DropoutConfig::new(self.dropout).init(),
            d_model: self.d_model,
            n_heads: self.n_heads,
            num_kv_heads,
            d_k,
        })
    }
}

impl FlashMultiHeadAttention {
    /// The attended context, `[batch, seqlen_q, d_model]`.
    ///
    /// # Panics
    ///
    /// With the message of [`Self::try_forward`]'s error.
    pub fn forward(&self, input: FlashMhaInput) -> Tensor<3> {
        self.try_forward(input)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// The attended context, `[batch, seqlen_q, d_model]`.
    ///
    /// # Errors
    ///
    /// When shapes disagree with each other or with `d_model`, and in training with a dropout other
    /// than 0. Training is what Burn's `Dropout` means by it: the input is on an autodiff device
    /// and the layer is not frozen.
    pub fn try_forward(&self, input: FlashMhaInput) -> Result<Tensor<3>, AttentionError> {
        self.refuse_dropout(&input.query.device())?;
        let [batch, seqlen_q, _] = input.query.dims();
        let [_, seqlen_k, _] = input.key.dims();
        expect_shape("query", input.query.dims(), [batch, seqlen_q, self.d_model])?;
        expect_shape("key", input.key.dims(), [batch, seqlen_k, self.d_model])?;
        expect_shape("value", input.value.dims(), [batch, seqlen_k, self.d_model])?;
        let options = FlashOptions {
            mask: input.mask()?,
            causality: input.causality,
            gradient: input.gradient,
            precision: input.precision,
            ..FlashOptions::new()
        };

        let heads = |tensor: Tensor<3>, linear: &Linear, num_heads: usize| {
            let [_, seqlen, _] = tensor.dims();
            linear
                .forward(tensor)
                .reshape([batch, seqlen, num_heads, self.d_k])
                .swap_dims(1, 2)
        };
        let query = heads(input.query, &self.query, self.n_heads);
        let key = heads(input.key, &self.key, self.num_kv_heads);
        let value = heads(input.value, &self.value, self.num_kv_heads);
        let attended = try_flash_attention(query, key, value, options)?.out;
        let context = attended
            .swap_dims(1, 2)
            .reshape([batch, seqlen_q, self.n_heads * self.d_k]);
        Ok(self.output.forward(context))
    }

    fn refuse_dropout(&self, device: &Device) -> Result<(), AttentionError> {
        let prob = self.dropout.prob;
        if prob == 0.0 || !device.is_autodiff() || !self.dropout.training.is_enabled() {
            return Ok(());
        }
        let allowed = "0 in training: attention dropout is not supported";
        Err(AttentionError::new("dropout", prob, allowed))
    }
}

fn divides(
    argument: &'static str,
    value: usize,
    whole_name: &str,
    whole: usize,
) -> Result<(), AttentionError> {
    if value > 0 && whole > 0 && whole.is_multiple_of(value) {
        return Ok(());
    }
    let allowed = format!("a divisor of {whole_name}, {whole}");
    Err(AttentionError::new(argument, value, allowed))
}

fn expect_shape<const D: usize>(
    argument: &'static str,
    value: [usize; D],
    allowed: [usize; D],
) -> Result<(), AttentionError> {
    if value == allowed {
        return Ok(());
    }
    let (value, allowed) = (format!("{value:?}"), format!("{allowed:?}"));
    Err(AttentionError::new(argument, value, allowed))
}
