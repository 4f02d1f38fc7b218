//! Times attention forward beside Burn's own op and PyTorch's kernels; see `benches/README.md`.

// Each benchmark uses its part of the common code. Cargo sets cfg(test) for one even without a
// harness, and the compiler then drops the unit tests.
#[allow(dead_code, unused_imports)]
mod common;

use std::process::ExitCode;

use common::args::Args;
use common::device::Target;
use common::grid::{Case, Pass, Series};
use common::inputs::{Inputs, Sign, decode};
use common::oracle::{Agreement, Oracle, worst};
use common::outcome::{Outcome, Status};
use common::run::{self, reserved_for_one_launch};
use common::subject::Subject;
use common::timing::{Timed, measure};

fn main() -> ExitCode {
    run::main(Pass::Forward, attempt)
}

fn attempt(
    target: &Target,
    inputs: &Inputs,
    series: Series,
    case: &Case,
    args: &Args,
) -> Result<Outcome, String> {
    let mut subject = match Subject::new(series, case, inputs, target, args.choice) {
        Ok(subject) => subject,
        Err(reason) => return Ok(Outcome::without_time(Status::Refused, reason)),
    };
    // The first launch compiles, and autotunes where there is something to tune.
    subject.launch()?;
    subject.wait()?;
    let reserved = reserved_for_one_launch(target, &mut subject, Subject::forget_output)?;
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
    verdicts.push(judge(&mut subject, Sign::Minus)?);
    if verdicts[0].agreement == Agreement::Wrong {
        return Ok(Outcome::wrong(verdicts[0], subject.path()));
    }
    let timing = measure(&mut subject, args.batch)?;
    verdicts.push(judge(&mut subject, Sign::Minus)?);
    subject.set_sign(case, inputs, Sign::Plus);
    subject.launch()?;
    verdicts.push(judge(&mut subject, Sign::Plus)?);
    let work = case.work(series);
    let mut outcome = Outcome::timed(work, timing, worst(&verdicts), args.ceiling);
    outcome.reserved = Some(reserved);
    outcome.path = subject.path();
    Ok(outcome)
}
