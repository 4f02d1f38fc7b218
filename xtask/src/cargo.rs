//! The cargo command lines that several tasks share.

use clap::ValueEnum;
use xshell::{Cmd, Shell, cmd};

/// The package that owns tests/, benches/ and examples/.
pub const SUITE: &str = "flash-suite";

/// Everything that has tests. All tasks that build burn select these or only [`SUITE`], which
/// enables the same features of every dependency, so that none is compiled twice.
pub const TESTED: [&str; 4] = [
    "flash-reference",
    "flash-kernels",
    "burn-flash-attention",
    SUITE,
];

/// The stand-in under vendor/: not ours to format, lint or document.
pub const VENDORED: &str = "cubecl-llvm";

/// What the kernels are compiled for and run by.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Runtime {
    /// WebGPU's shading language, on any GPU and on a CPU through a software Vulkan driver.
    Wgpu,
    /// SPIR-V on a Vulkan GPU.
    Vulkan,
    /// CUDA C++ on an NVIDIA GPU.
    Cuda,
}

impl Runtime {
    /// All of them, the one that runs everywhere first.
    pub const ALL: [Self; 3] = [Self::Wgpu, Self::Vulkan, Self::Cuda];

    /// Its name in `FLASH_RUNTIME` and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Cuda => "cuda",
        }
    }

    /// The features that compile it in; `wgpu` is the default feature, and adding `vulkan` makes
    /// every wgpu device a SPIR-V one, so the two cannot share a build.
    pub fn features(self) -> &'static [&'static str] {
        match self {
            Self::Wgpu => &[],
            Self::Vulkan => &["--features", "flash-suite/vulkan"],
            Self::Cuda => &["--features", "flash-suite/cuda"],
        }
    }
}

/// `cargo test` of every package that has tests, on `runtime`; filters and flags are up to the
/// caller.
pub fn test(sh: &Shell, runtime: Runtime) -> Cmd<'_> {
    let packages = TESTED.iter().flat_map(|package| ["-p", package]);
    let features = runtime.features();
    cmd!(sh, "cargo test {packages...} {features...}").env("FLASH_RUNTIME", runtime.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_invocation_selects_every_tested_package() {
        let sh = Shell::new().unwrap();
        let line = test(&sh, Runtime::Cuda).to_string();
        assert_eq!(
            line,
            "cargo test -p flash-reference -p flash-kernels -p burn-flash-attention \
             -p flash-suite --features flash-suite/cuda"
        );
        assert!(!test(&sh, Runtime::Wgpu).to_string().contains("--features"));
    }

    #[test]
    fn runtime_names_are_those_of_the_command_line() {
        for runtime in Runtime::ALL {
            assert_eq!(Runtime::from_str(runtime.name(), false), Ok(runtime));
        }
    }
}
