//! One kernel, from its problem to what is wrong with its code.

use std::{fs, panic::catch_unwind, path::Path};

use flash_kernels::{
    Plan,
    codegen::{self, Source, Target},
    select::widest,
};

use super::{
    cases::{Case, target_name},
    cuda::{self, Toolchain},
    expect::{EXPECTATIONS, Subject},
    measure::{Measure, Measures},
    options::Options,
    spirv::{self, SpirvVal},
    wgsl,
};

/// What was found out about a kernel.
#[derive(Debug)]
pub struct Report {
    /// Which.
    pub case: Case,
    /// What it was generated from, where there is a plan.
    pub plan: Option<Plan>,
    /// What was measured; nothing where it does not compile.
    pub measures: Measures,
    /// What is wrong with it.
    pub failures: Vec<String>,
}

impl Report {
    /// Everything about one kernel.
    pub fn on(case: &Case, tools: &Tools, directory: &Path) -> Self {
        let mut report = Self {
            case: *case,
            plan: None,
            measures: Measures::new(),
            failures: Vec::new(),
        };
        let plan = match case.ask.plan(&case.machine.class) {
            Ok(plan) => plan,
            Err(error) => {
                report.failures.push(format!("no plan: {error}"));
                return report;
            }
        };
        report.plan = Some(plan);
        // Code generation panics on what a language has no word for.
        let measured = catch_unwind(|| measure(case, &plan, tools, directory));
        match measured.unwrap_or_else(|_| Err("code generation panicked".to_owned())) {
            Ok(measures) => report.measures = measures,
            Err(error) => report.failures.push(error),
        }
        if let Some(subject) = report.subject() {
            let all = EXPECTATIONS.iter();
            let violations: Vec<_> = all.filter_map(|x| x.violation(&subject)).collect();
            report.failures.extend(violations);
        }
        report
    }

    /// The kernel as expectations see it, if there is one.
    pub fn subject(&self) -> Option<Subject<'_>> {
        let plan = self.plan.as_ref().filter(|_| !self.measures.is_empty())?;
        Some(Subject {
            target: self.case.machine.target,
            plan,
            measures: &self.measures,
        })
    }
}

/// What compiles and validates, as far as the kernels asked for need it.
pub struct Tools {
    cuda: Option<Toolchain>,
    spirv: Option<SpirvVal>,
}

impl Tools {
    /// Finds the tools; files go to `directory`.
    ///
    /// # Errors
    ///
    /// When one is missing.
    pub fn open(options: &Options, cases: &[Case], directory: &Path) -> Result<Self, String> {
        let needs = |target| cases.iter().any(|case| case.machine.target == target);
        let cuda = match (&options.cuda_tools, needs(Target::Cuda)) {
            (_, false) => None,
            (Some(tools), true) => Some(Toolchain::open(tools, directory)?),
            (None, true) => {
                return Err("CUDA kernels need --cuda-tools; see --help".to_owned());
            }
        };
        let spirv = match needs(Target::Spirv) {
            true => Some(SpirvVal::find()?),
            false => None,
        };
        Ok(Self { cuda, spirv })
    }
}

/// Generates, compiles or validates, and counts: the plan's kernel, and the one that merges its parts.
fn measure(case: &Case, plan: &Plan, tools: &Tools, directory: &Path) -> Result<Measures, String> {
    let (target, dtype) = (case.machine.target, case.ask.dtype);
    let at =
        |source: &Source, name: &str| measure_of(case, source, plan, tools, &directory.join(name));
    let name = case.file_name();
    let mut measures = at(&codegen::kernel(target, plan, dtype)?, &name)?;
    if plan.is_split() {
        let width = widest(case.ask.val_dim, 4);
        let source = codegen::combine(target, plan.isa, dtype, width)?;
        let merge = at(&source, &format!("{name}-merge"))?;
        let same = [
            (Measure::Registers, Measure::MergeRegisters),
            (Measure::SpillBytes, Measure::MergeSpillBytes),
            (Measure::Buffers, Measure::MergeBuffers),
        ];
        let named = same
            .iter()
            .filter_map(|(from, to)| Some((*to, *merge.get(from)?)));
        measures.extend(named);
    }
    Ok(measures)
}

/// Compiles or validates a kernel of `plan`, whose files are called `stem`, and counts.
fn measure_of(
    case: &Case,
    source: &Source,
    plan: &Plan,
    tools: &Tools,
    stem: &Path,
) -> Result<Measures, String> {
    let target = case.machine.target;
    let (end, bytes) = match target {
        Target::Cuda => ("cu", source.text.clone().into_bytes()),
        Target::Wgsl => ("wgsl", source.text.clone().into_bytes()),
        Target::Spirv => ("spv", spirv::bytes(&source.words)),
    };
    let file = stem.with_extension(end);
    fs::write(&file, bytes).map_err(|e| format!("{}: {e}", file.display()))?;
    let missing = || format!("no tool for {}", target_name(target));
    match target {
        Target::Cuda => of_cuda(case, source, tools.cuda.as_ref().ok_or_else(missing)?, stem),
        Target::Wgsl => of_wgsl(case, source, plan),
        Target::Spirv => of_spirv(source, tools.spirv.as_ref().ok_or_else(missing)?),
    }
}

fn of_cuda(
    case: &Case,
    source: &Source,
    tools: &Toolchain,
    stem: &Path,
) -> Result<Measures, String> {
    let name = stem.file_name().unwrap_or_default().to_string_lossy();
    let machine = tools.compile(&source.text, case.machine.name, &name)?;
    Ok(Measures::from([
        (Measure::Registers, machine.registers),
        (Measure::SpillBytes, machine.spill_bytes),
        (Measure::StackBytes, machine.stack_bytes),
        (Measure::SharedBytes, cuda::shared_bytes(&source.text)?),
        (Measure::MatrixProducts, machine.count(&["HMMA"])),
        (Measure::WarpgroupProducts, machine.count(&["HGMMA"])),
        (Measure::WalkedProducts, machine.count_in_walk(&["HGMMA"])),
        (Measure::Serializations, machine.serializations),
        (Measure::AddressMoves, machine.count_in_walk(&["R2UR"])),
        (Measure::LateExponentials, machine.count_late(&["MUFU"])),
        (Measure::MatrixLoads, machine.count(&["LDSM"])),
        (Measure::AsyncCopies, machine.count(&["LDGSTS"])),
        (Measure::BoxCopies, machine.count(&["UTMALDG"])),
        (Measure::Elementary, machine.count(&["MUFU"])),
        (Measure::MultiplyAdds, machine.count(&["FFMA"])),
        (Measure::LocalAccesses, machine.count(&["LDL", "STL"])),
        (
            Measure::LoopedLocalAccesses,
            machine.count_in_loops(&["LDL", "STL"]),
        ),
        (Measure::Instructions, machine.instructions()),
    ]))
}

fn of_wgsl(case: &Case, source: &Source, plan: &Plan) -> Result<Measures, String> {
    let shader = wgsl::validate(&source.text, &case.machine.class, plan)?;
    Ok(Measures::from([
        (Measure::SharedBytes, shader.shared_bytes),
        (Measure::Threads, shader.threads),
        (Measure::Buffers, shader.buffers),
        (Measure::Barriers, shader.barriers),
        (Measure::Instructions, source.text.lines().count()),
    ]))
}

fn of_spirv(source: &Source, validator: &SpirvVal) -> Result<Measures, String> {
    use spirv::op;
    let words = &source.words;
    validator.validate(words)?;
    Ok(Measures::from([
        (Measure::SharedBytes, spirv::shared_bytes(words)?),
        (
            Measure::MatrixProducts,
            spirv::count(words, op::COOP_MUL_ADD),
        ),
        (Measure::MatrixLoads, spirv::count(words, op::COOP_LOAD)),
        (
            Measure::MatrixFunctions,
            spirv::count(words, op::COOP_PER_ELEMENT),
        ),
        (Measure::Barriers, spirv::count(words, op::CONTROL_BARRIER)),
        (Measure::Instructions, words.len()),
    ]))
}
