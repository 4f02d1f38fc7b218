//! The BERT encoder of all-MiniLM-L6-v2, with its attention on `flash_attention`.

use std::path::Path;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::store::{
    FloatCastAdapter, ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore,
};
use burn::tensor::activation::gelu;
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_flash_attention::{AttentionError, AttentionReport, FlashOptions, try_flash_attention};

use crate::files::Json;
use crate::{Failure, Outcome};

/// Tensors of the file that a sentence embedding has no use for: the pooler's (the embedding is a
/// mean over tokens) and a buffer that holds 0, 1, 2, ...
const NOT_NEEDED: [&str; 3] = [
    "embeddings.position_ids",
    "pooler.dense.bias",
    "pooler.dense.weight",
];

/// The sizes in `config.json`, under its names.
#[derive(Clone, Debug)]
pub struct BertConfig {
    vocab_size: usize,
    max_position_embeddings: usize,
    type_vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    layer_norm_eps: f64,
}

impl BertConfig {
    /// Reads `config.json` in the model's directory.
    ///
    /// # Errors
    ///
    /// If a size is missing, or the file asks for something that [`Bert`] does not do.
    pub fn load(dir: &Path) -> Outcome<Self> {
        let json = Json::load(dir, "config.json")?;
        json.require("model_type", "bert")?;
        json.require("hidden_act", "gelu")?;
        json.require("position_embedding_type", "absolute")?;
        let config = Self {
            vocab_size: json.size("vocab_size")?,
            max_position_embeddings: json.size("max_position_embeddings")?,
            type_vocab_size: json.size("type_vocab_size")?,
            hidden_size: json.size("hidden_size")?,
            intermediate_size: json.size("intermediate_size")?,
            num_hidden_layers: json.size("num_hidden_layers")?,
            num_attention_heads: json.size("num_attention_heads")?,
            layer_norm_eps: json.number("layer_norm_eps")?,
        };
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(
                format!("config.json: {heads} heads do not divide a width of {width}").into(),
            );
        }
        Ok(config)
    }

    /// The longest sequence there are position embeddings for, in tokens.
    pub fn max_tokens(&self) -> usize {
        self.max_position_embeddings
    }

    fn norm(&self, device: &Device) -> LayerNorm {
        LayerNormConfig::new(self.hidden_size)
            .with_epsilon(self.layer_norm_eps)
            .init(device)
    }

    fn table(&self, rows: usize, device: &Device) -> Embedding {
        EmbeddingConfig::new(rows, self.hidden_size).init(device)
    }

    fn projection(&self, device: &Device) -> Linear {
        LinearConfig::new(self.hidden_size, self.hidden_size).init(device)
    }
}

/// The encoder. Field names are those of the checkpoint (see [`Bert::load`] for the two that
/// cannot be), so a tensor's name says where it belongs.
#[derive(Module, Debug)]
pub struct Bert {
    embeddings: BertEmbeddings,
    encoder: BertEncoder,
}

#[derive(Module, Debug)]
struct BertEmbeddings {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    layer_norm: LayerNorm,
}

#[derive(Module, Debug)]
struct BertEncoder {
    layer: Vec<BertLayer>,
}

#[derive(Module, Debug)]
struct BertLayer {
    attention: BertAttention,
    intermediate: BertIntermediate,
    output: BertOutput,
}

#[derive(Module, Debug)]
struct BertAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: BertOutput,
    num_heads: usize,
}

#[derive(Module, Debug)]
struct BertIntermediate {
    dense: Linear,
}

/// A projection back to the model's width, the residual sum and its normalisation.
#[derive(Module, Debug)]
struct BertOutput {
    dense: Linear,
    layer_norm: LayerNorm,
}

/// What [`Bert::forward`] returns.
pub struct Encoded {
    /// The last layer's output, `[batch, seq, hidden_size]`.
    pub hidden: Tensor<3>,
    /// How attention ran, one entry per different report.
    pub reports: Vec<AttentionReport>,
}

/// What [`Bert::load`] returns.
pub struct Loaded {
    /// The model with the checkpoint's weights.
    pub model: Bert,
    /// How many tensors were read into it.
    pub tensors: usize,
    /// How many values they hold.
    pub parameters: usize,
}

impl Bert {
    /// Reads `model.safetensors` in the model's directory; weights are converted to `dtype`.
    ///
    /// # Errors
    ///
    /// If a tensor is missing, has another shape or kind, or is one that the encoder does not know.
    pub fn load(dir: &Path, config: &BertConfig, dtype: DType, device: &Device) -> Outcome<Loaded> {
        let path = dir.join("model.safetensors");
        if !path.is_file() {
            return Err(format!("{} is not a file", path.display()).into());
        }
        let mut model = Self::new(config, device);
        // `self` is a keyword and field names are snake case; everything else keeps its name. The
        // adapter transposes the weights of `Linear` and calls those of `LayerNorm` gamma and beta.
        let mut store = SafetensorsStore::from_file(&path)
            .with_key_remapping(r"\.attention\.self\.", ".attention.")
            .with_key_remapping(r"\.LayerNorm\.", ".layer_norm.")
            .with_from_adapter(PyTorchToBurnAdapter.chain(FloatCastAdapter::to(dtype)));
        let fail = |what: &str| -> Failure { format!("{}: {what}", path.display()).into() };
        let result = model
            .load_from(&mut store)
            .map_err(|error| fail(&error.to_string()))?;
        // The store refuses missing tensors, wrong shapes and wrong kinds by itself. Tensors that
        // have no place in the model it only reports.
        let mut unknown = result.unused;
        unknown.retain(|name| !NOT_NEEDED.contains(&name.as_str()));
        if !unknown.is_empty() {
            let names = unknown.join(", ");
            return Err(fail(&format!("the encoder has no place for {names}")));
        }
        Ok(Loaded {
            tensors: result.applied.len(),
            parameters: model.num_params(),
            model,
        })
    }

    fn new(config: &BertConfig, device: &Device) -> Self {
        Self {
            embeddings: BertEmbeddings {
                word_embeddings: config.table(config.vocab_size, device),
                position_embeddings: config.table(config.max_position_embeddings, device),
                token_type_embeddings: config.table(config.type_vocab_size, device),
                layer_norm: config.norm(device),
            },
            encoder: BertEncoder {
                layer: (0..config.num_hidden_layers)
                    .map(|_| BertLayer::new(config, device))
                    .collect(),
            },
        }
    }

    /// Encodes a padded batch. `ids` and `type_ids` are `[batch, seq]`; `padding` is
    /// `[batch, 1, 1, seq]` with true where a token is padding, which no query may see.
    ///
    /// # Errors
    ///
    /// What `try_flash_attention` refuses.
    pub fn forward(
        &self,
        ids: Tensor<2, Int>,
        type_ids: Tensor<2, Int>,
        padding: &Tensor<4, Bool>,
    ) -> Result<Encoded, AttentionError> {
        let mut hidden = self.embeddings.forward(ids, type_ids);
        let mut reports = Vec::new();
        for layer in &self.encoder.layer {
            let report;
            (hidden, report) = layer.forward(hidden, padding)?;
            if !reports.contains(&report) {
                reports.push(report);
            }
        }
        Ok(Encoded { hidden, reports })
    }
}

impl BertEmbeddings {
    fn forward(&self, ids: Tensor<2, Int>, type_ids: Tensor<2, Int>) -> Tensor<3> {
        let [_, seq] = ids.dims();
        let positions = Tensor::<1, Int>::arange(0..seq as i64, &ids.device()).unsqueeze();
        let sum = self.word_embeddings.forward(ids)
            + self.position_embeddings.forward(positions)
            + self.token_type_embeddings.forward(type_ids);
        self.layer_norm.forward(sum)
    }
}

impl BertLayer {
    fn new(config: &BertConfig, device: &Device) -> Self {
        let (width, wide) = (config.hidden_size, config.intermediate_size);
        Self {
            attention: BertAttention {
                query: config.projection(device),
                key: config.projection(device),
                value: config.projection(device),
                output: BertOutput {
                    dense: config.projection(device),
                    layer_norm: config.norm(device),
                },
                num_heads: config.num_attention_heads,
            },
            intermediate: BertIntermediate {
                dense: LinearConfig::new(width, wide).init(device),
            },
            output: BertOutput {
                dense: LinearConfig::new(wide, width).init(device),
                layer_norm: config.norm(device),
            },
        }
    }

    fn forward(
        &self,
        x: Tensor<3>,
        padding: &Tensor<4, Bool>,
    ) -> Result<(Tensor<3>, AttentionReport), AttentionError> {
        let (x, report) = self.attention.forward(x, padding)?;
        let wide = gelu(self.intermediate.dense.forward(x.clone()));
        Ok((self.output.forward(wide, x), report))
    }
}

impl BertAttention {
    fn forward(
        &self,
        x: Tensor<3>,
        padding: &Tensor<4, Bool>,
    ) -> Result<(Tensor<3>, AttentionReport), AttentionError> {
        let [batch, seq, width] = x.dims();
        // [batch, seq, width] to [batch, heads, seq, width / heads]: a view, nothing is copied.
        let heads = |projection: &Linear| {
            projection
                .forward(x.clone())
                .reshape([batch, seq, self.num_heads, width / self.num_heads])
                .swap_dims(1, 2)
        };
        let (query, key, value) = (heads(&self.query), heads(&self.key), heads(&self.value));
        let options = FlashOptions::new().with_mask(padding.clone());
        let attended = try_flash_attention(query, key, value, options)?;
        let joined = attended.out.swap_dims(1, 2).reshape([batch, seq, width]);
        Ok((self.output.forward(joined, x), attended.report))
    }
}

impl BertOutput {
    fn forward(&self, x: Tensor<3>, residual: Tensor<3>) -> Tensor<3> {
        self.layer_norm.forward(self.dense.forward(x) + residual)
    }
}
