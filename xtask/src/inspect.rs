//! `cargo xtask inspect`: what the kernels compile to, without a GPU.

use clap::Args;
use xshell::{Shell, cmd};

use crate::cargo::SUITE;
use crate::{Result, progress, setup};

/// What to look at.
#[derive(Args, Default)]
pub struct Options {
    /// Passed on to the `inspect` binary.
    #[arg(last = true)]
    args: Vec<String>,
}

/// Compiles every plan for CUDA, WGSL and SPIR-V and prints a table of what came out.
///
/// # Errors
/// When the tools cannot be installed, or the `inspect` binary finds something wrong.
pub fn run(sh: &Shell, options: &Options) -> Result<()> {
    let tools = setup::codegen_tools(sh)?;
    let args = &options.args;
    // NVRTC opens a second library by name, and looks nowhere else for it.
    let library_path = format!("{}/lib", tools.display());
    let inspect = cmd!(
        sh,
        "cargo run -p {SUITE} --bin inspect -- --cuda-tools {tools} {args...}"
    )
    .env("LD_LIBRARY_PATH", library_path);
    progress::run("inspect", inspect)
}
