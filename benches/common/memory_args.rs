//! The command line of the memory benchmark.

use std::path::PathBuf;
use std::time::Duration;

use super::args::{Role, list, one, positive};
use super::grid::{Case, Causality, Dtype, Pass, Series};

/// What `--help` prints.
pub const USAGE: &str = "\
Peak device memory of a training step through a stack of attention layers: our op under Burn's
autodiff (op) beside Burn's own (burn).

  cargo bench --bench memory [--features cuda|vulkan] -- [options]
  FLASH_RUNTIME=cuda|vulkan|wgpu picks the runtime.

  --seqlens LIST    powers of two are best       (default 512,1024,...,65536)
  --only LIST       of op,burn                   (default both)
  --dtype TYPE      f16, bf16 or f32             (default f16)
  --batch N         batch size                   (default 1)
  --heads N         heads of queries and keys    (default 8)
  --dim N           head dimension               (default 64)
  --layers N        layers of the stack          (default 2)
  --causal WHICH    no or yes                    (default no)
  --small           f32, 2 heads, seqlens 256,512,1024: for a CPU device
  --limit SECONDS   for one step, its compilation and autotuning included (default 120)
  --budget SECONDS  for the whole run: stop the case at hand, 'skip' the rest
  --out FILE        one JSON object per line
  --with FILE       adds the results in the output of an earlier run to table, fit and plot
  --plot FILE       SVG of memory against sequence length, both logarithmic
";

/// The parsed command line.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryArgs {
    /// What this process is.
    pub role: Role,
    /// Sequence lengths.
    pub seqlens: Vec<usize>,
    /// `Op`, `Burn` or both.
    pub series: Vec<Series>,
    /// Element type.
    pub dtype: Dtype,
    /// Batch size.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// Layers.
    pub layers: usize,
    /// Mask.
    pub causality: Causality,
    /// Longest time for one step.
    pub limit: Duration,
    /// Longest time for the whole run.
    pub budget: Option<Duration>,
    /// JSON lines go here.
    pub out: Option<PathBuf>,
    /// JSON lines of earlier runs.
    pub earlier: Vec<PathBuf>,
    /// The SVG goes here.
    pub plot: Option<PathBuf>,
}

impl MemoryArgs {
    /// Parses the arguments after the program's name.
    ///
    /// # Errors
    ///
    /// A message for the user: an unknown option, or a missing or malformed value.
    pub fn parse(args: &[String]) -> Result<Self, String> {
        let small = args.iter().any(|arg| arg == "--small");
        let mut parsed = Self {
            role: Role::Main,
            seqlens: if small {
                vec![256, 512, 1024]
            } else {
                (9..=16).map(|power| 1 << power).collect()
            },
            series: vec![Series::Op, Series::Burn],
            dtype: if small { Dtype::F32 } else { Dtype::F16 },
            batch: 1,
            heads: if small { 2 } else { 8 },
            head_dim: 64,
            layers: 2,
            causality: Causality::Full,
            limit: Duration::from_secs(120),
            budget: None,
            out: None,
            earlier: Vec::new(),
            plot: None,
        };
        let mut rest = args.iter();
        while let Some(option) = rest.next() {
            match option.as_str() {
                "--bench" | "--small" => continue,
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
        Ok(parsed)
    }

    fn set(&mut self, option: &str, value: &str) -> Result<(), String> {
        let series = |text: &str| {
            let known = [Series::Op, Series::Burn];
            Series::parse(text).filter(|it| known.contains(it))
        };
        let number = || one(option, value, positive);
        let seconds = || number().map(|it| Duration::from_secs(it as u64));
        match option {
            "--seqlens" => self.seqlens = list(option, value, positive)?,
            "--only" => self.series = list(option, value, series)?,
            "--dtype" => self.dtype = one(option, value, Dtype::parse)?,
            "--batch" => self.batch = number()?,
            "--heads" => self.heads = number()?,
            "--dim" => self.head_dim = number()?,
            "--layers" => self.layers = number()?,
            "--causal" => {
                self.causality = one(option, value, |text| match text {
                    "no" => Some(Causality::Full),
                    "yes" => Some(Causality::Causal),
                    _ => None,
                })?;
            }
            "--limit" => self.limit = seconds()?,
            "--budget" => self.budget = Some(seconds()?),
            "--worker" => self.role = Role::Worker(one(option, value, series)?),
            "--out" => self.out = Some(value.into()),
            "--with" => self.earlier.push(value.into()),
            "--plot" => self.plot = Some(value.into()),
            _ => return Err(format!("unknown option {option}")),
        }
        Ok(())
    }

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
    use super::*;

    fn parse(line: &str) -> Result<MemoryArgs, String> {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        MemoryArgs::parse(&args)
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
