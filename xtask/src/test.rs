//! `cargo xtask test`: the tests, on one runtime or on all.

use clap::{Args, ValueEnum};
use xshell::Shell;

use crate::cargo::{self, Runtime};
use crate::{Result, progress, setup};

/// What to test.
#[derive(Args)]
pub struct Options {
    /// What the kernels run on.
    #[arg(long, value_enum, default_value_t = Selection::Wgpu)]
    runtime: Selection,
    /// Run only the tests whose names contain this.
    filter: Option<String>,
    /// Passed on to the test binaries.
    #[arg(last = true)]
    args: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Selection {
    /// WGSL: any GPU, or a CPU through a software Vulkan driver.
    Wgpu,
    /// SPIR-V on a Vulkan GPU.
    Vulkan,
    /// An NVIDIA GPU.
    Cuda,
    /// All three, one after another.
    All,
}

impl Selection {
    fn runtimes(self) -> &'static [Runtime] {
        match self {
            Self::Wgpu => &[Runtime::Wgpu],
            Self::Vulkan => &[Runtime::Vulkan],
            Self::Cuda => &[Runtime::Cuda],
            Self::All => &Runtime::ALL,
        }
    }
}

/// Tests every selected runtime, also after one has failed, and says at the end which ran.
///
/// # Errors
/// When a runtime is missing or any of its tests fails.
pub fn run(sh: &Shell, options: &Options) -> Result<()> {
    let mut ran = Vec::new();
    let mut failed = Vec::new();
    for &runtime in options.runtime.runtimes() {
        match test(sh, runtime, options) {
            Ok(described) => ran.push(described),
            Err(error) => {
                eprintln!("error: {error}");
                failed.push(runtime.name());
            }
        }
    }
    println!("runtimes that ran and passed: {}", list(&ran));
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("failed: {}", failed.join(", ")).into())
}

fn test(sh: &Shell, runtime: Runtime, options: &Options) -> Result<String> {
    setup::for_runtime(sh, runtime)?;
    let (filter, args) = (&options.filter, &options.args);
    let tests = cargo::test(sh, runtime)
        .arg("--no-fail-fast")
        .args(filter)
        .arg("--")
        .args(args)
        // Burn tunes its own products for minutes on a GPU; tests want their results alone.
        .env("CUBECL_AUTOTUNE_LEVEL", "minimal");
    progress::run(&format!("tests on {}", runtime.name()), tests)?;

    let describe = cargo::test(sh, runtime)
        .args(["--quiet", "--test", "attention", "--"])
        .args(["--exact", "runtime::describe", "--nocapture"]);
    let name = format!("device of {}", runtime.name());
    described(&progress::capture(&name, describe)?)
        .ok_or_else(|| "the test runtime::describe printed no line `runtime: ..`".into())
}

/// What the test `runtime::describe` says after `runtime: `; the line may begin with the test
/// runner's own words.
fn described(output: &str) -> Option<String> {
    let line = output.lines().find(|line| line.contains("runtime: "))?;
    let (_, device) = line.split_once("runtime: ")?;
    Some(device.trim().to_owned())
}

fn list(ran: &[String]) -> String {
    match ran {
        [] => "none".to_owned(),
        all => all.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_is_found_after_the_runners_own_words() {
        let output = "running 1 test\n\
                      test runtime::describe ... runtime: wgpu (WGSL) on llvmpipe\nok\n";
        assert_eq!(described(output).unwrap(), "wgpu (WGSL) on llvmpipe");
    }

    #[test]
    fn no_description_is_not_taken_for_one() {
        assert_eq!(described("test runtime::describe ... ok\n"), None);
    }

    #[test]
    fn all_means_every_runtime() {
        assert_eq!(Selection::All.runtimes(), Runtime::ALL);
        assert_eq!(list(&[]), "none");
    }
}
