//! What cargo says of its progress.

/// One line of cargo's that a bar says better.
#[derive(Debug, PartialEq)]
pub enum Status {
    /// `done` crates of `all` are compiled; `busy` names those under way.
    Crates { done: u64, all: u64, busy: String },
    /// A crate is downloaded, compiled or found compiled.
    Crate,
}

/// What `line` says, if it is about progress.
pub fn status(line: &str) -> Option<Status> {
    const BUSY: [&str; 6] = [
        "Compiling",
        "Checking",
        "Documenting",
        "Downloading",
        "Downloaded",
        "Fresh",
    ];
    let plain = console::strip_ansi_codes(line);
    let (verb, rest) = plain.trim().split_once(' ')?;
    match verb {
        "Building" => crates(rest),
        _ => BUSY.contains(&verb).then_some(Status::Crate),
    }
}

/// The count in `[====>   ] 123/456: burn-core, naga`.
fn crates(rest: &str) -> Option<Status> {
    let (_, counted) = rest.split_once(']')?;
    let (count, busy) = counted.split_once(':').unwrap_or((counted, ""));
    let (done, all) = count.trim().split_once('/')?;
    Some(Status::Crates {
        done: done.parse().ok()?,
        all: all.parse().ok()?,
        busy: busy.trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_of_crates_is_read_under_its_colors() {
        let line =
            "\x1b[1m\x1b[96m    Building\x1b[0m [===>     ] 123/456: burn-core, naga  \x1b[K";
        let expected = Status::Crates {
            done: 123,
            all: 456,
            busy: "burn-core, naga".to_owned(),
        };
        assert_eq!(status(line), Some(expected));
        assert_eq!(status("Building the house"), None);
    }

    #[test]
    fn lines_of_single_crates_are_recognized_under_their_colors() {
        let colored = "\x1b[1m\x1b[92m   Compiling\x1b[0m burn v0.22.1";
        assert_eq!(status(colored), Some(Status::Crate));
        assert_eq!(status("warning: Compiling is slow"), None);
        assert_eq!(status("Compilingx y"), None);
    }
}
