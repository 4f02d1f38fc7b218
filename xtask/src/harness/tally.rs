//! What has run, what runs, and what failed.

use std::time::{Duration, Instant};

use super::event::{Event, Outcome};
use crate::progress::{self, Step};

/// So many of the slowest tests are named at the end.
const SLOWEST: usize = 10;

/// How often a log is told how far the tests are.
const PERIOD: Duration = Duration::from_secs(30);

/// The state of a run.
pub struct Tally {
    all: usize,
    passed: usize,
    failed: Vec<String>,
    ignored: Vec<(String, String)>,
    /// Running tests that said that they assert nothing here, and why.
    skipped: Vec<(String, String)>,
    running: Vec<(String, Instant)>,
    times: Vec<(Duration, String)>,
    printed: Vec<String>,
    told: Instant,
}

impl Tally {
    /// Of a run of `all` tests.
    pub fn of(all: usize) -> Self {
        Self {
            all,
            passed: 0,
            failed: Vec::new(),
            ignored: Vec::new(),
            skipped: Vec::new(),
            running: Vec::new(),
            times: Vec::new(),
            printed: Vec::new(),
            told: Instant::now(),
        }
    }

    fn done(&self) -> usize {
        self.passed + self.failed.len() + self.ignored.len()
    }

    /// Takes in `event`; a failure is shown at once.
    pub fn take(&mut self, event: Event, step: &Step) {
        match event {
            Event::Started(name) => self.running.push((name, Instant::now())),
            Event::Printed(line) => match skipped(&line) {
                Some(skipped) => self.skipped.push(skipped),
                None => self.printed.push(line),
            },
            Event::Ended {
                name,
                outcome,
                took,
            } => {
                self.running.retain(|(running, _)| *running != name);
                let skipped = self
                    .skipped
                    .iter()
                    .position(|(skipped, _)| *skipped == name);
                match (outcome, skipped) {
                    (Outcome::Passed, Some(at)) => self.ignored.push(self.skipped.remove(at)),
                    (Outcome::Passed, None) => self.passed += 1,
                    (Outcome::Ignored(reason), _) => self.ignored.push((name.clone(), reason)),
                    (Outcome::Failed(output), _) => self.fail(name.clone(), &output, step),
                }
                self.times.push((took, name));
            }
        }
    }

    fn fail(&mut self, name: String, output: &str, step: &Step) {
        step.keep(&format!("FAILED {name}\n{}", output.trim_end()));
        self.failed.push(name);
    }

    /// Takes in that the process of `tests` ended: those that did not end before have failed.
    pub fn end(&mut self, tests: &[String], how: &str, step: &Step) {
        for test in tests {
            let ended = self.times.iter().any(|(_, name)| name == test);
            if !ended {
                self.running.retain(|(running, _)| running != test);
                let output = format!("its process ended before it did ({how})");
                self.fail(test.clone(), &output, step);
                self.times.push((Duration::ZERO, test.clone()));
            }
        }
    }

    /// Shows how far the run is, and which of the running tests has run longest.
    pub fn show(&mut self, step: &Step) {
        let longest = self.running.iter().min_by_key(|(_, since)| *since);
        let longest = longest.map_or_else(String::new, |(name, since)| {
            format!("{name} ({})", progress::seconds(since.elapsed()))
        });
        let done = self.done();
        step.at(done as u64, self.all as u64, &longest);
        if !step.is_drawn() && self.told.elapsed() >= PERIOD {
            self.told = Instant::now();
            let elapsed = progress::seconds(step.elapsed());
            println!(
                "    {done} of {} after {elapsed}; longest running: {longest}",
                self.all
            );
        }
    }

    /// Whether tests ran, and none failed.
    pub fn is_ok(&self) -> bool {
        self.failed.is_empty() && self.done() == self.all
    }

    /// The first line printed past the harness that `find` finds something in.
    pub fn printed<'a, T>(&'a self, find: impl Fn(&'a str) -> Option<T>) -> Option<T> {
        self.printed.iter().find_map(|line| find(line))
    }

    /// How many tests were skipped for each reason.
    fn reasons(&self) -> impl Iterator<Item = String> {
        let mut counts = std::collections::BTreeMap::<_, usize>::new();
        for (_, reason) in &self.ignored {
            *counts.entry(reason.clone()).or_default() += 1;
        }
        counts
            .into_iter()
            .map(|(reason, count)| format!("skipped {count}: {reason}"))
    }

    /// All tests with their times in seconds, the slowest first.
    pub fn times(&self) -> String {
        let mut times: Vec<_> = self.times.iter().collect();
        times.sort_by(|a, b| b.cmp(a));
        let lines = times.iter();
        lines
            .map(|(took, name)| format!("{:.3}\t{name}\n", took.as_secs_f64()))
            .collect()
    }

    /// The slowest tests, what was ignored and why, what failed, and the counts.
    pub fn summary(&self) -> String {
        let mut lines = Vec::new();
        let mut times: Vec<_> = self.times.iter().collect();
        times.sort_by(|a, b| b.cmp(a));
        let sum: Duration = times.iter().map(|(took, _)| *took).sum();
        let slowest = &times[..times.len().min(SLOWEST)];
        let part: Duration = slowest.iter().map(|(took, _)| *took).sum();
        lines.push(format!(
            "slowest {} tests, {} of {} in all:",
            slowest.len(),
            progress::seconds(part),
            progress::seconds(sum)
        ));
        let slowest = slowest.iter();
        lines.extend(
            slowest.map(|(took, name)| format!("  {:>10}  {name}", progress::seconds(*took))),
        );
        lines.extend(self.reasons());
        lines.extend(self.failed.iter().map(|name| format!("failed: {name}")));
        lines.push(format!(
            "tests: {} passed, {} failed, {} skipped",
            self.passed,
            self.failed.len(),
            self.ignored.len()
        ));
        lines.join("\n")
    }
}

/// Name and reason in what a test prints that asserts nothing here.
fn skipped(line: &str) -> Option<(String, String)> {
    let (name, reason) = line.strip_prefix("skipped: ")?.split_once(": ")?;
    Some((name.to_owned(), reason.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(name: &str, outcome: Outcome, seconds: u64) -> Event {
        Event::Ended {
            name: name.to_owned(),
            outcome,
            took: Duration::from_secs(seconds),
        }
    }

    #[test]
    fn a_run_is_summed_up() {
        let step = Step::start("testing");
        let mut tally = Tally::of(3);
        tally.take(Event::Started("one".to_owned()), &step);
        tally.take(ended("one", Outcome::Passed, 2), &step);
        tally.take(
            ended("two", Outcome::Ignored("no card".to_owned()), 0),
            &step,
        );
        assert!(!tally.is_ok(), "one has not run");
        tally.take(ended("three", Outcome::Passed, 1), &step);
        assert!(tally.is_ok());
        let summary = tally.summary();
        assert!(summary.contains("2.0 s  one"), "{summary}");
        assert!(summary.contains("skipped 1: no card"), "{summary}");
        assert!(
            summary.ends_with("\ntests: 2 passed, 0 failed, 1 skipped"),
            "{summary}"
        );
    }

    #[test]
    fn a_test_that_asserts_nothing_is_skipped() {
        let step = Step::start("testing");
        let mut tally = Tally::of(2);
        let line = "skipped: a::one: no time".to_owned();
        tally.take(Event::Printed(line), &step);
        tally.take(ended("a::one", Outcome::Passed, 0), &step);
        tally.take(ended("a::two", Outcome::Passed, 0), &step);
        assert!(tally.is_ok());
        let summary = tally.summary();
        assert!(summary.contains("skipped 1: no time"), "{summary}");
        assert!(
            summary.ends_with("tests: 1 passed, 0 failed, 1 skipped"),
            "{summary}"
        );
    }

    #[test]
    fn a_test_whose_process_dies_has_failed() {
        let step = Step::start("testing");
        let mut tally = Tally::of(2);
        tally.take(ended("one", Outcome::Passed, 2), &step);
        tally.take(Event::Started("two".to_owned()), &step);
        tally.end(&["one".to_owned(), "two".to_owned()], "signal 11", &step);
        assert!(!tally.is_ok());
        assert!(tally.summary().contains("failed: two\n"));
    }
}
