//! From sentences to embeddings: tokens, padded batches, the encoder, mean pooling.

use std::path::Path;

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_flash_attention::AttentionReport;
use indicatif::ProgressBar;
use tokenizers::{
    Encoding, PaddingParams, Tokenizer, TruncationParams, TruncationStrategy, pad_encodings,
};

use crate::Outcome;
use crate::bert::{Bert, BertConfig, Loaded};
use crate::files::Json;

/// A loaded model with its tokenizer.
pub struct Embedder {
    tokenizer: Tokenizer,
    loaded: Loaded,
    max_tokens: usize,
    device: Device,
}

/// What [`Embedder::embed`] returns.
pub struct Embedded {
    /// One vector of length 1 per sentence, in the order of the sentences.
    pub vectors: Vec<Vec<f32>>,
    /// The token ids of each sentence, special tokens included, without padding.
    pub token_ids: Vec<Vec<u32>>,
    /// How attention ran, one entry per different report.
    pub reports: Vec<AttentionReport>,
    /// How many tokens of padding the batches held, and how many tokens in all.
    pub padding: (usize, usize),
}

impl Embedder {
    /// Loads model and tokenizer from the files of a sentence-transformers directory:
    /// `config.json`, `model.safetensors`, `tokenizer.json`, `sentence_bert_config.json`,
    /// `1_Pooling/config.json`. Weights and activations are in `dtype`.
    ///
    /// # Errors
    ///
    /// If a file is missing, does not fit, or asks for something this example does not do.
    pub fn load(dir: &Path, dtype: DType, device: &Device) -> Outcome<Self> {
        let pooling = Json::load(dir, "1_Pooling/config.json")?;
        pooling.require("pooling_mode_mean_tokens", true)?;
        pooling.require("pooling_mode_cls_token", false)?;
        pooling.require("pooling_mode_max_tokens", false)?;
        pooling.require("pooling_mode_mean_sqrt_len_tokens", false)?;
        let config = BertConfig::load(dir)?;
        let max_tokens = Json::load(dir, "sentence_bert_config.json")?.size("max_seq_length")?;
        let available = config.max_tokens();
        if max_tokens > available {
            return Err(
                format!("max_seq_length {max_tokens} exceeds {available} positions").into(),
            );
        }
        Ok(Self {
            tokenizer: tokenizer(dir, max_tokens)?,
            loaded: Bert::load(dir, &config, dtype, device)?,
            max_tokens,
            device: device.clone(),
        })
    }

    /// One line about the model.
    pub fn describe(&self) -> String {
        let Loaded {
            tensors,
            parameters,
            ..
        } = &self.loaded;
        let limit = self.max_tokens;
        format!("{tensors} tensors, {parameters} parameters, at most {limit} tokens a sentence")
    }

    /// Embeds the sentences, `batch` at a time, the longest first: neighbors then have similar
    /// lengths and little padding. `progress` counts sentences.
    ///
    /// # Errors
    ///
    /// If a sentence cannot be tokenized, attention refuses its input or the device fails.
    pub fn embed(
        &self,
        sentences: &[String],
        batch: usize,
        progress: &ProgressBar,
    ) -> Outcome<Embedded> {
        let texts: Vec<&str> = sentences.iter().map(String::as_str).collect();
        let encodings = self
            .tokenizer
            .encode_batch(texts, true)
            .map_err(|error| format!("tokenizer: {error}"))?;
        let mut order: Vec<usize> = (0..encodings.len()).collect();
        order.sort_by_key(|&index| std::cmp::Reverse(encodings[index].len()));
        let mut embedded = Embedded {
            vectors: vec![Vec::new(); sentences.len()],
            token_ids: encodings.iter().map(|e| e.get_ids().to_vec()).collect(),
            reports: Vec::new(),
            padding: (0, 0),
        };
        for chunk in order.chunks(batch) {
            let mut padded: Vec<Encoding> = chunk.iter().map(|&i| encodings[i].clone()).collect();
            pad_encodings(&mut padded, &PaddingParams::default())
                .map_err(|error| format!("padding: {error}"))?;
            let rows = self.embed_batch(&padded, &mut embedded)?;
            for (&index, row) in chunk.iter().zip(rows) {
                embedded.vectors[index] = row;
            }
            progress.inc(chunk.len() as u64);
        }
        Ok(embedded)
    }

    /// Embeds one padded batch. Adds its reports and padding to `embedded`.
    fn embed_batch(&self, padded: &[Encoding], embedded: &mut Embedded) -> Outcome<Vec<Vec<f32>>> {
        let shape = [padded.len(), padded[0].len()];
        let ids = self.int_tensor(padded, shape, Encoding::get_ids);
        let type_ids = self.int_tensor(padded, shape, Encoding::get_type_ids);
        let dropped: Vec<bool> = padded
            .iter()
            .flat_map(|encoding| encoding.get_attention_mask().iter().map(|&keep| keep == 0))
            .collect();
        embedded.padding.0 += dropped.iter().filter(|&&dropped| dropped).count();
        embedded.padding.1 += dropped.len();
        let dropped = TensorData::new(dropped, [shape[0], 1, 1, shape[1]]);
        let dropped = Tensor::<4, Bool>::from_data(dropped, &self.device);
        let encoded = self.loaded.model.forward(ids, type_ids, &dropped)?;
        for report in encoded.reports {
            if !embedded.reports.contains(&report) {
                embedded.reports.push(report);
            }
        }
        let pooled = mean_pool(encoded.hidden, dropped);
        let [_, width] = pooled.dims();
        let values: Vec<f32> = pooled.try_into_vec_as()?;
        Ok(values.chunks(width).map(<[f32]>::to_vec).collect())
    }

    /// One of the encodings' rows of numbers as a tensor `[batch, seq]`.
    fn int_tensor(
        &self,
        padded: &[Encoding],
        shape: [usize; 2],
        row: fn(&Encoding) -> &[u32],
    ) -> Tensor<2, Int> {
        let values: Vec<i32> = padded
            .iter()
            .flat_map(|encoding| row(encoding).iter().map(|&value| value as i32))
            .collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }
}

/// The mean over the tokens of each sentence, scaled to length 1, in f32. `hidden` is
/// `[batch, seq, width]`, `dropped` `[batch, 1, 1, seq]` with true for padding; the result is
/// `[batch, width]`. Each sentence has at least the two special tokens.
fn mean_pool(hidden: Tensor<3>, dropped: Tensor<4, Bool>) -> Tensor<2> {
    let [batch, seq, width] = hidden.dims();
    let kept = dropped
        .bool_not()
        .reshape([batch, seq, 1])
        .float()
        .cast(DType::F32);
    let sum = (hidden.cast(DType::F32) * kept.clone()).sum_dim(1);
    let mean = (sum / kept.sum_dim(1)).reshape([batch, width]);
    let length = mean.clone().square().sum_dim(1).sqrt();
    mean / length
}

/// The model's tokenizer. `tokenizer.json` of this model cuts at 128 tokens and pads to 128; what
/// counts is `max_seq_length` of sentence-transformers, and padding to the longest of a batch.
fn tokenizer(dir: &Path, max_length: usize) -> Outcome<Tokenizer> {
    let path = dir.join("tokenizer.json");
    let fail = |error: tokenizers::Error| format!("{}: {error}", path.display());
    let mut tokenizer = Tokenizer::from_file(&path).map_err(fail)?;
    let truncation = TruncationParams {
        max_length,
        strategy: TruncationStrategy::LongestFirst,
        ..Default::default()
    };
    tokenizer
        .with_padding(None)
        .with_truncation(Some(truncation))
        .map_err(fail)?;
    Ok(tokenizer)
}
