//! Python's package installer, for files that are published on PyPI and nowhere else.

use xshell::{Cmd, Shell, cmd};

use super::system::{self, Packages};
use crate::Result;

const PACKAGES: Packages = Packages {
    apt: &["python3", "python3-pip"],
    dnf: &["python3", "python3-pip"],
    pacman: &["python", "python-pip"],
};

/// Sees to it that there is a `python3` with `pip`.
///
/// # Errors
/// When there is none and it cannot be installed from here.
pub fn ensure(sh: &Shell) -> Result<()> {
    let works = || {
        let version = cmd!(sh, "python3 -m pip --version").quiet();
        version.ignore_stdout().ignore_stderr().run().is_ok()
    };
    if works() {
        return Ok(());
    }
    system::install(sh, &PACKAGES, "python3 with pip")
}

/// `pip install`, without questions, moving bars or advice. The caller adds `--target`: into a
/// directory of its own pip installs also where the system's packages are closed to it (PEP 668).
pub fn install(sh: &Shell) -> Cmd<'_> {
    cmd!(
        sh,
        "python3 -m pip --disable-pip-version-check install --no-input --progress-bar off --no-deps"
    )
    .env("PIP_ROOT_USER_ACTION", "ignore")
}
