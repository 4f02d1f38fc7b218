//! What the kernels compile to, without a GPU.
//!
//! Generates a table of kernels, compiles the CUDA ones to machine code, validates WGSL with naga
//! and SPIR-V with `spirv-val`, prints what came out, and fails when an expectation of `expect.rs`
//! does not hold. `cargo xtask inspect` installs the tools and calls this.

mod cases;
mod counts;
mod cuda;
mod expect;
mod measure;
mod nvrtc;
mod options;
mod plans;
mod report;
mod sass;
mod spirv;
mod table;
mod wgsl;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use clap::Parser;
use flash_kernels::codegen::Target;
use indicatif::{ProgressBar, ProgressStyle};

use cases::Case;
use expect::EXPECTATIONS;
use options::Options;
use report::{Report, Tools};

fn main() -> ExitCode {
    inspect(&Options::parse()).unwrap_or_else(|error| {
        eprintln!("inspect: {error}");
        ExitCode::from(2)
    })
}

/// Looks at every kernel that is asked for; a failure when one disappoints.
fn inspect(options: &Options) -> Result<ExitCode, String> {
    let mut cases = cases::all();
    cases.retain(|case| options.wants(case));
    if cases.is_empty() {
        return Err("no kernel is asked for; see --help".to_owned());
    }
    let directory = Directory::of(options)?;
    let tools = Tools::open(options, &cases, &directory.path)?;
    let reports = look_at(&cases, &tools, &directory.path);
    for target in [Target::Cuda, Target::Spirv, Target::Wgsl] {
        let all = reports.iter();
        let own: Vec<_> = all.filter(|x| x.case.machine.target == target).collect();
        if !own.is_empty() {
            println!("{}", table::render(target, &own));
        }
    }
    let mut failures: Vec<_> = reports.iter().flat_map(failures_of).collect();
    let (checks, idle) = applied(&reports);
    if options.wants_all() {
        let idle = idle.iter().map(|what| format!("no kernel tests: {what}"));
        failures.extend(idle);
    }
    for failure in &failures {
        println!("FAILED {failure}");
    }
    println!(
        "{} kernels, {} expectations checked {checks} times, {} failures",
        reports.len(),
        EXPECTATIONS.len() - idle.len(),
        failures.len()
    );
    Ok(match failures.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn failures_of(report: &Report) -> Vec<String> {
    let label = report.case.label();
    let failures = report.failures.iter();
    failures
        .map(|failure| format!("{label}: {failure}"))
        .collect()
}

/// How often an expectation applied to a kernel that compiled, and which never did.
fn applied(reports: &[Report]) -> (usize, Vec<&'static str>) {
    let (mut checks, mut idle) = (0, Vec::new());
    for expectation in EXPECTATIONS {
        let subjects = reports.iter().filter_map(Report::subject);
        match subjects.filter(|x| expectation.applies_to(x)).count() {
            0 => idle.push(expectation.what),
            count => checks += count,
        }
    }
    (checks, idle)
}

/// Where generated files go; removed in the end unless it was asked for.
struct Directory {
    path: PathBuf,
    is_ours: bool,
}

impl Directory {
    fn of(options: &Options) -> Result<Self, String> {
        let name = format!("flash-inspect-{}", std::process::id());
        let path = match &options.keep {
            Some(path) => path.clone(),
            None => std::env::temp_dir().join(name),
        };
        fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let is_ours = options.keep.is_none();
        Ok(Self { path, is_ours })
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.is_ours
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            eprintln!("inspect: {} stays: {error}", self.path.display());
        }
    }
}

/// A report on each case, on as many threads as there are cores.
fn look_at(cases: &[Case], tools: &Tools, directory: &Path) -> Vec<Report> {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed}] {wide_msg}");
    let bar = ProgressBar::new(cases.len() as u64)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(case) = cases.get(at) else {
                return done;
            };
            bar.set_message(case.label());
            done.push((at, Report::on(case, tools, directory)));
            bar.inc(1);
        }
    };
    let cores = thread::available_parallelism().map_or(1, Into::into);
    let mut reports: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let done = workers.into_iter().map(|worker| worker.join());
        done.flat_map(|done| done.expect("a report catches its panics"))
            .collect()
    });
    bar.finish_and_clear();
    reports.sort_by_key(|(at, _)| *at);
    reports.into_iter().map(|(_, report)| report).collect()
}
