//! Developer tasks of burn-flash-attention: `cargo xtask --help` lists them.

mod bench;
mod bundle;
mod cargo;
mod check;
mod demo;
mod harness;
mod inspect;
mod newcomer;
mod paths;
mod progress;
mod readme;
mod setup;
mod test;
mod tidy;
mod train;
mod user_crates;
mod validate;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xshell::Shell;

/// What a task can fail with: a sentence for the person who ran it.
type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// Developer tasks of burn-flash-attention.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check for what builds and tests need, and install it where that is possible.
    Setup(setup::Options),
    /// Sentence embeddings with all-MiniLM-L6-v2 on this attention.
    Demo(demo::Options),
    /// Train a small GPT on this attention.
    Train(train::Options),
    /// Run the tests on one runtime or on all of them.
    Test(test::Options),
    /// Run the benchmarks.
    Bench(bench::Options),
    /// Formatting, clippy and documentation, warnings denied.
    Check,
    /// The rules of the code that a script can see.
    Tidy,
    /// Registers, spills, shared memory and instruction counts of every plan, without a GPU.
    Inspect(inspect::Options),
    /// Pack test, bench and example binaries for a GPU machine without Rust.
    Bundle(bundle::Options),
    /// Build what the README tells users to write, in crates outside of the workspace, and package
    /// the libraries.
    Crates(user_crates::Options),
    /// What CI runs: the README's commands in an empty home, check, the tests of xtask, tidy, crates,
    /// inspect.
    Validate,
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    let sh = Shell::new()?;
    // Read before the directory changes: paths given as arguments are relative to it.
    let started_in = sh.current_dir();
    sh.change_dir(paths::root()?);
    match task {
        Task::Setup(options) => setup::run(&sh, &options),
        Task::Demo(options) => demo::run(&sh, &options, &started_in),
        Task::Train(options) => train::run(&sh, &options),
        Task::Test(options) => test::run(&sh, &options),
        Task::Bench(options) => bench::run(&sh, &options),
        Task::Check => check::run(&sh),
        Task::Tidy => tidy::run(&sh),
        Task::Inspect(options) => inspect::run(&sh, &options),
        Task::Bundle(options) => bundle::run(&sh, &options),
        Task::Crates(options) => user_crates::run(&sh, &options),
        Task::Validate => validate::run(&sh),
    }
}
