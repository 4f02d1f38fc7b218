//! `cargo xtask setup`: what builds, tests and inspection need beyond Rust. Every task calls the
//! part it depends on; with everything in place that takes a few file look-ups.

mod cuda_tools;
pub mod pip;
mod spirv_tools;
pub mod system;
mod vulkan;

use std::path::PathBuf;

use clap::Args;
use xshell::{Shell, cmd};

use crate::cargo::Runtime;
use crate::{Result, paths, progress};

/// What to set up.
#[derive(Args)]
pub struct Options {
    /// Also the tools that compile and disassemble CUDA without a GPU (pip, about 0.5 GB).
    #[arg(long)]
    cuda_tools: bool,
}

/// Checks and, where it may, installs what tests on WGPU need; the CUDA tools on request.
///
/// # Errors
/// When something is missing and cannot be installed from here: the message says how to.
pub fn run(sh: &Shell, options: &Options) -> Result<()> {
    for_tests(sh, Runtime::Wgpu)?;
    if options.cuda_tools {
        cuda_tools::ensure(sh)?;
    }
    Ok(())
}

/// What the kernels need to run on `runtime`.
///
/// # Errors
/// When it is missing and cannot be installed from here.
pub fn for_runtime(sh: &Shell, runtime: Runtime) -> Result<()> {
    match runtime {
        Runtime::Wgpu => vulkan::ensure(sh, vulkan::Language::Wgsl),
        Runtime::Vulkan => vulkan::ensure(sh, vulkan::Language::Spirv),
        Runtime::Cuda => cuda_device(),
    }
}

/// What the tests need on `runtime`: its driver, and the tools that some of them start.
///
/// # Errors
/// As [`for_runtime`].
pub fn for_tests(sh: &Shell, runtime: Runtime) -> Result<()> {
    for_runtime(sh, runtime)?;
    for tool in TEST_TOOLS {
        tool.ensure(sh)?;
    }
    Ok(())
}

/// A program that setup brings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tool {
    /// Checks SPIR-V.
    SpirvVal,
}

/// What tests start.
pub const TEST_TOOLS: [Tool; 1] = [Tool::SpirvVal];

impl Tool {
    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::SpirvVal => "spirv-val",
        }
    }

    /// Where it is, below the project's cache directory, once setup has brought it.
    pub fn place(self) -> &'static str {
        match self {
            Self::SpirvVal => spirv_tools::PLACE,
        }
    }

    fn ensure(self, sh: &Shell) -> Result<()> {
        match self {
            Self::SpirvVal => spirv_tools::ensure(sh),
        }
    }
}

/// The tools that look at generated code without a GPU; returns the root of the CUDA tree
/// (`bin`, `lib`, `include`, `nvvm`).
///
/// # Errors
/// When they are missing and cannot be installed from here.
pub fn codegen_tools(sh: &Shell) -> Result<PathBuf> {
    spirv_tools::ensure(sh)?;
    cuda_tools::ensure(sh)
}

/// rustfmt and clippy, which minimal toolchains lack.
///
/// # Errors
/// When one is missing and rustup cannot add it.
pub fn components(sh: &Shell) -> Result<()> {
    let works = |tool: &str| {
        let version = cmd!(sh, "cargo {tool} --version").quiet();
        version.ignore_stdout().ignore_stderr().run().is_ok()
    };
    if works("fmt") && works("clippy") {
        return Ok(());
    }
    let add = cmd!(sh, "rustup component add rustfmt clippy");
    if paths::program("rustup").is_none() {
        return Err("rustfmt or clippy is missing, and so is rustup, which could add it".into());
    }
    progress::run("install rustfmt and clippy", add)
}

fn cuda_device() -> Result<()> {
    // The second is how a Linux under Windows sees the GPU.
    let devices = ["/dev/nvidiactl", "/dev/dxg"];
    let found = devices.iter().any(|path| PathBuf::from(path).exists());
    if found || !cfg!(target_os = "linux") {
        return Ok(());
    }
    Err("cuda: no NVIDIA GPU here (no /dev/nvidiactl); the wgpu runtime needs none".into())
}
