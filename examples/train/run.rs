//! The loop: steps, losses, checkpoints, the clock and the progress bar.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::args::Args;
use crate::trainer::Trainer;
use crate::{Outcome, checkpoint};

/// How many lines a whole training prints about where it is.
const LINES: usize = 10;

/// How the loop runs, apart from what is trained.
#[derive(Clone, Debug)]
pub struct Pace {
    /// Losses read at a time.
    pub log_every: usize,
    /// Steps of this loop before the clock starts.
    pub measure_after: usize,
    /// Steps between checkpoints.
    pub checkpoint_every: usize,
    /// The step after which to stop.
    pub stop_at: usize,
}

impl From<&Args> for Pace {
    fn from(args: &Args) -> Self {
        Self {
            log_every: args.log_every,
            measure_after: args.measure_after,
            checkpoint_every: args.checkpoint_every,
            stop_at: args.stop_at,
        }
    }
}

/// What a loop measured.
#[derive(Clone, Debug)]
pub struct Record {
    /// The loss of every step since the training began, in nats per character.
    pub losses: Vec<f64>,
    /// Seconds of the whole loop.
    pub seconds: f64,
    /// Characters per second after the first steps, without checkpoints: the device was waited for
    /// at both ends. `None` if the loop was too short.
    pub tokens_per_second: Option<f64>,
}

impl Record {
    /// Mean loss of the last tenth of the steps done.
    pub fn final_loss(&self) -> f64 {
        let count = self.losses.len().div_ceil(10);
        let last = &self.losses[self.losses.len() - count..];
        last.iter().sum::<f64>() / count as f64
    }

    /// One line about losses and speed.
    pub fn describe(&self, held_out: f64) -> String {
        let speed = match self.tokens_per_second {
            Some(rate) => format!("{rate:.0} tokens/s"),
            None => "too short for tokens/s".to_owned(),
        };
        let loss = self.final_loss();
        format!("{loss:.4} in the last tenth of the steps, {held_out:.4} held out; {speed}")
    }
}

/// Trains until `pace.stop_at`; `losses` are those of the steps done before. Writes `losses.jsonl`
/// and checkpoints under `out`, the last one after the last step.
///
/// # Errors
///
/// If a loss is not finite, the device fails, or a file cannot be written.
pub fn run(
    trainer: &mut Trainer,
    losses: Vec<f64>,
    pace: &Pace,
    out: &Path,
    label: &str,
) -> Outcome<Record> {
    let first = trainer.step;
    let start = Instant::now();
    let mut log = Log::begin(trainer, losses, pace, out, label)?;
    let mut clock = Clock::default();
    let mut pending = Vec::new();
    while trainer.step < pace.stop_at {
        if trainer.step == first + pace.measure_after {
            trainer.sync()?;
            clock.resume();
        }
        pending.push(trainer.advance());
        clock.count();
        let step = trainer.step;
        let ends = step == pace.stop_at;
        let saves = ends || step.is_multiple_of(pace.checkpoint_every);
        if pending.len() == pace.log_every || saves {
            log.read(trainer, std::mem::take(&mut pending))?;
        }
        if saves {
            trainer.sync()?;
            clock.pause();
            checkpoint::save(trainer, &log.losses, out)?;
            clock.resume_if_paused();
        }
    }
    log.bar.finish_and_clear();
    Ok(Record {
        losses: log.losses,
        seconds: start.elapsed().as_secs_f64(),
        tokens_per_second: clock.rate(trainer.settings.tokens_per_step()),
    })
}

/// Time between [`Clock::resume`] and [`Clock::pause`], and the steps in it.
#[derive(Default)]
struct Clock {
    spent: Duration,
    since: Option<Instant>,
    steps: usize,
}

impl Clock {
    fn resume(&mut self) {
        self.since = Some(Instant::now());
    }

    fn count(&mut self) {
        self.steps += usize::from(self.since.is_some());
    }

    fn pause(&mut self) {
        if let Some(since) = self.since.take() {
            self.spent += since.elapsed();
        }
    }

    fn resume_if_paused(&mut self) {
        if self.steps > 0 {
            self.resume();
        }
    }

    fn rate(&self, tokens_per_step: usize) -> Option<f64> {
        let tokens = (self.steps * tokens_per_step) as f64;
        (self.steps > 0).then(|| tokens / self.spent.as_secs_f64())
    }
}

/// Losses as they become known: in memory, in the file, on the bar.
struct Log {
    losses: Vec<f64>,
    file: BufWriter<File>,
    path: PathBuf,
    bar: ProgressBar,
    label: String,
    last_read: Instant,
    line_every: usize,
}

impl Log {
    fn begin(
        trainer: &Trainer,
        losses: Vec<f64>,
        pace: &Pace,
        out: &Path,
        label: &str,
    ) -> Outcome<Self> {
        fs::create_dir_all(out)?;
        let path = out.join("losses.jsonl");
        let file = BufWriter::new(File::create(&path)?);
        let style = "{prefix} {bar:30} {pos}/{len} {eta} {msg}";
        let bar = ProgressBar::new(pace.stop_at as u64)
            .with_style(ProgressStyle::with_template(style)?)
            .with_prefix(label.to_owned())
            .with_position(trainer.step as u64);
        // The first steps also compile and tune kernels: show at once that work began.
        bar.tick();
        let mut log = Self {
            losses: Vec::new(),
            file,
            path,
            bar,
            label: label.to_owned(),
            last_read: Instant::now(),
            line_every: (pace.stop_at / LINES).max(1),
        };
        for loss in losses {
            log.push(trainer, loss)?;
        }
        Ok(log)
    }

    /// Reads the losses of the steps just done, and so waits for the device.
    fn read(&mut self, trainer: &Trainer, pending: Vec<Tensor<1>>) -> Outcome<()> {
        let count = pending.len();
        let losses: Vec<f32> = Tensor::cat(pending, 0).try_into_vec_as()?;
        let tokens = (count * trainer.settings.tokens_per_step()) as f64;
        let rate = tokens / self.last_read.elapsed().as_secs_f64();
        self.last_read = Instant::now();
        for loss in losses {
            self.push(trainer, f64::from(loss))?;
        }
        self.file.flush()?;
        let step = self.losses.len();
        let loss = self.losses[step - 1];
        let state = format!(
            "loss {loss:.4}, learning rate {:.1e}, {rate:.0} tokens/s",
            trainer.rate(step - 1)
        );
        self.bar.set_position(step as u64);
        self.bar.set_message(state.clone());
        if step / self.line_every > (step - count) / self.line_every {
            let label = &self.label;
            self.bar
                .suspend(|| println!("{label}: step {step:>5}, {state}"));
        }
        Ok(())
    }

    fn push(&mut self, trainer: &Trainer, loss: f64) -> Outcome<()> {
        let step = self.losses.len();
        if !loss.is_finite() {
            return Err(format!("the loss of step {} is {loss}", step + 1).into());
        }
        let line = json!({ "step": step + 1, "loss": loss, "lr": trainer.rate(step) });
        let written = writeln!(self.file, "{line}");
        written.map_err(|error| format!("{}: {error}", self.path.display()))?;
        self.losses.push(loss);
        Ok(())
    }
}
