//! The cargo command lines that several tasks share.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde_json::Value;
use xshell::{Cmd, Shell, cmd};

use crate::Result;

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

/// `cargo test` of every package that has tests, for `runtime` and with more of the suite's
/// `features`.
pub fn test<'a>(sh: &'a Shell, runtime: Runtime, features: &[String]) -> Cmd<'a> {
    let packages = TESTED.iter().flat_map(|package| ["-p", package]);
    selected(cmd!(sh, "cargo test {packages...}"), runtime, features)
}

/// The examples in the documentation of the same packages, compiled with the same features.
pub fn doctest<'a>(sh: &'a Shell, runtime: Runtime, features: &[String]) -> Cmd<'a> {
    test(sh, runtime, features).args(["--doc", "--quiet"])
}

fn selected<'a>(command: Cmd<'a>, runtime: Runtime, features: &[String]) -> Cmd<'a> {
    let more = features
        .iter()
        .flat_map(|feature| ["--features".to_owned(), format!("{SUITE}/{feature}")]);
    command
        .args(runtime.features())
        .args(more)
        .env("FLASH_RUNTIME", runtime.name())
}

/// An executable that cargo has built.
#[derive(Debug, PartialEq)]
pub struct Executable {
    /// Kind of its target: `test`, `bench`, `example`, `bin` or `lib`.
    pub kind: String,
    /// Name of its target; unique within a kind.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its package's directory.
    pub directory: PathBuf,
    /// Whether it was built with the test harness.
    pub is_test: bool,
}

/// The executables in cargo's JSON messages.
///
/// # Errors
/// When a line is no message of cargo's.
pub fn executables(messages: &str) -> Result<Vec<Executable>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line)
            .map_err(|error| format!("not a message of cargo: {line}: {error}"))?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let Some(path) = message["executable"].as_str() else {
            continue;
        };
        let manifest = PathBuf::from(text(&message["manifest_path"]));
        found.push(Executable {
            kind: text(&message["target"]["kind"][0]),
            name: text(&message["target"]["name"]),
            path: path.into(),
            directory: manifest.parent().map(Path::to_owned).unwrap_or_default(),
            is_test: message["profile"]["test"] == true,
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_invocation_selects_every_tested_package() {
        let sh = Shell::new().unwrap();
        let line = test(&sh, Runtime::Cuda, &["exhaustive".to_owned()]).to_string();
        assert_eq!(
            line,
            "cargo test -p flash-reference -p flash-kernels -p burn-flash-attention \
             -p flash-suite --features flash-suite/cuda --features flash-suite/exhaustive"
        );
        let plain = test(&sh, Runtime::Wgpu, &[]).to_string();
        assert!(!plain.contains("--features"), "{plain}");
    }

    #[test]
    fn runtime_names_are_those_of_the_command_line() {
        for runtime in Runtime::ALL {
            assert_eq!(Runtime::from_str(runtime.name(), false), Ok(runtime));
        }
    }

    #[test]
    fn executables_are_read_from_cargos_messages() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"half"},"executable":null}"#,
            "\n",
            r#"{"manifest_path":"/w/Cargo.toml","target":{"kind":["test"],"name":"attention"},"profile":{"test":true},"executable":"/t/a-1"}"#,
            "\n",
            r#"{"manifest_path":"/w/Cargo.toml","target":{"kind":["bench"],"name":"forward"},"profile":{"test":false},"executable":"/t/f-2"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let found = executables(messages).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|x| {
                (
                    x.kind.as_str(),
                    x.name.as_str(),
                    x.path.to_str().unwrap(),
                    x.is_test,
                )
            })
            .collect();
        let expected = [
            ("test", "attention", "/t/a-1", true),
            ("bench", "forward", "/t/f-2", false),
        ];
        assert_eq!(found, expected);
        assert_eq!(executables(messages).unwrap()[0].directory, Path::new("/w"));
        assert!(executables("warning: no JSON").is_err());
    }
}
