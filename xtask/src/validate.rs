//! `cargo xtask validate`: what CI runs.

use std::time::Instant;

use xshell::{Shell, cmd};

use crate::{Result, check, inspect, newcomer, progress, tidy, user_crates};

type Step = (&'static str, fn(&Shell) -> Result<()>);

const STEPS: [Step; 7] = [
    // First, while nothing has been set up that a newcomer would not have.
    ("newcomer", newcomer::run),
    ("check", check::run),
    ("xtask", own_tests),
    ("tidy", tidy::run),
    ("ndarray", ndarray),
    ("crates", |sh| {
        user_crates::run(sh, &user_crates::Options::default())
    }),
    ("inspect", |sh| {
        inspect::run(sh, &inspect::Options::default())
    }),
];

/// Runs the steps in order and lists how long each took.
///
/// # Errors
/// At the first step that fails; the rest is not run.
pub fn run(sh: &Shell) -> Result<()> {
    run_steps(sh, &STEPS)
}

fn run_steps(sh: &Shell, steps: &[Step]) -> Result<()> {
    let mut summary = Vec::new();
    let mut failure = None;
    for (index, (name, step)) in steps.iter().enumerate() {
        println!("\n[{}/{}] {name}", index + 1, steps.len());
        let started = Instant::now();
        let result = step(sh);
        let took = progress::seconds(started.elapsed());
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        summary.push(format!("  {name:8} {verdict:6} {took}"));
        if let Err(error) = result {
            failure = Some(format!("{name}: {error}"));
            break;
        }
    }
    println!("\n{}", summary.join("\n"));
    failure.map_or(Ok(()), |failure| Err(failure.into()))
}

/// The tests of these tasks, the rules of `tidy` above all: a rule that finds nothing is no rule.
fn own_tests(sh: &Shell) -> Result<()> {
    progress::run("tests of xtask", cmd!(sh, "cargo test -p xtask"))
}

/// Burn's other processor backend, which is not built for everybody.
fn ndarray(sh: &Shell) -> Result<()> {
    let xtask = cmd!(sh, "cargo xtask test --features ndarray ndarray");
    progress::run("tests of NdArray", xtask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failing_step_stops_the_run() {
        let sh = Shell::new().unwrap();
        let steps: [Step; 3] = [
            ("one", |_| Ok(())),
            ("two", |_| Err("no luck".into())),
            ("three", |_| unreachable!("a step after a failed one")),
        ];
        let error = run_steps(&sh, &steps).unwrap_err().to_string();
        assert_eq!(error, "two: no luck");
    }

    #[test]
    fn all_steps_passing_is_a_pass() {
        let sh = Shell::new().unwrap();
        assert!(run_steps(&sh, &[("one", |_| Ok(()))]).is_ok());
    }
}
