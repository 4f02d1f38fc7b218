//! The commands that the README tells people to type.

use crate::Result;

/// The first line of a code block in `readme` that begins with `start`, as words.
///
/// # Errors
/// When the README has no such line.
pub fn command(readme: &str, start: &str) -> Result<Vec<String>> {
    let mut in_code = false;
    for line in readme.lines() {
        let line = line.trim();
        if line.starts_with("```") {
            in_code = !in_code;
            continue;
        }
        let line = line.strip_prefix("$ ").unwrap_or(line);
        let line = line.split(" #").next().unwrap_or(line).trim_end();
        let after = line.strip_prefix(start);
        if in_code && after.is_some_and(|rest| rest.is_empty() || rest.starts_with(' ')) {
            return Ok(line.split_whitespace().map(str::to_owned).collect());
        }
    }
    Err(format!("README.md has no code block with a line `{start}`").into())
}

/// The first code block of `readme` in `language` that contains `part`.
///
/// # Errors
/// When the README has no such block.
pub fn block(readme: &str, language: &str, part: &str) -> Result<String> {
    let fence = format!("```{language}\n");
    readme
        .split(&fence)
        .skip(1)
        .filter_map(|rest| rest.split_once("```"))
        .find(|(block, _)| block.contains(part))
        .map(|(block, _)| block.to_owned())
        .ok_or_else(|| format!("README.md has no block of {language} with `{part}`").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = "\
Run `cargo xtask test` to test.
cargo xtask demo in prose
```sh
$ cargo xtask demo          # downloads 84 MB
cargo xtask tests
cargo xtask test --runtime wgpu   # on the CPU
```
";

    #[test]
    fn commands_are_taken_from_code_blocks_without_prompt_and_comment() {
        let demo = command(README, "cargo xtask demo").unwrap();
        assert_eq!(demo.join(" "), "cargo xtask demo");
        let test = command(README, "cargo xtask test").unwrap();
        assert_eq!(test.join(" "), "cargo xtask test --runtime wgpu");
    }

    #[test]
    fn a_block_is_found_by_its_language_and_contents() {
        assert!(
            block(README, "sh", "xtask demo")
                .unwrap()
                .starts_with("$ cargo")
        );
        assert!(block(README, "rust", "xtask demo").is_err());
        assert!(block(README, "sh", "xtask bench").is_err());
    }

    #[test]
    fn a_command_that_the_readme_lacks_is_an_error() {
        assert!(command(README, "cargo xtask bench").is_err());
    }
}
