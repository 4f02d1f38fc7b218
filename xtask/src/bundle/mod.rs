//! `cargo xtask bundle`: binaries for a GPU machine that has no Rust.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;
use xshell::{Shell, cmd};

use crate::cargo::{self, Executable, SUITE};
use crate::progress::{self, Step};
use crate::setup::system::{self, Packages};
use crate::{Result, paths};

/// Where the bundle is put, below the root of the repository; git ignores it.
const DIR: &str = ".bundle";
/// The most that one compressed file may have.
const LIMIT: u64 = 60 * 1024 * 1024;
const XZ: Packages = Packages {
    apt: &["xz-utils"],
    dnf: &["xz"],
    pacman: &["xz"],
};
const RUN_SH: &str = include_str!("run.sh");

/// What to pack.
#[derive(Args)]
pub struct Options {
    /// The runtimes to compile in, wgpu besides.
    #[arg(long, value_delimiter = ',', default_value = "cuda,vulkan,persistence")]
    features: Vec<String>,
}

/// Builds, compresses and lists the bundle.
///
/// # Errors
/// When the build fails, `xz` is missing and cannot be installed, or a file comes out larger than 60 MB.
pub fn run(sh: &Shell, options: &Options) -> Result<()> {
    if paths::program("xz").is_none() {
        system::install(sh, &XZ, "xz, which compresses the bundle")?;
    }
    let features = options.features.join(",");
    // One selection of targets, so that dependencies are compiled once. The patterns leave out
    // unit tests of binaries; the profile strips.
    let build = cmd!(
        sh,
        "cargo build -p {SUITE} --profile bundle --features {features}
            --test * --bench * --examples --message-format json-render-diagnostics"
    );
    let messages = progress::capture("build the bundle", build)?;
    let executables = packed(cargo::executables(&messages)?);
    if executables.is_empty() {
        return Err("bundle: cargo named no executable".into());
    }
    let dir = sh.current_dir().join(DIR);
    sh.remove_path(&dir)?;
    fs::create_dir_all(&dir)?;
    let sizes = pack(&executables, &dir)?;
    write_script(&dir.join("run.sh"), &runtimes(&options.features))?;
    report(&sizes)
}

fn pack(executables: &[(String, PathBuf)], dir: &Path) -> Result<Vec<(String, u64, u64)>> {
    let step = Step::start("compress");
    let mut sizes = Vec::new();
    for (name, path) in executables {
        step.busy(name);
        let packed = dir.join(format!("{name}.xz"));
        compress(path, &packed)?;
        sizes.push((
            name.clone(),
            path.metadata()?.len(),
            packed.metadata()?.len(),
        ));
    }
    step.done();
    Ok(sizes)
}

fn compress(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("xz")
        .args(["-6", "--threads=0", "--stdout"])
        .arg(from)
        .stdin(Stdio::null())
        .stdout(File::create(to)?)
        .status()?;
    if status.success() {
        return Ok(());
    }
    Err(format!("xz {}: {status}", from.display()).into())
}

/// The executables of tests, benches and examples, named by kind, as names are unique within a kind
/// only.
fn packed(executables: Vec<Executable>) -> Vec<(String, PathBuf)> {
    let kinds = ["test", "bench", "example"];
    let mut packed: Vec<_> = executables
        .into_iter()
        .filter(|built| kinds.contains(&built.kind.as_str()))
        .map(|built| (format!("{}-{}", built.kind, built.name), built.path))
        .collect();
    packed.sort();
    packed
}

/// What the binaries can run on: with `vulkan` compiled in, wgpu is SPIR-V as well and no runtime
/// of its own.
fn runtimes(features: &[String]) -> String {
    let compiled_in = |name: &&str| features.iter().any(|feature| feature == name);
    let mut names: Vec<_> = ["cuda", "vulkan"].into_iter().filter(compiled_in).collect();
    if !names.contains(&"vulkan") {
        names.push("wgpu");
    }
    names.join(" ")
}

fn write_script(path: &Path, runtimes: &str) -> Result<()> {
    fs::write(path, RUN_SH.replace("@RUNTIMES@", runtimes))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn report(sizes: &[(String, u64, u64)]) -> Result<()> {
    let mb = |bytes: u64| bytes as f64 / (1024.0 * 1024.0);
    println!("{:32} {:>10} {:>10}", DIR, "MB", "MB .xz");
    for (name, plain, packed) in sizes {
        println!("{name:32} {:10.1} {:10.1}", mb(*plain), mb(*packed));
    }
    let total: u64 = sizes.iter().map(|(_, _, packed)| packed).sum();
    println!("{:32} {:>10} {:10.1}", "all", "", mb(total));
    let large: Vec<_> = sizes
        .iter()
        .filter(|(_, _, packed)| *packed > LIMIT)
        .map(|(name, _, _)| name.as_str())
        .collect();
    if large.is_empty() {
        return Ok(());
    }
    Err(format!("over {} MB compressed: {}", mb(LIMIT), large.join(", ")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_named_by_kind() {
        let built = |kind: &str, name: &str| Executable {
            kind: kind.into(),
            name: name.into(),
            path: format!("/t/{name}").into(),
            directory: "/w".into(),
            is_test: kind == "test",
        };
        let all = vec![
            built("test", "attention"),
            built("bin", "inspect"),
            built("bench", "forward"),
        ];
        let expected = [
            ("bench-forward".to_owned(), PathBuf::from("/t/forward")),
            ("test-attention".to_owned(), PathBuf::from("/t/attention")),
        ];
        assert_eq!(packed(all), expected);
    }

    #[test]
    fn vulkan_takes_the_place_of_wgpu() {
        let features = |names: &[&str]| names.iter().map(|&name| name.into()).collect::<Vec<_>>();
        assert_eq!(runtimes(&features(&["cuda", "vulkan"])), "cuda vulkan");
        assert_eq!(runtimes(&features(&["cuda"])), "cuda wgpu");
        assert_eq!(runtimes(&features(&[])), "wgpu");
    }

    #[test]
    fn a_file_over_the_limit_is_an_error() {
        let size = |packed| [("test-attention".to_owned(), 3 * LIMIT, packed)];
        assert!(report(&size(LIMIT)).is_ok());
        let error = report(&size(LIMIT + 1)).unwrap_err().to_string();
        assert!(error.contains("test-attention"), "{error}");
    }
}
