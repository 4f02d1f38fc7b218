//! The cases: the grid of the FlashAttention papers, and its FLOP count.

use clap::ValueEnum;

/// Element type of Q, K, V and O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// IEEE half precision.
    #[value(alias = "float16")]
    F16,
    /// bfloat16.
    #[value(alias = "bfloat16")]
    Bf16,
    /// IEEE single precision.
    #[value(alias = "float32")]
    F32,
    /// f32 with products in tf32 where ours has them: the path of a result tells whether it did.
    Tf32,
}

impl Dtype {
    /// The name on the command line, in the table and in the JSON file.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
        }
    }

    /// Parses [`Dtype::name`] and PyTorch's names (`float16`, `bfloat16`, `float32`).
    pub fn parse(text: &str) -> Option<Self> {
        Self::from_str(text, false).ok()
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::Tf32 => 4,
        }
    }

    /// What tensors hold.
    pub fn stored(self) -> Self {
        match self {
            Self::Tf32 => Self::F32,
            Self::F16 | Self::Bf16 | Self::F32 => self,
        }
    }
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Causality {
    /// All keys.
    #[value(name = "no")]
    Full,
    /// The keys at or before its own position.
    #[value(name = "yes")]
    Causal,
}

impl Causality {
    /// `yes` or `no`, the cell of the causal column.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "no",
            Self::Causal => "yes",
        }
    }
}

/// Which benchmark it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Attention.
    Forward,
    /// Its gradient.
    Backward,
}

impl Pass {
    /// The name of the benchmark and of the pass in the JSON file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }

    /// What can be timed, in the order in which a case runs it. The first three are the default.
    pub fn series(self) -> &'static [Series] {
        match self {
            Self::Forward => &Series::ALL[..3],
            Self::Backward => &Series::ALL,
        }
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Series {
    /// Our kernels, launched on raw buffers by `flash_kernels::forward` or `backward`.
    Ours,
    /// Our op through Burn's tensor API, `burn_flash_attention::attention`; in the backward
    /// benchmark forward and backward under autodiff.
    Op,
    /// Burn's own op, `burn::tensor::module::attention`, likewise.
    Burn,
    /// The kernels `delta` and `dq`: `flash_kernels::backward` asked for dq alone.
    Dq,
    /// The kernels `delta` and `dkv`: asked for dk and dv.
    Dkv,
    /// The kernel `delta`: asked for dk and dv of a problem without keys.
    Delta,
}

impl Series {
    const ALL: [Self; 6] = [
        Self::Ours,
        Self::Op,
        Self::Burn,
        Self::Dq,
        Self::Dkv,
        Self::Delta,
    ];

    /// The name on the command line, in the table and in the JSON file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Op => "op",
            Self::Burn => "burn",
            Self::Dq => "dq",
            Self::Dkv => "dkv",
            Self::Delta => "delta",
        }
    }

    /// Parses [`Series::name`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::from_str(text, false).ok()
    }

    /// True for what this project wrote.
    pub fn is_own(self) -> bool {
        self != Self::Burn
    }
}

/// How much work a case holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 16 384 tokens of width 2048: the grid of the papers, for a GPU.
    Papers,
    /// 256 tokens of width 256, for a software device on a CPU.
    Small,
    /// One sequence of 8 heads: few query tiles, as in decoding.
    Few,
}

/// Heads of [`Size::Few`].
const FEW_HEADS: usize = 8;

impl Size {
    /// Tokens in all, batch times sequence length.
    pub fn tokens(self) -> usize {
        match self {
            Self::Papers => 16_384,
            Self::Small => 256,
            Self::Few => 1,
        }
    }

    /// Width of a token with this head dimension, heads times head dimension.
    pub fn width(self, head_dim: usize) -> usize {
        match self {
            Self::Papers => 2048,
            Self::Small => 256,
            Self::Few => FEW_HEADS * head_dim,
        }
    }
}

/// One point of the grid. K and V are `[batch, num_heads, seqlen, head_dim]`, packed, Q and O have
/// `queries` rows to a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Which benchmark it belongs to.
    pub pass: Pass,
    /// Element type.
    pub dtype: Dtype,
    /// Head dimension of Q, K and V.
    pub head_dim: usize,
    /// Whether the mask is causal.
    pub causality: Causality,
    /// Length of keys.
    pub seqlen: usize,
    /// Length of queries, at most that of keys: they are the last ones under a causal mask.
    pub queries: usize,
    /// Batch size.
    pub batch: usize,
    /// Number of query heads, and of key and value heads.
    pub num_heads: usize,
}

impl Case {
    /// The forward case of `size` with this head dimension and length: batch = tokens / seqlen and
    /// heads = width / head_dim, both at least one.
    pub fn new(
        size: Size,
        dtype: Dtype,
        head_dim: usize,
        causality: Causality,
        seqlen: usize,
    ) -> Self {
        Self {
            pass: Pass::Forward,
            dtype,
            head_dim,
            causality,
            seqlen,
            queries: seqlen,
            batch: (size.tokens() / seqlen).max(1),
            num_heads: (size.width(head_dim) / head_dim).max(1),
        }
    }

    /// The same case with fewer queries than keys.
    pub fn with_queries(self, queries: usize) -> Self {
        Self { queries, ..self }
    }

    /// The same case in another benchmark.
    pub fn of(self, pass: Pass) -> Self {
        Self { pass, ..self }
    }

    /// Useful floating-point operations of one launch of `series`, in multiples of
    /// [`Case::flops`]: the forward pass has two products of matrices, the backward pass five.
    /// The kernels `dq` and `dkv` have three and four by themselves, two of them the same.
    pub fn work(&self, series: Series) -> f64 {
        match (self.pass, series) {
            (Pass::Forward, _) => self.flops(),
            (Pass::Backward, Series::Ours) => 2.5 * self.flops(),
            (Pass::Backward, Series::Op | Series::Burn) => 3.5 * self.flops(),
            (Pass::Backward, Series::Dq) => 1.5 * self.flops(),
            (Pass::Backward, Series::Dkv) => 2.0 * self.flops(),
            (Pass::Backward, Series::Delta) => 2.0 * self.elements() as f64,
        }
    }

    /// Useful floating-point operations of the forward pass by the FlashAttention papers' formula:
    /// 4 · batch · heads · queries · seqlen · head_dim, without the half of the square of queries that
    /// a causal mask drops.
    pub fn flops(&self) -> f64 {
        let (queries, keys) = (self.queries as f64, self.seqlen as f64);
        let per_query = match self.causality {
            Causality::Full => keys,
            Causality::Causal => keys - queries / 2.0,
        };
        4.0 * (self.batch * self.num_heads * self.head_dim) as f64 * queries * per_query
    }

    /// Shape of Q and O.
    pub fn shape(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.queries, self.head_dim]
    }

    /// Shape of K and V.
    pub fn key_shape(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.seqlen, self.head_dim]
    }

    /// Elements of K and V; Q and O have as many or fewer.
    pub fn elements(&self) -> usize {
        self.key_shape().iter().product()
    }

    /// Elements of Q and O.
    pub fn output_elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// `4096`, or `128x4096` for 128 queries.
    pub fn lengths(&self) -> String {
        match self.queries == self.seqlen {
            true => self.seqlen.to_string(),
            false => format!("{}x{}", self.queries, self.seqlen),
        }
    }

    /// A short name for messages.
    pub fn label(&self) -> String {
        format!(
            "{} d={} causal={} N={}",
            self.dtype.name(),
            self.head_dim,
            self.causality.name(),
            self.lengths()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_follow_the_papers() {
        let case = Case::new(Size::Papers, Dtype::F16, 64, Causality::Full, 1024);
        assert_eq!(case.shape(), [16, 32, 1024, 64]);
        // 4 * 16 * 32 * 1024^2 * 64
        assert_eq!(case.flops(), 137_438_953_472.0);
        let causal = Case::new(Size::Papers, Dtype::F16, 64, Causality::Causal, 1024);
        assert_eq!(causal.flops(), 68_719_476_736.0);
    }

    #[test]
    fn backward_is_five_products_and_forward_two() {
        let case = Case::new(Size::Papers, Dtype::F16, 64, Causality::Causal, 1024);
        let backward = case.of(Pass::Backward);
        for series in Pass::Forward.series() {
            assert_eq!(case.work(*series), case.flops());
        }
        // 10 * 16 * 32 * 1024^2 * 64, halved
        assert_eq!(backward.work(Series::Ours), 171_798_691_840.0);
        let both = case.flops() + backward.work(Series::Ours);
        assert_eq!(backward.work(Series::Op), both);
        assert_eq!(backward.work(Series::Burn), both);
    }

    #[test]
    fn everything_is_found_by_its_name() {
        for series in Pass::Backward.series() {
            assert_eq!(Series::parse(series.name()), Some(*series));
        }
        for dtype in Dtype::value_variants() {
            assert_eq!(Dtype::parse(dtype.name()), Some(*dtype));
        }
        assert_eq!(Dtype::parse("bfloat16"), Some(Dtype::Bf16));
        assert!(!Pass::Forward.series().contains(&Series::Dq));
    }

    #[test]
    fn work_grows_with_the_length_and_not_with_the_head_dimension() {
        let at = |d, n| Case::new(Size::Papers, Dtype::Bf16, d, Causality::Full, n).flops();
        assert_eq!(at(64, 4096), at(128, 4096));
        assert_eq!(at(64, 16_384), 16.0 * at(64, 1024));
    }

    #[test]
    fn elements_are_the_same_all_over_the_grid() {
        for d in [64, 128, 256] {
            for n in [1024, 4096, 16_384] {
                let case = Case::new(Size::Papers, Dtype::F32, d, Causality::Full, n);
                assert_eq!(case.elements(), 16_384 * 2048);
            }
        }
    }

    #[test]
    fn few_queries_have_keys_of_another_shape() {
        let whole = Case::new(Size::Few, Dtype::F16, 128, Causality::Causal, 4096);
        let case = whole.with_queries(128);
        assert_eq!(case.shape(), [1, 8, 128, 128]);
        assert_eq!(case.key_shape(), [1, 8, 4096, 128]);
        assert_eq!(
            (whole.lengths(), case.lengths()),
            ("4096".into(), "128x4096".into())
        );
        // The last 128 rows of the whole: each of its blocks of 128 rows has 128² more.
        let rest = whole.with_queries(4096).flops() - case.flops();
        let square = 4.0 * 8.0 * 128.0 * 128.0 * 128.0;
        assert_eq!(case.flops(), square * 31.5);
        assert_eq!(
            rest,
            square * (0..31).map(|i| f64::from(i) + 0.5).sum::<f64>()
        );
    }

    #[test]
    fn more_than_the_tokens_still_gives_one_sequence() {
        let case = Case::new(Size::Small, Dtype::F32, 512, Causality::Full, 300);
        assert_eq!(case.shape(), [1, 1, 300, 512]);
    }
}
