//! Checkpoints: weights, optimizer state, and what is needed to go on as if nothing had happened.
//! The learning rate and the batches are functions of the step, so the step stands for both.

use std::fs;
use std::path::{Path, PathBuf};

use burn::module::Module;
use serde_json::{Value, json};

use crate::Outcome;
use crate::trainer::Trainer;

/// How many are kept.
const KEPT: usize = 2;

const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const STATE: &str = "state.json";

/// Writes a checkpoint under `out` and removes all but the newest ones.
///
/// # Errors
///
/// If a file cannot be written or removed.
pub fn save(trainer: &Trainer, losses: &[f64], out: &Path) -> Outcome<()> {
    let dir = at(out, trainer.step);
    // Under another name until it is whole, so that an interrupted one is never taken for a whole.
    let unfinished = dir.with_extension("part");
    for old in [&unfinished, &dir] {
        if old.exists() {
            fs::remove_dir_all(old)?;
        }
    }
    fs::create_dir_all(&unfinished)?;
    trainer.model.clone().save_file(unfinished.join(MODEL))?;
    trainer.optimizer.save(unfinished.join(OPTIMIZER))?;
    let state = json!({
        "step": trainer.step,
        "settings": trainer.settings.to_json(),
        "text": identity(trainer),
        "losses": losses,
    });
    fs::write(
        unfinished.join(STATE),
        serde_json::to_string_pretty(&state)?,
    )?;
    fs::rename(&unfinished, &dir)?;
    let steps = list(out)?;
    for &step in &steps[..steps.len().saturating_sub(KEPT)] {
        fs::remove_dir_all(at(out, step))?;
    }
    Ok(())
}

/// Puts a new trainer where the checkpoint of `step` was, and returns the losses until then.
///
/// # Errors
///
/// If the checkpoint cannot be read, or is of another training than the trainer's.
pub fn load(trainer: &mut Trainer, out: &Path, step: usize) -> Outcome<Vec<f64>> {
    let dir = at(out, step);
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", dir.display());
    let state = fs::read_to_string(dir.join(STATE)).map_err(|error| named(&error))?;
    let state: Value = serde_json::from_str(&state)?;
    trainer.settings.expect_same(&state["settings"])?;
    if state["text"] != identity(trainer) {
        return Err(named(&"it was trained on another text; see --text").into());
    }
    let losses: Option<Vec<f64>> = state["losses"]
        .as_array()
        .and_then(|losses| losses.iter().map(Value::as_f64).collect())
        // They were f32, and parsing a decimal may miss an f64 by its last bit.
        .map(|losses: Vec<f64>| losses.iter().map(|&loss| f64::from(loss as f32)).collect());
    let losses = losses
        .filter(|losses| losses.len() == step && state["step"] == step)
        .ok_or_else(|| named(&"losses and step disagree"))?;
    trainer.model = trainer.model.clone().try_load_file(dir.join(MODEL))?;
    // Burn puts the state on its default device first, and where the gradients are when it is used.
    trainer.optimizer = trainer.optimizer.clone().load(dir.join(OPTIMIZER))?;
    trainer.step = step;
    Ok(losses)
}

/// The steps of the checkpoints under `out`, the oldest first.
///
/// # Errors
///
/// If the directory exists and cannot be read.
pub fn list(out: &Path) -> Outcome<Vec<usize>> {
    let dir = out.join("checkpoints");
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let mut steps = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        // Names of another kind are not ours.
        steps.extend(name.to_str().and_then(|name| name.parse::<usize>().ok()));
    }
    steps.sort();
    Ok(steps)
}

/// Removes the checkpoints under `out`: those of an earlier training.
///
/// # Errors
///
/// If one cannot be removed.
pub fn clear(out: &Path) -> Outcome<()> {
    for step in list(out)? {
        fs::remove_dir_all(at(out, step))?;
    }
    Ok(())
}

fn at(out: &Path, step: usize) -> PathBuf {
    out.join("checkpoints").join(format!("{step:07}"))
}

/// What tells the trainer's text from another one.
fn identity(trainer: &Trainer) -> Value {
    let text = trainer.text;
    let numbers = text.train.iter().chain(&text.held_out);
    // FNV-1a.
    let hash = numbers.fold(0xcbf2_9ce4_8422_2325_u64, |hash, &number| {
        (hash ^ number as u64).wrapping_mul(0x0100_0000_01b3)
    });
    json!({ "alphabet": text.alphabet.iter().collect::<String>(), "hash": format!("{hash:016x}") })
}
