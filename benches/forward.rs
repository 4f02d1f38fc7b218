//! Times attention forward beside Burn's own op and PyTorch's kernels; see `benches/README.md`.

// Cargo sets cfg(test) for a benchmark even without a harness; the compiler then drops the unit
// tests, which the test binary runs, but not what they use.
#[cfg_attr(test, allow(dead_code, unused_imports))]
mod common;

use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use common::args::{Args, Isolation, Role, USAGE};
use common::device::{Runtime, Target};
use common::grid::{Case, Series};
use common::inputs::{Inputs, Sign, decode};
use common::oracle::{Agreement, Oracle, worst};
use common::outcome::{Origin, Outcome, Status, iso_date, json_line};
use common::peers::Peers;
use common::plot;
use common::subject::Subject;
use common::table::{self, Row};
use common::timing::{Timed, measure};
use common::worker::{Worker, serve};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let result = Args::parse(&words).and_then(|args| match args.role {
        Role::Help => {
            print!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        Role::Worker(series) => {
            let mut bench = Bench::open(Runtime::from_environment()?);
            let cases = args.cases();
            serve(|position| bench.run(series, &cases[position], &args));
            Ok(ExitCode::SUCCESS)
        }
        Role::Main => run_grid(&args),
    });
    result.unwrap_or_else(|message| {
        eprintln!("{message}");
        ExitCode::from(2)
    })
}

/// A device, and the inputs that the last case used.
struct Bench {
    target: Target,
    inputs: Option<Inputs>,
}

impl Bench {
    fn open(runtime: Runtime) -> Self {
        Self {
            target: Target::open(runtime),
            inputs: None,
        }
    }

    /// Checks and times `series` on `case`. Nothing escapes as a panic.
    fn run(&mut self, series: Series, case: &Case, args: &Args) -> Outcome {
        let stale = |inputs: &Inputs| !inputs.serve(case.dtype, case.elements());
        if self.inputs.as_ref().is_none_or(stale) {
            self.inputs = Some(Inputs::new(case.dtype, case.elements()));
        }
        let attempt = AssertUnwindSafe(|| self.attempt(series, case, args));
        catch_unwind(attempt).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            let message = text.unwrap_or("no message");
            Outcome::without_time(Status::Failed, format!("panicked: {message}"))
        })
    }

    fn attempt(&self, series: Series, case: &Case, args: &Args) -> Outcome {
        let Some(inputs) = &self.inputs else {
            return Outcome::without_time(Status::Failed, "no inputs");
        };
        let mut subject = match Subject::new(series, case, inputs, &self.target, args.tile) {
            Ok(subject) => subject,
            Err(reason) => return Outcome::without_time(Status::Refused, reason),
        };
        self.check_and_time(&mut subject, case, inputs, args)
            .unwrap_or_else(|fault| Outcome::without_time(Status::Failed, fault))
    }

    fn check_and_time(
        &self,
        subject: &mut Subject,
        case: &Case,
        inputs: &Inputs,
        args: &Args,
    ) -> Result<Outcome, String> {
        // The first launch compiles, and autotunes where there is something to tune.
        subject.launch()?;
        subject.wait()?;
        let reserved = self.reserved_for_one_launch(subject)?;
        let oracle = Oracle::new(case, inputs);
        let judge = |subject: &mut Subject, sign| {
            let out = decode(case.dtype, &subject.output()?);
            oracle.judge(&out, sign)
        };
        // Before and after the timing a launch with V's sign changed shows that launches run; the
        // last of the timed launches shows that none failed.
        let mut verdicts = Vec::with_capacity(3);
        subject.set_sign(case, inputs, Sign::Minus);
        subject.launch()?;
        verdicts.push(judge(subject, Sign::Minus)?);
        if verdicts[0].agreement == Agreement::Wrong {
            let mut outcome = Outcome::without_time(Status::Wrong, "not timed");
            outcome.verdict = Some(verdicts[0]);
            outcome.path = subject.path();
            return Ok(outcome);
        }
        let timing = measure(subject, args.batch)?;
        verdicts.push(judge(subject, Sign::Minus)?);
        subject.set_sign(case, inputs, Sign::Plus);
        subject.launch()?;
        verdicts.push(judge(subject, Sign::Plus)?);
        let mut outcome = Outcome::timed(case, timing, worst(&verdicts), args.ceiling);
        outcome.reserved = Some(reserved);
        outcome.path = subject.path();
        Ok(outcome)
    }

    /// Bytes in the device's pools after one launch into pools that held the inputs alone. The
    /// output of that launch stays.
    fn reserved_for_one_launch(&self, subject: &mut Subject) -> Result<u64, String> {
        subject.forget_output();
        subject.wait()?;
        let cleanup = self.target.client.memory_cleanup();
        cleanup.map_err(|error| error.to_string())?;
        subject.launch()?;
        subject.wait()?;
        Ok(self.target.reserved_bytes())
    }
}

/// Who runs the cases. There is one, so its size does not matter.
#[allow(clippy::large_enum_variant)]
enum Runner {
    Here(Bench),
    /// A child per series, `None` until its first case and after a case that did not count.
    Children(Vec<(Series, Option<Worker>)>),
}

impl Runner {
    /// Runs the case at `position` for at most `limit`, which only children keep to.
    fn run(&mut self, series: Series, position: usize, args: &Args, limit: Duration) -> Outcome {
        let workers = match self {
            Self::Here(bench) => return bench.run(series, &args.cases()[position], args),
            Self::Children(workers) => workers,
        };
        let Some((_, slot)) = workers.iter_mut().find(|(which, _)| *which == series) else {
            return Outcome::without_time(Status::Skipped, "not asked for");
        };
        let mut worker = match slot.take().map_or_else(|| Worker::start(series), Ok) {
            Ok(worker) => worker,
            Err(error) => return Outcome::without_time(Status::Crashed, error.to_string()),
        };
        let outcome = worker.run(position, limit);
        // A refusal leaves the process as it was; a fault may have poisoned the device.
        if outcome.status.counts() || outcome.status == Status::Refused {
            *slot = Some(worker);
        }
        outcome
    }
}

fn run_grid(args: &Args) -> Result<ExitCode, String> {
    let start = Instant::now();
    let runtime = Runtime::from_environment()?;
    let peers = args.peers.as_ref().map(|path| {
        let text = std::fs::read_to_string(path);
        Peers::parse(&text.map_err(|error| format!("{}: {error}", path.display()))?)
    });
    let peers = peers.transpose()?;
    let mut lines = args.out.as_ref().map(File::create).transpose();
    let lines = lines.as_mut().map_err(|error| format!("--out: {error}"))?;

    let bench = Bench::open(runtime);
    let origin = origin(runtime, &bench.target);
    println!("{} ({}), {}", origin.device, origin.runtime, origin.date);
    println!("{}\n", origin.command);
    let mut runner = match args.isolation {
        Isolation::InProcess => Runner::Here(bench),
        Isolation::Child => Runner::Children(args.series.iter().map(|it| (*it, None)).collect()),
    };

    let cases = args.cases();
    let mut rows = Vec::with_capacity(cases.len());
    for (position, case) in cases.iter().enumerate() {
        let mut outcomes = Vec::with_capacity(args.series.len());
        for &series in &args.series {
            let left = args.budget.map(|it| it.saturating_sub(start.elapsed()));
            let outcome = if left.is_some_and(|left| left.is_zero()) {
                Outcome::without_time(Status::Skipped, "the budget is spent")
            } else {
                let limit = left.map_or(args.limit, |left| left.min(args.limit));
                runner.run(series, position, args, limit)
            };
            if let Some(file) = lines.as_mut() {
                let line = json_line(&origin, case, series, &outcome);
                writeln!(file, "{line}").map_err(|error| format!("--out: {error}"))?;
            }
            report_progress((position + 1, cases.len()), case, series, &outcome, start);
            outcomes.push((series, outcome));
        }
        rows.push(Row {
            case: *case,
            outcomes,
        });
    }

    print!("{}", table::render(&rows, &args.series, peers.as_ref()));
    if let Some(path) = &args.plot {
        let title = format!("Attention forward, {} ({})", origin.device, origin.runtime);
        let panels = table::panels(&rows, &args.series, peers.as_ref());
        plot::write(path, &title, &panels).map_err(|error| format!("--plot: {error}"))?;
    }
    let mut all = rows.iter().flat_map(|row| &row.outcomes);
    let failed = all.any(|(series, it)| series.is_own() && !it.status.is_acceptable());
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn report_progress(
    (number, of): (usize, usize),
    case: &Case,
    series: Series,
    outcome: &Outcome,
    start: Instant,
) {
    let result = match outcome.tflops(case) {
        Some(tflops) => format!("{} TFLOP/s", table::figures(tflops)),
        None => outcome.status.name().to_owned(),
    };
    eprintln!(
        "[{number}/{of}, {:.0} s] {} {}: {result}",
        start.elapsed().as_secs_f64(),
        case.label(),
        series.name()
    );
}

fn origin(runtime: Runtime, target: &Target) -> Origin {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut words = vec![
        format!("FLASH_RUNTIME={}", runtime.name()),
        "forward".into(),
    ];
    words.extend(std::env::args().skip(1).filter(|word| word != "--bench"));
    Origin {
        device: target.name(),
        runtime: runtime.name().into(),
        date: iso_date(now.map_or(0, |time| time.as_secs())),
        command: words.join(" "),
    }
}
