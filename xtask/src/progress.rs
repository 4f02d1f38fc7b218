//! Running a command as a named step: on a terminal a bar with the time elapsed and left, plain lines
//! elsewhere.

mod cargo;

use std::io::{self, BufRead, BufReader, IsTerminal, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::Result;

/// Runs `command` as the step `name` and shows what it prints.
///
/// # Errors
/// When it cannot be started or fails; the message holds the command line.
pub fn run(name: &str, command: impl Into<Command>) -> Result<()> {
    let mut command = command.into();
    let line = shown(&command);
    let step = Step::start(name);
    command.stdin(Stdio::null());
    let status = if step.bar.is_some() {
        colored(&mut command);
        // One pipe for both streams keeps their lines in order.
        let (reader, writer) = io::pipe()?;
        command.stdout(writer.try_clone()?).stderr(writer);
        let mut child = command
            .spawn()
            .map_err(|error| format!("{line}: {error}"))?;
        // It holds the writing ends, and the pipe ends when they are closed.
        drop(command);
        step.relay(reader)?;
        child.wait()?
    } else {
        command
            .status()
            .map_err(|error| format!("{line}: {error}"))?
    };
    step.end(status, &line)
}

/// Runs `command` as the step `name`, shows its errors and returns its standard output.
///
/// # Errors
/// As [`run`].
pub fn capture(name: &str, command: impl Into<Command>) -> Result<String> {
    let mut command = command.into();
    let line = shown(&command);
    let step = Step::start(name);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    if step.bar.is_some() {
        colored(&mut command);
        command.stderr(Stdio::piped());
    }
    let mut child = command
        .spawn()
        .map_err(|error| format!("{line}: {error}"))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let mut captured = Vec::new();
    // Both at a time: a child that fills one pipe while the other is read waits for ever.
    thread::scope(|scope| {
        let errors = err.map(|err| scope.spawn(|| step.relay(err)));
        out.map_or(Ok(0), |mut out| out.read_to_end(&mut captured))?;
        errors
            .map_or(Ok(Ok(())), |errors| errors.join())
            .map_err(|_| io::Error::other("a reader panicked"))?
    })?;
    step.end(child.wait()?, &line)?;
    Ok(String::from_utf8_lossy(&captured).into_owned())
}

/// Behind a pipe cargo would think that nobody sees colors, or how many crates are done.
fn colored(command: &mut Command) {
    if std::env::var_os("NO_COLOR").is_none() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    command
        .env("CARGO_TERM_PROGRESS_WHEN", "always")
        .env("CARGO_TERM_PROGRESS_WIDTH", "100");
}

/// A step in progress; its line disappears when it is dropped.
pub struct Step {
    name: String,
    started: Instant,
    bar: Option<ProgressBar>,
}

impl Step {
    /// Shows that the step `name` has begun.
    pub fn start(name: &str) -> Self {
        let bar = io::stdout().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout())
                .with_style(style(UNCOUNTED))
                .with_prefix(name.to_owned());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if bar.is_none() {
            println!("==> {name}");
        }
        Self {
            name: name.to_owned(),
            started: Instant::now(),
            bar,
        }
    }

    /// Says what the step is busy with.
    pub fn busy(&self, with: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(with.to_owned()),
            None => println!("    {with}"),
        }
    }

    /// Says that `done` of `all` parts are done, and what the step is busy with; off a terminal
    /// nothing, since a line for each part would bury the others.
    pub fn at(&self, done: u64, all: u64, with: &str) {
        let Some(bar) = &self.bar else { return };
        if bar.length() != Some(all) {
            bar.set_length(all);
            bar.set_style(style(COUNTED));
            // The time left is reckoned from here on: another count has another pace.
            bar.reset_eta();
        }
        bar.set_position(done);
        bar.set_message(with.to_owned());
    }

    /// Shows `line` and keeps it.
    pub fn keep(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => println!("{line}"),
        }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Whether there is a bar.
    pub fn is_drawn(&self) -> bool {
        self.bar.is_some()
    }

    /// Ends the step with a line that says how long it took.
    pub fn done(self) {
        let name = self.name.clone();
        println!("==> {name}: done in {}", self.stop());
    }

    /// Ends the step without a line and returns how long it took.
    fn stop(self) -> String {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        seconds(self.started.elapsed())
    }

    fn end(self, status: ExitStatus, line: &str) -> Result<()> {
        if status.success() {
            self.done();
            return Ok(());
        }
        let name = self.name.clone();
        let took = self.stop();
        Err(format!("{name} failed after {took}: {status}\n  {line}").into())
    }

    /// Shows the lines of `stream` above the bar until it ends, but for what cargo says of its
    /// progress, which moves the bar.
    fn relay(&self, stream: impl Read) -> io::Result<()> {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while read_line(&mut reader, &mut line)? {
            let text = String::from_utf8_lossy(&line);
            match (&self.bar, cargo::status(&text)) {
                (Some(_), Some(cargo::Status::Crates { done, all, busy })) => {
                    self.at(done, all, &busy);
                }
                (Some(_), Some(cargo::Status::Crate)) => {}
                (_, None) if text.trim().is_empty() => {}
                _ => self.keep(text.trim_end()),
            }
            line.clear();
        }
        Ok(())
    }
}

/// Without a count the step has no end in sight.
const UNCOUNTED: &str = "{spinner} {prefix} [{elapsed}] {wide_msg}";
const COUNTED: &str = "{spinner} {prefix} [{elapsed}, {eta} left] {pos}/{len} {wide_msg}";

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}

/// Appends what comes before the next line feed or carriage return, with which cargo redraws its
/// progress; false at the end.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    loop {
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            return Ok(!line.is_empty());
        }
        let end = buffer.iter().position(|byte| b"\r\n".contains(byte));
        line.extend_from_slice(&buffer[..end.unwrap_or(buffer.len())]);
        let used = end.map_or(buffer.len(), |end| end + 1);
        reader.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A command line to show or to copy, with the variables that were set for it.
fn shown(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        let (name, value) = (name.display(), value?.display());
        Some(format!("{name}={value}"))
    });
    let words = [command.get_program()]
        .into_iter()
        .chain(command.get_args());
    let words = words.map(|word| {
        let word = word.to_string_lossy().into_owned();
        let plain = !word.is_empty() && !word.contains([' ', '\'', '"', '*', '$']);
        if plain { word } else { format!("{word:?}") }
    });
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

/// A duration as a person reads it.
pub fn seconds(took: Duration) -> String {
    match took.as_secs() {
        0..60 => format!("{:.1} s", took.as_secs_f64()),
        whole => format!("{} min {} s", whole / 60, whole % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_is_an_error_that_names_it() {
        let mut command = Command::new("sh");
        command.args(["-c", "exit 3"]).env("FLASH_RUNTIME", "wgpu");
        let error = run("failing", command).unwrap_err().to_string();
        assert!(error.contains("failing failed"), "{error}");
        assert!(
            error.contains("FLASH_RUNTIME=wgpu sh -c \"exit 3\""),
            "{error}"
        );
    }

    #[test]
    fn only_standard_output_is_captured() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; echo three"]);
        let captured = capture("printing", command).unwrap();
        assert_eq!(captured, "one\nthree\n");
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let error = run("missing", Command::new("no-such-program-here")).unwrap_err();
        assert!(error.to_string().contains("no-such-program-here"));
    }

    #[test]
    fn lines_end_where_cargo_redraws_its_progress() {
        let mut reader = BufReader::with_capacity(4, "one\rtwo\nthree".as_bytes());
        let mut lines = Vec::new();
        let mut line = Vec::new();
        while read_line(&mut reader, &mut line).unwrap() {
            lines.push(String::from_utf8(std::mem::take(&mut line)).unwrap());
        }
        assert_eq!(lines, ["one", "two", "three"]);
    }

    #[test]
    fn durations_read_well() {
        assert_eq!(seconds(Duration::from_millis(1250)), "1.2 s");
        assert_eq!(seconds(Duration::from_secs(125)), "2 min 5 s");
    }
}
