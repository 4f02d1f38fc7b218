//! Finding functions and their extent, inside macros too, where a parser of items sees only tokens.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A function with a body.
#[derive(Debug, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Attributes and qualifiers before `fn`.
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

/// The functions of `code`, whose tokens are `tokens`, in order, nested ones included.
pub fn find(code: &str, tokens: TokenStream) -> Vec<Function> {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let mut found = Vec::new();
    let mut head = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Ident(word) if word == "fn" => {
                found.extend(function(code, &tokens[head..at], &tokens[at..]));
            }
            TokenTree::Group(group) => {
                found.extend(find(code, group.stream()));
                if group.delimiter() == Delimiter::Brace {
                    head = at + 1;
                }
            }
            TokenTree::Punct(sign) if sign.as_char() == ';' => head = at + 1,
            _ => {}
        }
    }
    found
}

/// The function whose `fn` is the first of `tokens`; `None` for a type or a declaration.
fn function(code: &str, head: &[TokenTree], tokens: &[TokenTree]) -> Option<Function> {
    let [keyword, name, rest @ ..] = tokens else {
        return None;
    };
    if let TokenTree::Group(_) = name {
        return None;
    }
    let body = rest.iter().find_map(|token| match token {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(Some(group)),
        TokenTree::Punct(sign) if sign.as_char() == ';' => Some(None),
        _ => None,
    })??;
    let start = |token: &TokenTree| token.span().byte_range().start;
    let head_at = head.first().unwrap_or(keyword);
    let (line, open) = (keyword.span().start().line, body.span_open());
    let close = body.span_close().end().line;
    Some(Function {
        name: name.to_string(),
        head: code[start(head_at)..start(keyword)].trim().to_owned(),
        signature: code[start(name)..open.byte_range().start].to_owned(),
        line,
        lines: close - line + 1,
        body_lines: (close - open.end().line).saturating_sub(1),
    })
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
        let found = find(CODE, CODE.parse().expect("tokens"));
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
        let found = find(CODE, CODE.parse().expect("tokens"));
        assert_eq!(found[0].head, "#[cube(\n    launch_unchecked,\n)]\npub");
        assert!(found[0].signature.contains("x: [u32; 3]"));
        assert_eq!(found[1].head, "");
        assert_eq!(found[2].head, "pub(crate)");
    }

    #[test]
    fn functions_in_macros_are_found() {
        let code = "macro_rules! m {\n    ($n:ident) => { pub fn $n(x: bool) {\n    } };\n}\n";
        let found = find(code, code.parse().expect("tokens"));
        assert_eq!((found[0].line, found[0].lines), (2, 2));
        assert_eq!(found[0].head, "pub");
    }
}
