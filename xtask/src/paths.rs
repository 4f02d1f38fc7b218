//! Where the repository is, and where downloads go.

use std::env;
use std::path::{Path, PathBuf};

use etcetera::BaseStrategy;

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
    let base = etcetera::choose_base_strategy()?.cache_dir();
    Ok(base.join("burn-flash-attention"))
}

/// The file that running `name` would start, found as a shell finds it.
pub fn program(name: &str) -> Option<PathBuf> {
    which::which(name).ok()
}

/// How many processes can run at a time.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
