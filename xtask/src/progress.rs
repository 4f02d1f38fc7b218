//! Running a command as a named step: a spinner with the elapsed time on a terminal, plain lines
//! elsewhere.

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

/// Behind a pipe cargo would think that nobody sees colors.
fn colored(command: &mut Command) {
    if std::env::var_os("NO_COLOR").is_none() {
        command.env("CARGO_TERM_COLOR", "always");
    }
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
            let style = ProgressStyle::with_template("{spinner} {prefix} [{elapsed}] {wide_msg}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner());
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout())
                .with_style(style)
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

    /// Shows the lines of `stream` above the spinner until it ends.
    fn relay(&self, stream: impl Read) -> io::Result<()> {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            let text = String::from_utf8_lossy(&line);
            match (&self.bar, cargo_status(&text)) {
                (Some(bar), Some(status)) => bar.set_message(status),
                (Some(bar), None) => bar.println(text.trim_end()),
                (None, _) => println!("{}", text.trim_end()),
            }
            line.clear();
        }
        Ok(())
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The lines by which cargo says which crate it is at: they replace one another on the spinner's
/// line in place of scrolling by in hundreds.
fn cargo_status(line: &str) -> Option<String> {
    const BUSY: [&str; 6] = [
        "Compiling",
        "Checking",
        "Documenting",
        "Downloading",
        "Downloaded",
        "Fresh",
    ];
    let plain = without_escapes(line);
    let plain = plain.trim();
    BUSY.iter()
        .any(|verb| plain.strip_prefix(verb).is_some_and(|x| x.starts_with(' ')))
        .then(|| plain.to_owned())
}

/// `line` without its color codes (`ESC [ .. letter`).
fn without_escapes(line: &str) -> String {
    let mut parts = line.split('\x1b');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| c.is_ascii_alphabetic());
        plain.push_str(end.map_or(part, |end| &part[end + 1..]));
    }
    plain
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
    fn cargo_status_lines_are_recognized_under_their_colors() {
        let colored = "\x1b[1m\x1b[92m   Compiling\x1b[0m burn v0.22.1";
        assert_eq!(cargo_status(colored).unwrap(), "Compiling burn v0.22.1");
        assert_eq!(cargo_status("warning: Compiling is slow"), None);
        assert_eq!(cargo_status("Compilingx y"), None);
    }

    #[test]
    fn durations_read_well() {
        assert_eq!(seconds(Duration::from_millis(1250)), "1.2 s");
        assert_eq!(seconds(Duration::from_secs(125)), "2 min 5 s");
    }
}
