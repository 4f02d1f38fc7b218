//! Telling code, comments and literals of Rust apart, without parsing it.

/// What a character of a source file belongs to.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Code,
    Comment,
    Literal,
}

/// A text split into two of the same shape: what is not part of one is a space there.
pub struct Split {
    /// The code, string and character literals emptied.
    pub code: String,
    /// The comments, with their slashes.
    pub comments: String,
}

/// Splits Rust source text.
pub fn split(text: &str) -> Split {
    let chars: Vec<char> = text.chars().collect();
    let mut split = Split {
        code: String::with_capacity(text.len()),
        comments: String::new(),
    };
    let mut at = 0;
    while at < chars.len() {
        let (part, end) = next(&chars, at);
        for &c in &chars[at..end] {
            let blank = if c == '\n' { '\n' } else { ' ' };
            split.code.push(if part == Part::Code { c } else { blank });
            let comment = part == Part::Comment;
            split.comments.push(if comment { c } else { blank });
        }
        at = end;
    }
    split
}

/// What starts at `at`, and where it ends.
fn next(chars: &[char], at: usize) -> (Part, usize) {
    let starts = |text: &str| {
        chars[at..]
            .iter()
            .copied()
            .take(text.len())
            .eq(text.chars())
    };
    if starts("//") {
        return (Part::Comment, find(chars, at, '\n'));
    }
    if starts("/*") {
        return (Part::Comment, block_comment_end(chars, at));
    }
    let after_word = at > 0 && is_word(chars[at - 1]);
    if !after_word && let Some(end) = raw_string_end(chars, at) {
        return (Part::Literal, end);
    }
    match chars[at] {
        '"' => (Part::Literal, quoted_end(chars, at, '"')),
        '\'' if is_character(chars, at) => (Part::Literal, quoted_end(chars, at, '\'')),
        // A raw identifier, `r#type`: its sign must not be taken for anything else.
        _ => (Part::Code, at + 1),
    }
}

/// Whether the quote at `at` opens a character, not a lifetime or a label.
fn is_character(chars: &[char], at: usize) -> bool {
    let after = (chars.get(at + 1), chars.get(at + 2));
    matches!(after, (Some('\\'), _) | (Some(_), Some('\'')))
}

fn quoted_end(chars: &[char], at: usize, quote: char) -> usize {
    let mut end = at + 1;
    while end < chars.len() {
        match chars[end] {
            '\\' => end += 2,
            c if c == quote => return end + 1,
            _ => end += 1,
        }
    }
    chars.len()
}

/// The end of `r"..."`, `r#"..."#`, `br"..."` and so on, if one starts at `at`.
fn raw_string_end(chars: &[char], at: usize) -> Option<usize> {
    let prefix = match chars[at..] {
        ['b' | 'c', 'r', ..] => 2,
        ['r', ..] => 1,
        _ => return None,
    };
    let rest = &chars[at + prefix..];
    let hashes = rest.iter().take_while(|&&c| c == '#').count();
    if rest.get(hashes) != Some(&'"') {
        return None;
    }
    let mut end = at + prefix + hashes + 1;
    while end < chars.len() {
        let closing = chars[end + 1..].iter().take(hashes);
        if chars[end] == '"' && closing.filter(|&&c| c == '#').count() == hashes {
            return Some(end + 1 + hashes);
        }
        end += 1;
    }
    Some(chars.len())
}

/// Block comments nest.
fn block_comment_end(chars: &[char], at: usize) -> usize {
    let mut depth = 0;
    let mut end = at;
    while end + 1 < chars.len() {
        match (chars[end], chars[end + 1]) {
            ('/', '*') => depth += 1,
            ('*', '/') => depth -= 1,
            _ => {
                end += 1;
                continue;
            }
        }
        end += 2;
        if depth == 0 {
            return end;
        }
    }
    chars.len()
}

fn find(chars: &[char], at: usize, wanted: char) -> usize {
    let found = chars[at..].iter().position(|&c| c == wanted);
    found.map_or(chars.len(), |offset| at + offset)
}

/// Whether `c` can be part of an identifier.
pub fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        let split = split(text);
        assert_eq!(split.code.chars().count(), text.chars().count());
        assert_eq!(split.comments.chars().count(), text.chars().count());
        split.code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_literals_are_not_code() {
        assert_eq!(code("a // b\nc"), "a c");
        assert_eq!(code("a /* b /* c */ d */ e"), "a e");
        assert_eq!(code(r#"f("b // \" c", 1)"#), "f( , 1)");
        assert_eq!(code("f(r#\"a\" \"b\"#, br\"\\\") g"), "f( , ) g");
        assert_eq!(code(r"f('\'', '{', b'x') g"), "f( , , b ) g");
    }

    #[test]
    fn lifetimes_and_raw_identifiers_are_code() {
        assert_eq!(code("fn f<'a>(x: &'a str)"), "fn f<'a>(x: &'a str)");
        assert_eq!(code("'outer: loop {}"), "'outer: loop {}");
        assert_eq!(code("let r#fn = for_\"b\""), "let r#fn = for_");
    }

    #[test]
    fn comments_keep_their_text_and_place() {
        let split = split("a; // why \"so\"\n/* b */ c");
        let lines: Vec<_> = split.comments.lines().collect();
        assert_eq!(lines, ["   // why \"so\"", "/* b */  "]);
    }

    #[test]
    fn what_is_never_closed_ends_with_the_file() {
        assert_eq!(code("a /* b"), "a");
        assert_eq!(code("a \"b"), "a");
        assert_eq!(code("a r#\"b\""), "a");
    }
}
