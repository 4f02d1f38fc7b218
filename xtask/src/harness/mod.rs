//! Runs test binaries in as many processes as there are cores and tells how far they are.
//!
//! A process compiles its kernels one after the other, and on a software device compiling is most of
//! the time: in one process all cores but one would wait. The names of the tests are dealt out in
//! pieces, and neighbors, which often share kernels, stay together.

mod event;
mod pieces;
mod tally;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use crate::progress::Step;
use crate::{Result, paths};
use event::Event;
use pieces::Piece;
pub use tally::Tally;

/// A test binary, and where cargo would run it.
#[derive(Clone, Debug, PartialEq)]
pub struct Binary {
    /// Name of the target.
    pub name: String,
    /// The executable.
    pub path: PathBuf,
    /// Its package's directory: tests read files relative to it.
    pub directory: PathBuf,
}

/// Which tests, and how.
pub struct Options<'a> {
    /// Only tests whose names contain this.
    pub filter: Option<&'a str>,
    /// Passed on to the binaries.
    pub args: &'a [String],
    /// Environment of the binaries.
    pub variables: &'a [(&'static str, &'static str)],
}

impl Binary {
    fn command(&self, options: &Options) -> Command {
        let mut command = Command::new(&self.path);
        command
            .current_dir(&self.directory)
            .env("CARGO_MANIFEST_DIR", &self.directory)
            .envs(options.variables.iter().copied())
            .args(options.args)
            .stdin(Stdio::null());
        command
    }

    /// The names of its tests that `options` select.
    fn tests(&self, options: &Options) -> Result<Vec<String>> {
        let mut list = self.command(options);
        list.args(options.filter)
            .args(["--list", "--format", "terse"]);
        let output = list.stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err(format!("{} --list: {}", self.path.display(), output.status).into());
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    }
}

/// What a worker tells: an event, or that the piece at this index has ended, and how.
enum Message {
    Event(Event),
    Ended(usize, String),
}

/// Runs the tests of `binaries` as the step `name`.
///
/// # Errors
/// When a binary cannot be started or lists no tests; failed tests are in the [`Tally`].
pub fn run(name: &str, binaries: &[Binary], options: &Options) -> Result<Tally> {
    let mut queue = Vec::new();
    for binary in binaries {
        let tests = binary.tests(options)?;
        queue.extend(pieces::cut(binary, &tests, paths::cores()));
    }
    // The suite is the last binary, and training, the longest of it, comes last in the alphabet.
    queue.reverse();
    let (last, queue): (Vec<_>, Vec<_>) = queue.into_iter().partition(|piece| piece.alone);
    let all = queue
        .iter()
        .chain(&last)
        .map(|piece| piece.tests.len())
        .sum();
    let step = Step::start(name);
    let mut tally = Tally::of(all);
    run_pieces(queue, paths::cores(), options, &step, &mut tally)?;
    run_pieces(last, 1, options, &step, &mut tally)?;
    step.done();
    Ok(tally)
}

/// Runs `pieces` in `workers` processes at a time.
fn run_pieces(
    pieces: Vec<Piece>,
    workers: usize,
    options: &Options,
    step: &Step,
    tally: &mut Tally,
) -> Result<()> {
    let next = Mutex::new(0..pieces.len());
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..workers.min(pieces.len()) {
            let (next, pieces, sender) = (&next, &pieces, sender.clone());
            scope.spawn(move || {
                while let Some(index) = next.lock().ok().and_then(|mut next| next.next()) {
                    let ended = match run_piece(&pieces[index], options, &sender) {
                        Ok(status) => status,
                        Err(error) => error.to_string(),
                    };
                    // The receiver lives as long as this scope.
                    let _ = sender.send(Message::Ended(index, ended));
                }
            });
        }
        drop(sender);
        loop {
            match receiver.recv_timeout(Duration::from_secs(1)) {
                Ok(Message::Event(event)) => tally.take(event, step),
                Ok(Message::Ended(index, how)) => tally.end(&pieces[index].tests, &how, step),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
            tally.show(step);
        }
    });
    Ok(())
}

/// Runs one piece and sends what its tests do; returns how the process ended.
fn run_piece(piece: &Piece, options: &Options, sender: &Sender<Message>) -> Result<String> {
    let mut command = piece.binary.command(options);
    // Events with a start and a time are JSON's alone, which the harness calls unstable: the variable
    // opens it in the binary, and nothing is compiled with it.
    command
        .args(["--exact", "--format", "json", "--report-time"])
        .args(["-Z", "unstable-options", "--test-threads", "2"])
        .args(&piece.tests)
        .env("RUSTC_BOOTSTRAP", "1")
        .stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let output = child.stdout.take().ok_or("no standard output")?;
    for line in BufReader::new(output).lines() {
        if let Some(event) = Event::parse(&line?) {
            // The receiver lives as long as the workers.
            let _ = sender.send(Message::Event(event));
        }
    }
    Ok(child.wait()?.to_string())
}
