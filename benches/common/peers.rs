//! Reads what `benches/anchors/peers.py` printed.
//!
//! A measured line is
//! `cudnn float16 d=64 causal=0 n=1024 fwd 0.3488 ms 394.0 TF/s bwd 1.0041 ms 342.2 TF/s`,
//! with `n=128x1024 bh=8` for 128 queries of 8 heads, and the part from `bwd` on only where the
//! backward pass was timed. A line that holds `FAILED` names a combination that the peer cannot do.
//! All other lines (versions, bandwidths) are ignored.

use super::grid::{Case, Causality, Dtype, Pass, Series};

/// PyTorch's attention back-ends, of which none has a name for products in tf32, in the order of the table's columns.
pub const NAMES: [&str; 4] = ["cudnn", "fa2", "mem_eff", "math"];

/// One peer on one case.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Which of [`NAMES`].
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Head dimension.
    pub head_dim: usize,
    /// Whether the mask is causal.
    pub causality: Causality,
    /// Length of keys.
    pub seqlen: usize,
    /// Length of queries.
    pub queries: usize,
    /// Heads of all batch entries, where the line says.
    pub heads: Option<usize>,
    /// TFLOP/s of the forward pass, by the papers' formula.
    pub forward: f64,
    /// TFLOP/s of the backward pass, where it was timed.
    pub backward: Option<f64>,
}

/// All that a peers file says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Peers {
    /// The measured combinations.
    pub entries: Vec<Entry>,
}

impl Peers {
    /// Parses the text of a peers file.
    ///
    /// # Errors
    ///
    /// When no line is a measurement, so that a wrong file does not go unnoticed.
    pub fn parse(text: &str) -> Result<Self, String> {
        let entries: Vec<Entry> = text.lines().filter_map(parse_line).collect();
        if entries.is_empty() {
            return Err("the peers file holds no measured line".into());
        }
        Ok(Self { entries })
    }

    /// TFLOP/s of the peer `name` on `case` in what `series` does there, if it was measured: the
    /// forward pass, the backward pass for `ours` in the backward benchmark, or both for `op`.
    pub fn tflops(&self, name: &str, case: &Case, series: Series) -> Option<f64> {
        let entry = self.entries.iter().find(|entry| {
            entry.name == name
                && entry.dtype == case.dtype.stored()
                && entry.head_dim == case.head_dim
                && entry.causality == case.causality
                && (entry.queries, entry.seqlen) == (case.queries, case.seqlen)
                && entry
                    .heads
                    .is_none_or(|it| it == case.batch * case.num_heads)
        })?;
        match (case.pass, series) {
            (Pass::Forward, _) => Some(entry.forward),
            (Pass::Backward, Series::Ours) => entry.backward,
            (Pass::Backward, Series::Op | Series::Burn) => {
                let seconds = 1.0 / entry.forward + 2.5 / entry.backward?;
                Some(3.5 / seconds)
            }
            (Pass::Backward, Series::Dq | Series::Dkv | Series::Delta) => None,
        }
    }

    /// The names among [`NAMES`] that were measured at all.
    pub fn names(&self) -> Vec<&'static str> {
        NAMES
            .into_iter()
            .filter(|name| self.entries.iter().any(|entry| entry.name == *name))
            .collect()
    }
}

fn parse_line(line: &str) -> Option<Entry> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let heads = words.iter().find_map(|word| word.strip_prefix("bh="));
    let heads = heads.map(str::parse).transpose().ok()?;
    let [name, dtype, head_dim, causal, seqlen, passes @ ..] = words.as_slice() else {
        return None;
    };
    if !NAMES.contains(name) {
        return None;
    }
    let lengths = seqlen.strip_prefix("n=")?;
    // As many queries as keys, or both: `128x4096`.
    let (queries, seqlen) = lengths.split_once('x').unwrap_or((lengths, lengths));
    Some(Entry {
        name: (*name).to_owned(),
        dtype: Dtype::parse(dtype)?,
        head_dim: head_dim.strip_prefix("d=")?.parse().ok()?,
        causality: match causal.strip_prefix("causal=")? {
            "0" => Causality::Full,
            "1" => Causality::Causal,
            _ => return None,
        },
        seqlen: seqlen.parse().ok()?,
        queries: queries.parse().ok()?,
        heads,
        forward: throughput(passes, "fwd")?,
        backward: throughput(passes, "bwd"),
    })
}

/// The number before `TF/s` in `PASS 0.349 ms 394 TF/s`.
fn throughput(words: &[&str], pass: &str) -> Option<f64> {
    let start = words.iter().position(|word| *word == pass)?;
    match words.get(start + 1..start + 5)? {
        [milliseconds, "ms", tflops, "TF/s"] => {
            milliseconds.parse::<f64>().ok()?;
            tflops
                .parse()
                .ok()
                .filter(|x: &f64| x.is_finite() && *x > 0.0)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::grid::Size;
    use super::*;

    const TEXT: &str = "\
2.11.0+cu130 13.0 91900 NVIDIA H200
cudnn    float16   d=64 causal=0 n=1024 fwd 0.349 ms 394 TF/s  bwd 1.001 ms 342 TF/s
fa2 bfloat16 d=128 causal=1 n=4096 fwd 0.9712 ms 283.1 TF/s
cudnn float16 d=64 causal=0 n=128x4096 bh=8 fwd 0.011 ms 97.6 TF/s
math torch.float32 256 True 16384 FAILED out of memory
fa2 decode b=1 hq=32 hk=8 n=32768 49.9 us 2.69 TB/s
copy 4.27 TB/s
cudnn float16 d=64 causal=2 n=1024 fwd 0.349 ms 394 TF/s
cudnn float16 d=64 causal=1 n=1024 fwd 0.349 ms nan TF/s
";

    #[test]
    fn measured_lines_are_read_and_the_rest_is_not() {
        let peers = Peers::parse(TEXT).unwrap();
        assert_eq!(peers.entries.len(), 3, "{peers:?}");
        assert_eq!(peers.entries[0].backward, Some(342.0));
        assert_eq!(peers.entries[1].backward, None);
        assert_eq!(peers.names(), ["cudnn", "fa2"]);
    }

    #[test]
    fn a_case_finds_its_own_line_only() {
        let peers = Peers::parse(TEXT).unwrap();
        let case = |dtype, d, causality, n| Case::new(Size::Papers, dtype, d, causality, n);
        let hit = case(Dtype::Bf16, 128, Causality::Causal, 4096);
        assert_eq!(peers.tflops("fa2", &hit, Series::Ours), Some(283.1));
        assert_eq!(peers.tflops("cudnn", &hit, Series::Ours), None);
        let other = case(Dtype::F16, 128, Causality::Causal, 4096);
        assert_eq!(peers.tflops("fa2", &other, Series::Ours), None);
        let full = case(Dtype::F16, 64, Causality::Full, 1024);
        assert_eq!(peers.tflops("cudnn", &full, Series::Ours), Some(394.0));
        let few = |size| {
            let case = Case::new(size, Dtype::F16, 64, Causality::Full, 4096);
            peers.tflops("cudnn", &case.with_queries(128), Series::Ours)
        };
        assert_eq!((few(Size::Few), few(Size::Papers)), (Some(97.6), None));
    }

    #[test]
    fn the_backward_pass_is_compared_with_the_backward_pass() {
        let peers = Peers::parse(TEXT).unwrap();
        let full = Case::new(Size::Papers, Dtype::F16, 64, Causality::Full, 1024);
        let full = full.of(Pass::Backward);
        let of = |series| peers.tflops("cudnn", &full, series);
        assert_eq!(of(Series::Ours), Some(342.0));
        let seconds = (full.flops() / 394.0) + (2.5 * full.flops() / 342.0);
        let both = of(Series::Op).unwrap();
        assert!((both - 3.5 * full.flops() / seconds).abs() < 1e-9, "{both}");
        assert_eq!(of(Series::Dq), None);
        let forward_only = Case::new(Size::Papers, Dtype::Bf16, 128, Causality::Causal, 4096);
        let forward_only = forward_only.of(Pass::Backward);
        assert_eq!(peers.tflops("fa2", &forward_only, Series::Ours), None);
    }

    #[test]
    fn a_file_without_measurements_is_an_error() {
        assert!(Peers::parse("copy 4.27 TB/s\n").is_err());
    }
}
