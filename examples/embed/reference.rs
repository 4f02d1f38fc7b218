//! The recorded embeddings of the built-in sentences, and the comparison with them.

use serde_json::Value;

use crate::Outcome;
use crate::embedder::Embedded;

/// The largest cosine distance to the recorded embedding that passes. Half precision stays below
/// 1e-4; a padding mask that is not applied gives 0.4, a sentence cut in the wrong place 0.05.
pub const ALLOWED: f64 = 1e-3;

/// `tests/fixtures/minilm/PROVENANCE.md` says where the values come from.
const RECORDED: &str = include_str!("../../tests/fixtures/minilm/reference.json");

/// The built-in sentences and what an independent implementation makes of them.
pub struct Reference {
    /// The sentences, of 3 to more than 256 tokens.
    pub sentences: Vec<String>,
    token_ids: Vec<Vec<u32>>,
    vectors: Vec<Vec<f32>>,
}

/// How far embeddings are from the recorded ones.
pub struct Comparison {
    /// The largest cosine distance; NaN if any was.
    pub largest: f64,
    /// The sentence it belongs to.
    pub worst: usize,
}

impl Reference {
    /// Parses the recorded values.
    ///
    /// # Errors
    ///
    /// If the file that was compiled in is not of the expected form.
    pub fn load() -> Outcome<Self> {
        let json: Value = serde_json::from_str(RECORDED)?;
        let mut reference = Self {
            sentences: Vec::new(),
            token_ids: Vec::new(),
            vectors: Vec::new(),
        };
        for entry in json["sentences"].as_array().into_iter().flatten() {
            let text = entry["text"].as_str().ok_or("reference.json: no text")?;
            reference.sentences.push(text.to_owned());
            let ids = serde_json::from_value(entry["token_ids"].clone())?;
            reference.token_ids.push(ids);
            let vector = serde_json::from_value(entry["embedding"].clone())?;
            reference.vectors.push(vector);
        }
        if reference.sentences.is_empty() {
            return Err("reference.json holds no sentences".into());
        }
        Ok(reference)
    }

    /// Compares the embeddings of [`Self::sentences`] with the recorded ones.
    ///
    /// # Errors
    ///
    /// If the tokenizer gave other tokens, a vector has another size or is not of length 1.
    pub fn compare(&self, embedded: &Embedded) -> Outcome<Comparison> {
        let count = self.sentences.len();
        if embedded.vectors.len() != count {
            return Err(format!("{} embeddings, {count} recorded", embedded.vectors.len()).into());
        }
        let mut comparison = Comparison {
            largest: 0.0,
            worst: 0,
        };
        for index in 0..count {
            let (ours, recorded) = (&embedded.vectors[index], &self.vectors[index]);
            let sentence = index + 1;
            if embedded.token_ids[index] != self.token_ids[index] {
                return Err(format!(
                    "tokens of built-in sentence {sentence} differ from the recorded ones"
                )
                .into());
            }
            if ours.len() != recorded.len() {
                return Err(format!("{} values, {} recorded", ours.len(), recorded.len()).into());
            }
            let length = dot(ours, ours).sqrt();
            if (length - 1.0).abs() > ALLOWED {
                return Err(format!(
                    "embedding of built-in sentence {sentence} has length {length}"
                )
                .into());
            }
            // The absolute value gives NaN a positive sign, and `total_cmp` puts that above all.
            let distance = (1.0 - cosine(ours, recorded)).abs();
            if distance.total_cmp(&comparison.largest).is_gt() {
                comparison.largest = distance;
                comparison.worst = index;
            }
        }
        Ok(comparison)
    }
}

/// The cosine of the angle between two vectors, in f64.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
    products.sum()
}
