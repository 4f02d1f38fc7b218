//! The output and the log-sum-exp.

use crate::mask::sees;
use crate::{Head, Inputs, Output, Spec, add_scaled, for_each_part, piece, piece_mut, split};

/// Attention of `x` as `spec` says, in `f64`.
///
/// Shapes are those of the fields of [`Inputs`] and [`Output`]. A row that sees nothing gives an
/// output of zero and a log-sum-exp of −∞.
///
/// # Panics
///
/// If a slice does not have the length `spec` gives it, if `num_heads` is not a multiple of
/// `num_kv_heads`, or if `softcap` is not positive.
pub fn forward(spec: &Spec, x: &Inputs) -> Output {
    spec.check(x);
    let heads = spec.batch * spec.num_heads;
    let mut out = vec![0.0; heads * spec.seqlen_q * spec.val_dim];
    let mut lse = vec![f64::NEG_INFINITY; heads * spec.seqlen_q];
    let parts = split(&mut out, heads)
        .into_iter()
        .zip(split(&mut lse, heads));
    for_each_part(spec, parts.collect(), |index, (out, lse)| {
        forward_head(spec, &Head::new(spec, x, index), out, lse);
    });
    Output { out, lse }
}

/// One head of [`forward`]: `out` is `[Sq, Dv]` and holds zeros, `lse` is `[Sq]`.
fn forward_head(spec: &Spec, head: &Head, out: &mut [f64], lse: &mut [f64]) {
    let k_t = crate::transpose(head.k, spec.seqlen_k, spec.head_dim);
    let mut row = Row::new(spec);
    for (i, lse) in lse.iter_mut().enumerate() {
        *lse = row.softmax(spec, head, &k_t, i);
        row.mean_value(spec, head, piece_mut(out, i, spec.val_dim));
    }
}

/// What the softmax of one query gives, kept from query to query to allocate once.
pub(crate) struct Row {
    /// The keys that count, ascending. Only their elements of `p` and `slope` mean anything: the
    /// others may hold NaN that a dropped key brought in, and are never read.
    pub(crate) kept: Vec<usize>,
    /// Probabilities, `[Sk]`.
    pub(crate) p: Vec<f64>,
    /// Derivative of the softcap at the score, `1 − tanh²`, or 1 without a softcap, `[Sk]`.
    pub(crate) slope: Vec<f64>,
}

impl Row {
    pub(crate) fn new(spec: &Spec) -> Self {
        Self {
            kept: Vec::with_capacity(spec.seqlen_k),
            p: vec![0.0; spec.seqlen_k],
            slope: vec![1.0; spec.seqlen_k],
        }
    }

    /// Fills `self` for query `i`, given the transposed keys, and returns its log-sum-exp.
    pub(crate) fn softmax(&mut self, spec: &Spec, head: &Head, k_t: &[f64], i: usize) -> f64 {
        let keys = spec.seqlen_k;
        self.kept.clear();
        self.kept
            .extend((0..keys).filter(|&j| sees(spec, head, i, j)));
        self.scores(spec, head, k_t, i);

        let s = &mut self.p;
        let mut max = f64::NEG_INFINITY;
        for &j in &self.kept {
            // Not `f64::max`, which would hide a NaN score.
            if s[j] > max || s[j].is_nan() {
                max = s[j];
            }
        }
        // Nothing kept, or nothing but −∞: no weight anywhere, and `−∞ − −∞` must not be formed.
        if max == f64::NEG_INFINITY {
            self.kept.clear();
            return max;
        }
        let mut sum = 0.0;
        for &j in &self.kept {
            s[j] = (s[j] - max).exp();
            sum += s[j];
        }
        for &j in &self.kept {
            s[j] /= sum;
        }
        max + sum.ln()
    }

    /// Leaves the scores of the kept keys in `p`.
    fn scores(&mut self, spec: &Spec, head: &Head, k_t: &[f64], i: usize) {
        let keys = spec.seqlen_k;
        let s = &mut self.p;
        s.fill(0.0);
        for (d, &q) in piece(head.q, i, spec.head_dim).iter().enumerate() {
            add_scaled(s, q, piece(k_t, d, keys));
        }
        for &j in &self.kept {
            s[j] *= spec.scale;
            if let Some(cap) = spec.softcap {
                let tanh = (s[j] / cap).tanh();
                s[j] = cap * tanh;
                self.slope[j] = 1.0 - tanh * tanh;
            }
            if let Some(bias) = head.bias {
                s[j] += bias[i * keys + j];
            }
        }
    }

    /// Adds the mean of the values under `p` to `out`, `[Dv]`.
    pub(crate) fn mean_value(&self, spec: &Spec, head: &Head, out: &mut [f64]) {
        for &j in &self.kept {
            add_scaled(out, self.p[j], piece(head.v, j, spec.val_dim));
        }
    }
}
