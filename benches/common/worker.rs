//! One child process per series, which is told a case and answers with its result.
//!
//! Burn's own op autotunes for minutes inside a call that cannot be interrupted, and a kernel
//! that faults poisons its device for the rest of the process. A child can be stopped and
//! replaced. It lives for many cases, so that what it tuned and compiled is reused, and the
//! series of one case run right after one another, on the same warm device.
//!
//! The protocol is lines: the main process writes a position in the list of cases, which both have
//! from the same command line, the child answers [`MARK`] and a JSON object. All other lines of the
//! child go to stderr.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::{Map, Value};

/// What an answer starts with.
const MARK: &str = "@outcome ";

/// Why a child gave no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Silence {
    /// It is still at it.
    Timeout(Duration),
    /// It ended; how, in words.
    Ended(String),
}

/// A running child.
pub struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Worker {
    /// Starts this same program, with the same arguments and `--worker NAME`.
    ///
    /// # Errors
    ///
    /// When the process cannot be started.
    pub fn start(name: &str) -> std::io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .args(["--worker", name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take().expect("stdin is piped");
        let stdout = child.stdout.take().expect("stdout is piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                match line.strip_prefix(MARK) {
                    None => eprintln!("{line}"),
                    Some(answer) => {
                        if sender.send(answer.to_owned()).is_err() {
                            return;
                        }
                    }
                }
            }
        });
        Ok(Self {
            child,
            stdin,
            lines,
        })
    }

    /// The child's answer on the case at `position`.
    ///
    /// # Errors
    ///
    /// When there is none within `limit`, or none that is JSON. The worker is to be dropped then,
    /// which ends the child.
    pub fn run(&mut self, position: usize, limit: Duration) -> Result<Value, Silence> {
        if writeln!(self.stdin, "{position}").is_err() {
            return Err(self.ended());
        }
        match self.lines.recv_timeout(limit) {
            Ok(answer) => {
                let value = serde_json::from_str(&answer);
                value.map_err(|error| Silence::Ended(format!("{error} in {answer}")))
            }
            Err(RecvTimeoutError::Timeout) => Err(Silence::Timeout(limit)),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
        }
    }

    fn ended(&mut self) -> Silence {
        Silence::Ended(match self.child.wait() {
            Ok(status) => format!("the process ended: {status}"),
            Err(error) => error.to_string(),
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The child may be inside a call that never returns, so it is not asked to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child's side: answers each position on stdin with the result of `run`, until stdin ends.
pub fn serve(mut run: impl FnMut(usize) -> Map<String, Value>) {
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let Ok(position) = line.trim().parse() else {
            eprintln!("not a position in the grid: {line}");
            return;
        };
        println!("{MARK}{}", Value::Object(run(position)));
    }
}
