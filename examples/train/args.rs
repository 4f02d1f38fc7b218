//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Arg, Args as _, Command, FromArgMatches};

use crate::settings::{PRESETS, SIZES, Settings, positive, whole};
use crate::{Outcome, device};

const ABOUT: &str = "\
Trains a GPT-style character model in Burn with burn-flash-attention.

Writes the losses, the loss curve and checkpoints under --out, a sample of the model's text and, as
the last line, `result: ` and a JSON object. Everything but attention is f32.";

const COMPARE: &str = "\
--compare: with D the mean over all steps of |loss of flash - loss of burn| and R that of |loss of
burn with another rounding - loss of burn|, the two agree if D <= 4 R, or if D is below a thousandth
of what another seed does. --max-loss holds for flash.

FLASH_RUNTIME chooses the runtime: ";

/// The parsed command line.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// What to train.
    #[command(flatten)]
    pub settings: Settings,
    /// Steps over which the learning rate rises [default: a tenth].
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    warmup: Option<usize>,
    /// Text to learn, whose last twentieth is held out [default: Paradise Lost, compiled in].
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Directory of everything written; without --resume, checkpoints in it are removed.
    #[arg(long, value_name = "DIR", default_value = "target/train")]
    pub out: PathBuf,
    /// Losses stay on the device and are read N at a time, so that reading them does not hold up
    /// the device.
    #[arg(long, value_name = "N", value_parser = positive, default_value = "10")]
    pub log_every: usize,
    /// Steps before the clock of tokens/s starts [default: a tenth, at least 10].
    #[arg(long, value_name = "N", value_parser = positive)]
    #[arg(default_value_t = usize::MAX, hide_default_value = true)]
    pub measure_after: usize,
    /// Steps between checkpoints, of which the newest two are kept [default: only after the last
    /// step].
    #[arg(long, value_name = "N", value_parser = positive)]
    #[arg(default_value_t = usize::MAX, hide_default_value = true)]
    pub checkpoint_every: usize,
    /// Stops after step N, with a checkpoint.
    #[arg(long, value_name = "N", value_parser = positive)]
    #[arg(default_value_t = usize::MAX, hide_default_value = true)]
    pub stop_at: usize,
    /// Continues from the newest checkpoint under --out.
    #[arg(long)]
    pub resume: bool,
    /// Characters of the sample.
    #[arg(long, value_name = "N", value_parser = whole::<usize>, default_value = "400")]
    pub sample: usize,
    /// Fails unless the loss of held-out text, in nats per character, is below X in the end; none
    /// for any loss [default: 2.42 with preset tiny, else none].
    // By its path: one value that is an option, not an optional value.
    #[arg(long, value_name = "X|none", value_parser = max_loss)]
    pub max_loss: std::option::Option<f64>,
    /// Afterwards trains again from the newest checkpoint before the end (without
    /// --checkpoint-every, of the middle) and fails unless every loss has the same bits, or, on a
    /// device that does not repeat itself, differs at most 4 times as much as two trainings from
    /// that checkpoint.
    #[arg(long, conflicts_with_all = ["compare", "resume", "stop_at"])]
    pub check_resume: bool,
    /// Instead trains flash, burn, burn with another rounding and burn with another seed, and fails
    /// unless flash and burn agree; see below.
    #[arg(long, conflicts_with_all = ["resume", "stop_at"])]
    pub compare: bool,
}

impl Args {
    /// Parses the command line, the program's name first.
    ///
    /// # Errors
    ///
    /// The help that is asked for, or what is wrong with an option or with two together.
    pub fn read<T>(words: impl IntoIterator<Item = T>) -> Result<Self, clap::Error>
    where
        T: Into<OsString> + Clone,
    {
        let mut command = command();
        let matches = command.try_get_matches_from_mut(words)?;
        let mut args = Self::from_arg_matches(&matches)?;
        match args.finish() {
            Err(message) => Err(command.error(ErrorKind::ValueValidation, message)),
            Ok(()) => Ok(args),
        }
    }

    /// Defaults that depend on other options, and what options say about each other.
    fn finish(&mut self) -> Outcome<()> {
        let steps = self.settings.steps;
        self.settings.warmup = self.warmup.unwrap_or(steps / 10);
        self.settings.check()?;
        self.stop_at = self.stop_at.min(steps);
        if self.measure_after == usize::MAX {
            self.measure_after = (steps / 10).max(10).min(steps / 2);
        }
        if self.measure_after >= steps {
            let after = self.measure_after;
            return Err(format!("--measure-after {after}: fewer than --steps, {steps}").into());
        }
        let every = self.checkpoint_every;
        if self.check_resume && every == usize::MAX {
            self.checkpoint_every = steps.div_ceil(2);
        } else if self.check_resume && every >= steps {
            return Err(format!("--checkpoint-every {every}: fewer than --steps, {steps}").into());
        }
        Ok(())
    }
}

/// The options, with the preset's sizes as the defaults of theirs.
fn command() -> Command {
    let preset = Arg::new("preset")
        .long("preset")
        .value_name("NAME")
        .value_parser(PRESETS)
        .default_value("tiny")
        .help(
            "2, 4 or 6 layers with 64, 128 or 512 features on 64, 256 or 4096 characters; the \
             sizes of one preset are tuned together",
        );
    // The defaults of the sizes look at the preset, so it must have its own before them.
    let command = Args::augment_args(Command::new("train").arg(preset))
        .args_override_self(true)
        // -1 is refused as the value of the option before it, and not as an unknown option.
        .mut_args(|arg| {
            let takes_value = arg.get_action().takes_values();
            arg.allow_negative_numbers(takes_value)
        })
        .about(ABOUT)
        .after_help(format!("{COMPARE}{}", device::runtimes().join(", ")));
    SIZES.iter().fold(command, |command, (size, defaults)| {
        let presets = PRESETS.iter().zip(defaults);
        let defaults = presets.map(|(preset, default)| ("preset", *preset, *default));
        command.mut_arg(size, |arg| arg.required(false).default_value_ifs(defaults))
    })
}

fn max_loss(text: &str) -> Result<Option<f64>, &'static str> {
    if text == "none" {
        return Ok(None);
    }
    let loss = text.parse().ok().filter(|loss: &f64| loss.is_finite());
    loss.map(Some).ok_or("expected a number or none")
}
