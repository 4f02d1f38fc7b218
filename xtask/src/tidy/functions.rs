//! Finding functions and their extent in code whose comments and literals are emptied.

use super::lexer::is_word;

/// A function with a body.
#[derive(Debug, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Attributes and qualifiers before `fn`, without white space between.
    pub head: String,
    /// From the name to the body.
    pub signature: String,
    /// The line of `fn`, from 1.
    pub line: usize,
    /// Lines from `fn` to the closing brace, both included.
    pub lines: usize,
    /// Lines between the body's braces.
    pub body_lines: usize,
}

/// The functions of `code` in order, nested ones included.
pub fn find(code: &str) -> Vec<Function> {
    let chars: Vec<char> = code.chars().collect();
    (0..chars.len())
        .filter(|&at| is_keyword(&chars, at))
        .filter_map(|at| function(&chars, at))
        .collect()
}

fn is_keyword(chars: &[char], at: usize) -> bool {
    chars[at..].starts_with(&['f', 'n'])
        && (at == 0 || !is_word(chars[at - 1]) && chars[at - 1] != '#')
        && chars.get(at + 2).is_some_and(|c| c.is_whitespace())
}

fn function(chars: &[char], at: usize) -> Option<Function> {
    let name_at = at + chars[at + 2..].iter().position(|c| !c.is_whitespace())? + 2;
    let name: String = chars[name_at..]
        .iter()
        .take_while(|c| is_word(**c))
        .collect();
    let open = body_start(chars, name_at)?;
    let close = body_end(chars, open)?;
    let line_of = |at: usize| chars[..at].iter().filter(|c| **c == '\n').count() + 1;
    let head_at = chars[..at]
        .iter()
        .rposition(|c| matches!(c, ';' | '{' | '}'));
    let head = &chars[head_at.map_or(0, |at| at + 1)..at];
    Some(Function {
        name,
        head: collapse(head),
        signature: chars[name_at..open].iter().collect(),
        line: line_of(at),
        lines: line_of(close) - line_of(at) + 1,
        body_lines: (line_of(close) - line_of(open)).saturating_sub(1),
    })
}

/// The brace that opens the body; `None` for a declaration without one.
fn body_start(chars: &[char], from: usize) -> Option<usize> {
    let mut depth = 0;
    for (at, c) in chars.iter().enumerate().skip(from) {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            '{' if depth == 0 => return Some(at),
            ';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

fn body_end(chars: &[char], open: usize) -> Option<usize> {
    let mut depth = 0;
    for (at, c) in chars.iter().enumerate().skip(open) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// White space removed, except one space between words.
fn collapse(chars: &[char]) -> String {
    let text: String = chars.iter().collect();
    let mut collapsed = String::new();
    for word in text.split_whitespace() {
        let joins = collapsed.ends_with(is_word) && word.starts_with(is_word);
        collapsed.push_str(if joins { " " } else { "" });
        collapsed.push_str(word);
    }
    collapsed
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "\
use a;

#[cube(
    launch_unchecked,
)]
pub fn kernel<const N: usize>(
    x: [u32; 3],
) -> u32 {
    if x[0] == 1 {
        2
    } else {
        fn inner() {}
        3
    }
}

trait T {
    fn declared(&self) -> u32;
    pub(crate) fn with_body(&self) { 1 }
}
type F = fn (u32) -> u32;
";

    #[test]
    fn functions_are_found_with_their_extent() {
        let found = find(CODE);
        let extents: Vec<_> = found
            .iter()
            .map(|f| (f.name.as_str(), f.line, f.lines, f.body_lines))
            .collect();
        let expected = [
            ("kernel", 6, 10, 6),
            ("inner", 12, 1, 0),
            ("with_body", 19, 1, 0),
        ];
        assert_eq!(extents, expected);
    }

    #[test]
    fn heads_and_signatures_belong_to_their_function() {
        let found = find(CODE);
        assert_eq!(found[0].head, "#[cube(launch_unchecked,)]pub");
        assert!(found[0].signature.contains("x: [u32; 3]"));
        assert_eq!(found[1].head, "");
        assert_eq!(found[2].head, "pub(crate)");
    }
}
