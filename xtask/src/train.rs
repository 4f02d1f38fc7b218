//! `cargo xtask train`: trains a small model on this attention.

use clap::Args;
use xshell::{Shell, cmd};

use crate::cargo::{Runtime, SUITE};
use crate::{Result, progress, setup};

/// Which training.
#[derive(Args)]
pub struct Options {
    /// What the kernels run on.
    #[arg(long, value_enum, default_value_t = Runtime::Wgpu)]
    runtime: Runtime,
    /// Passed on to the example; `-- --help` lists its options. Without any, the small preset is
    /// trained, and its checkpoints are checked.
    #[arg(last = true)]
    args: Vec<String>,
}

/// Minutes on two cores, with a loss to check.
const SMALL: [&str; 5] = [
    "--preset",
    "tiny",
    "--checkpoint-every",
    "140",
    "--check-resume",
];

/// Runs the example `train`.
///
/// # Errors
/// When the runtime is missing, or the training misses its loss.
pub fn run(sh: &Shell, options: &Options) -> Result<()> {
    let runtime = options.runtime;
    setup::for_runtime(sh, runtime)?;
    let features = runtime.features();
    let (small, args) = match options.args.as_slice() {
        [] => (&SMALL[..], &[][..]),
        args => (&[][..], args),
    };
    let train = cmd!(
        sh,
        "cargo run -p {SUITE} --example train {features...} -- {small...} {args...}"
    )
    .env("FLASH_RUNTIME", runtime.name());
    progress::run("train", train)
}
