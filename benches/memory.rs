//! Peak device memory of a training step beside Burn's own attention; see `benches/README.md`.

// Each benchmark uses its part of the common code. Cargo sets cfg(test) for one even without a
// harness, and the compiler then drops the unit tests.
#[allow(dead_code, unused_imports)]
mod common;

use std::fs::File;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Map, Value, json};

use common::device::{Runtime, Target};
use common::grid::{Case, Series};
use common::memory_args::MemoryArgs;
use common::memory_report::{Entry, earlier, json_line, panel, render, verdict};
use common::oracle::Agreement;
use common::outcome::{Outcome, Status};
use common::plot::{self, Vertical};
use common::run::{origin, without_panic};
use common::step;
use common::worker::{Silence, Worker, serve};

fn main() -> ExitCode {
    let args = MemoryArgs::parse();
    let result = match args.worker {
        Some(series) => work(series, &args),
        None => run(&args),
    };
    result.unwrap_or_else(|message| {
        eprintln!("{message}");
        ExitCode::from(2)
    })
}

/// The child's side: `series` on each case that it is told.
fn work(series: Series, args: &MemoryArgs) -> Result<ExitCode, String> {
    let target = Target::open(Runtime::from_environment()?);
    let cases = args.cases();
    serve(|position| answer(&target, series, &cases[position], args.layers));
    Ok(ExitCode::SUCCESS)
}

/// One step.
fn answer(target: &Target, series: Series, case: &Case, layers: usize) -> Map<String, Value> {
    let footprint = match without_panic(|| step::measure(target, series, case, layers)) {
        Ok(footprint) => footprint,
        Err(fault) => {
            let outcome = Outcome::without_time(Status::of_fault(&fault), fault);
            return outcome.to_json();
        }
    };
    let outcome = Outcome {
        status: match footprint.verdict.agreement {
            Agreement::Agrees => Status::Ok,
            Agreement::Inaccurate => Status::Inaccurate,
            Agreement::Wrong => Status::Wrong,
        },
        timing: None,
        reserved: Some(footprint.peak.reserved),
        path: footprint.path,
        verdict: Some(footprint.verdict),
        detail: None,
    };
    let mut object = outcome.to_json();
    object.insert("in_use_bytes".into(), json!(footprint.peak.in_use));
    object.insert("step_seconds".into(), json!(footprint.seconds));
    let before = footprint.before;
    object.insert("reserved_bytes_before".into(), json!(before.reserved));
    object.insert("in_use_bytes_before".into(), json!(before.in_use));
    object
}

/// Runs one step in a child of its own, so that no other step's pools or faults matter.
fn step_in_child(series: Series, case: &Case, position: usize, limit: Duration) -> Entry {
    let result = match Worker::start(series.name()) {
        Ok(mut worker) => worker.run(position, limit),
        Err(error) => Err(Silence::Ended(error.to_string())),
    };
    let entry = match result {
        Ok(value) => Entry::from_json(series, case.seqlen, &value),
        Err(Silence::Ended(how)) => Err(how),
        Err(Silence::Timeout(limit)) => {
            let detail = format!("stopped after {:.0} s", limit.as_secs_f64());
            let outcome = Outcome::without_time(Status::NotFinished, detail);
            return without_step(series, case, outcome);
        }
    };
    entry.unwrap_or_else(|how| {
        let outcome = Outcome::without_time(Status::Crashed, how);
        without_step(series, case, outcome)
    })
}

fn without_step(series: Series, case: &Case, outcome: Outcome) -> Entry {
    Entry {
        series,
        seqlen: case.seqlen,
        outcome,
        in_use: None,
        seconds: None,
    }
}

fn run(args: &MemoryArgs) -> Result<ExitCode, String> {
    let start = Instant::now();
    let runtime = Runtime::from_environment()?;
    // This process allocates nothing on the device while a child is measured.
    let origin = origin("memory", runtime, &Target::open(runtime));
    println!("{} ({}), {}", origin.device, origin.runtime, origin.date);
    println!("{}\n", origin.command);
    let mut entries = Vec::new();
    for path in &args.earlier {
        let named = |error: String| format!("--with {}: {error}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
        entries.extend(earlier(args, &origin, &text).map_err(named)?);
    }
    let mut lines = args.out.as_ref().map(File::create).transpose();
    let lines = lines.as_mut().map_err(|error| format!("--out: {error}"))?;
    let cases = args.cases();
    for &series in &args.series {
        for (position, case) in cases.iter().enumerate() {
            let left = args.budget.map(|it| it.saturating_sub(start.elapsed()));
            let limit = left.map_or(args.limit, |left| left.min(args.limit));
            let entry = if limit.is_zero() {
                let outcome = Outcome::without_time(Status::Skipped, "the budget is spent");
                without_step(series, case, outcome)
            } else {
                step_in_child(series, case, position, limit)
            };
            if let Some(file) = lines.as_mut() {
                let line = json_line(&origin, args, &entry);
                writeln!(file, "{line}").map_err(|error| format!("--out: {error}"))?;
            }
            eprintln!(
                "[{:.0} s] N={} {}: {}",
                start.elapsed().as_secs_f64(),
                case.seqlen,
                series.name(),
                entry.mib().map_or_else(
                    || entry.outcome.status.name().to_owned(),
                    |it| format!("{it:.0} MiB")
                )
            );
            entries.retain(|it| (it.series, it.seqlen) != (series, case.seqlen));
            entries.push(entry);
        }
    }
    print!("{}", render(&entries));
    if let Some(path) = &args.plot {
        let title = format!(
            "Memory of a training step, {} ({})",
            origin.device, origin.runtime
        );
        let setting = format!(
            "{} layers, batch {}, heads {}, d={}",
            args.layers, args.batch, args.heads, args.head_dim
        );
        let panels = [panel(&entries, &format!("{} {setting}", args.dtype.name()))];
        plot::write(path, &title, Vertical::MEMORY, &panels)
            .map_err(|error| format!("--plot: {error}"))?;
    }
    let mut own = entries.iter().filter(|it| it.series.is_own());
    let failed = own.any(|it| !it.outcome.status.is_acceptable());
    Ok(if failed || verdict(&entries).0 == Some(false) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
