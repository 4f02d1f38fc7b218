//! `cargo xtask tidy`: the rules of this code that a script can see, as one table in `rules.rs`.

#[cfg(test)]
mod examples;
mod functions;
mod lexer;
mod rules;
mod source;

use xshell::{Shell, cmd};

use crate::Result;
use rules::{RULES, Rule};
use source::Source;

/// Checks every file that git tracks or would track, the vendored ones left out.
///
/// # Errors
/// When a rule is violated; each violation is printed with its place and what to do about it.
pub fn run(sh: &Shell) -> Result<()> {
    let sources = sources(sh)?;
    let mut found = 0;
    for source in &sources {
        for rule in RULES {
            for message in violations(rule, source) {
                println!("{message}");
                found += 1;
            }
        }
    }
    let checked = format!("{} files, {} rules", sources.len(), RULES.len());
    if found == 0 {
        println!("tidy: {checked}, nothing found");
        return Ok(());
    }
    Err(format!("tidy: {found} violations ({checked})").into())
}

/// One message for each place where `source` violates `rule`.
fn violations(rule: &Rule, source: &Source) -> Vec<String> {
    if !(rule.applies)(&source.path) {
        return Vec::new();
    }
    let found = (rule.check)(source).into_iter();
    found
        .map(|finding| {
            let (path, name, advice) = (&source.path, rule.name, rule.advice);
            format!(
                "{path}:{}: [{name}] {}: {advice}",
                finding.line, finding.what
            )
        })
        .collect()
}

fn sources(sh: &Shell) -> Result<Vec<Source>> {
    // A clone of another user's, as in a container, is not "safe" to git; its list of files is.
    let listed = cmd!(
        sh,
        "git -c safe.directory=* ls-files -z --cached --others --exclude-standard"
    );
    let listed = listed.quiet().read()?;
    let mut sources = Vec::new();
    for path in listed.split('\0').filter(|path| rules::is_ours(path)) {
        // Still listed while a deletion is not committed.
        if sh.path_exists(path) {
            let source = Source::new(path, &sh.read_file(path)?).map_err(|error| {
                let line = error.span().start().line;
                format!("{path}:{line}: {error}")
            });
            sources.push(source?);
        }
    }
    if sources.is_empty() {
        return Err("tidy: git lists no file to check".into());
    }
    Ok(sources)
}
