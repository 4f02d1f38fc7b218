//! `cargo xtask crates`: what a user of the libraries does, outside of the workspace.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use xshell::{Shell, cmd};

use crate::cargo::Runtime;
use crate::{Result, progress, readme, setup};

/// The libraries that are published.
const LIBRARIES: [&str; 3] = ["flash-reference", "flash-kernels", "burn-flash-attention"];

/// Which versions of dependencies to take.
#[derive(Args, Default)]
pub struct Options {
    /// Let cargo choose the newest versions of all dependencies, as it does for a new crate, in place
    /// of those of this workspace's Cargo.lock.
    #[arg(long)]
    latest: bool,
}

/// A crate outside of the workspace.
struct UserCrate {
    name: &'static str,
    manifest: String,
    main: String,
}

/// Builds and runs a crate with `wgpu`, checks one with `cuda`, and packages the libraries.
///
/// # Errors
/// When the README lacks what such a crate needs, or one of them fails.
pub fn run(sh: &Shell, options: &Options) -> Result<()> {
    setup::for_runtime(sh, Runtime::Wgpu)?;
    let root = sh.current_dir();
    let readme = sh.read_file("README.md")?;
    let workspace = sh.read_file("Cargo.toml")?;
    // Not below the workspace, which cargo would take for theirs.
    let home = std::env::temp_dir().join(format!("flash-users-{}", std::process::id()));
    let result = build(sh, &root, &readme, &workspace, &home, options);
    fs::remove_dir_all(&home)?;
    result?;
    let packages = LIBRARIES.iter().flat_map(|library| ["-p", library]);
    // What is packaged was compiled above; compiled again from the package it would take as long.
    let package = cmd!(sh, "cargo package --no-verify --allow-dirty {packages...}");
    progress::run("package the libraries", package)
}

fn build(
    sh: &Shell,
    root: &Path,
    readme: &str,
    workspace: &str,
    home: &Path,
    options: &Options,
) -> Result<()> {
    let target = root.join("target");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(target, PathBuf::from);
    for (user, verb) in [
        (wgpu(readme, workspace, root)?, "run"),
        (cuda(readme, workspace, root)?, "check"),
    ] {
        let name = user.name;
        let place = user.write(home)?;
        if !options.latest {
            fs::copy(root.join("Cargo.lock"), place.join("Cargo.lock"))?;
        }
        let manifest = place.join("Cargo.toml");
        let cargo = cmd!(sh, "cargo {verb} --manifest-path {manifest}")
            .env("CARGO_TARGET_DIR", &target)
            // The value that is set for this program is the workspace's.
            .env_remove("CARGO_MANIFEST_DIR");
        progress::run(&format!("a user's crate with {name}: {verb}"), cargo)?;
    }
    Ok(())
}

/// The README's example as it stands.
fn wgpu(readme: &str, workspace: &str, root: &Path) -> Result<UserCrate> {
    let dependencies = readme::block(readme, "toml", "burn-flash-attention")?;
    let body = readme::block(readme, "rust", "flash_attention(")?;
    Ok(UserCrate {
        name: "wgpu",
        manifest: manifest("wgpu", &dependencies, "", workspace, root),
        main: main(&body),
    })
}

/// The same for CUDA, with the patch that the README gives.
fn cuda(readme: &str, workspace: &str, root: &Path) -> Result<UserCrate> {
    let dependencies = readme::block(readme, "toml", "burn-flash-attention")?;
    let patch = readme::block(readme, "toml", "[patch.crates-io]")?;
    let body = readme::block(readme, "rust", "flash_attention(")?;
    let body = body.replace("Device::wgpu(DeviceKind::DefaultDevice)", "Device::cuda(0)");
    let body = body.replace("Device, DeviceKind, ", "Device, ");
    Ok(UserCrate {
        name: "cuda",
        manifest: manifest(
            "cuda",
            &dependencies.replace("\"wgpu\"", "\"cuda\""),
            &patch,
            workspace,
            root,
        ),
        main: main(&body),
    })
}

fn manifest(name: &str, dependencies: &str, patch: &str, workspace: &str, root: &Path) -> String {
    let clone = root.display().to_string();
    let filled = |text: &str| text.replace("../burn-flash-attention", &clone);
    let profile = profile(workspace);
    let (dependencies, patch) = (filled(dependencies), filled(patch));
    format!(
        "[package]\nname = \"user-of-{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\n{dependencies}\n{patch}\n{profile}"
    )
}

/// The workspace's profile `dev`: what is compiled with it there need not be compiled again.
fn profile(workspace: &str) -> String {
    workspace
        .split("\n[")
        .filter(|table| table.starts_with("profile.dev"))
        .filter(|table| !table.contains("flash-reference"))
        .map(|table| format!("[{table}\n"))
        .collect()
}

fn main(body: &str) -> String {
    format!("fn main() {{\n{body}\n}}\n")
}

impl UserCrate {
    fn write(&self, home: &Path) -> Result<PathBuf> {
        let place = home.join(self.name);
        fs::create_dir_all(place.join("src"))?;
        fs::write(place.join("Cargo.toml"), &self.manifest)?;
        fs::write(place.join("src/main.rs"), &self.main)?;
        Ok(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths;

    #[test]
    fn crates_are_made_of_the_readme() {
        let root = paths::root().unwrap();
        let text = |name: &str| fs::read_to_string(root.join(name)).unwrap();
        let (readme, workspace) = (text("README.md"), text("Cargo.toml"));
        let clone = root.display().to_string();
        let wgpu = wgpu(&readme, &workspace, &root).unwrap();
        let library = format!("path = \"{clone}/crates/burn-flash-attention\"");
        assert!(wgpu.manifest.contains(&library), "{}", wgpu.manifest);
        assert!(!wgpu.manifest.contains("[patch"), "{}", wgpu.manifest);
        assert!(wgpu.manifest.contains("opt-level"), "{}", wgpu.manifest);
        let cuda = cuda(&readme, &workspace, &root).unwrap();
        assert!(!cuda.manifest.contains("wgpu\"]"), "{}", cuda.manifest);
        let patch = format!("path = \"{clone}/vendor/nvrtc-only-cubecl-llvm\"");
        assert!(cuda.manifest.contains(&patch), "{}", cuda.manifest);
        assert!(cuda.main.contains("Device::cuda(0)"), "{}", cuda.main);
        assert!(!cuda.main.contains("DeviceKind"), "{}", cuda.main);
    }
}
