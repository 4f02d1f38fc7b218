//! Times the gradient of attention beside Burn's own and PyTorch's; see `benches/README.md`.

// Each benchmark uses its part of the common code. Cargo sets cfg(test) for one even without a
// harness, and the compiler then drops the unit tests.
#[allow(dead_code, unused_imports)]
mod common;

use std::process::ExitCode;

use common::args::Args;
use common::device::Target;
use common::gradient::Subject;
use common::gradient_oracle::{Oracle, repeated};
use common::grid::{Case, Pass, Series};
use common::inputs::{Inputs, Sign};
use common::oracle::{Agreement, worst};
use common::outcome::{Outcome, Status};
use common::run::{self, reserved_for_one_launch};
use common::timing::{Timed, measure};

fn main() -> ExitCode {
    run::main(Pass::Backward, attempt)
}

fn attempt(
    target: &Target,
    inputs: &Inputs,
    series: Series,
    case: &Case,
    args: &Args,
) -> Result<Outcome, String> {
    let mut subject = match Subject::new(
        series,
        case,
        inputs,
        target,
        args.choice.units,
        args.schedule,
    ) {
        Ok(subject) => subject,
        Err(reason) => return Ok(Outcome::without_time(Status::Refused, reason)),
    };
    // The first launch compiles, and autotunes where there is something to tune.
    subject.launch()?;
    subject.wait()?;
    let reserved = reserved_for_one_launch(target, &mut subject, Subject::forget_output)?;
    let oracle = Oracle::new(case, inputs);
    let sparse = oracle.d_out(inputs);
    let compute = |subject: &mut Subject, d_out: &[f32], sign| {
        subject.set_d_out(case, d_out, sign);
        subject.launch_for_check()?;
        subject.output()
    };
    // The specification checks launches whose d_out is nothing but the sampled rows, before and
    // after the timing with opposite signs. What is timed has all of d_out, and the last timed
    // launch must repeat what such a launch gave for the opposite sign.
    let minus = compute(&mut subject, &sparse, Sign::Minus)?;
    let mut verdicts = vec![oracle.judge(&minus, Sign::Minus)?];
    if verdicts[0].agreement == Agreement::Wrong {
        return Ok(Outcome::wrong(verdicts[0], subject.path()));
    }
    let minus = compute(&mut subject, &inputs.d_out, Sign::Minus)?;
    subject.set_d_out(case, &inputs.d_out, Sign::Plus);
    let timing = measure(&mut subject, args.batch)?;
    if series != Series::Delta {
        verdicts.push(repeated(case, &minus, &subject.output()?)?);
    }
    let plus = compute(&mut subject, &sparse, Sign::Plus)?;
    verdicts.push(oracle.judge(&plus, Sign::Plus)?);
    let work = case.work(series);
    let mut outcome = Outcome::timed(work, timing, worst(&verdicts), args.ceiling);
    outcome.reserved = Some(reserved);
    outcome.path = subject.path();
    Ok(outcome)
}
