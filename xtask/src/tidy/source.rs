//! One file as the rules see it.

use proc_macro2::{LexError, TokenStream};

use super::functions::{self, Function};
use super::lexer::{self, is_word};

/// A file of the repository, split into what the rules look at. Line numbers start at 1.
pub struct Source {
    /// Its path from the root of the repository, with forward slashes.
    pub path: String,
    /// The lines as they are.
    pub raw: Vec<String>,
    /// The lines without comments and with literals emptied; as they are unless it is Rust.
    pub code: Vec<String>,
    /// The comments of each line; empty unless it is Rust.
    pub comments: Vec<String>,
    /// The functions with a body; none unless it is Rust.
    pub functions: Vec<Function>,
}

/// One violation of a rule.
#[derive(Debug, PartialEq)]
pub struct Finding {
    /// The line, from 1.
    pub line: usize,
    /// What is there.
    pub what: String,
}

impl Source {
    /// Splits `text`, which is the content of `path`.
    ///
    /// # Errors
    /// When it should be Rust and does not consist of tokens.
    pub fn new(path: &str, text: &str) -> Result<Self, LexError> {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let raw = lines(text);
        let mut source = Self {
            path: path.to_owned(),
            code: raw.clone(),
            comments: vec![String::new(); raw.len()],
            raw,
            functions: Vec::new(),
        };
        if path.ends_with(".rs") {
            let tokens: TokenStream = text.parse()?;
            let split = lexer::split(text, tokens.clone());
            source.code = lines(&split.code);
            source.comments = lines(&split.comments);
            source.functions = functions::find(&split.code, tokens);
        }
        Ok(source)
    }

    /// A finding on every line of code that has `needle`, see [`has`].
    pub fn code_with(&self, needle: &str) -> Vec<Finding> {
        findings(&self.code, needle)
    }

    /// A finding on every line that has `needle` anywhere, literals and comments included.
    pub fn anything_with(&self, needle: &str) -> Vec<Finding> {
        findings(&self.raw, needle)
    }

    /// A finding on every comment that has `needle`.
    pub fn comments_with(&self, needle: &str) -> Vec<Finding> {
        findings(&self.comments, needle)
    }
}

fn findings(lines: &[String], needle: &str) -> Vec<Finding> {
    let numbered = lines.iter().enumerate();
    numbered
        .filter(|(_, line)| has(line, needle))
        .map(|(index, _)| Finding {
            line: index + 1,
            what: format!("`{needle}`"),
        })
        .collect()
}

/// Whether `text` has `needle`, not as part of a longer word at an end where `needle` itself has
/// a word character: `Mma` is not in `Cmma` or `MmaUnit`, `todo!` is in `todo!()`.
pub fn has(text: &str, needle: &str) -> bool {
    let joins = |inside: Option<char>, outside: Option<char>| {
        inside.is_some_and(is_word) && outside.is_some_and(is_word)
    };
    text.match_indices(needle).any(|(at, found)| {
        let before = text[..at].chars().next_back();
        let after = text[at + found.len()..].chars().next();
        !joins(needle.chars().next(), before) && !joins(needle.chars().next_back(), after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_whole() {
        assert!(has("x: Mma,", "Mma") && has("Mma", "Mma"));
        assert!(!has("Cmma", "mma") && !has("MmaUnit", "Mma"));
        assert!(has("todo!()", "todo!") && !has("mytodo!()", "todo!"));
        assert!(has("burn::x", "burn::") && !has("auburn::x", "burn::"));
    }

    #[test]
    fn other_files_have_no_comments_and_no_functions() {
        let source = Source::new("a.toml", "// fn a() {}\n").unwrap();
        assert_eq!(source.code_with("fn")[0].line, 1);
        assert!(source.functions.is_empty() && source.comments_with("fn").is_empty());
    }

    #[test]
    fn what_is_never_closed_is_an_error() {
        for text in ["a /* b", "a \"b", "a r#\"b\"", "fn a() {"] {
            assert!(Source::new("a.rs", text).is_err(), "{text}");
        }
    }
}
