//! What is asked: shapes, element type, mask and scale of one attention.

use crate::AttentionError;

/// Element type of q, k, v and the output. Sums are always kept in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatKind {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// bfloat16.
    Bf16,
}

impl FloatKind {
    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Which keys a query may see by position alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Causality {
    /// Every key.
    #[default]
    Full,
    /// Bottom-right aligned: query `i` sees key `j` iff `j - (seqlen_k - seqlen_q) <= i`.
    Causal,
}

/// Whether a bool mask is read besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Masking {
    /// No mask.
    #[default]
    None,
    /// One bool per score, `true` = drop, any dimension broadcast by stride 0.
    Dense,
}

/// In which order the gradient of the queries is summed over keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GradientOrder {
    /// By the keys' positions, in one place: equal bits from run to run.
    #[default]
    Deterministic,
    /// As the parts come, added up in f32 in global memory: faster on sm_90, where dq differs from run
    /// to run by the rounding of its sums. Everything else has equal bits. Where that kernel cannot
    /// run, the order is `Deterministic`.
    Fused,
}

/// How exactly products of f32 are computed. Sums are f32 either way, and so is everything else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// As f32.
    #[default]
    Full,
    /// Operands may be rounded to tf32, the 10 bits of fraction of f16 with the range of f32, to the
    /// nearest: a permission to use tensor cores. Where there are none for it (everywhere but on CUDA
    /// from sm_80 on), and for f16 and bf16, which it does not concern, it changes nothing.
    Tf32,
}

/// Sizes of one attention: q `[batch, num_heads, seqlen_q, head_dim]`,
/// k `[batch, num_kv_heads, seqlen_k, head_dim]`, v `[batch, num_kv_heads, seqlen_k, val_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct AttentionShape {
    /// Independent problems.
    pub batch: usize,
    /// Heads of q and of the output.
    pub num_heads: usize,
    /// Heads of k and v; query head `h` reads `h / (num_heads / num_kv_heads)`.
    pub num_kv_heads: usize,
    /// Queries.
    pub seqlen_q: usize,
    /// Keys.
    pub seqlen_k: usize,
    /// Features of q and k.
    pub head_dim: usize,
    /// Features of v and the output.
    pub val_dim: usize,
}

impl AttentionShape {
    /// Derives the sizes from the shapes of q, k and v.
    ///
    /// # Errors
    ///
    /// When batch, heads, keys or features disagree, or `num_heads` is no multiple of
    /// `num_kv_heads`.
    pub fn new(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Self, AttentionError> {
        let [batch, num_heads, seqlen_q, head_dim] = q;
        let [_, num_kv_heads, seqlen_k, _] = k;
        let same = |argument, value: usize, allowed: usize, of: &str| {
            if value == allowed {
                return Ok(());
            }
            Err(AttentionError::new(
                argument,
                value,
                format!("{allowed}, as {of}"),
            ))
        };
        same("key batch", k[0], batch, "the query has")?;
        same("value batch", v[0], batch, "the query has")?;
        same("key head_dim", k[3], head_dim, "the query has")?;
        same("value num_heads", v[1], num_kv_heads, "the key has")?;
        same("value seqlen", v[2], seqlen_k, "the key has")?;
        let grouped = match num_kv_heads {
            0 => num_heads == 0,
            n => num_heads.is_multiple_of(n),
        };
        if !grouped {
            return Err(AttentionError::new(
                "key num_heads",
                num_kv_heads,
                format!("a divisor of the query's {num_heads} heads"),
            ));
        }
        Ok(Self {
            batch,
            num_heads,
            num_kv_heads,
            seqlen_q,
            seqlen_k,
            head_dim,
            val_dim: v[3],
        })
    }

    /// Shape of the output, `[batch, num_heads, seqlen_q, val_dim]`.
    pub const fn out(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.seqlen_q, self.val_dim]
    }

    /// Shape of the log-sum-exp, `[batch, num_heads, seqlen_q, 1]`.
    pub const fn lse(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.seqlen_q, 1]
    }

    /// Query heads that share one key head.
    pub const fn group(&self) -> usize {
        match self.num_kv_heads {
            0 => 1,
            n => self.num_heads / n,
        }
    }
}

/// One attention, as far as it decides what is compiled and launched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionProblem {
    /// Sizes.
    pub shape: AttentionShape,
    /// Element type of q, k, v and the output.
    pub dtype: FloatKind,
    /// Positional mask.
    pub causality: Causality,
    /// Bool mask.
    pub masking: Masking,
    /// The user's scale; scores are `scale * q·k`.
    pub scale: f32,
    /// What may become of products of f32.
    pub precision: Precision,
}
