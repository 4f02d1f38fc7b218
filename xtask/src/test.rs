//! `cargo xtask test`: the tests, on one runtime or on all.

use clap::{Args, ValueEnum};
use xshell::Shell;

use crate::cargo::{self, Runtime};
use crate::harness::{self, Binary};
use crate::{Result, progress, setup};

/// Burn tunes its own products for minutes; tests want their results alone. And where a backtrace of
/// panics is asked for, CubeCL would take one of each of its errors too, of which a kernel that is built
/// has thousands.
const VARIABLES: [(&str, &str); 2] = [
    ("CUBECL_AUTOTUNE_LEVEL", "minimal"),
    ("RUST_LIB_BACKTRACE", "0"),
];

/// What to test.
#[derive(Args)]
pub struct Options {
    /// What the kernels run on.
    #[arg(long, value_enum, default_value_t = Selection::Wgpu)]
    runtime: Selection,
    /// More features of the suite, as `exhaustive` or `ndarray`.
    #[arg(long, value_delimiter = ',')]
    features: Vec<String>,
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

/// Returns the device's description, or that no test was asked for it.
fn test(sh: &Shell, runtime: Runtime, options: &Options) -> Result<String> {
    setup::for_tests(sh, runtime)?;
    let build = cargo::test(sh, runtime, &options.features).args([
        "--no-run",
        "--message-format",
        "json-render-diagnostics",
    ]);
    let messages = progress::capture(&format!("build the tests for {}", runtime.name()), build)?;
    let binaries = binaries(&messages)?;
    let variables: Vec<_> = [("FLASH_RUNTIME", runtime.name())]
        .into_iter()
        .chain(VARIABLES)
        .collect();
    let run = harness::Options {
        filter: options.filter.as_deref(),
        args: &options.args,
        variables: &variables,
    };
    let tally = harness::run(&format!("tests on {}", runtime.name()), &binaries, &run)?;
    println!("{}", tally.summary());
    let times = sh.current_dir().join("target/test-times.tsv");
    sh.write_file(&times, tally.times())?;
    println!("the times of all: {}", times.display());
    if !tally.is_ok() {
        return Err(format!("tests on {} failed", runtime.name()).into());
    }
    if options.filter.is_none() {
        let examples = cargo::doctest(sh, runtime, &options.features);
        progress::run("examples of the documentation", examples)?;
    }
    match (tally.printed(described), &options.filter) {
        (Some(device), _) => Ok(device.to_owned()),
        (None, Some(filter)) => Ok(format!("{}, tests `{filter}` only", runtime.name())),
        (None, None) => Err("the test runtime::describe printed no line `runtime: ..`".into()),
    }
}

/// The test binaries in cargo's messages.
fn binaries(messages: &str) -> Result<Vec<Binary>> {
    let built = cargo::executables(messages)?;
    let tests = built.into_iter().filter(|built| built.is_test);
    let binaries: Vec<_> = tests
        .map(|built| Binary {
            name: built.name,
            path: built.path,
            directory: built.directory,
        })
        .collect();
    match binaries.is_empty() {
        true => Err("cargo named no test binary".into()),
        false => Ok(binaries),
    }
}

/// What the test `runtime::describe` says after `runtime: `; the line may begin with other words.
fn described(line: &str) -> Option<&str> {
    let (_, device) = line.split_once("runtime: ")?;
    Some(device.trim())
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
        let line = "test runtime::describe ... runtime: wgpu (WGSL) on llvmpipe";
        assert_eq!(described(line), Some("wgpu (WGSL) on llvmpipe"));
    }

    #[test]
    fn no_description_is_not_taken_for_one() {
        assert_eq!(described("test runtime::describe ... ok"), None);
    }

    #[test]
    fn all_means_every_runtime() {
        assert_eq!(Selection::All.runtimes(), Runtime::ALL);
        assert_eq!(list(&[]), "none");
    }
}
