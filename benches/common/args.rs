//! The command line of a benchmark.

use std::path::PathBuf;
use std::time::Duration;

use flash_kernels::GradientOrder;

use super::choice::{Choice, Units, tile, units};
use super::grid::{Case, Causality, Dtype, Pass, Series, Size};

/// Whether series run in child processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// One child per series; a case can be stopped at its limit.
    Child,
    /// Everything in this process; nothing can be stopped.
    InProcess,
}

/// What this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Runs the grid and writes the report.
    Main,
    /// Reads case numbers from stdin and answers with results for this series.
    Worker(Series),
    /// Prints [`usage`](super::usage::usage) and ends.
    Help,
}

/// The parsed command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Args {
    /// Which benchmark this is.
    pub pass: Pass,
    /// What this process is.
    pub role: Role,
    /// Element types.
    pub dtypes: Vec<Dtype>,
    /// Head dimensions.
    pub dims: Vec<usize>,
    /// Sequence lengths.
    pub seqlens: Vec<usize>,
    /// Queries; none for as many as keys.
    pub queries: Vec<usize>,
    /// Causal settings.
    pub causalities: Vec<Causality>,
    /// What is timed.
    pub series: Vec<Series>,
    /// What replaces the table's choice for ours.
    pub choice: Choice,
    /// Order of the gradient's sums.
    pub schedule: GradientOrder,
    /// Papers' or tiny shapes.
    pub size: Size,
    /// Longest time for one series on one case.
    pub limit: Duration,
    /// Longest time for the whole run.
    pub budget: Option<Duration>,
    /// Least length of a timed batch.
    pub batch: Duration,
    /// TFLOP/s that no device can exceed.
    pub ceiling: f64,
    /// Child processes or not.
    pub isolation: Isolation,
    /// JSON lines go here.
    pub out: Option<PathBuf>,
    /// The SVG goes here.
    pub plot: Option<PathBuf>,
    /// Output of the peers script.
    pub peers: Option<PathBuf>,
}

impl Args {
    /// The arguments when none are given.
    fn with_defaults(pass: Pass, size: Size) -> Self {
        let small = size == Size::Small;
        Self {
            pass,
            role: Role::Main,
            dtypes: if small {
                vec![Dtype::F32]
            } else {
                vec![Dtype::F16, Dtype::Bf16]
            },
            dims: if small { vec![64] } else { vec![64, 128] },
            seqlens: match size {
                Size::Papers => vec![1024, 4096, 16_384],
                Size::Small => vec![64, 256],
                Size::Few => vec![1024, 4096, 16_384, 65_536],
            },
            queries: match size {
                Size::Papers | Size::Small => Vec::new(),
                Size::Few => vec![1, 128, 512, 1024],
            },
            causalities: match size {
                Size::Papers | Size::Small => vec![Causality::Full, Causality::Causal],
                Size::Few => vec![Causality::Full],
            },
            series: pass.series()[..3].to_vec(),
            choice: Choice::NONE,
            schedule: GradientOrder::Deterministic,
            size,
            limit: Duration::from_secs(240),
            budget: None,
            batch: Duration::from_millis(if small { 20 } else { 200 }),
            ceiling: 1500.0,
            isolation: Isolation::Child,
            out: None,
            plot: None,
            peers: None,
        }
    }

    /// Parses the arguments after the name of the benchmark of `pass`.
    ///
    /// # Errors
    ///
    /// A message for the user: an unknown option, a missing or malformed value, or `--peers`
    /// with `--small` (the peers are measured on the papers' grid).
    pub fn parse(pass: Pass, args: &[String]) -> Result<Self, String> {
        let size = args.iter().find_map(|arg| Size::parse(arg));
        let size = size.unwrap_or(Size::Papers);
        let mut parsed = Self::with_defaults(pass, size);
        let mut rest = args.iter();
        while let Some(option) = rest.next() {
            match option.as_str() {
                // Cargo passes --bench to a benchmark without the standard harness.
                "--bench" => continue,
                option if Size::parse(option).is_some() => continue,
                "--in-process" => {
                    parsed.isolation = Isolation::InProcess;
                    continue;
                }
                "--help" | "-h" => {
                    parsed.role = Role::Help;
                    continue;
                }
                _ => {}
            }
            let value = rest
                .next()
                .ok_or_else(|| format!("unknown option or missing value: {option}"))?;
            parsed.set(option, value)?;
        }
        if pass == Pass::Backward && !parsed.queries.is_empty() {
            return Err("--queries and --small-shapes are of the forward benchmark".into());
        }
        let choice = parsed.choice;
        if pass == Pass::Backward && (choice.tile.is_some() || choice.splits.is_some()) {
            return Err("--tile and --splits are of the forward benchmark".into());
        }
        if choice.units == Units::Mma && parsed.schedule == GradientOrder::Fused {
            return Err("--schedule fused is of the kernels that --units mma leaves out".into());
        }
        if parsed.peers.is_some() && size == Size::Small {
            return Err("--peers needs the papers' grid, so it does not go with --small".into());
        }
        Ok(parsed)
    }

    fn set(&mut self, option: &str, value: &str) -> Result<(), String> {
        let known = self.pass.series();
        let series = |text: &str| Series::parse(text).filter(|it| known.contains(it));
        match option {
            "--dtype" | "--dtypes" => self.dtypes = list(option, value, Dtype::parse)?,
            "--dims" => self.dims = list(option, value, positive)?,
            "--seqlens" => self.seqlens = list(option, value, positive)?,
            "--queries" => self.queries = list(option, value, positive)?,
            "--units" => self.choice.units = one(option, value, units)?,
            "--splits" => self.choice.splits = Some(one(option, value, positive)?),
            "--only" => self.series = list(option, value, series)?,
            "--tile" => self.choice.tile = Some(one(option, value, tile)?),
            "--schedule" => self.schedule = one(option, value, schedule)?,
            "--causal" => {
                self.causalities = match value {
                    "both" => vec![Causality::Full, Causality::Causal],
                    "no" => vec![Causality::Full],
                    "yes" => vec![Causality::Causal],
                    _ => return Err(format!("--causal {value}: expected both, no or yes")),
                }
            }
            "--limit" => self.limit = Duration::from_secs(one(option, value, positive)? as u64),
            "--budget" => {
                self.budget = Some(Duration::from_secs(one(option, value, positive)? as u64));
            }
            "--batch-ms" => {
                self.batch = Duration::from_millis(one(option, value, positive)? as u64);
            }
            "--ceiling" => {
                self.ceiling = one(option, value, |text| {
                    text.parse().ok().filter(|x: &f64| *x > 0.0)
                })?;
            }
            "--worker" => self.role = Role::Worker(one(option, value, series)?),
            "--out" => self.out = Some(value.into()),
            "--plot" => self.plot = Some(value.into()),
            "--peers" => self.peers = Some(value.into()),
            _ => return Err(format!("unknown option {option}")),
        }
        Ok(())
    }

    /// The grid, lengths innermost. The same list in the main process and in its workers, which
    /// are told a position in it.
    pub fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &dtype in &self.dtypes {
            for &head_dim in &self.dims {
                for &causality in &self.causalities {
                    for &seqlen in &self.seqlens {
                        let case = Case::new(self.size, dtype, head_dim, causality, seqlen);
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

fn schedule(text: &str) -> Option<GradientOrder> {
    match text {
        "deterministic" => Some(GradientOrder::Deterministic),
        "fused" => Some(GradientOrder::Fused),
        _ => None,
    }
}

/// A number from 1 on.
pub fn positive(text: &str) -> Option<usize> {
    text.parse().ok().filter(|&n| n > 0)
}

/// The value of an option.
///
/// # Errors
///
/// When `parse` has none for the text; the message names the option.
pub fn one<T>(option: &str, value: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, String> {
    parse(value).ok_or_else(|| format!("{option}: {value:?} is not a value it takes"))
}

/// The values of an option, separated by commas.
///
/// # Errors
///
/// As [`one`].
pub fn list<T>(
    option: &str,
    value: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Vec<T>, String> {
    value
        .split(',')
        .map(|item| one(option, item.trim(), &parse))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::usage::usage;
    use super::*;

    fn parse_for(pass: Pass, line: &str) -> Result<Args, String> {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Args::parse(pass, &args)
    }

    fn parse(line: &str) -> Result<Args, String> {
        parse_for(Pass::Forward, line)
    }

    #[test]
    fn the_default_grid_is_the_papers() {
        let args = parse("--bench").unwrap();
        assert_eq!(args.cases().len(), 2 * 2 * 2 * 3);
        assert_eq!(args.series, [Series::Ours, Series::Op, Series::Burn]);
        assert_eq!(args.role, Role::Main);
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
        for pass in [Pass::Forward, Pass::Backward] {
            let usage = usage(pass);
            assert!(usage.contains(&format!("--bench {} ", pass.name())));
            for series in pass.series() {
                assert!(usage.contains(series.name()), "{usage}");
            }
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for line in [
            "--nope 1",
            "--dims",
            "--dims 0",
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
    }
}
