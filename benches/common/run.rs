//! Runs the grid: each series on each case, in children or here, and writes the report.

use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::args::Args;
use super::date::iso_date;
use super::device::{Runtime, Target};
use super::grid::{Case, Pass, Series};
use super::inputs::Inputs;
use super::outcome::{Origin, Outcome, Status, json_line};
use super::peers::Peers;
use super::plot::{self, Vertical};
use super::table::{self, Row};
use super::timing::Timed;
use super::worker::{Silence, Worker, serve};

/// Checks and times a series on a case. An error is a fault; a refusal is an outcome.
pub type Attempt = fn(&Target, &Inputs, Series, &Case, &Args) -> Result<Outcome, String>;

/// The `main` of the benchmark of `pass`.
pub fn main(pass: Pass, attempt: Attempt) -> ExitCode {
    let args = Args::read(pass, std::env::args_os()).unwrap_or_else(|error| error.exit());
    let result = match args.worker {
        Some(series) => work(series, &args, attempt),
        None => run_grid(&args, attempt),
    };
    result.unwrap_or_else(|message| {
        eprintln!("{message}");
        ExitCode::from(2)
    })
}

/// The child's side: `series` on each case that it is told.
fn work(series: Series, args: &Args, attempt: Attempt) -> Result<ExitCode, String> {
    let mut bench = Bench::open(Runtime::from_environment()?, attempt);
    let cases = args.cases();
    serve(|position| bench.run(series, &cases[position], args).to_json());
    Ok(ExitCode::SUCCESS)
}

/// A device, and the inputs that the last case used.
struct Bench {
    target: Target,
    inputs: Option<Inputs>,
    attempt: Attempt,
}

impl Bench {
    fn open(runtime: Runtime, attempt: Attempt) -> Self {
        Self {
            target: Target::open(runtime),
            inputs: None,
            attempt,
        }
    }

    /// Checks and times `series` on `case`. Nothing escapes as a panic.
    fn run(&mut self, series: Series, case: &Case, args: &Args) -> Outcome {
        let mine = |inputs: &Inputs| inputs.serve(case.dtype, case.elements());
        let inputs = self.inputs.take().filter(mine);
        let inputs = inputs.unwrap_or_else(|| Inputs::new(case.pass, case.dtype, case.elements()));
        let result = without_panic(|| (self.attempt)(&self.target, &inputs, series, case, args));
        self.inputs = Some(inputs);
        result.unwrap_or_else(|fault| Outcome::without_time(Status::of_fault(&fault), fault))
    }
}

/// What `call` returns, its panic turned into an error.
///
/// # Errors
///
/// That of `call`, or `panicked: ` and the panic's message.
pub fn without_panic<T>(call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panicked: {}", text.unwrap_or("no message")))
    })
}

/// Bytes in the device's pools after one launch into pools that held the inputs alone, once
/// `forget` has dropped the output of the last one. The output of this launch stays.
///
/// # Errors
///
/// The first of a launch, a wait or the device.
pub fn reserved_for_one_launch<S: Timed>(
    target: &Target,
    subject: &mut S,
    forget: impl FnOnce(&mut S),
) -> Result<u64, String> {
    forget(subject);
    subject.wait()?;
    let cleanup = target.client.memory_cleanup();
    cleanup.map_err(|error| error.to_string())?;
    subject.launch()?;
    subject.wait()?;
    Ok(target.reserved_bytes())
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
        let mut worker = match slot.take().map_or_else(|| Worker::start(series.name()), Ok) {
            Ok(worker) => worker,
            Err(error) => return Outcome::without_time(Status::Crashed, error.to_string()),
        };
        let crashed = |detail| Outcome::without_time(Status::Crashed, detail);
        let outcome = match worker.run(position, limit) {
            Ok(answer) => Outcome::from_json(&answer).unwrap_or_else(crashed),
            Err(Silence::Ended(how)) => crashed(how),
            Err(Silence::Timeout(limit)) => Outcome::without_time(
                Status::NotFinished,
                format!("stopped after {:.0} s", limit.as_secs_f64()),
            ),
        };
        // A refusal leaves the process as it was; a fault may have poisoned the device.
        if outcome.status.counts() || outcome.status == Status::Refused {
            *slot = Some(worker);
        }
        outcome
    }
}

fn run_grid(args: &Args, attempt: Attempt) -> Result<ExitCode, String> {
    let start = Instant::now();
    let runtime = Runtime::from_environment()?;
    let peers = args.peers.as_ref().map(|path| {
        let text = std::fs::read_to_string(path);
        Peers::parse(&text.map_err(|error| format!("{}: {error}", path.display()))?)
    });
    let peers = peers.transpose()?;
    let mut lines = args.out.as_ref().map(File::create).transpose();
    let lines = lines.as_mut().map_err(|error| format!("--out: {error}"))?;

    let bench = Bench::open(runtime, attempt);
    let origin = origin(args.pass.name(), runtime, &bench.target);
    println!("{} ({}), {}", origin.device, origin.runtime, origin.date);
    println!("{}\n", origin.command);
    let mut runner = match args.in_process {
        true => Runner::Here(bench),
        false => Runner::Children(args.series.iter().map(|it| (*it, None)).collect()),
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
        let title = format!(
            "Attention {}, {} ({})",
            args.pass.name(),
            origin.device,
            origin.runtime
        );
        let panels = table::panels(&rows, &args.series, peers.as_ref());
        plot::write(path, &title, Vertical::THROUGHPUT, &panels)
            .map_err(|error| format!("--plot: {error}"))?;
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
    let result = match outcome.tflops(case.work(series)) {
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

/// Where and how this run of the benchmark `name` is made.
pub fn origin(name: &str, runtime: Runtime, target: &Target) -> Origin {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut words = vec![format!("FLASH_RUNTIME={}", runtime.name()), name.into()];
    words.extend(std::env::args().skip(1).filter(|word| word != "--bench"));
    Origin {
        device: target.name(),
        runtime: runtime.name().into(),
        date: iso_date(now.map_or(0, |time| time.as_secs())),
        command: words.join(" "),
    }
}
