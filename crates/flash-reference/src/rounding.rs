//! Rounding to a GPU's number formats, and the plain computation in them.
//!
//! The plain computation is what a framework does without a fused kernel: one operation after the
//! other, each result rounded to the dtype of the tensors. Its distance from the `f64`
//! specification is the yardstick for a kernel of the same dtype.

use crate::backward::{by_kv_head, zeros};
pub use crate::format::{Dtype, round, round_all, ulp};
use crate::mask::sees;
use crate::{
    Gradients, Head, Inputs, Output, Spec, add_scaled, for_each_part, piece, piece_mut, split,
    transpose,
};

/// An `f32` result rounded to what tensors of `dtype` hold.
fn fit(dtype: Dtype, x: f32) -> f32 {
    match dtype.stored() {
        Dtype::F32 => x,
        stored => round(stored, f64::from(x)) as f32,
    }
}

/// An element of a tensor as products of matrices in `dtype` take it.
fn operand(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::Tf32 => round(dtype, f64::from(x)) as f32,
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => x,
    }
}

/// [`fit`] of every element, in place.
fn fit_all(dtype: Dtype, x: &mut [f32]) {
    for x in x {
        *x = fit(dtype, *x);
    }
}

/// The plain computation of attention in `dtype`, with the shapes of [`forward`](crate::forward()).
///
/// The inputs are rounded to `dtype`. Every operation (product of matrices, scale, each of the
/// three steps of the softcap, bias, softmax, product of matrices) computes and sums in `f32` and
/// rounds its result to `dtype`; the softmax does so once, at its end. `lse` is left in `f32`.
/// [`Dtype::Tf32`] rounds the operands of products of matrices instead, and no result.
/// Where a score overflows `dtype` the result is infinite or NaN, as it would be on a GPU.
///
/// # Panics
///
/// As [`forward`](crate::forward()) does.
pub fn forward_plain(dtype: Dtype, spec: &Spec, x: &Inputs) -> Output {
    spec.check(x);
    let rounded = Rounded::new(dtype, x);
    let x = rounded.inputs(x.mask);
    let heads = spec.batch * spec.num_heads;
    let mut out = vec![0.0; heads * spec.seqlen_q * spec.val_dim];
    let mut lse = vec![f64::NEG_INFINITY; heads * spec.seqlen_q];
    let parts = split(&mut out, heads)
        .into_iter()
        .zip(split(&mut lse, heads));
    for_each_part(spec, parts.collect(), |index, (out, lse)| {
        let head = PlainHead::new(dtype, spec, Head::new(spec, &x, index));
        let mut row = PlainRow::new(spec);
        let mut sum = vec![0.0; spec.val_dim];
        for (i, lse) in lse.iter_mut().enumerate() {
            *lse = f64::from(row.softmax(&head, i));
            sum.fill(0.0);
            for &j in &row.kept {
                add_scaled(
                    &mut sum,
                    operand(dtype, row.p[j]),
                    piece(&head.v, j, spec.val_dim),
                );
            }
            fit_all(dtype, &mut sum);
            store(piece_mut(out, i, spec.val_dim), &sum);
        }
    });
    Output { out, lse }
}

/// The plain computation of the gradients in `dtype`, with the shapes of
/// [`backward`](crate::backward()).
///
/// As in [`forward_plain`], the inputs and `d_out` are rounded to `dtype`, and every operation
/// computes and sums in `f32` and rounds its result. The operations are those of automatic
/// differentiation: the softmax starts from its stored, rounded probabilities and takes
/// `rowsum(P ∘ dP)`, the softcap from its stored tanh, and the key and value gradients of each
/// query head are rounded before they are summed over the group.
///
/// # Panics
///
/// As [`backward`](crate::backward()) does.
pub fn backward_plain(dtype: Dtype, spec: &Spec, x: &Inputs, d_out: &[f64]) -> Gradients {
    spec.check(x);
    spec.check_d_out(d_out);
    let rounded = Rounded::new(dtype, x);
    let x = rounded.inputs(x.mask);
    let d_out = round_all(dtype, d_out);
    let mut grads = zeros(&x);
    for_each_part(spec, by_kv_head(spec, &mut grads), |kv_index, part| {
        let [dq, dk, dv, dbias] = part;
        let queries = spec.seqlen_q * spec.head_dim;
        let scores = dbias.len().checked_div(spec.group()).unwrap_or_default();
        let d_outs = spec.seqlen_q * spec.val_dim;
        let mut dk_sum = vec![0.0; dk.len()];
        let mut dv_sum = vec![0.0; dv.len()];
        for member in 0..spec.group() {
            let index = kv_index * spec.group() + member;
            let head = PlainHead::new(dtype, spec, Head::new(spec, &x, index));
            let dq = piece_mut(dq, member, queries);
            let dbias = piece_mut(dbias, member, scores);
            let (dk, dv) = backward_head(&head, piece(&d_out, index, d_outs), dq, dbias);
            add_scaled(&mut dk_sum, 1.0, &dk);
            add_scaled(&mut dv_sum, 1.0, &dv);
        }
        fit_all(dtype, &mut dk_sum);
        fit_all(dtype, &mut dv_sum);
        store(dk, &dk_sum);
        store(dv, &dv_sum);
    });
    grads
}

/// One query head of [`backward_plain`]: writes its `dq`, `[Sq, D]`, and its `dbias`, `[Sq, Sk]` or
/// empty, and returns its `dk`, `[Sk, D]`, and `dv`, `[Sk, Dv]`.
fn backward_head(
    head: &PlainHead,
    d_out: &[f64],
    dq: &mut [f64],
    dbias: &mut [f64],
) -> (Vec<f32>, Vec<f32>) {
    let &PlainHead { dtype, spec, .. } = head;
    let (keys, dim, val_dim) = (spec.seqlen_k, spec.head_dim, spec.val_dim);
    let v_t = transpose(&head.v, keys, val_dim);
    let d_out = narrow(d_out);
    let mut dk = vec![0.0; head.k.len()];
    let mut dv = vec![0.0; head.v.len()];
    let mut row = PlainRow::new(spec);
    let mut dp = vec![0.0; keys];
    let mut dq_sum = vec![0.0; dim];
    for i in 0..spec.seqlen_q {
        let q = piece(&head.q, i, dim);
        let d_out = piece(&d_out, i, val_dim);
        row.softmax(head, i);
        dp.fill(0.0);
        for (e, &d_out) in d_out.iter().enumerate() {
            add_scaled(&mut dp, d_out, piece(&v_t, e, keys));
        }
        fit_all(dtype, &mut dp);
        let delta: f32 = row.kept.iter().map(|&j| row.p[j] * dp[j]).sum();
        dq_sum.fill(0.0);
        for &j in &row.kept {
            let ds = fit(dtype, row.p[j] * (dp[j] - delta));
            if head.inner.bias.is_some() {
                dbias[i * keys + j] = f64::from(ds);
            }
            let dx = fit(dtype, row.before_softcap(head, j, ds) * spec.scale as f32);
            let (dx, p) = (operand(dtype, dx), operand(dtype, row.p[j]));
            add_scaled(&mut dq_sum, dx, piece(&head.k, j, dim));
            add_scaled(piece_mut(&mut dk, j, dim), dx, q);
            add_scaled(piece_mut(&mut dv, j, val_dim), p, d_out);
        }
        fit_all(dtype, &mut dq_sum);
        store(piece_mut(dq, i, dim), &dq_sum);
    }
    fit_all(dtype, &mut dk);
    fit_all(dtype, &mut dv);
    (dk, dv)
}

/// The inputs of a plain computation, rounded.
struct Rounded {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    bias: Option<Vec<f64>>,
}

impl Rounded {
    fn new(dtype: Dtype, x: &Inputs) -> Self {
        Self {
            q: round_all(dtype, x.q),
            k: round_all(dtype, x.k),
            v: round_all(dtype, x.v),
            bias: x.bias.map(|bias| round_all(dtype.stored(), bias)),
        }
    }

    fn inputs<'a>(&'a self, mask: Option<&'a [bool]>) -> Inputs<'a> {
        Inputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            mask,
            bias: self.bias.as_deref(),
        }
    }
}

/// A query head in `f32`, its values already those of `dtype`.
struct PlainHead<'a> {
    dtype: Dtype,
    spec: &'a Spec,
    inner: Head<'a>,
    q: Vec<f32>,
    k: Vec<f32>,
    k_t: Vec<f32>,
    v: Vec<f32>,
}

impl<'a> PlainHead<'a> {
    fn new(dtype: Dtype, spec: &'a Spec, inner: Head<'a>) -> Self {
        let k = narrow(inner.k);
        Self {
            dtype,
            spec,
            q: narrow(inner.q),
            k_t: transpose(&k, spec.seqlen_k, spec.head_dim),
            k,
            v: narrow(inner.v),
            inner,
        }
    }
}

/// The softmax of one query; as in the `f64` forward pass, only the elements of `kept` mean
/// anything.
struct PlainRow {
    kept: Vec<usize>,
    /// Probabilities, rounded, `[Sk]`.
    p: Vec<f32>,
    /// Rounded tanh of the softcap, `[Sk]`.
    tanh: Vec<f32>,
}

impl PlainRow {
    fn new(spec: &Spec) -> Self {
        Self {
            kept: Vec::with_capacity(spec.seqlen_k),
            p: vec![0.0; spec.seqlen_k],
            tanh: vec![0.0; spec.seqlen_k],
        }
    }

    /// Fills `self` for query `i` and returns its log-sum-exp.
    fn softmax(&mut self, head: &PlainHead, i: usize) -> f32 {
        let spec = head.spec;
        self.kept.clear();
        self.kept
            .extend((0..spec.seqlen_k).filter(|&j| sees(spec, &head.inner, i, j)));
        self.scores(head, i);

        let s = &mut self.p;
        let mut max = f32::NEG_INFINITY;
        for &j in &self.kept {
            if s[j] > max || s[j].is_nan() {
                max = s[j];
            }
        }
        if max == f32::NEG_INFINITY {
            self.kept.clear();
            return max;
        }
        let mut sum = 0.0;
        for &j in &self.kept {
            s[j] = (s[j] - max).exp();
            sum += s[j];
        }
        for &j in &self.kept {
            s[j] = fit(head.dtype, s[j] / sum);
        }
        max + sum.ln()
    }

    /// Leaves the scores of the kept keys in `p`.
    fn scores(&mut self, head: &PlainHead, i: usize) {
        let &PlainHead { dtype, spec, .. } = head;
        let keys = spec.seqlen_k;
        let s = &mut self.p;
        s.fill(0.0);
        for (d, &q) in piece(&head.q, i, spec.head_dim).iter().enumerate() {
            add_scaled(s, q, piece(&head.k_t, d, keys));
        }
        for &j in &self.kept {
            s[j] = fit(dtype, s[j]);
            s[j] = fit(dtype, s[j] * spec.scale as f32);
            if let Some(cap) = spec.softcap {
                let ratio = fit(dtype, s[j] / cap as f32);
                self.tanh[j] = fit(dtype, ratio.tanh());
                s[j] = fit(dtype, self.tanh[j] * cap as f32);
            }
            if let Some(bias) = head.inner.bias {
                s[j] = fit(dtype, s[j] + bias[i * keys + j] as f32);
            }
        }
    }

    /// The gradient of the score of key `j` before the softcap, if any, from `ds` after it.
    fn before_softcap(&self, head: &PlainHead, j: usize, ds: f32) -> f32 {
        let Some(cap) = head.spec.softcap else {
            return ds;
        };
        let d_tanh = fit(head.dtype, ds * cap as f32);
        let d_ratio = fit(head.dtype, d_tanh * (1.0 - self.tanh[j] * self.tanh[j]));
        fit(head.dtype, d_ratio / cap as f32)
    }
}

/// `x`, whose values fit an `f32`, as `f32`.
fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

/// Writes `from` to `to`.
fn store(to: &mut [f64], from: &[f32]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = f64::from(from);
    }
}
