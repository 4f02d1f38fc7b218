//! The README's commands on a machine that has nothing of ours: what a newcomer types is what CI
//! runs, and what they lack CI lacks.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use xshell::{Shell, cmd};

use crate::setup::TEST_TOOLS;
use crate::{Result, paths, progress, readme};

/// The commands of the README, in its order.
const COMMANDS: [&str; 3] = ["cargo xtask demo", "cargo xtask test", "cargo xtask train"];

/// Of the environment these are kept: how the registries and the outside are reached, and what CI is.
const KEPT: [&str; 8] = [
    "CI",
    "LANG",
    "TERM",
    "TMPDIR",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
];

/// Prefixes of more such variables.
const KEPT_PREFIXES: [&str; 3] = ["CARGO_HTTP", "CARGO_NET", "PIP_"];

/// Directories of programs that a bare system has.
const SYSTEM: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A home that holds nothing; it is removed when this is dropped.
struct Newcomer {
    home: PathBuf,
    /// The real one, which holds crates that were downloaded. In another place cargo would take all
    /// that is compiled for out of date.
    cargo_home: PathBuf,
    path: String,
    target: PathBuf,
}

/// Runs the README's commands in an empty home.
///
/// # Errors
/// When one of them fails, or a program is on the path that setup should have to bring.
pub fn run(sh: &Shell) -> Result<()> {
    let newcomer = Newcomer::new(sh)?;
    newcomer.must_lack_tools()?;
    let readme = sh.read_file("README.md")?;
    for start in COMMANDS {
        let words = readme::command(&readme, start)?;
        let command = newcomer.command(&words)?;
        progress::run(&format!("in an empty home: {}", words.join(" ")), command)?;
    }
    Ok(())
}

impl Newcomer {
    fn new(sh: &Shell) -> Result<Self> {
        let sysroot = cmd!(sh, "rustc --print sysroot").quiet().read()?;
        let target = cargo_target(sh)?;
        let home = env::temp_dir().join(format!("newcomer-{}", std::process::id()));
        fs::create_dir_all(&home)?;
        let cargo_home = env::var_os("CARGO_HOME").map(PathBuf::from);
        let cargo_home = cargo_home.or_else(|| Some(env::home_dir()?.join(".cargo")));
        Ok(Self {
            path: format!("{sysroot}/bin:{SYSTEM}"),
            home,
            cargo_home: cargo_home.ok_or("no home directory")?,
            target,
        })
    }

    /// A program on the path would hide that setup does not bring it.
    fn must_lack_tools(&self) -> Result<()> {
        for tool in TEST_TOOLS {
            if let Some(found) = self.find(tool.name(), tool.place()) {
                return Err(format!(
                    "{} is there before setup: {}; this check would prove nothing",
                    tool.name(),
                    found.display()
                )
                .into());
            }
        }
        Ok(())
    }

    /// Where the program `name` is, which setup keeps at `place` of the project's cache.
    fn find(&self, name: &str, place: &str) -> Option<PathBuf> {
        let brought = self.cache().join("burn-flash-attention").join(place);
        if brought.is_file() {
            return Some(brought);
        }
        which::which_in(name, Some(&self.path), &self.home).ok()
    }

    fn cache(&self) -> PathBuf {
        self.home.join("cache")
    }

    fn command(&self, words: &[String]) -> Result<Command> {
        let (program, args) = words.split_first().ok_or("an empty command")?;
        let program = which::which_in(program, Some(&self.path), &self.home)?;
        let kept = env::vars_os().filter(|(name, _)| {
            let name = name.to_string_lossy();
            let prefix = KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
            prefix || KEPT.iter().any(|kept| name.eq_ignore_ascii_case(kept))
        });
        let mut command = Command::new(program);
        command
            .args(args)
            .env_clear()
            .envs(kept)
            .env("PATH", &self.path)
            .env("HOME", &self.home)
            .env("CARGO_HOME", &self.cargo_home)
            .env("XDG_CACHE_HOME", self.cache())
            .env("XDG_CONFIG_HOME", self.home.join("config"))
            .env("XDG_DATA_HOME", self.home.join("data"))
            .env("CARGO_TARGET_DIR", &self.target)
            .current_dir(paths::root()?);
        Ok(command)
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        // It lies in the system's folder for what may be lost.
        let _ = fs::remove_dir_all(&self.home);
    }
}

/// Cargo's target directory, as a setting or its default.
fn cargo_target(sh: &Shell) -> Result<PathBuf> {
    let metadata = cmd!(sh, "cargo metadata --no-deps --format-version 1").quiet();
    let metadata: serde_json::Value = serde_json::from_str(&metadata.read()?)?;
    let target = metadata["target_directory"].as_str();
    Ok(target
        .ok_or("cargo metadata names no target directory")?
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The newcomer's home has no tool until setup has brought it: without it in [`TEST_TOOLS`], the
    /// tests that start it find none, also where the real home has one, and fail.
    #[test]
    fn a_tool_that_setup_does_not_bring_is_missing() {
        let sh = Shell::new().unwrap();
        let newcomer = Newcomer::new(&sh).unwrap();
        newcomer.must_lack_tools().unwrap();
        let print = [
            "sh",
            "-c",
            "echo $HOME $XDG_CACHE_HOME $SPIRV_VAL; command -v spirv-val",
        ];
        let mut command = newcomer.command(&print.map(str::to_owned)).unwrap();
        let output = command.output().unwrap();
        assert!(!output.status.success(), "spirv-val is on the path");
        let text = String::from_utf8(output.stdout).unwrap();
        let home = newcomer.home.display();
        assert_eq!(text.trim(), format!("{home} {home}/cache"));

        for tool in TEST_TOOLS {
            let brought = newcomer
                .cache()
                .join("burn-flash-attention")
                .join(tool.place());
            fs::create_dir_all(brought.parent().unwrap()).unwrap();
            fs::write(&brought, "").unwrap();
            assert_eq!(newcomer.find(tool.name(), tool.place()), Some(brought));
            assert!(newcomer.must_lack_tools().is_err());
        }
        let home = newcomer.home.clone();
        drop(newcomer);
        assert!(!home.exists());
    }

    #[test]
    fn every_command_is_in_the_readme() {
        let sh = Shell::new().unwrap();
        let readme = sh
            .read_file(paths::root().unwrap().join("README.md"))
            .unwrap();
        for start in COMMANDS {
            assert!(readme::command(&readme, start).is_ok(), "{start}");
        }
    }
}
