//! Packages of the operating system: installed where that needs nobody's permission, otherwise
//! the exact command is given.

use xshell::{Shell, cmd};

use crate::{Result, paths, progress};

/// The same software under the names of three package managers.
pub struct Packages {
    /// Debian and Ubuntu.
    pub apt: &'static [&'static str],
    /// Fedora.
    pub dnf: &'static [&'static str],
    /// Arch.
    pub pacman: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Manager {
    Apt,
    Dnf,
    Pacman,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum User {
    Root,
    Other,
}

/// Installs `packages`, which `purpose` names for the person waiting.
///
/// # Errors
/// When this user or this system cannot: the message holds the command that would.
pub fn install(sh: &Shell, packages: &Packages, purpose: &str) -> Result<()> {
    let (manager, user) = (manager(), user(sh));
    if (manager, user) != (Some(Manager::Apt), User::Root) {
        return Err(instructions(manager, packages, purpose).into());
    }
    let names = packages.apt;
    // Lists may be absent (container images ship none) or too old to fetch from.
    let update = cmd!(sh, "apt-get update --quiet");
    progress::run("apt-get update", update)?;
    let install = cmd!(
        sh,
        "apt-get install --quiet --yes --no-install-recommends {names...}"
    );
    let install = install.env("DEBIAN_FRONTEND", "noninteractive");
    progress::run(&format!("install {}", names.join(" ")), install)
}

fn manager() -> Option<Manager> {
    [
        ("apt-get", Manager::Apt),
        ("dnf", Manager::Dnf),
        ("pacman", Manager::Pacman),
    ]
    .into_iter()
    .find_map(|(program, manager)| paths::program(program).map(|_| manager))
}

fn user(sh: &Shell) -> User {
    match cmd!(sh, "id -u").quiet().read().as_deref() {
        Ok("0") => User::Root,
        _ => User::Other,
    }
}

fn instructions(manager: Option<Manager>, packages: &Packages, purpose: &str) -> String {
    let command = match manager {
        Some(Manager::Apt) => format!(
            "sudo apt-get update && sudo apt-get install --no-install-recommends {}",
            packages.apt.join(" ")
        ),
        Some(Manager::Dnf) => format!("sudo dnf install {}", packages.dnf.join(" ")),
        Some(Manager::Pacman) => format!("sudo pacman -S {}", packages.pacman.join(" ")),
        None => {
            let names = packages.apt.join(", ");
            return format!("{purpose} is missing; Debian has it in the packages {names}");
        }
    };
    format!("{purpose} is missing; install it with:\n  {command}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKAGES: Packages = Packages {
        apt: &["libone", "two"],
        dnf: &["one"],
        pacman: &["uno"],
    };

    #[test]
    fn instructions_are_a_command_of_the_system_at_hand() {
        let apt = instructions(Some(Manager::Apt), &PACKAGES, "a thing");
        assert!(apt.contains("sudo apt-get install --no-install-recommends libone two"));
        let dnf = instructions(Some(Manager::Dnf), &PACKAGES, "a thing");
        assert!(dnf.ends_with("sudo dnf install one"));
        let pacman = instructions(Some(Manager::Pacman), &PACKAGES, "a thing");
        assert!(pacman.ends_with("sudo pacman -S uno"));
    }

    #[test]
    fn an_unknown_system_is_told_what_to_look_for() {
        let text = instructions(None, &PACKAGES, "a thing");
        assert!(text.contains("a thing is missing") && text.contains("libone, two"));
    }
}
