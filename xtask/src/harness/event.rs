//! A line of a test binary's output.

use std::time::Duration;

use serde_json::Value;

/// What a test binary says.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A test began.
    Started(String),
    /// A test ended.
    Ended {
        name: String,
        outcome: Outcome,
        took: Duration,
    },
    /// What a test printed past the harness.
    Printed(String),
}

/// How a test ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Passed,
    /// With what it printed.
    Failed(String),
    /// With the reason that the test gives.
    Ignored(String),
}

impl Event {
    /// The event that `line` tells; none if it only sums up.
    pub fn parse(line: &str) -> Option<Self> {
        let Ok(value) = serde_json::from_str::<Value>(line) else {
            let line = line.trim();
            return (!line.is_empty()).then(|| Self::Printed(line.to_owned()));
        };
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        if value["type"] != "test" {
            return None;
        }
        let outcome = match value["event"].as_str()? {
            "started" => return Some(Self::Started(text("name"))),
            "ok" => Outcome::Passed,
            "failed" => Outcome::Failed(text("stdout") + &text("message")),
            "ignored" => Outcome::Ignored(text("message")),
            // `timeout` says that a test is slow, which the bar says too.
            _ => return None,
        };
        let seconds = value["exec_time"].as_f64().unwrap_or_default();
        Some(Self::Ended {
            name: text("name"),
            outcome,
            took: Duration::from_secs_f64(seconds),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(outcome: Outcome, seconds: f64) -> Option<Event> {
        Some(Event::Ended {
            name: "a::b".to_owned(),
            outcome,
            took: Duration::from_secs_f64(seconds),
        })
    }

    #[test]
    fn the_harness_is_understood() {
        let started = r#"{ "type": "test", "event": "started", "name": "a::b" }"#;
        assert_eq!(
            Event::parse(started),
            Some(Event::Started("a::b".to_owned()))
        );
        let ok = r#"{ "type": "test", "name": "a::b", "event": "ok", "exec_time": 1.5 }"#;
        assert_eq!(Event::parse(ok), ended(Outcome::Passed, 1.5));
        let failed = r#"{ "type": "test", "name": "a::b", "event": "failed", "exec_time": 2, "stdout": "why\n" }"#;
        assert_eq!(
            Event::parse(failed),
            ended(Outcome::Failed("why\n".to_owned()), 2.0)
        );
        let ignored =
            r#"{ "type": "test", "name": "a::b", "event": "ignored", "message": "no card" }"#;
        assert_eq!(
            Event::parse(ignored),
            ended(Outcome::Ignored("no card".to_owned()), 0.0)
        );
    }

    #[test]
    fn sums_are_no_events_and_other_lines_were_printed() {
        let suite = r#"{ "type": "suite", "event": "started", "test_count": 3 }"#;
        assert_eq!(Event::parse(suite), None);
        assert_eq!(Event::parse(""), None);
        let line = "runtime: wgpu on llvmpipe";
        assert_eq!(Event::parse(line), Some(Event::Printed(line.to_owned())));
    }
}
