//! The result of one series on one case, and its JSON form.

use serde_json::{Map, Value, json};

use super::grid::{Case, Series};
use super::oracle::{Agreement, Verdict};
use super::timing::Timing;

/// How a series did on a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Ran, and its output agrees with the specification.
    Ok,
    /// Ran, but its output is outside the tolerance, though close.
    Inaccurate,
    /// Its output is not attention of these inputs; its time means nothing.
    Wrong,
    /// Faster than any device can be; its time means nothing.
    Impossible,
    /// Declined by an error value: the op does not take this case on this device.
    Refused,
    /// The device had no memory left for an allocation.
    OutOfMemory,
    /// Asked for a buffer larger than the device has any.
    TooBig,
    /// Panicked, or the device reported a fault.
    Failed,
    /// The process died.
    Crashed,
    /// Stopped at the time limit.
    NotFinished,
    /// Never started, the budget being spent.
    Skipped,
}

impl Status {
    const ALL: [Self; 11] = [
        Self::Ok,
        Self::Inaccurate,
        Self::Wrong,
        Self::Impossible,
        Self::Refused,
        Self::OutOfMemory,
        Self::TooBig,
        Self::Failed,
        Self::Crashed,
        Self::NotFinished,
        Self::Skipped,
    ];

    /// The name in the table and in the JSON file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Inaccurate => "inaccurate",
            Self::Wrong => "wrong",
            Self::Impossible => "impossible",
            Self::Refused => "refused",
            Self::OutOfMemory => "out of memory",
            Self::TooBig => "buffer too big",
            Self::Failed => "failed",
            Self::Crashed => "crashed",
            Self::NotFinished => "not finished",
            Self::Skipped => "skipped",
        }
    }

    /// What a fault with this message is. CubeCL says `out of device memory allocating N bytes`
    /// and `can't allocate buffer of size: N`; drivers say `out of memory`.
    pub fn of_fault(message: &str) -> Self {
        let message = message.to_lowercase();
        let says = |text: &str| message.contains(text);
        if says("out of device memory") || says("out of memory") || says("outofmemory") {
            Self::OutOfMemory
        } else if says("can't allocate buffer of size") || says("buffertoobig") {
            Self::TooBig
        } else {
            Self::Failed
        }
    }

    /// True if the time counts.
    pub fn counts(self) -> bool {
        matches!(self, Self::Ok | Self::Inaccurate)
    }

    /// True if our own series may end so without failing the benchmark.
    pub fn is_acceptable(self) -> bool {
        matches!(self, Self::Ok | Self::Refused | Self::Skipped)
    }
}

/// The result of one series on one case.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// How it did.
    pub status: Status,
    /// Its time, if it was timed.
    pub timing: Option<Timing>,
    /// Bytes the device's memory pools held for one call, inputs and output included.
    pub reserved: Option<u64>,
    /// What ran: our plan, or nothing for Burn's own op.
    pub path: Option<String>,
    /// The check of the output.
    pub verdict: Option<Verdict>,
    /// The message of a refusal or failure.
    pub detail: Option<String>,
}

impl Outcome {
    /// A result without a time.
    pub fn without_time(status: Status, detail: impl Into<String>) -> Self {
        Self {
            status,
            timing: None,
            reserved: None,
            path: None,
            verdict: None,
            detail: Some(detail.into()),
        }
    }

    /// A wrong output, which was not timed.
    pub fn wrong(verdict: Verdict, path: Option<String>) -> Self {
        Self {
            verdict: Some(verdict),
            path,
            ..Self::without_time(Status::Wrong, "not timed")
        }
    }

    /// A timed result of launches of `work` operations; its status follows from the check of the
    /// output and from `ceiling`, in TFLOP/s.
    pub fn timed(work: f64, timing: Timing, verdict: Verdict, ceiling: f64) -> Self {
        let status = match verdict.agreement {
            Agreement::Wrong => Status::Wrong,
            _ if tflops(work, timing.median) > ceiling => Status::Impossible,
            Agreement::Inaccurate => Status::Inaccurate,
            Agreement::Agrees => Status::Ok,
        };
        Self {
            status,
            timing: Some(timing),
            reserved: None,
            path: None,
            verdict: Some(verdict),
            detail: None,
        }
    }

    /// TFLOP/s for launches of `work` operations, where the time counts.
    pub fn tflops(&self, work: f64) -> Option<f64> {
        let timing = self.timing.filter(|_| self.status.counts())?;
        Some(tflops(work, timing.median))
    }

    /// One JSON object without the case.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("status".into(), json!(self.status.name()));
        if let Some(timing) = self.timing {
            object.insert("ms".into(), json!(timing.median * 1e3));
            object.insert("ms_fastest".into(), json!(timing.fastest * 1e3));
            object.insert("ms_slowest".into(), json!(timing.slowest * 1e3));
            object.insert("launches_per_batch".into(), json!(timing.launches));
            object.insert("ms_idle_wait".into(), json!(timing.wait * 1e3));
            object.insert("ms_to_queue".into(), json!(timing.queue * 1e3));
        }
        if let Some(verdict) = self.verdict {
            let agreement = match verdict.agreement {
                Agreement::Agrees => "agrees",
                Agreement::Inaccurate => "inaccurate",
                Agreement::Wrong => "wrong",
            };
            object.insert("agreement".into(), json!(agreement));
            object.insert("max_error".into(), json!(verdict.error));
            object.insert("tolerance".into(), json!(verdict.tolerance));
            object.insert("relative_error".into(), json!(verdict.relative));
            object.insert("rows_checked".into(), json!(verdict.rows));
        }
        let texts = [("path", &self.path), ("detail", &self.detail)];
        for (key, text) in texts {
            if let Some(text) = text {
                object.insert(key.into(), json!(text));
            }
        }
        if let Some(bytes) = self.reserved {
            object.insert("reserved_bytes".into(), json!(bytes));
        }
        object
    }

    /// Reads [`Outcome::to_json`].
    ///
    /// # Errors
    ///
    /// When `object` has no known status.
    pub fn from_json(object: &Value) -> Result<Self, String> {
        let status = Status::ALL
            .into_iter()
            .find(|status| object["status"] == status.name())
            .ok_or_else(|| format!("no status in {object}"))?;
        // JSON has no NaN: serde_json writes null.
        let float = |key: &str| object[key].as_f64().unwrap_or(f64::NAN);
        let text = |key: &str| object[key].as_str().map(str::to_owned);
        let whole = |key: &str| object[key].as_u64().unwrap_or(0) as usize;
        let timing = object["ms"].is_f64().then(|| Timing {
            median: float("ms") / 1e3,
            fastest: float("ms_fastest") / 1e3,
            slowest: float("ms_slowest") / 1e3,
            launches: whole("launches_per_batch"),
            wait: float("ms_idle_wait") / 1e3,
            queue: float("ms_to_queue") / 1e3,
        });
        let agreement = match object["agreement"].as_str() {
            Some("agrees") => Some(Agreement::Agrees),
            Some("inaccurate") => Some(Agreement::Inaccurate),
            Some(_) => Some(Agreement::Wrong),
            None => None,
        };
        Ok(Self {
            status,
            timing,
            reserved: object["reserved_bytes"].as_u64(),
            path: text("path"),
            verdict: agreement.map(|agreement| Verdict {
                agreement,
                error: float("max_error"),
                tolerance: float("tolerance"),
                relative: float("relative_error"),
                rows: whole("rows_checked"),
            }),
            detail: text("detail"),
        })
    }
}

fn tflops(work: f64, seconds: f64) -> f64 {
    work / seconds / 1e12
}

/// Where and how a run was made; part of every JSON line.
#[derive(Clone, Debug, PartialEq)]
pub struct Origin {
    /// The device's own name.
    pub device: String,
    /// `cuda`, `vulkan` or `wgpu`.
    pub runtime: String,
    /// UTC, ISO 8601.
    pub date: String,
    /// The command line.
    pub command: String,
}

/// The line of the JSON file for one series on one case.
pub fn json_line(origin: &Origin, case: &Case, series: Series, outcome: &Outcome) -> String {
    let work = case.work(series);
    let mut object = json!({
        "pass": case.pass.name(),
        "series": series.name(),
        "dtype": case.dtype.name(),
        "head_dim": case.head_dim,
        "causal": case.causality.name() == "yes",
        "seqlen": case.seqlen,
        "queries": case.queries,
        "batch": case.batch,
        "num_heads": case.num_heads,
        "flops": work,
        "tflops": outcome.tflops(work),
        "device": origin.device,
        "runtime": origin.runtime,
        "date": origin.date,
        "command": origin.command,
    });
    if let Value::Object(fields) = &mut object {
        fields.extend(outcome.to_json());
    }
    object.to_string()
}

#[cfg(test)]
mod tests {
    use super::super::date::iso_date;
    use super::super::grid::{Causality, Dtype, Size};
    use super::*;

    fn case() -> Case {
        Case::new(Size::Papers, Dtype::F16, 128, Causality::Causal, 4096)
    }

    fn timing(median: f64) -> Timing {
        Timing {
            median,
            fastest: median * 0.5,
            slowest: median * 2.0,
            launches: 64,
            wait: 0.25,
            queue: 0.125,
        }
    }

    fn verdict(agreement: Agreement) -> Verdict {
        Verdict {
            agreement,
            error: 0.125,
            tolerance: 0.25,
            relative: 0.5,
            rows: 32,
        }
    }

    #[test]
    fn json_keeps_everything() {
        let mut timed = Outcome::timed(
            case().flops(),
            timing(0.5),
            verdict(Agreement::Agrees),
            1500.0,
        );
        timed.reserved = Some(1 << 40);
        timed.path = Some("Mma".into());
        let refused = Outcome::without_time(Status::Refused, "no f16 here");
        for outcome in [timed, refused] {
            let text = Value::Object(outcome.to_json()).to_string();
            let back = Outcome::from_json(&serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(back, outcome);
        }
        assert!(Outcome::from_json(&json!({})).is_err());
    }

    #[test]
    fn a_fault_of_memory_is_told_from_others() {
        let of = Status::of_fault;
        assert_eq!(
            of("Out of device memory allocating 4 bytes"),
            Status::OutOfMemory
        );
        assert_eq!(of("can't allocate buffer of size: 9"), Status::TooBig);
        assert_eq!(of("an illegal memory access"), Status::Failed);
    }

    #[test]
    fn a_time_counts_only_for_a_right_and_possible_output() {
        let fast = case().flops() / 1.345e15;
        let slow = case().flops() / 0.3e15;
        let status = |seconds, agreement, ceiling| {
            let outcome =
                Outcome::timed(case().flops(), timing(seconds), verdict(agreement), ceiling);
            assert_eq!(
                outcome.tflops(case().flops()).is_some(),
                outcome.status.counts()
            );
            outcome.status
        };
        assert_eq!(status(slow, Agreement::Agrees, 1500.0), Status::Ok);
        assert_eq!(
            status(slow, Agreement::Inaccurate, 1500.0),
            Status::Inaccurate
        );
        assert_eq!(status(fast, Agreement::Agrees, 1000.0), Status::Impossible);
        assert_eq!(status(fast, Agreement::Wrong, 1500.0), Status::Wrong);
    }

    #[test]
    fn a_line_names_the_case_and_the_origin() {
        let origin = Origin {
            device: "D".into(),
            runtime: "cuda".into(),
            date: iso_date(0),
            command: "forward".into(),
        };
        let outcome = Outcome::timed(
            case().flops(),
            timing(0.5),
            verdict(Agreement::Agrees),
            1500.0,
        );
        let line = json_line(&origin, &case(), Series::Burn, &outcome);
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["series"], "burn");
        assert_eq!(value["causal"], true);
        assert_eq!(value["num_heads"], 16);
        assert_eq!(value["tflops"], case().flops() / 0.5 / 1e12);
        assert_eq!(value["device"], "D");
        assert!(!line.contains('\n'));
    }
}
