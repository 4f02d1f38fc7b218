//! `cargo xtask bench`: the benchmarks, in release.

use clap::Args;
use xshell::{Shell, cmd};

use crate::cargo::{Runtime, SUITE};
use crate::{Result, progress, setup};

/// What to measure.
#[derive(Args)]
pub struct Options {
    /// One benchmark (a file of benches/ without its ending); all of them when left out.
    name: Option<String>,
    /// What the kernels run on.
    #[arg(long, value_enum, default_value_t = Runtime::Wgpu)]
    runtime: Runtime,
    /// Passed on to the benchmark.
    #[arg(last = true)]
    args: Vec<String>,
}

/// Runs the benchmarks.
///
/// # Errors
/// When the runtime is missing or a benchmark fails.
pub fn run(sh: &Shell, options: &Options) -> Result<()> {
    let Options {
        name,
        runtime,
        args,
    } = options;
    setup::for_runtime(sh, *runtime)?;
    // The default device may be a processor: the papers' sizes are for those who ask for them.
    let small = (*runtime == Runtime::Wgpu && args.is_empty()).then_some("--small");
    let features = runtime.features();
    // The pattern leaves out binaries and examples, which `cargo bench` would run as well.
    let name = name.as_deref().unwrap_or("*");
    let bench = cmd!(
        sh,
        "cargo bench -p {SUITE} --bench {name} {features...} -- {small...} {args...}"
    )
    .env("FLASH_RUNTIME", runtime.name());
    progress::run(&format!("benchmarks on {}", runtime.name()), bench)
}
