//! The command line of the memory benchmark.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Parser};

use super::args::{one_of, positive, seconds, takes_negative_numbers};
use super::grid::{Case, Causality, Dtype, Pass, Series};

const SERIES: [Series; 2] = [Series::Op, Series::Burn];
const DTYPES: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::F32];

/// Peak device memory of a training step through a stack of attention layers: our op under Burn's
/// autodiff (op) beside Burn's own (burn).
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(
    name = "memory",
    args_override_self = true,
    mut_args = takes_negative_numbers,
    override_usage = "cargo bench --bench memory [--features cuda|vulkan] -- [OPTIONS]",
    after_help = "FLASH_RUNTIME=cuda|vulkan|wgpu picks the runtime."
)]
pub struct MemoryArgs {
    /// Cargo passes it to a benchmark without the standard harness.
    #[arg(long, hide = true)]
    bench: bool,
    /// Makes this process a child, which measures this series only.
    #[arg(long, hide = true, value_parser = one_of(&SERIES))]
    pub worker: Option<Series>,
    /// Sequence lengths; powers of two are best.
    #[arg(long, value_name = "LIST", value_parser = positive)]
    #[arg(action = ArgAction::Set, value_delimiter = ',')]
    #[arg(default_value = "512,1024,2048,4096,8192,16384,32768,65536")]
    #[arg(default_value_if("small", "true", "256,512,1024"))]
    pub seqlens: Vec<usize>,
    /// What is measured.
    #[arg(long = "only", value_name = "LIST", value_parser = one_of(&SERIES))]
    #[arg(action = ArgAction::Set, value_delimiter = ',', default_value = "op,burn")]
    pub series: Vec<Series>,
    /// Element type.
    #[arg(long, value_name = "TYPE", value_parser = one_of(&DTYPES))]
    #[arg(default_value = "f16", default_value_if("small", "true", "f32"))]
    pub dtype: Dtype,
    /// Batch size.
    #[arg(long, value_name = "N", value_parser = positive, default_value = "1")]
    pub batch: usize,
    /// Heads of queries and keys.
    #[arg(long, value_name = "N", value_parser = positive)]
    #[arg(default_value = "8", default_value_if("small", "true", "2"))]
    pub heads: usize,
    /// Head dimension.
    #[arg(long = "dim", value_name = "N", value_parser = positive, default_value = "64")]
    pub head_dim: usize,
    /// Layers of the stack.
    #[arg(long, value_name = "N", value_parser = positive, default_value = "2")]
    pub layers: usize,
    /// Causal mask.
    #[arg(long = "causal", value_name = "WHICH")]
    #[arg(value_enum, default_value_t = Causality::Full)]
    pub causality: Causality,
    /// For a CPU device: --dtype f32 --heads 2 --seqlens 256,512,1024.
    #[arg(long)]
    small: bool,
    /// Longest time for one step, its compilation and autotuning included.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "120")]
    pub limit: Duration,
    /// Longest time for the whole run: stops the case at hand, 'skips' the rest.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub budget: Option<Duration>,
    /// Writes one JSON object per line here.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Adds the results in the output of an earlier run to table, fit and plot; may be repeated.
    #[arg(long = "with", value_name = "FILE")]
    pub earlier: Vec<PathBuf>,
    /// Writes an SVG of memory against sequence length here, both logarithmic.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

impl MemoryArgs {
    /// The cases of one series, the shortest first: each takes longer than the one before, so a budget
    /// leaves the most lengths done.
    pub fn cases(&self) -> Vec<Case> {
        let mut seqlens = self.seqlens.clone();
        seqlens.sort_unstable();
        let case = |seqlen| Case {
            pass: Pass::Backward,
            dtype: self.dtype,
            head_dim: self.head_dim,
            causality: self.causality,
            seqlen,
            queries: seqlen,
            batch: self.batch,
            num_heads: self.heads,
        };
        seqlens.into_iter().map(case).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<MemoryArgs, String> {
        let words = ["memory"].into_iter().chain(line.split_whitespace());
        MemoryArgs::try_parse_from(words).map_err(|error| error.to_string())
    }

    #[test]
    fn the_options_are_sound() {
        MemoryArgs::command().debug_assert();
    }

    #[test]
    fn the_shortest_comes_first() {
        let args = parse("--bench").unwrap();
        let lengths: Vec<usize> = args.cases().iter().map(|it| it.seqlen).collect();
        assert_eq!(
            lengths,
            [512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]
        );
        assert_eq!(args.cases()[7].shape(), [1, 8, 65_536, 64]);
    }

    #[test]
    fn options_are_read_and_nonsense_is_refused_by_name() {
        let args = parse("--small --heads 3 --layers 4 --causal yes --only burn --with a --with b");
        let args = args.unwrap();
        assert_eq!((args.heads, args.layers), (3, 4));
        assert_eq!(args.series, [Series::Burn]);
        assert_eq!(args.cases()[0].dtype, Dtype::F32);
        assert_eq!(args.earlier.len(), 2);
        for line in [
            "--only ours",
            "--heads 0",
            "--dtype tf32",
            "--layers -1",
            "--causal both",
            "--nope 1",
            "--out",
        ] {
            let option = line.split_whitespace().next().unwrap();
            let message = parse(line).unwrap_err();
            assert!(message.contains(option), "{line}: {message}");
        }
    }
}
