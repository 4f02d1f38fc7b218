//! The command line.

use std::path::PathBuf;

use burn::tensor::DType;
use burn_flash_attention::GradientOrder;

use crate::Outcome;
use crate::settings::{Activations, AttentionKind, Settings};

/// What `--help` prints.
pub const HELP: &str = "\
Trains a GPT-style character model in Burn with burn-flash-attention.

Usage: train [OPTIONS]

Writes the losses, the loss curve and checkpoints under --out, a sample of the model's text and, as
the last line, `result: ` and a JSON object. Everything but attention is f32.

  --preset NAME            tiny (default), small or large: 2, 4 or 6 layers with 64, 128 or 512
                           features on 64, 256 or 4096 characters
  --text FILE              text to learn (default: Paradise Lost, compiled in); its last twentieth
                           is held out
  --attention KIND         flash (default) or burn: Burn's own on the same weights and batches
  --attention-dtype TYPE   f32 (default), f16 or bf16: Q, K and V are cast to it
  --gradient-order KIND    deterministic (default), or fused: faster on sm_90, other bits each time
  --layers N --dim N --heads N --context N --batch N --steps N --warmup N --lr X --seed N
                           instead of the preset's; one preset's sizes are tuned together
  --gradient-checkpointing on|off   (default off)
  --out DIR                default: target/train; without --resume, checkpoints in it are removed
  --log-every N            losses stay on the device and are read N at a time (default 10), so that
                           reading them does not hold up the device
  --measure-after N        steps before the clock of tokens/s starts (default: a tenth, at least 10)
  --checkpoint-every N     steps between checkpoints, of which the newest two are kept
                           (default: only after the last step)
  --stop-at N              stops after step N, with a checkpoint
  --resume                 continues from the newest checkpoint under --out
  --sample N               characters of the sample (default 400)
  --max-loss X|none        fails unless the loss of held-out text, in nats per character, is below X
                           in the end (default: 2.42 with preset tiny, else none)
  --check-resume           then trains again from the newest checkpoint before the end (without
                           --checkpoint-every, of the middle) and fails unless every loss has the
                           same bits, or, on a device that does not repeat itself, differs at most
                           4 times as much as two trainings from that checkpoint
  --compare                instead trains flash, burn, burn with another rounding and burn with
                           another seed, and fails unless flash and burn agree; see below
  --help                   this text

--compare: with D the mean over all steps of |loss of flash - loss of burn| and R that of |loss of
burn with another rounding - loss of burn|, the two agree if D <= 4 R, or if D is below a thousandth
of what another seed does. --max-loss holds for flash.

FLASH_RUNTIME chooses the runtime: ";

/// What the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One training.
    Train,
    /// One training, and its second half again from a checkpoint.
    CheckResume,
    /// Trainings that differ in attention, rounding and seed.
    Compare,
}

/// Where a training begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// With new weights.
    Fresh,
    /// From the newest checkpoint.
    Resume,
}

/// The parsed command line.
#[derive(Clone, Debug)]
pub struct Args {
    /// What to train.
    pub settings: Settings,
    /// What to do.
    pub mode: Mode,
    /// Where to begin.
    pub start: Start,
    /// The text's file, if it is not the default one.
    pub text: Option<PathBuf>,
    /// The directory of everything written.
    pub out: PathBuf,
    /// Losses read at a time.
    pub log_every: usize,
    /// Steps before the clock starts.
    pub measure_after: usize,
    /// Steps between checkpoints.
    pub checkpoint_every: usize,
    /// The step after which to stop.
    pub stop_at: usize,
    /// Characters of the sample.
    pub sample: usize,
    /// The held-out loss to fall below.
    pub max_loss: Option<f64>,
}

impl Args {
    /// Parses the arguments after the program's name; `None` asks for [`HELP`].
    ///
    /// # Errors
    ///
    /// If an option is unknown, lacks its value, has a wrong one or contradicts another.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Outcome<Option<Self>> {
        let given: Vec<String> = arguments.into_iter().collect();
        if given.iter().any(|word| word == "--help" || word == "-h") {
            return Ok(None);
        }
        // The preset is what the other options change, wherever it stands.
        let position = given.iter().rposition(|word| word == "--preset");
        let preset = position.and_then(|index| given.get(index + 1));
        let mut args = Self::defaults(preset.map_or("tiny", String::as_str))?;
        let mut warmup = None;
        let mut words = given.into_iter();
        while let Some(option) = words.next() {
            match option.as_str() {
                "--resume" => args.start = Start::Resume,
                "--check-resume" => args.mode = Mode::CheckResume,
                "--compare" => args.mode = Mode::Compare,
                _ => {
                    let next = words.next().filter(|next| !next.starts_with("--"));
                    let value =
                        next.ok_or_else(|| format!("{option} needs a value, or is unknown"))?;
                    match option.as_str() {
                        "--warmup" => warmup = Some(number(&option, &value, 0)?),
                        _ => args.set(&option, &value)?,
                    }
                }
            }
        }
        args.finish(warmup)?;
        Ok(Some(args))
    }

    fn defaults(preset: &str) -> Outcome<Self> {
        let (settings, max_loss) = Settings::preset(preset)?;
        Ok(Self {
            settings,
            mode: Mode::Train,
            start: Start::Fresh,
            text: None,
            out: PathBuf::from("target/train"),
            log_every: 10,
            measure_after: usize::MAX,
            checkpoint_every: usize::MAX,
            stop_at: usize::MAX,
            sample: 400,
            max_loss,
        })
    }

    /// Sets the option that takes `value`.
    fn set(&mut self, option: &str, value: &str) -> Outcome<()> {
        let settings = &mut self.settings;
        let count = match option {
            "--layers" => &mut settings.layers,
            "--dim" => &mut settings.dim,
            "--heads" => &mut settings.heads,
            "--context" => &mut settings.context,
            "--batch" => &mut settings.batch,
            "--steps" => &mut settings.steps,
            "--log-every" => &mut self.log_every,
            "--measure-after" => &mut self.measure_after,
            "--checkpoint-every" => &mut self.checkpoint_every,
            "--stop-at" => &mut self.stop_at,
            "--sample" => {
                self.sample = number(option, value, 0)?;
                return Ok(());
            }
            _ => return self.set_other(option, value),
        };
        *count = number(option, value, 1)?;
        Ok(())
    }

    fn set_other(&mut self, option: &str, value: &str) -> Outcome<()> {
        let settings = &mut self.settings;
        match option {
            "--preset" => {}
            "--text" => self.text = Some(PathBuf::from(value)),
            "--out" => self.out = PathBuf::from(value),
            "--attention" => {
                settings.attention = match value {
                    "flash" => AttentionKind::Flash,
                    "burn" => AttentionKind::Burn,
                    _ => return Err(refusal(option, value, "flash or burn")),
                }
            }
            "--attention-dtype" => {
                settings.attention_dtype = match value {
                    "f32" => DType::F32,
                    "f16" => DType::F16,
                    "bf16" => DType::BF16,
                    _ => return Err(refusal(option, value, "f32, f16 or bf16")),
                }
            }
            "--gradient-order" => {
                settings.gradient_order = match value {
                    "deterministic" => GradientOrder::Deterministic,
                    "fused" => GradientOrder::Fused,
                    _ => return Err(refusal(option, value, "deterministic or fused")),
                }
            }
            "--gradient-checkpointing" => {
                settings.activations = match value {
                    "on" => Activations::Recompute,
                    "off" => Activations::Keep,
                    _ => return Err(refusal(option, value, "on or off")),
                }
            }
            "--lr" => {
                let rate = value
                    .parse()
                    .ok()
                    .filter(|rate| (1e-12..=1.0).contains(rate));
                let allowed = "a number of at most 1 and more than 0";
                settings.learning_rate = rate.ok_or_else(|| refusal(option, value, allowed))?;
            }
            "--seed" => {
                let seed = value.parse();
                settings.seed = seed.map_err(|_| refusal(option, value, "a whole number"))?;
            }
            "--max-loss" if value == "none" => self.max_loss = None,
            "--max-loss" => {
                let loss = value.parse().ok().filter(|loss: &f64| loss.is_finite());
                let loss = loss.ok_or_else(|| refusal(option, value, "a number or none"))?;
                self.max_loss = Some(loss);
            }
            _ => return Err(format!("unknown option {option}; --help lists them").into()),
        }
        Ok(())
    }

    /// Defaults that depend on other options, and what options say about each other.
    fn finish(&mut self, warmup: Option<usize>) -> Outcome<()> {
        let steps = self.settings.steps;
        self.settings.warmup = warmup.unwrap_or(steps / 10);
        self.settings.check()?;
        self.stop_at = self.stop_at.min(steps);
        if self.measure_after == usize::MAX {
            self.measure_after = (steps / 10).max(10).min(steps / 2);
        }
        if self.measure_after >= steps {
            let after = self.measure_after;
            return Err(format!("--measure-after {after}: fewer than --steps, {steps}").into());
        }
        if self.mode == Mode::Train {
            return Ok(());
        }
        if self.start == Start::Resume || self.stop_at < steps {
            return Err("--check-resume and --compare exclude --resume and --stop-at".into());
        }
        let every = self.checkpoint_every;
        if self.mode == Mode::CheckResume && every == usize::MAX {
            self.checkpoint_every = steps.div_ceil(2);
        } else if self.mode == Mode::CheckResume && every >= steps {
            return Err(format!("--checkpoint-every {every}: fewer than --steps, {steps}").into());
        }
        Ok(())
    }
}

fn number(option: &str, value: &str, least: usize) -> Outcome<usize> {
    let number = value.parse().ok().filter(|&number| number >= least);
    let allowed = format!("a whole number of at least {least}");
    number.ok_or_else(|| refusal(option, value, &allowed))
}

fn refusal(option: &str, value: &str, allowed: &str) -> crate::Failure {
    format!("{option} {value}: {allowed}").into()
}
