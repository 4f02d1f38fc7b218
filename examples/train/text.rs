//! The text as character numbers, and the batches cut from it.

use std::collections::BTreeMap;
use std::path::Path;

use flash_reference::rng::Rng;

use crate::Outcome;

/// What is learned without `--text`; `data/README.md` says where it is from.
const DEFAULT: &str = include_str!("data/paradise-lost.txt");

/// One of this many characters at the end is held out.
const HELD_OUT: usize = 20;

/// A text, split into what is trained on and what is held out.
pub struct Text {
    /// What it is called in messages.
    pub name: String,
    /// Each character that occurs, in order; a character's number is its place.
    pub alphabet: Vec<char>,
    /// The numbers of the characters to train on.
    pub train: Vec<i32>,
    /// The numbers of the characters held out.
    pub held_out: Vec<i32>,
}

impl Text {
    /// Reads `path`, or takes the default text.
    ///
    /// # Errors
    ///
    /// If the file cannot be read as UTF-8, or a part is not longer than a sequence of `context`
    /// characters.
    pub fn load(path: Option<&Path>, context: usize) -> Outcome<Self> {
        let (name, text) = match path {
            None => ("Paradise Lost".to_owned(), DEFAULT.to_owned()),
            Some(path) => {
                let name = path.display().to_string();
                let text = std::fs::read_to_string(path);
                (
                    name.clone(),
                    text.map_err(|error| format!("--text {name}: {error}"))?,
                )
            }
        };
        let mut numbers: BTreeMap<char, i32> = text.chars().map(|char| (char, 0)).collect();
        for (number, place) in (0..).zip(numbers.values_mut()) {
            *place = number;
        }
        let mut train: Vec<i32> = text.chars().map(|char| numbers[&char]).collect();
        let held_out = train.split_off(train.len() - train.len() / HELD_OUT);
        if held_out.len() <= context {
            let needed = (context + 1) * HELD_OUT;
            let length = train.len() + held_out.len();
            let text = format!(
                "--text {name}: {length} characters; --context {context} needs at least {needed}"
            );
            return Err(text.into());
        }
        let alphabet = numbers.into_keys().collect();
        Ok(Self {
            name,
            alphabet,
            train,
            held_out,
        })
    }

    /// The characters that `numbers` stand for.
    pub fn decode(&self, numbers: &[i32]) -> String {
        numbers
            .iter()
            .map(|&number| self.alphabet[number as usize])
            .collect()
    }

    /// Mean of `-ln p` of a held-out character with the frequencies of the part to train on, each
    /// count raised by one: without knowing any other character, and knowing the one before. A
    /// model whose attention does nothing comes about as low as the second.
    pub fn baselines(&self) -> [f64; 2] {
        let size = self.alphabet.len();
        let mut alone = vec![1.0; size];
        let mut after = vec![vec![1.0; size]; size];
        for pair in self.train.windows(2) {
            alone[pair[1] as usize] += 1.0;
            after[pair[0] as usize][pair[1] as usize] += 1.0;
        }
        let surprise = |counts: &[f64], next: i32| {
            let total: f64 = counts.iter().sum();
            -(counts[next as usize] / total).ln()
        };
        let pairs = self.held_out.windows(2);
        let count = pairs.len() as f64;
        let sums = pairs.fold([0.0; 2], |[first, second], pair| {
            [
                first + surprise(&alone, pair[1]),
                second + surprise(&after[pair[0] as usize], pair[1]),
            ]
        });
        sums.map(|sum| sum / count)
    }
}

/// Sequences of `context + 1` characters, one after the other, from places of `text` that depend on
/// `seed` and `step` alone: so a resumed training sees the batches that it would have seen.
pub fn batch(text: &[i32], batch: usize, context: usize, seed: u64, step: usize) -> Vec<i32> {
    let mut random = Rng::stream(seed, step as u64);
    let places = text.len() - context;
    let mut numbers = Vec::with_capacity(batch * (context + 1));
    for _ in 0..batch {
        let place = random.below(places);
        numbers.extend_from_slice(&text[place..=place + context]);
    }
    numbers
}
