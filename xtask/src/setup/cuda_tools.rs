//! NVRTC, ptxas and nvdisasm from NVIDIA's pip packages: CUDA source to machine code without a
//! GPU or a CUDA installation.

use std::fs;
use std::path::{Path, PathBuf};

use xshell::{Shell, cmd};

use super::pip;
use crate::{Result, paths, progress};

/// One release for all that takes part in compiling: NVRTC, the headers it includes and ptxas
/// must agree. The disassembler reads older code too, and 13.2 is the first that PyPI has.
const PACKAGES: [&str; 7] = [
    "nvidia-cuda-nvrtc==13.0.*",
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-nvdisasm==13.2.*",
];
/// What must be in the tree for it to be of use.
const FILES: [&str; 6] = [
    "bin/ptxas",
    "bin/nvdisasm",
    "lib/libnvrtc.so.13",
    "include/cuda_runtime.h",
    "include/crt",
    "include/cccl",
];

/// Installs the tools on the first call; returns the root of their tree.
///
/// # Errors
/// When Python is missing or an installation fails or leaves out a file.
pub fn ensure(sh: &Shell) -> Result<PathBuf> {
    let home = paths::cache()?.join("cuda-tools");
    // Written last and compared whole: an interrupted installation or another release is redone.
    let stamp = home.join("installed.txt");
    let wanted = PACKAGES.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted)
        && let Ok(tree) = complete_tree(&home)
    {
        println!("cuda tools: {}", tree.display());
        return Ok(tree);
    }
    pip::ensure(sh)?;
    sh.remove_path(&stamp)?;
    // pip stays outside: then Debian's python3 does without its package python3-venv.
    let venv = cmd!(sh, "python3 -m venv --clear --without-pip {home}");
    progress::run("virtual environment for the CUDA tools", venv)?;
    let target = site_packages(&home)?;
    let install = pip::install(sh).args(PACKAGES).arg("--target").arg(target);
    progress::run("download the CUDA tools (0.2 GB)", install)?;
    let tree = complete_tree(&home)?;
    fs::write(&stamp, &wanted)?;
    println!("cuda tools: {}", tree.display());
    Ok(tree)
}

/// `lib/python3.*/site-packages` below `home`.
fn site_packages(home: &Path) -> Result<PathBuf> {
    let pythons = fs::read_dir(home.join("lib"))?.flatten();
    let mut found = pythons.map(|python| python.path().join("site-packages"));
    let packages = found.find(|packages| packages.is_dir());
    packages.ok_or_else(|| format!("no site-packages under {}", home.display()).into())
}

/// The CUDA tree of the virtual environment at `home`, if nothing is missing in it.
fn complete_tree(home: &Path) -> Result<PathBuf> {
    let tree = site_packages(home)?.join("nvidia/cu13");
    match FILES.iter().find(|file| !tree.join(file).exists()) {
        None => Ok(tree),
        Some(missing) => Err(format!("{} has no {missing}", tree.display()).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_with_a_file_missing_is_not_complete() {
        let home = std::env::temp_dir().join(format!("xtask-cuda-{}", std::process::id()));
        assert!(complete_tree(&home).is_err());
        let tree = home.join("lib/python3.11/site-packages/nvidia/cu13");
        for file in FILES {
            fs::create_dir_all(tree.join(file)).unwrap();
        }
        assert_eq!(complete_tree(&home).unwrap(), tree);
        fs::remove_dir_all(tree.join(FILES[0])).unwrap();
        let error = complete_tree(&home).unwrap_err().to_string();
        assert!(error.ends_with("has no bin/ptxas"), "{error}");
        fs::remove_dir_all(&home).unwrap();
    }
}
