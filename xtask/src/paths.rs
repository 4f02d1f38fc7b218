//! Where the repository is, and where downloads go.

use std::env;
use std::path::{Path, PathBuf};

use crate::Result;

/// The root of the repository.
pub fn root() -> Result<PathBuf> {
    // The value that `cargo run` sets comes first: a target directory may be shared by several
    // clones, and the value compiled in is that of the clone that was built last.
    let manifest = env::var_os("CARGO_MANIFEST_DIR")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    let root = manifest.parent().map(Path::to_path_buf);
    root.ok_or_else(|| format!("{} has no parent directory", manifest.display()).into())
}

/// This project's directory in the user's cache directory; not created here.
pub fn cache() -> Result<PathBuf> {
    let absolute = |name: &str| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let base = absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .or_else(|| absolute("LOCALAPPDATA"))
        .ok_or("no cache directory: set XDG_CACHE_HOME or HOME to an absolute path")?;
    Ok(base.join("burn-flash-attention"))
}

/// The file that running `name` would start, found as a shell finds it.
pub fn program(name: &str) -> Option<PathBuf> {
    let file = format!("{name}{}", env::consts::EXE_SUFFIX);
    env::split_paths(&env::var_os("PATH")?)
        .map(|dir| dir.join(&file))
        .find(|path| path.is_file())
}
