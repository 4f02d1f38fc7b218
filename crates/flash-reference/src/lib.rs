//! Attention and its gradients in plain `f64`: the specification the kernels are tested against.
//!
//! Everything here follows the definition and nothing follows the kernels: the softmax takes its
//! maximum and its sum in separate passes over whole rows, the mask is decided element by element,
//! and no number is carried from one block of keys to the next. A kernel that agrees with this
//! crate therefore agrees for another reason than a shared mistake.
//!
//! For query `i` and key `j` of one head:
//!
//! ```text
//! s = scale · (q_i · k_j)          scale
//! s = cap · tanh(s / cap)          softcap, if any
//! j is dropped                     where the mask is true, or the causal rule hides it
//! s = s + bias_ij                  bias, if any
//! p = softmax over the kept j
//! out_i = Σ p_ij v_j               lse_i = ln Σ exp(s_ij)
//! ```
//!
//! A dropped key is skipped, never multiplied by zero, so whatever its key and value rows hold
//! (NaN included) reaches no result. A row without a kept key gives an output of exactly zero, a
//! log-sum-exp of −∞ and zero gradients; so does a row whose every score is −∞. A bias of −∞ drops
//! its key as the mask does.
//!
//! Tensors are packed slices in row-major order. Lengths may be zero.
//!
//! Sources: the forward and backward formulas are those of FlashAttention (arXiv 2205.14135,
//! appendix B), before any tiling; the softcap is the one of Gemma 2 (arXiv 2408.00118).

use std::num::NonZero;
use std::ops::{AddAssign, Mul};
use std::sync::Mutex;
use std::thread;

mod backward;
mod format;
mod forward;
mod mask;
pub mod rng;
pub mod rounding;

pub use backward::backward;
pub use forward::forward;

/// Which keys a query sees by position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Causality {
    /// Every query sees every key.
    #[default]
    Full,
    /// Query `i` sees key `j` if and only if `j − (seqlen_k − seqlen_q) ≤ i`: the last query sees
    /// every key, whatever the two lengths are (bottom-right alignment).
    Causal,
}

/// What is asked: the shape and the options of one attention call.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Number of batch entries, `B`.
    pub batch: usize,
    /// Number of query heads, `H`; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Number of key and value heads, `Hkv`; query head `h` reads head `h / (H / Hkv)`.
    pub num_kv_heads: usize,
    /// Number of queries, `Sq`.
    pub seqlen_q: usize,
    /// Number of keys, `Sk`.
    pub seqlen_k: usize,
    /// Length of a query row and of a key row, `D`.
    pub head_dim: usize,
    /// Length of a value row and of an output row, `Dv`.
    pub val_dim: usize,
    /// Factor on `q · k`, usually `1 / sqrt(head_dim)`.
    pub scale: f64,
    /// Bound `cap` of the scaled score, as `cap · tanh(s / cap)`; positive. `None` leaves scores
    /// unbounded.
    pub softcap: Option<f64>,
    /// Which keys a query sees by position.
    pub causality: Causality,
}

/// The tensors of one attention call, packed in row-major order.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Queries, `[B, H, Sq, D]`.
    pub q: &'a [f64],
    /// Keys, `[B, Hkv, Sk, D]`.
    pub k: &'a [f64],
    /// Values, `[B, Hkv, Sk, Dv]`.
    pub v: &'a [f64],
    /// Keys to drop, `[B, H, Sq, Sk]`: `true` drops.
    pub mask: Option<&'a [bool]>,
    /// Added to the scores after the softcap, `[B, H, Sq, Sk]`; −∞ drops the key.
    pub bias: Option<&'a [f64]>,
}

/// The result of [`forward()`].
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Weighted means of the values, `[B, H, Sq, Dv]`.
    pub out: Vec<f64>,
    /// Natural logarithm of each row's sum of `exp(s)`, `[B, H, Sq]`; −∞ for a row that sees
    /// nothing.
    pub lse: Vec<f64>,
}

/// The result of [`backward()`]: the gradient of `Σ d_out ∘ out`.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// With respect to the queries, `[B, H, Sq, D]`.
    pub dq: Vec<f64>,
    /// With respect to the keys, `[B, Hkv, Sk, D]`: the sum over the query heads that read them.
    pub dk: Vec<f64>,
    /// With respect to the values, `[B, Hkv, Sk, Dv]`: the sum over the query heads that read them.
    pub dv: Vec<f64>,
    /// With respect to the bias, `[B, H, Sq, Sk]`, if there was one.
    pub dbias: Option<Vec<f64>>,
}

impl Spec {
    /// Number of query heads that share one key and value head.
    fn group(&self) -> usize {
        self.num_heads
            .checked_div(self.num_kv_heads)
            .unwrap_or_default()
    }

    /// How many threads to compute on: those of the machine, or one if starting another would take
    /// longer than the work (tens of microseconds at this many products).
    fn threads(&self) -> usize {
        const FEW_PRODUCTS: usize = 1 << 17;
        let queries = self.batch * self.num_heads * self.seqlen_q;
        if queries * self.seqlen_k * (self.head_dim + self.val_dim) < FEW_PRODUCTS {
            return 1;
        }
        thread::available_parallelism().map_or(1, NonZero::get)
    }

    /// Panics unless the lengths of `x` and the options fit together.
    fn check(&self, x: &Inputs) {
        assert_eq!(
            self.group() * self.num_kv_heads,
            self.num_heads,
            "num_heads must be a multiple of num_kv_heads"
        );
        assert!(
            self.softcap.is_none_or(|cap| cap > 0.0),
            "softcap must be positive"
        );
        let queries = self.batch * self.num_heads * self.seqlen_q;
        let keys = self.batch * self.num_kv_heads * self.seqlen_k;
        assert_eq!(x.q.len(), queries * self.head_dim, "length of q");
        assert_eq!(x.k.len(), keys * self.head_dim, "length of k");
        assert_eq!(x.v.len(), keys * self.val_dim, "length of v");
        if let Some(mask) = x.mask {
            assert_eq!(mask.len(), queries * self.seqlen_k, "length of mask");
        }
        if let Some(bias) = x.bias {
            assert_eq!(bias.len(), queries * self.seqlen_k, "length of bias");
        }
    }

    /// Panics unless `d_out` has the length of the output.
    fn check_d_out(&self, d_out: &[f64]) {
        let queries = self.batch * self.num_heads * self.seqlen_q;
        assert_eq!(d_out.len(), queries * self.val_dim, "length of d_out");
    }
}

/// What one query head reads.
#[derive(Clone, Copy)]
struct Head<'a> {
    /// `[Sq, D]`
    q: &'a [f64],
    /// `[Sk, D]`
    k: &'a [f64],
    /// `[Sk, Dv]`
    v: &'a [f64],
    /// `[Sq, Sk]`
    mask: Option<&'a [bool]>,
    /// `[Sq, Sk]`
    bias: Option<&'a [f64]>,
}

impl<'a> Head<'a> {
    /// Query head `index`, counted through the batch: `b · H + h`.
    fn new(spec: &Spec, x: &Inputs<'a>, index: usize) -> Self {
        let (b, h) = (index / spec.num_heads, index % spec.num_heads);
        let kv_index = b * spec.num_kv_heads + h / spec.group();
        let scores = spec.seqlen_q * spec.seqlen_k;
        Self {
            q: piece(x.q, index, spec.seqlen_q * spec.head_dim),
            k: piece(x.k, kv_index, spec.seqlen_k * spec.head_dim),
            v: piece(x.v, kv_index, spec.seqlen_k * spec.val_dim),
            mask: x.mask.map(|mask| piece(mask, index, scores)),
            bias: x.bias.map(|bias| piece(bias, index, scores)),
        }
    }
}

/// Piece number `index` of consecutive pieces of `length` elements.
fn piece<T>(data: &[T], index: usize, length: usize) -> &[T] {
    &data[index * length..][..length]
}

/// `piece`, to write to.
fn piece_mut<T>(data: &mut [T], index: usize, length: usize) -> &mut [T] {
    &mut data[index * length..][..length]
}

/// `data` cut into `parts` pieces of one length, which may be zero (`chunks_mut` refuses that).
fn split<T>(mut data: &mut [T], parts: usize) -> Vec<&mut [T]> {
    let length = data.len().checked_div(parts).unwrap_or_default();
    let mut pieces = Vec::with_capacity(parts);
    for _ in 0..parts {
        let (head, tail) = data.split_at_mut(length);
        pieces.push(head);
        data = tail;
    }
    pieces
}

/// The transpose of the `rows × columns` matrix `data`.
fn transpose<T: Copy>(data: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns)
        .flat_map(|column| (0..rows).map(move |row| data[row * columns + column]))
        .collect()
}

/// `sum += factor · x`, element by element. Every matrix product here is made of this step rather
/// than of dot products: its elements are independent, so the compiler may vectorize it without
/// reordering a sum.
fn add_scaled<T: Copy + Mul<Output = T> + AddAssign>(sum: &mut [T], factor: T, x: &[T]) {
    for (sum, &x) in sum.iter_mut().zip(x) {
        *sum += factor * x;
    }
}

/// Runs `work(index, part)` for every part, on as many threads as `spec` is worth.
fn for_each_part<T: Send>(spec: &Spec, parts: Vec<T>, work: impl Fn(usize, T) + Sync) {
    let threads = spec.threads().min(parts.len());
    let queue = Mutex::new(parts.into_iter().enumerate());
    let drain = || loop {
        let next = queue.lock().expect("no thread panics holding it").next();
        let Some((index, part)) = next else { return };
        work(index, part);
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(drain);
        }
        drain();
    });
}
