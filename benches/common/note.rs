//! What is said of a result under the table.

use super::outcome::{Outcome, Status};

/// A launch of fewer seconds is in part the host's work.
const BRIEF: f64 = 1e-4;

/// What is to be said of a result that is not plain.
pub fn note(outcome: &Outcome) -> Option<String> {
    if outcome.status == Status::Ok {
        let brief = outcome.timing.filter(|it| it.median < BRIEF)?;
        let (all, host) = (brief.median * 1e6, brief.queue * 1e6);
        return Some(format!(
            "{all:.1} µs a launch, which the host queues in {host:.1} µs"
        ));
    }
    let mut note = outcome.status.name().to_owned();
    if let Some(verdict) = outcome.verdict {
        note += &format!(
            ", error {:.2e} where {:.2e} is allowed, relative {:.1e}, {} rows checked",
            verdict.error, verdict.tolerance, verdict.relative, verdict.rows
        );
    }
    if let Some(timing) = outcome.timing {
        note += &format!(", {:.4} ms", timing.median * 1e3);
    }
    if let Some(detail) = &outcome.detail {
        // A panic's message can hold a whole kernel, and an allocation that failed comes with
        // everything that lacked it.
        let decides = |line: &&str| Status::of_fault(line) == outcome.status;
        let lacks_memory = matches!(outcome.status, Status::OutOfMemory | Status::TooBig);
        let line = detail.lines().find(|line| lacks_memory && decides(line));
        let detail = line.unwrap_or(detail);
        let line: String = detail.split_whitespace().collect::<Vec<_>>().join(" ");
        note += &format!(": {}", line.chars().take(300).collect::<String>());
    }
    Some(note)
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{Agreement, Verdict};
    use super::super::timing::Timing;
    use super::*;

    /// A right result of `seconds` a launch, queued in 4 µs.
    fn right(seconds: f64) -> Outcome {
        let timing = Timing {
            median: seconds,
            fastest: seconds,
            slowest: seconds,
            launches: 1,
            wait: 0.0,
            queue: 4e-6,
        };
        let verdict = Verdict {
            agreement: Agreement::Agrees,
            error: 0.25,
            tolerance: 0.5,
            relative: 0.01,
            rows: 8,
        };
        Outcome::timed(1.0, timing, verdict, 1500.0)
    }

    #[test]
    fn a_brief_launch_tells_what_the_host_takes() {
        let told = note(&right(24e-6));
        let wanted = "24.0 µs a launch, which the host queues in 4.0 µs";
        assert_eq!(told.as_deref(), Some(wanted));
        assert_eq!(note(&right(240e-6)), None);
    }
}
