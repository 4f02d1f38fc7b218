//! The command line of a benchmark of the papers' grid.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command, CommandFactory, FromArgMatches, Parser, ValueEnum};
use flash_kernels::GradientOrder;

use super::choice::{Choice, Units};
use super::grid::{Case, Causality, Dtype, Pass, Series, Size};

/// The parsed command line.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(
    args_override_self = true,
    mut_args = takes_negative_numbers,
    after_help = "FLASH_RUNTIME=cuda|vulkan|wgpu picks the runtime."
)]
pub struct Args {
    /// Which benchmark this is.
    #[arg(skip = Pass::Forward)]
    pub pass: Pass,
    /// Cargo passes it to a benchmark without the standard harness.
    #[arg(long, hide = true)]
    bench: bool,
    /// Makes this process a child, which times this series only.
    #[arg(long, hide = true)]
    pub worker: Option<Series>,
    /// What is timed.
    #[arg(long = "only", value_name = "LIST", action = ArgAction::Set, value_delimiter = ',')]
    #[arg(default_value = "ours,op,burn")]
    pub series: Vec<Series>,
    /// Element types.
    #[arg(long = "dtype", alias = "dtypes", value_name = "LIST")]
    #[arg(action = ArgAction::Set, value_delimiter = ',')]
    #[arg(default_value = "f16,bf16", default_value_if("small", "true", "f32"))]
    pub dtypes: Vec<Dtype>,
    /// Head dimensions.
    #[arg(long, value_name = "LIST", value_parser = positive)]
    #[arg(action = ArgAction::Set, value_delimiter = ',')]
    #[arg(default_value = "64,128", default_value_if("small", "true", "64"))]
    pub dims: Vec<usize>,
    /// Sequence lengths.
    #[arg(long, value_name = "LIST", value_parser = positive)]
    #[arg(action = ArgAction::Set, value_delimiter = ',')]
    #[arg(default_value = "1024,4096,16384", default_value_ifs([
        ("small", "true", "64,256"),
        ("small_shapes", "true", "1024,4096,16384,65536"),
    ]))]
    pub seqlens: Vec<usize>,
    /// Numbers of queries, of which all pairs with --seqlens that have at most as many queries as
    /// keys; without it as many as keys. Forward only.
    #[arg(long, value_name = "LIST", value_parser = positive)]
    #[arg(action = ArgAction::Set, value_delimiter = ',')]
    #[arg(default_value_if("small_shapes", "true", "1,128,512,1024"))]
    pub queries: Vec<usize>,
    /// Causal settings.
    // By its path: one value that is a vector, not a value for each element.
    #[arg(long = "causal", value_name = "WHICH", value_parser = causalities())]
    #[arg(default_value = "both", default_value_if("small_shapes", "true", "no"))]
    pub causalities: std::vec::Vec<Causality>,
    /// What replaces the table's choice for ours.
    #[command(flatten)]
    pub choice: Choice,
    /// Order of the sums of the gradient; fused where it can run.
    #[arg(long, value_name = "WHICH", value_parser = schedule(), default_value = "deterministic")]
    pub schedule: GradientOrder,
    /// Tiny shapes for a CPU device: --dtype f32 --dims 64 --seqlens 64,256 --batch-ms 20.
    #[arg(long, conflicts_with_all = ["small_shapes", "peers"])]
    small: bool,
    /// One sequence of 8 heads, forward only: --queries 1,128,512,1024
    /// --seqlens 1024,4096,16384,65536 --causal no.
    #[arg(long)]
    small_shapes: bool,
    /// Longest time for one series on one case, its compilation and autotuning included; past it
    /// the case is 'not finished'.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "240")]
    pub limit: Duration,
    /// Longest time for the whole run: stops the case at hand, 'skips' the rest.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub budget: Option<Duration>,
    /// Least length of a timed batch in milliseconds.
    #[arg(long = "batch-ms", value_name = "MS", value_parser = milliseconds)]
    #[arg(default_value = "200", default_value_if("small", "true", "20"))]
    pub batch: Duration,
    /// TFLOP/s that no device can exceed: a faster result is 'impossible'.
    #[arg(long, value_name = "TFLOPS", value_parser = ceiling, default_value = "1500")]
    pub ceiling: f64,
    /// No child processes and no limit: for profilers and sanitizers.
    #[arg(long)]
    pub in_process: bool,
    /// Writes one JSON object per line here.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Writes an SVG of TFLOP/s against sequence length here.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Output of benches/anchors/peers.py from the same machine: adds ratios.
    #[arg(long, value_name = "FILE")]
    pub peers: Option<PathBuf>,
}

impl Args {
    /// The options of the benchmark of `pass`.
    fn command_of(pass: Pass) -> Command {
        let name = pass.name();
        let about = match pass {
            Pass::Forward => "Times attention forward",
            Pass::Backward => "Times the gradient of attention",
        };
        let usage = format!("cargo bench --bench {name} [--features cuda|vulkan] -- [OPTIONS]");
        let command = Self::command()
            .name(name)
            .about(about)
            .override_usage(usage);
        let series = ["series", "worker"].into_iter();
        series.fold(command, |command, id| {
            command.mut_arg(id, |arg| arg.value_parser(one_of(pass.series())))
        })
    }

    /// Parses the command line of the benchmark of `pass`, its name first.
    ///
    /// # Errors
    ///
    /// The help that is asked for, or what is wrong with an option or with two together.
    pub fn read<T>(pass: Pass, words: impl IntoIterator<Item = T>) -> Result<Self, clap::Error>
    where
        T: Into<OsString> + Clone,
    {
        let mut command = Self::command_of(pass);
        let matches = command.try_get_matches_from_mut(words)?;
        let args = Self::from_arg_matches(&matches)?;
        let args = Self { pass, ..args };
        match args.contradiction() {
            Some(message) => Err(command.error(ErrorKind::ArgumentConflict, message)),
            None => Ok(args),
        }
    }

    fn contradiction(&self) -> Option<&'static str> {
        let (choice, is_backward) = (self.choice, self.pass == Pass::Backward);
        if is_backward && !self.queries.is_empty() {
            Some("--queries and --small-shapes are of the forward benchmark")
        } else if is_backward && (choice.tile.is_some() || choice.splits.is_some()) {
            Some("--tile and --splits are of the forward benchmark")
        } else if choice.units == Units::Mma && self.schedule == GradientOrder::Fused {
            Some("--schedule fused is of the kernels that --units mma leaves out")
        } else {
            None
        }
    }

    fn size(&self) -> Size {
        match (self.small, self.small_shapes) {
            (true, _) => Size::Small,
            (_, true) => Size::Few,
            _ => Size::Papers,
        }
    }

    /// The grid, lengths innermost. The same list in the main process and in its workers, which
    /// are told a position in it.
    pub fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &dtype in &self.dtypes {
            for &head_dim in &self.dims {
                for &causality in &self.causalities {
                    for &seqlen in &self.seqlens {
                        let case = Case::new(self.size(), dtype, head_dim, causality, seqlen);
                        let case = case.of(self.pass);
                        let fewer = self.queries.iter().filter(|it| **it <= seqlen);
                        cases.extend(fewer.map(|queries| case.with_queries(*queries)));
                        if self.queries.is_empty() {
                            cases.push(case);
                        }
                    }
                }
            }
        }
        cases
    }
}

fn causalities() -> impl TypedValueParser<Value = Vec<Causality>> {
    PossibleValuesParser::new(["both", "no", "yes"]).map(|which| match which.as_str() {
        "no" => vec![Causality::Full],
        "yes" => vec![Causality::Causal],
        _ => vec![Causality::Full, Causality::Causal],
    })
}

fn schedule() -> impl TypedValueParser<Value = GradientOrder> {
    let names = PossibleValuesParser::new(["deterministic", "fused"]);
    names.map(|name| match name.as_str() {
        "fused" => GradientOrder::Fused,
        _ => GradientOrder::Deterministic,
    })
}

fn ceiling(text: &str) -> Result<f64, &'static str> {
    let number = text.parse().ok().filter(|&number| number > 0.0);
    number.ok_or("expected a number greater than 0")
}

fn milliseconds(text: &str) -> Result<Duration, &'static str> {
    positive(text).map(|number| Duration::from_millis(number as u64))
}

/// A number of seconds from 1 on.
///
/// # Errors
///
/// As [`positive`].
pub fn seconds(text: &str) -> Result<Duration, &'static str> {
    positive(text).map(|number| Duration::from_secs(number as u64))
}

/// A number from 1 on.
///
/// # Errors
///
/// What is allowed, when the text is anything else.
pub fn positive(text: &str) -> Result<usize, &'static str> {
    let number = text.parse().ok().filter(|&number| number > 0);
    number.ok_or("expected a whole number of at least 1")
}

/// The name of one of `values`.
pub fn one_of<T>(values: &'static [T]) -> impl TypedValueParser<Value = T>
where
    T: ValueEnum + Send + Sync,
{
    let names = PossibleValuesParser::new(values.iter().filter_map(T::to_possible_value));
    names.map(|name| T::from_str(&name, false).expect("the parser has checked it"))
}

/// So that -1 is refused as the value of the option before it, and not as an unknown option.
pub fn takes_negative_numbers(arg: Arg) -> Arg {
    let takes_value = arg.get_action().takes_values();
    arg.allow_negative_numbers(takes_value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_for(pass: Pass, line: &str) -> Result<Args, String> {
        let words = [pass.name()].into_iter().chain(line.split_whitespace());
        Args::read(pass, words).map_err(|error| error.to_string())
    }

    fn parse(line: &str) -> Result<Args, String> {
        parse_for(Pass::Forward, line)
    }

    #[test]
    fn the_options_are_sound_and_help_names_every_series() {
        for pass in [Pass::Forward, Pass::Backward] {
            Args::command_of(pass).debug_assert();
            let help = parse_for(pass, "--help").unwrap_err();
            assert!(help.contains(&format!("--bench {} ", pass.name())));
            for series in pass.series() {
                assert!(help.contains(series.name()), "{help}");
            }
        }
        assert!(!parse("--help").unwrap_err().contains("dkv"));
    }

    #[test]
    fn the_default_grid_is_the_papers() {
        let args = parse("--bench").unwrap();
        assert_eq!(args.cases().len(), 2 * 2 * 2 * 3);
        assert_eq!(args.series, [Series::Ours, Series::Op, Series::Burn]);
        assert_eq!(args.worker, None);
        let child = parse("--small --bench --worker op").unwrap();
        assert_eq!(child.worker, Some(Series::Op));
    }

    #[test]
    fn lists_and_values_are_read() {
        let args = parse(
            "--dtype f32,tf32 --dims 256 --seqlens 4096 --causal yes --only ours,burn --limit 9",
        )
        .unwrap();
        assert_eq!(args.dtypes, [Dtype::F32, Dtype::Tf32]);
        assert_eq!(args.causalities, [Causality::Causal]);
        assert_eq!(args.series, [Series::Ours, Series::Burn]);
        assert_eq!(args.limit, Duration::from_secs(9));
        let shapes: Vec<_> = args.cases().iter().map(Case::shape).collect();
        assert_eq!(shapes, [[4, 8, 4096, 256]; 2]);
    }

    #[test]
    fn small_changes_the_defaults_wherever_it_stands() {
        let args = parse("--dims 32 --small").unwrap();
        assert_eq!(args.dims, [32]);
        assert_eq!(args.cases()[0].shape(), [4, 8, 64, 32]);
        assert_eq!(args.batch, Duration::from_millis(20));
        assert_eq!(args.dtypes, [Dtype::F32]);
    }

    #[test]
    fn small_shapes_are_pairs_of_lengths_of_one_sequence() {
        let args = parse("--small-shapes --dtype f16 --dims 128 --seqlens 256,4096").unwrap();
        let lengths: Vec<_> = args.cases().iter().map(Case::lengths).collect();
        let pairs = [
            "1x256",
            "128x256",
            "1x4096",
            "128x4096",
            "512x4096",
            "1024x4096",
        ];
        assert_eq!(lengths, pairs);
        assert_eq!(args.cases()[1].shape(), [1, 8, 128, 128]);
        let one = parse("--queries 1 --seqlens 1024 --dtype f16 --dims 64 --splits 4").unwrap();
        assert_eq!((one.cases().len(), one.choice.splits), (2, Some(4)));
        assert!(parse_for(Pass::Backward, "--queries 1").is_err());
        assert!(parse_for(Pass::Backward, "--small-shapes").is_err());
        assert!(parse_for(Pass::Backward, "--tile 128x64").is_err());
        assert!(parse("--units mma --schedule fused").is_err());
    }

    #[test]
    fn kernels_of_the_gradient_are_series_of_that_benchmark_alone() {
        let args = parse_for(Pass::Backward, "--only dq,dkv,delta").unwrap();
        assert_eq!(args.schedule, GradientOrder::Deterministic);
        let fused = parse_for(Pass::Backward, "--schedule fused").unwrap();
        assert_eq!(fused.schedule, GradientOrder::Fused);
        assert_eq!(args.series, [Series::Dq, Series::Dkv, Series::Delta]);
        assert!(args.cases().iter().all(|it| it.pass == Pass::Backward));
        assert!(parse("--only dq").unwrap_err().contains("dq"));
        let earlier = parse_for(Pass::Backward, "--units mma").unwrap();
        assert_eq!(
            (args.choice, earlier.choice.units),
            (Choice::NONE, Units::Mma)
        );
    }

    #[test]
    fn the_last_of_several_values_counts() {
        let args = parse("--dims 32 --limit 1 --small --dims 64 --limit 2 --small").unwrap();
        assert_eq!((args.dims, args.limit), (vec![64], Duration::from_secs(2)));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for line in [
            "--nope 1",
            "--dims",
            "--dims 0",
            "--dims -1",
            "--dtype f8",
            "--causal maybe",
            "--schedule fast",
            "--ceiling -1",
            "--tile 100x64",
            "--tile 64",
            "--units scalar",
        ] {
            let message = parse(line).unwrap_err();
            let option = line.split_whitespace().next().unwrap();
            assert!(message.contains(option), "{line}: {message}");
        }
        assert!(parse("--small --peers f").is_err());
        assert!(parse("--small --small-shapes").is_err());
    }
}
