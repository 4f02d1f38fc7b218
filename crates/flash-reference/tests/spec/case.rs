//! Small problems that together use every option.

use flash_reference::{Causality, Inputs, Spec, rng::Rng};

/// A problem that owns its tensors.
#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub spec: Spec,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub mask: Option<Vec<bool>>,
    pub bias: Option<Vec<f64>>,
}

impl Case {
    /// `spec` with random tensors in [-1, 1) and neither mask nor bias.
    pub fn new(name: &'static str, spec: Spec) -> Self {
        let queries = spec.batch * spec.num_heads * spec.seqlen_q;
        let keys = spec.batch * spec.num_kv_heads * spec.seqlen_k;
        Self {
            name,
            q: noise(queries * spec.head_dim, 1),
            k: noise(keys * spec.head_dim, 2),
            v: noise(keys * spec.val_dim, 3),
            mask: None,
            bias: None,
            spec,
        }
    }

    /// Drops about a third of the keys, and in the second row of every head all of them.
    pub fn with_mask(mut self) -> Self {
        let Spec {
            seqlen_q, seqlen_k, ..
        } = self.spec;
        let noise = noise(self.num_scores(), 4);
        let dropped = noise.iter().enumerate().map(|(at, x)| {
            let i = at / seqlen_k % seqlen_q;
            i == 1 || *x < -0.3
        });
        self.mask = Some(dropped.collect());
        self
    }

    pub fn with_bias(mut self) -> Self {
        self.bias = Some(noise(self.num_scores(), 5));
        self
    }

    pub fn inputs(&self) -> Inputs<'_> {
        Inputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            mask: self.mask.as_deref(),
            bias: self.bias.as_deref(),
        }
    }

    /// A random gradient of the output.
    pub fn d_out(&self) -> Vec<f64> {
        noise(self.num_rows() * self.spec.val_dim, 6)
    }

    /// `B · H · Sq`
    pub fn num_rows(&self) -> usize {
        self.spec.batch * self.spec.num_heads * self.spec.seqlen_q
    }

    /// `B · H · Sq · Sk`
    pub fn num_scores(&self) -> usize {
        self.num_rows() * self.spec.seqlen_k
    }
}

/// Two batch entries, four heads that share two, five queries, seven keys.
pub fn small() -> Spec {
    Spec {
        batch: 2,
        num_heads: 4,
        num_kv_heads: 2,
        seqlen_q: 5,
        seqlen_k: 7,
        head_dim: 6,
        val_dim: 6,
        scale: 0.7,
        softcap: None,
        causality: Causality::Full,
    }
}

/// One head of one-element rows with a scale of one.
pub fn single_head(seqlen_q: usize, seqlen_k: usize) -> Spec {
    Spec {
        batch: 1,
        num_heads: 1,
        num_kv_heads: 1,
        seqlen_q,
        seqlen_k,
        head_dim: 1,
        val_dim: 1,
        scale: 1.0,
        softcap: None,
        causality: Causality::Full,
    }
}

/// Every option alone, and all at once.
pub fn every_option() -> Vec<Case> {
    let causal = |seqlen_q, seqlen_k| Spec {
        seqlen_q,
        seqlen_k,
        causality: Causality::Causal,
        ..small()
    };
    let kv_heads = |num_kv_heads| Spec {
        num_kv_heads,
        ..small()
    };
    let val_dim = |val_dim| Spec { val_dim, ..small() };
    let capped = Spec {
        softcap: Some(0.8),
        ..small()
    };
    let everything = |seqlen_q, seqlen_k| Spec {
        softcap: Some(0.8),
        val_dim: 3,
        ..causal(seqlen_q, seqlen_k)
    };
    vec![
        Case::new("grouped heads", small()),
        Case::new("as many key heads as query heads", kv_heads(4)),
        Case::new("one key head", kv_heads(1)),
        Case::new("mask", small()).with_mask(),
        Case::new("bias", small()).with_bias(),
        Case::new("softcap", capped),
        Case::new("short values", val_dim(3)),
        Case::new("long values", val_dim(9)),
        Case::new("causal, square", causal(6, 6)),
        Case::new("causal, fewer queries", causal(3, 8)),
        Case::new("causal, fewer keys", causal(8, 3)),
        Case::new(
            "one query",
            Spec {
                seqlen_q: 1,
                ..small()
            },
        ),
        Case::new(
            "one key",
            Spec {
                seqlen_k: 1,
                ..small()
            },
        )
        .with_bias(),
        Case::new("everything, fewer queries", everything(4, 7))
            .with_mask()
            .with_bias(),
        Case::new("everything, fewer keys", everything(7, 4))
            .with_mask()
            .with_bias(),
    ]
}

/// `length` numbers in [-1, 1) that depend on `seed` alone.
pub fn noise(length: usize, seed: u64) -> Vec<f64> {
    let mut rng = Rng::new(seed << 32);
    let draw = || rng.next_u64() as f64 / 2.0_f64.powi(63) - 1.0;
    std::iter::repeat_with(draw).take(length).collect()
}

/// The largest absolute value of `x`.
pub fn max_abs(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |max, x| x.abs().max(max))
}

/// The largest distance between elements of `a` and `b`; infinities of one sign are equal, and a
/// NaN anywhere gives infinity.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference = |(a, b): (&f64, &f64)| if a == b { 0.0 } else { (a - b).abs() };
    a.iter().zip(b).map(difference).fold(0.0, |max, d| {
        if d.is_nan() {
            f64::INFINITY
        } else {
            d.max(max)
        }
    })
}

/// The bits of `x`: equal bits are a stronger claim than `==`, and NaN equals itself.
pub fn bits(x: &[f64]) -> Vec<u64> {
    x.iter().map(|x| x.to_bits()).collect()
}
