//! A GPT-style model: embeddings of characters and positions, pre-norm blocks, a head.

use burn::module::{Initializer, Module, ModuleVisitor, Param};
use burn::nn::{
    Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::module::attention as burn_attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_flash_attention::{
    AttentionReport, FlashOptions, GradientOrder, attention_report, flash_attention,
};

use crate::Outcome;
use crate::settings::{AttentionKind, Settings};

/// The standard deviation of new weights times the root of the width: 0.02 at about GPT-2's width.
/// A block's last layers get less.
const WEIGHT_STD: f64 = 0.5;

/// The model's weights.
#[derive(Module, Debug)]
pub struct Model {
    characters: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    mlp_norm: LayerNorm,
    expand: Linear,
    gelu: Gelu,
    contract: Linear,
}

/// How the blocks attend: no part of the weights, so both kinds begin with the same ones.
#[derive(Clone, Copy, Debug)]
pub struct Attend {
    kind: AttentionKind,
    gradient: GradientOrder,
    dtype: DType,
    heads: usize,
}

impl From<&Settings> for Attend {
    fn from(settings: &Settings) -> Self {
        Self {
            kind: settings.attention,
            gradient: settings.gradient_order,
            dtype: settings.attention_dtype,
            heads: settings.heads,
        }
    }
}

impl Model {
    /// A model with new weights, which depend on the settings' sizes and seed.
    pub fn new(settings: &Settings, alphabet: usize, device: &Device) -> Self {
        device.seed(settings.seed);
        let std = WEIGHT_STD / (settings.dim as f64).sqrt();
        let embedding = |rows: usize| {
            EmbeddingConfig::new(rows, settings.dim)
                .with_initializer(normal(std))
                .init(device)
        };
        let model = Self {
            characters: embedding(alphabet),
            positions: embedding(settings.context),
            blocks: (0..settings.layers)
                .map(|_| Block::new(settings, std, device))
                .collect(),
            norm: norm(settings.dim, device),
            head: linear(settings.dim, alphabet, std, device),
        };
        // Burn draws a weight when it is first used: here, in one order, right after the seed.
        model.visit(&mut Draw);
        model
    }

    /// The logits of the next character, `[batch, seqlen, alphabet]`, after characters
    /// `[batch, seqlen]`, seqlen at most the context.
    pub fn forward(&self, characters: Tensor<2, Int>, attend: Attend) -> Tensor<3> {
        self.logits(self.features(characters, attend))
    }

    /// Of `features`, `[batch, seqlen, dim]`.
    pub fn logits(&self, features: Tensor<3>) -> Tensor<3> {
        self.head.forward(features)
    }

    /// What the head reads, `[batch, seqlen, dim]`.
    pub fn features(&self, characters: Tensor<2, Int>, attend: Attend) -> Tensor<3> {
        let [batch, seqlen] = characters.dims();
        let weight = self.characters.weight.val();
        let [alphabet, dim] = weight.dims();
        // A product with one-hot rows instead of Embedding::forward, whose gradient in Burn adds up
        // a feature's 16 384 rows one after the other, and the alphabet is small.
        let numbers = Tensor::arange(0..alphabet as i64, &characters.device());
        let one_hot = characters
            .reshape([batch * seqlen, 1])
            .equal(numbers.reshape([1, alphabet]))
            .float();
        let embedded = one_hot.matmul(weight).reshape([batch, seqlen, dim]);
        let positions = self.positions.weight.val().narrow(0, 0, seqlen);
        let mut hidden = embedded + positions.unsqueeze::<3>();
        for block in &self.blocks {
            hidden = block.forward(hidden, attend);
        }
        self.norm.forward(hidden)
    }
}

impl Block {
    fn new(settings: &Settings, std: f64, device: &Device) -> Self {
        let dim = settings.dim;
        let square = || linear(dim, dim, std, device);
        // What is added to the residual grows with the number of summands.
        let last = std / (2.0 * settings.layers as f64).sqrt();
        Self {
            attention_norm: norm(dim, device),
            query: square(),
            key: square(),
            value: square(),
            output: linear(dim, dim, last, device),
            mlp_norm: norm(dim, device),
            expand: linear(dim, 4 * dim, std, device),
            gelu: Gelu::new(),
            contract: linear(4 * dim, dim, last, device),
        }
    }

    fn forward(&self, hidden: Tensor<3>, attend: Attend) -> Tensor<3> {
        let normed = self.attention_norm.forward(hidden.clone());
        let hidden = hidden + self.attention(normed, attend);
        let normed = self.mlp_norm.forward(hidden.clone());
        let wide = self.gelu.forward(self.expand.forward(normed));
        hidden + self.contract.forward(wide)
    }

    fn attention(&self, hidden: Tensor<3>, attend: Attend) -> Tensor<3> {
        let [batch, seqlen, dim] = hidden.dims();
        let heads = |layer: &Linear| {
            let projected = layer.forward(hidden.clone());
            projected
                .reshape([batch, seqlen, attend.heads, dim / attend.heads])
                .swap_dims(1, 2)
                .cast(attend.dtype)
        };
        let [query, key, value] = [&self.query, &self.key, &self.value].map(heads);
        let attended = attend.run(query, key, value).cast(DType::F32);
        self.output
            .forward(attended.swap_dims(1, 2).reshape([batch, seqlen, dim]))
    }
}

impl Attend {
    /// Causal attention of `[batch, heads, seqlen, head_dim]`.
    fn run(self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Tensor<4> {
        let burn = |query, key, value| {
            let options = AttentionModuleOptions {
                is_causal: true,
                ..AttentionModuleOptions::default()
            };
            burn_attention(query, key, value, None, None, options)
        };
        match self.kind {
            AttentionKind::Flash => flash_attention(query, key, value, self.options()).out,
            AttentionKind::Burn => burn(query, key, value),
            AttentionKind::BurnRescaled => burn(query * 3.0, key / 3.0, value),
        }
    }

    fn options(self) -> FlashOptions {
        FlashOptions::new()
            .causal()
            .with_gradient_order(self.gradient)
    }

    /// How [`AttentionKind::Flash`] runs in a training with these settings.
    ///
    /// # Errors
    ///
    /// If attention refuses the shapes or the element type.
    pub fn report(self, settings: &Settings, device: &Device) -> Outcome<AttentionReport> {
        let head_dim = settings.dim / settings.heads;
        let shape = [settings.batch, settings.heads, settings.context, head_dim];
        let zeros = Tensor::<4>::zeros(shape, (device, self.dtype)).require_grad();
        Ok(attention_report(&zeros, &zeros, &zeros, &self.options())?)
    }
}

struct Draw;

impl ModuleVisitor for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

fn normal(std: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std }
}

/// Without a bias, here and in [`norm`]: to the optimizer a small tensor costs as many launches as
/// a large one.
fn linear(input: usize, output: usize, std: f64, device: &Device) -> Linear {
    LinearConfig::new(input, output)
        .with_bias(false)
        .with_initializer(normal(std))
        .init(device)
}

fn norm(dim: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(dim).with_bias(false).init(device)
}
