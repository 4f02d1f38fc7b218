//! Telling code, comments and literals of Rust apart. The tokens are those of `proc-macro2`, which
//! takes fragments and reads macros like all else; comments are what lies between tokens.

use std::ops::Range;

use proc_macro2::{TokenStream, TokenTree};

/// What a part of a source file is.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Code,
    Comment,
    Literal,
}

/// A text split into two of the same length: what is not part of one is spaces there.
#[derive(Default)]
pub struct Split {
    /// The code, literals emptied.
    pub code: String,
    /// The comments, with their slashes.
    pub comments: String,
}

/// Splits Rust source text, whose tokens are `tokens`.
pub fn split(text: &str, tokens: TokenStream) -> Split {
    let mut split = Split::default();
    let mut end = 0;
    for (part, range) in parts(text, tokens) {
        split.push(Part::Comment, &text[end..range.start]);
        split.push(part, &text[range.clone()]);
        end = range.end;
    }
    split.push(Part::Comment, &text[end..]);
    split
}

impl Split {
    fn push(&mut self, part: Part, text: &str) {
        for (to, of) in [
            (&mut self.code, Part::Code),
            (&mut self.comments, Part::Comment),
        ] {
            if part == of {
                to.push_str(text);
            } else {
                let blanks = text.bytes().map(|b| if b == b'\n' { '\n' } else { ' ' });
                to.extend(blanks);
            }
        }
    }
}

/// What the tokens are and where, in order; a group is its two delimiters and what they enclose.
fn parts(text: &str, tokens: TokenStream) -> Vec<(Part, Range<usize>)> {
    let mut parts = Vec::new();
    for token in tokens {
        let range = token.span().byte_range();
        let starts = |comment| text[range.start..].starts_with(comment);
        match token {
            // A documentation comment, read as `#[doc = "..."]` with every token at its place.
            _ if starts("//") || starts("/*") => {}
            TokenTree::Group(group) => {
                parts.push((Part::Code, group.span_open().byte_range()));
                parts.extend(self::parts(text, group.stream()));
                parts.push((Part::Code, group.span_close().byte_range()));
            }
            TokenTree::Literal(_) => parts.push((Part::Literal, range)),
            _ => parts.push((Part::Code, range)),
        }
    }
    parts
}

/// Whether `c` can be part of an identifier.
pub fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str) -> Split {
        let split = super::split(text, text.parse().expect("tokens"));
        assert_eq!(split.code.len(), text.len());
        assert_eq!(split.comments.len(), text.len());
        split
    }

    fn code(text: &str) -> String {
        let code = split(text).code;
        code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_literals_are_not_code() {
        assert_eq!(code("a // b\nc"), "a c");
        assert_eq!(code("a /* b /* c */ d */ e"), "a e");
        assert_eq!(code("//! a\n/// b\nc /** d */ e"), "c e");
        assert_eq!(code(r#"f("ä // \" c", 1)"#), "f( , )");
        assert_eq!(code("f(r#\"a\" \"b\"#, br\"\\\") g"), "f( , ) g");
        assert_eq!(code(r"f('\'', '{', b'x') g"), "f( , , ) g");
    }

    #[test]
    fn lifetimes_and_raw_identifiers_are_code() {
        assert_eq!(code("fn f<'a>(x: &'a str)"), "fn f<'a>(x: &'a str)");
        assert_eq!(code("'outer: loop {}"), "'outer: loop {}");
        assert_eq!(code("let r#fn = for_\"b\""), "let r#fn = for_");
    }

    #[test]
    fn comments_keep_their_text_and_place() {
        let split = split("a; // why \"so\"\n/* b */ c\n/// d");
        let lines: Vec<_> = split.comments.lines().collect();
        assert_eq!(lines, ["   // why \"so\"", "/* b */  ", "/// d"]);
    }
}
