//! What must hold of a kernel, as one table.

use flash_kernels::{CopyKind, Masking, Pass, Plan, Precision, UnitKind, codegen::Target};

use super::{
    counts::{
        addition_moves, functions, loads, products, warpgroup_products, warpgroup_step,
        warpgroup_steps,
    },
    measure::{Measure, Measures},
    wgsl,
};

/// A kernel as the table sees it.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Language.
    pub target: Target,
    /// What it was generated from.
    pub plan: &'a Plan,
    /// What was measured of it.
    pub measures: &'a Measures,
}

/// How a number must compare.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    /// No more than this.
    AtMost(fn(&Plan) -> usize),
    /// This and no less.
    AtLeast(fn(&Plan) -> usize),
    /// This, neither more nor less.
    Exactly(fn(&Plan) -> usize),
}

/// One row: for the kernels it applies to, the measure keeps the bound.
#[derive(Clone, Copy, Debug)]
pub struct Expectation {
    /// What a violation is called.
    pub what: &'static str,
    /// The number it is about.
    pub measure: Measure,
    /// The kernels it applies to.
    pub applies: fn(Target, &Plan) -> bool,
    /// What is demanded.
    pub bound: Bound,
}

use Bound::{AtLeast, AtMost, Exactly};

/// Every expectation.
pub const EXPECTATIONS: &[Expectation] = &[
    row(
        "a unit has 255 registers",
        Measure::Registers,
        is_cuda,
        AtMost(|_| 255),
    ),
    row(
        "next to nothing is spilled",
        Measure::SpillBytes,
        is_main,
        AtMost(|plan| 4 * parked(plan)),
    ),
    row(
        "there is next to no stack",
        Measure::StackBytes,
        is_main,
        AtMost(|plan| 2 * parked(plan)),
    ),
    row(
        "local memory is hardly touched",
        Measure::LocalAccesses,
        is_main,
        AtMost(parked),
    ),
    row(
        "no loop touches local memory",
        Measure::LoopedLocalAccesses,
        is_cuda,
        AtMost(fetched),
    ),
    row(
        "warpgroups spill nothing",
        Measure::SpillBytes,
        is_wgmma,
        AtMost(|_| 0),
    ),
    row(
        "masks and narrow loads spill little",
        Measure::SpillBytes,
        is_edge,
        AtMost(|_| 64),
    ),
    row(
        "tensor cores multiply",
        Measure::MatrixProducts,
        is_mma,
        Exactly(products),
    ),
    row(
        "warpgroups multiply",
        Measure::WarpgroupProducts,
        is_wgmma,
        Exactly(warpgroup_products),
    ),
    row(
        "warpgroups multiply in the walk",
        Measure::WalkedProducts,
        is_wgmma,
        Exactly(|plan| warpgroup_steps(plan) * warpgroup_step(plan)),
    ),
    row(
        "warpgroup products run by themselves",
        Measure::Serializations,
        is_wgmma,
        AtMost(|_| 0),
    ),
    row(
        "addresses of products are computed where they are needed",
        Measure::AddressMoves,
        is_wgmma,
        AtMost(|plan| 4 + addition_moves(plan)),
    ),
    row(
        "exponentials run beside products",
        Measure::LateExponentials,
        overlaps,
        AtMost(|_| 0),
    ),
    row(
        "operands come by ldmatrix",
        Measure::MatrixLoads,
        is_mma,
        Exactly(loads),
    ),
    row(
        "tiles come by cp.async",
        Measure::AsyncCopies,
        is_async,
        AtLeast(|_| 1),
    ),
    row(
        "tiles come by boxes",
        Measure::BoxCopies,
        is_wgmma,
        AtLeast(|_| 3),
    ),
    row(
        "tiles come through registers",
        Measure::AsyncCopies,
        is_vector,
        AtMost(|_| 0),
    ),
    row(
        "exponentials are instructions",
        Measure::Elementary,
        is_cuda,
        AtLeast(|_| 1),
    ),
    row(
        "f32 is multiplied and added at once",
        Measure::MultiplyAdds,
        is_cuda_scalar,
        AtLeast(|_| 1),
    ),
    row(
        "shared memory is what the plan says",
        Measure::SharedBytes,
        always,
        Exactly(Plan::shared_bytes),
    ),
    row(
        "the cube is what the plan says",
        Measure::Threads,
        is_wgsl,
        Exactly(|plan| plan.threads),
    ),
    row(
        "every WebGPU device binds the buffers",
        Measure::Buffers,
        is_wgsl,
        AtMost(|_| wgsl::MOST_BUFFERS),
    ),
    row(
        "barriers are there",
        Measure::Barriers,
        is_portable,
        AtLeast(|_| 1),
    ),
    row(
        "merging parts spills nothing",
        Measure::MergeSpillBytes,
        |target, plan| is_cuda(target, plan) && plan.is_split(),
        AtMost(|_| 0),
    ),
    row(
        "every WebGPU device binds the buffers of a merge",
        Measure::MergeBuffers,
        |target, plan| is_wgsl(target, plan) && plan.is_split(),
        AtMost(|_| wgsl::MOST_BUFFERS),
    ),
    row(
        "cooperative matrices multiply",
        Measure::MatrixProducts,
        is_cmma,
        AtLeast(|_| 1),
    ),
    row(
        "functions change elements where a plan says so, and only there",
        Measure::MatrixFunctions,
        is_spirv,
        Exactly(functions),
    ),
    row(
        "Scalar needs no cooperative matrix",
        Measure::MatrixProducts,
        is_spirv_scalar,
        AtMost(|_| 0),
    ),
];

const fn row(
    what: &'static str,
    measure: Measure,
    applies: fn(Target, &Plan) -> bool,
    bound: Bound,
) -> Expectation {
    Expectation {
        what,
        measure,
        applies,
        bound,
    }
}

fn always(_: Target, _: &Plan) -> bool {
    true
}

fn is_cuda(target: Target, _: &Plan) -> bool {
    target == Target::Cuda
}

/// The kernels that most calls run: no bool mask, rows that a wide copy suits.
fn is_main(target: Target, plan: &Plan) -> bool {
    target == Target::Cuda && plan.masking == Masking::None && plan.copy == CopyKind::Async
}

/// A bool mask leaves some gradients in tf32 short of registers: up to three accesses in a step.
fn fetched(plan: &Plan) -> usize {
    match (plan.precision, plan.pass, plan.masking) {
        (Precision::Tf32, Pass::Dq | Pass::Dkv, Masking::Dense) => 3,
        _ => 0,
    }
}

/// Accesses to local memory that are let pass. Where 32 rows of 128 columns fill the register file,
/// ptxas for sm_80 parks two values before the walk and fetches them after it; that no loop touches
/// local memory is a row of its own. Everywhere else there is none.
fn parked(plan: &Plan) -> usize {
    let full = plan.unit == UnitKind::Mma && plan.rows == 32 && plan.tile.val_pad > 64;
    if full { 4 } else { 0 }
}

fn is_edge(target: Target, plan: &Plan) -> bool {
    target == Target::Cuda && !is_main(target, plan) && !is_wgmma(target, plan)
}

fn is_mma(_: Target, plan: &Plan) -> bool {
    plan.unit == UnitKind::Mma
}

fn is_wgmma(_: Target, plan: &Plan) -> bool {
    plan.unit == UnitKind::Wgmma
}

/// In whose walk other products of the warpgroup run during the exponentials; dkv needs them for the next.
fn overlaps(_: Target, plan: &Plan) -> bool {
    plan.unit == UnitKind::Wgmma && matches!(plan.pass, Pass::Forward | Pass::Dq)
}

fn is_cuda_scalar(target: Target, plan: &Plan) -> bool {
    target == Target::Cuda && plan.unit == UnitKind::Scalar
}

fn is_async(_: Target, plan: &Plan) -> bool {
    plan.copy == CopyKind::Async
}

fn is_vector(target: Target, plan: &Plan) -> bool {
    target == Target::Cuda && plan.copy == CopyKind::Vector
}

fn is_wgsl(target: Target, _: &Plan) -> bool {
    target == Target::Wgsl
}

fn is_portable(target: Target, _: &Plan) -> bool {
    target != Target::Cuda
}

fn is_cmma(_: Target, plan: &Plan) -> bool {
    plan.unit == UnitKind::Cmma
}

fn is_spirv(target: Target, _: &Plan) -> bool {
    target == Target::Spirv
}

fn is_spirv_scalar(target: Target, plan: &Plan) -> bool {
    target == Target::Spirv && plan.unit == UnitKind::Scalar
}

type Compare = fn(&usize, &usize) -> bool;

impl Expectation {
    /// Does it apply to this kernel?
    pub fn applies_to(&self, subject: &Subject) -> bool {
        (self.applies)(subject.target, subject.plan)
    }

    /// Why it does not hold, if it applies and does not.
    pub fn violation(&self, subject: &Subject) -> Option<String> {
        if !self.applies_to(subject) {
            return None;
        }
        let name = self.measure.name(subject.target);
        let Some(&value) = subject.measures.get(&self.measure) else {
            return Some(format!("{}: {name} was not measured", self.what));
        };
        let (holds, words, wanted) = match self.bound {
            AtMost(most) => (usize::le as Compare, "at most ", most),
            AtLeast(least) => (usize::ge as Compare, "at least ", least),
            Exactly(same) => (usize::eq as Compare, "", same),
        };
        let wanted = wanted(subject.plan);
        let violated = !holds(&value, &wanted);
        violated.then(|| format!("{}: {name} is {value}, not {words}{wanted}", self.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases;

    /// A kernel of the table to which `expectation` applies.
    fn kernel(expectation: &Expectation) -> (Target, Plan) {
        let mut kernels = cases::all().into_iter().filter_map(|case| {
            let plan = case.ask.plan(&case.machine.class).ok()?;
            Some((case.machine.target, plan))
        });
        let found = kernels.find(|(target, plan)| (expectation.applies)(*target, plan));
        found.unwrap_or_else(|| panic!("no kernel tests: {}", expectation.what))
    }

    #[test]
    fn every_expectation_applies_somewhere_and_can_fail() {
        for expectation in EXPECTATIONS {
            let (target, plan) = kernel(expectation);
            let violation = |value: Option<usize>| {
                let measures = value.map(|value| (expectation.measure, value));
                expectation.violation(&Subject {
                    target,
                    plan: &plan,
                    measures: &measures.into_iter().collect(),
                })
            };
            let (limit, wrong) = match expectation.bound {
                AtMost(of) | Exactly(of) => (of(&plan), of(&plan) + 1),
                AtLeast(of) => (of(&plan), of(&plan) - 1),
            };
            assert_eq!(violation(Some(limit)), None);
            let said = violation(Some(wrong)).unwrap();
            assert!(said.contains(&wrong.to_string()), "{said}");
            assert!(violation(None).is_some(), "{}", expectation.what);
        }
    }
}
