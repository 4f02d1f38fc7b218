//! `cargo xtask bundle`: binaries for a GPU machine that has no Rust.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::cargo::SUITE;
use crate::progress::{self, Step};
use crate::{Result, paths};

/// Where the bundle is put, below the root of the repository; git ignores it.
const DIR: &str = ".bundle";
/// The most that one compressed file may have.
const LIMIT: u64 = 60 * 1024 * 1024;
const RUN_SH: &str = include_str!("run.sh");

/// What to pack.
#[derive(Args)]
pub struct Options {
    /// The runtimes to compile in, wgpu besides.
    #[arg(long, value_delimiter = ',', default_value = "cuda,vulkan,persistence")]
    features: Vec<String>,
}

/// One executable to pack.
#[derive(Debug, PartialEq)]
struct Executable {
    name: String,
    path: PathBuf,
}

/// Builds, compresses and lists the bundle.
///
/// # Errors
/// When the build fails, `xz` is missing or a file comes out larger than 60 MB.
pub fn run(sh: &Shell, options: &Options) -> Result<()> {
    if paths::program("xz").is_none() {
        return Err("bundle: xz is missing (Debian package xz-utils)".into());
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
    let executables = executables(&messages)?;
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

fn pack(executables: &[Executable], dir: &Path) -> Result<Vec<(String, u64, u64)>> {
    let step = Step::start("compress");
    let mut sizes = Vec::new();
    for Executable { name, path } in executables {
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

/// The executables of tests, benches and examples in cargo's JSON messages, named by kind, as
/// names are unique within a kind only.
fn executables(messages: &str) -> Result<Vec<Executable>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line)
            .map_err(|error| format!("not a message of cargo: {line}: {error}"))?;
        let target = &message["target"];
        let kind = target["kind"][0].as_str().unwrap_or_default();
        let parts = (message["executable"].as_str(), target["name"].as_str());
        if let (Some(path), Some(name), "test" | "bench" | "example") = (parts.0, parts.1, kind) {
            found.push(Executable {
                name: format!("{kind}-{name}"),
                path: path.into(),
            });
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
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
    fn executables_are_read_from_cargos_messages() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"half"},"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"kind":["test"],"name":"attention"},"executable":"/t/a-1"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"inspect"},"executable":"/t/i"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"kind":["bench"],"name":"forward"},"executable":"/t/f-2"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let expected = [("bench-forward", "/t/f-2"), ("test-attention", "/t/a-1")];
        let expected = expected.map(|(name, path)| Executable {
            name: name.to_owned(),
            path: path.into(),
        });
        assert_eq!(executables(messages).unwrap(), expected);
        assert!(executables("warning: no JSON").is_err());
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
