//! One attention written out in f64 from its definition.

use burn::tensor::{Device, Tensor, TensorData};

use crate::*;

/// `[batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, val_dim]`.
pub(super) type Sizes = [usize; 7];

/// One attention on the host; `mask` and `bias` are `[batch, num_heads, seqlen_q, seqlen_k]`.
#[derive(Clone)]
pub(super) struct Case {
    pub sizes: Sizes,
    pub query: Vec<f64>,
    pub key: Vec<f64>,
    pub value: Vec<f64>,
    pub mask: Option<Vec<bool>>,
    pub bias: Option<Vec<f64>>,
    pub softcap: Option<f64>,
    pub causal: bool,
}

impl Case {
    /// Values in `[-1, 1)`, exact in f32 and f16 alike, from a fixed linear congruence.
    pub fn new(sizes: Sizes) -> Self {
        let [
            batch,
            heads,
            kv_heads,
            seqlen_q,
            seqlen_k,
            head_dim,
            val_dim,
        ] = sizes;
        let mut state = 1u32;
        let mut values = |len: usize| -> Vec<f64> {
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f64::from(state >> 24) / 128.0 - 1.0
            };
            (0..len).map(|_| next()).collect()
        };
        Self {
            sizes,
            query: values(batch * heads * seqlen_q * head_dim),
            key: values(batch * kv_heads * seqlen_k * head_dim),
            value: values(batch * kv_heads * seqlen_k * val_dim),
            mask: None,
            bias: None,
            softcap: None,
            causal: false,
        }
    }

    pub fn scores_len(&self) -> usize {
        let [batch, heads, _, seqlen_q, seqlen_k, ..] = self.sizes;
        batch * heads * seqlen_q * seqlen_k
    }

    /// Output and log-sum-exp of one row, straight from the definition.
    fn row(&self, batch: usize, head: usize, i: usize) -> (Vec<f64>, f64) {
        let [_, heads, kv_heads, seqlen_q, seqlen_k, head_dim, val_dim] = self.sizes;
        let row = (batch * heads + head) * seqlen_q + i;
        let kv = batch * kv_heads + head / (heads / kv_heads);
        let mut visible = Vec::new();
        for j in 0..seqlen_k {
            let ahead = j as i64 - (seqlen_k as i64 - seqlen_q as i64) > i as i64;
            let masked = self.mask.as_ref().is_some_and(|m| m[row * seqlen_k + j]);
            if masked || (self.causal && ahead) {
                continue;
            }
            let q = &self.query[row * head_dim..][..head_dim];
            let k = &self.key[(kv * seqlen_k + j) * head_dim..][..head_dim];
            let dot: f64 = q.iter().zip(k).map(|(q, k)| q * k).sum();
            let mut score = dot / (head_dim as f64).sqrt();
            if let Some(cap) = self.softcap {
                score = cap * (score / cap).tanh();
            }
            score += self.bias.as_ref().map_or(0.0, |b| b[row * seqlen_k + j]);
            visible.push((j, score));
        }
        let sum: f64 = visible.iter().map(|(_, score)| score.exp()).sum();
        let mut out = vec![0.0; val_dim];
        for (j, score) in visible {
            let v = &self.value[(kv * seqlen_k + j) * val_dim..][..val_dim];
            for (out, v) in out.iter_mut().zip(v) {
                *out += score.exp() / sum * v;
            }
        }
        (out, sum.ln())
    }

    pub fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let [batch, heads, _, seqlen_q, ..] = self.sizes;
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for b in 0..batch {
            for h in 0..heads {
                for i in 0..seqlen_q {
                    let (row, row_lse) = self.row(b, h, i);
                    out.extend(row);
                    lse.push(row_lse);
                }
            }
        }
        (out, lse)
    }

    /// Weighted sum of all outputs, the weights being different everywhere.
    pub fn loss(&self) -> f64 {
        let (out, _) = self.reference();
        out.iter().enumerate().map(|(i, o)| weight(i) * o).sum()
    }

    pub fn tensors(&self, device: &Device) -> [Tensor<4>; 3] {
        let [
            batch,
            heads,
            kv_heads,
            seqlen_q,
            seqlen_k,
            head_dim,
            val_dim,
        ] = self.sizes;
        [
            float(&self.query, [batch, heads, seqlen_q, head_dim], device),
            float(&self.key, [batch, kv_heads, seqlen_k, head_dim], device),
            float(&self.value, [batch, kv_heads, seqlen_k, val_dim], device),
        ]
    }

    pub fn options(&self, device: &Device) -> FlashOptions {
        let [batch, heads, _, seqlen_q, seqlen_k, ..] = self.sizes;
        let scores = [batch, heads, seqlen_q, seqlen_k];
        let mut options = FlashOptions::new().with_lse();
        options.softcap = self.softcap;
        options.bias = self.bias.as_ref().map(|bias| float(bias, scores, device));
        let mask = self.mask.clone();
        options.mask = mask.map(|mask| Tensor::from_data(TensorData::new(mask, scores), device));
        if self.causal {
            options.causal()
        } else {
            options
        }
    }

    /// Runs the case and compares output and log-sum-exp.
    pub fn check(&self) {
        let device = Device::flex();
        let [query, key, value] = self.tensors(&device);
        let output = flash_attention(query, key, value, self.options(&device));
        assert_eq!(output.report.path, AttentionPath::Composed);
        let (out, lse) = self.reference();
        assert_close(&host(output.out), &out, 1e-6);
        assert_close(&host(output.lse.unwrap()), &lse, 1e-6);
    }
}

pub(super) fn weight(index: usize) -> f64 {
    (index % 7) as f64 - 3.0
}

pub(super) fn float<const D: usize>(
    values: &[f64],
    dims: [usize; D],
    device: &Device,
) -> Tensor<D> {
    let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
    Tensor::from_data(TensorData::new(values, dims), device)
}

pub(super) fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

pub(super) fn assert_close(actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        assert!(a == e || (a - e).abs() <= tolerance, "[{i}]: {a}, not {e}");
    }
}
