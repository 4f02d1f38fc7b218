//! `cargo xtask check`: formatting, clippy and documentation.

use xshell::{Shell, cmd};

use crate::cargo::VENDORED;
use crate::{Result, progress, setup};

/// Every backend, so that no line is left out; the same for clippy and rustdoc, so that the
/// second reuses what the first has compiled.
const FEATURES: &str =
    "flash-suite/cuda,flash-suite/vulkan,flash-suite/ndarray,flash-suite/exhaustive";

/// Checks the members of the workspace, the vendored stand-in left out.
///
/// # Errors
/// At the first of the three that finds something.
pub fn run(sh: &Shell) -> Result<()> {
    setup::components(sh)?;
    let selection = ["--workspace", "--exclude", VENDORED, "--features", FEATURES];
    progress::run("formatting", cmd!(sh, "cargo fmt --all --check"))?;
    let clippy = cmd!(sh, "cargo clippy --all-targets --no-deps {selection...}");
    progress::run("clippy", clippy.args(["--", "-D", "warnings"]))?;
    let doc = cmd!(sh, "cargo doc --no-deps {selection...}").env("RUSTDOCFLAGS", "-D warnings");
    progress::run("documentation", doc)
}
