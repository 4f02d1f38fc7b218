//! The rules. A rule is a row of [`RULES`]; `examples.rs` holds, for each, code that violates it
//! and code that does not.

use super::functions::Function;
use super::lexer::is_word;
use super::source::{Finding, Source, has};

/// One rule.
pub struct Rule {
    /// What messages call it.
    pub name: &'static str,
    /// What to do about a violation.
    pub advice: &'static str,
    /// Which files it holds for, by path.
    pub applies: fn(&str) -> bool,
    /// Its violations in a file.
    pub check: fn(&Source) -> Vec<Finding>,
}

const FILE_LINES: usize = 400;
const FUNCTION_LINES: usize = 80;
const KERNEL_LINES: usize = 60;

const KERNELS: &str = "crates/flash-kernels/";
const DEVICE: &str = "crates/flash-kernels/src/kernel/";
const UNITS: &str = "crates/flash-kernels/src/kernel/unit/";
const MASK: &str = "crates/flash-kernels/src/kernel/mask.rs";
const HOPPER: &str = "crates/flash-kernels/src/kernel/unit/hopper.rs";
const FUSED: &str = "crates/flash-kernels/src/kernel/backward/fused_overlapped.rs";
const REFERENCE: &str = "crates/flash-reference/";

/// Every rule, the general ones first.
pub const RULES: &[Rule] = &[
    Rule {
        name: "file-length",
        advice: "split it along what its parts know",
        applies: is_rust,
        check: file_length,
    },
    Rule {
        name: "function-length",
        advice: "give a part of it a name",
        applies: is_rust,
        check: function_length,
    },
    Rule {
        name: "unfinished",
        advice: "finish it, refuse the case with an error, or leave it out",
        applies: is_rust,
        check: unfinished,
    },
    Rule {
        name: "machine-path",
        advice: "take it from the environment or from an argument",
        applies: is_ours,
        check: machine_path,
    },
    Rule {
        name: "bool-parameter",
        advice: "make it an enum, whose values say what they mean where the function is called",
        applies: is_host_library,
        check: bool_parameter,
    },
    Rule {
        name: "reference-alone",
        advice: "the specification is plain Rust: write out what the crate would do",
        applies: |path| path.starts_with(REFERENCE) && is_manifest(path),
        check: any_dependency,
    },
    Rule {
        name: "kernels-know-no-burn",
        advice: "move it to crates/burn-flash-attention and pass handles, shapes and strides",
        applies: |path| path.starts_with(KERNELS) && (is_rust(path) || is_manifest(path)),
        check: burn_crate,
    },
    Rule {
        name: "device-header",
        advice: "begin the file with `//!` and what its code does on the device",
        applies: is_device,
        check: header,
    },
    Rule {
        name: "kernel-length",
        advice: "the body of a kernel is its outline: move a part into a device function",
        applies: is_device,
        check: kernel_length,
    },
    Rule {
        name: "barrier-reason",
        advice: "say on the line above what would go wrong without it",
        applies: is_device,
        check: barrier_reason,
    },
    Rule {
        name: "unit-names",
        advice: "only kernel/unit/ knows the units: add to `MatrixUnit` what is missing",
        applies: |path| is_device(path) && !path.starts_with(UNITS),
        check: unit_names,
    },
    Rule {
        name: "mask-kinds",
        advice: "only kernel/mask.rs knows how a mask is given: ask it for the range or for `keep`",
        applies: |path| is_device(path) && path != MASK,
        check: |source| code_with_any(source, &["Masking", "MaskKind"]),
    },
    Rule {
        name: "finite-sentinel",
        advice: "use -inf, guarded before subtraction: a finite value becomes the maximum of an \
                 empty tile and its masked lanes then count as one",
        applies: is_device,
        check: finite_sentinel,
    },
    Rule {
        name: "atomics",
        advice: "let one cube own what it writes: sums then have one order, and WGPU has no \
                 atomic f32",
        applies: is_device,
        check: |source| code_with_any(source, &["Atomic"]),
    },
    Rule {
        name: "unordered-sums",
        advice: "only the fused gradient, which is never taken unasked, adds to what other cubes add \
                 to: let one cube own what it writes",
        applies: |path| is_device(path) && path != HOPPER && path != FUSED,
        check: |source| code_with_any(source, &["add_to_global"]),
    },
];

/// Whether `path` is a file that rules look at.
pub fn is_ours(path: &str) -> bool {
    let ends = [".rs", ".toml", ".md", ".sh", ".py"];
    let text = ends.iter().any(|end| path.ends_with(end)) || path.starts_with(".ci/");
    text && !path.starts_with("vendor/")
}

fn is_rust(path: &str) -> bool {
    path.ends_with(".rs")
}

fn is_manifest(path: &str) -> bool {
    path.ends_with("/Cargo.toml")
}

fn is_device(path: &str) -> bool {
    path.starts_with(DEVICE) && is_rust(path)
}

/// The crates that others call, less what runs on the device, where a comptime flag is a `bool`.
fn is_host_library(path: &str) -> bool {
    path.starts_with("crates/") && is_rust(path) && !is_device(path)
}

fn file_length(source: &Source) -> Vec<Finding> {
    let lines = source.raw.len();
    if lines <= FILE_LINES {
        return Vec::new();
    }
    vec![Finding {
        line: FILE_LINES + 1,
        what: format!("{lines} lines, at most {FILE_LINES}"),
    }]
}

fn function_length(source: &Source) -> Vec<Finding> {
    too_long(source, FUNCTION_LINES, |function| function.lines)
}

fn kernel_length(source: &Source) -> Vec<Finding> {
    too_long(source, KERNEL_LINES, |function| {
        let head: String = function.head.split_whitespace().collect();
        let is_kernel = head.contains("#[cube(launch");
        if is_kernel { function.body_lines } else { 0 }
    })
}

fn too_long(source: &Source, limit: usize, lines: fn(&Function) -> usize) -> Vec<Finding> {
    let long = source.functions.iter().filter(|f| lines(f) > limit);
    long.map(|function| Finding {
        line: function.line,
        what: format!(
            "`{}` has {} lines, at most {limit}",
            function.name,
            lines(function)
        ),
    })
    .collect()
}

fn unfinished(source: &Source) -> Vec<Finding> {
    let mut found = code_with_any(source, &["todo!", "unimplemented!", "dbg!", "#[ignore"]);
    for word in ["TODO", "FIXME"] {
        found.extend(source.comments_with(word));
    }
    found
}

fn machine_path(source: &Source) -> Vec<Finding> {
    // Put together here, else this file would violate its own rule.
    let roots = ["root", "work", "tmp", "home"].map(|dir| format!("/{dir}/"));
    let mut found = Vec::new();
    for root in &roots {
        // Part of a longer path or of an address otherwise: `target/tmp/`.
        let starts = |finding: &Finding| starts_a_path(&source.raw[finding.line - 1], root);
        found.extend(source.anything_with(root).into_iter().filter(starts));
    }
    found
}

fn starts_a_path(line: &str, root: &str) -> bool {
    line.match_indices(root).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| is_word(c) || matches!(c, '.' | '-' | '}' | '~' | '*'))
    })
}

fn bool_parameter(source: &Source) -> Vec<Finding> {
    let exported =
        |function: &&Function| has(&function.head, "pub") && !function.head.contains("pub(");
    let takes_bool = |function: &&Function| {
        let parameters = function.signature.split("->").next().unwrap_or_default();
        parameters.split([',', '(']).any(|parameter| {
            let ty = parameter.split(':').nth(1).unwrap_or_default();
            ty.trim().trim_end_matches(')').trim() == "bool"
        })
    };
    let functions = source.functions.iter();
    let found = functions.filter(exported).filter(takes_bool);
    found
        .map(|function| Finding {
            line: function.line,
            what: format!("public `{}` takes a bool", function.name),
        })
        .collect()
}

fn any_dependency(source: &Source) -> Vec<Finding> {
    dependencies(source)
        .map(|(line, name)| Finding {
            line,
            what: format!("depends on `{name}`"),
        })
        .collect()
}

fn burn_crate(source: &Source) -> Vec<Finding> {
    if is_manifest(&source.path) {
        let burn = dependencies(source).filter(|(_, name)| name.starts_with("burn"));
        let found = burn.map(|(line, name)| Finding {
            line,
            what: format!("depends on `{name}`"),
        });
        return found.collect();
    }
    let mut found = source.code_with("burn::");
    for (index, line) in source.code.iter().enumerate() {
        let mut words = line.split(|c| !is_word(c));
        if let Some(word) = words.find(|word| word.starts_with("burn_")) {
            found.push(Finding {
                line: index + 1,
                what: format!("`{word}`"),
            });
        }
    }
    found
}

/// The line and the name of each dependency of a manifest, whatever it is a dependency for.
fn dependencies(source: &Source) -> impl Iterator<Item = (usize, &str)> {
    let mut inside = false;
    let lines = source.raw.iter().enumerate();
    lines.filter_map(move |(index, line)| {
        let line = line.trim();
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            inside = section.ends_with("dependencies");
            // `[dependencies.name]`
            let (_, name) = section.split_once("dependencies.")?;
            return Some((index + 1, name));
        }
        let name = line.split(['=', '.', ' ']).next()?;
        let named = inside && !name.is_empty() && !name.starts_with('#');
        named.then_some((index + 1, name))
    })
}

fn header(source: &Source) -> Vec<Finding> {
    let first = source.raw.first().map_or("", String::as_str);
    if first.starts_with("//!") {
        return Vec::new();
    }
    vec![Finding {
        line: 1,
        what: "no header".to_owned(),
    }]
}

fn barrier_reason(source: &Source) -> Vec<Finding> {
    const BARRIERS: [&str; 7] = [
        "sync_cube(",
        "sync_plane(",
        "sync_storage(",
        "sync_async_proxy_shared(",
        "arrive_and_wait(",
        "wait_parity(",
        ".wait(",
    ];
    let waits = |line: &str| BARRIERS.iter().find(|call| has(line, call));
    let lines = source.code.iter().enumerate();
    lines
        .filter(|(_, line)| !has(line, "fn"))
        .filter_map(|(index, line)| waits(line).map(|call| (index, call)))
        .filter(|(index, _)| {
            let above = index.checked_sub(1).map(|above| &source.comments[above]);
            ![Some(&source.comments[*index]), above]
                .into_iter()
                .flatten()
                .any(|comment| is_reason(comment))
        })
        .map(|(index, call)| Finding {
            line: index + 1,
            what: format!("`{call})` without a reason"),
        })
        .collect()
}

/// Three words at least: "sync here" says nothing that the call does not.
fn is_reason(comment: &str) -> bool {
    let words = comment.split_whitespace();
    words
        .filter(|word| word.contains(char::is_alphabetic))
        .count()
        >= 3
}

fn unit_names(source: &Source) -> Vec<Finding> {
    let mut found = code_with_any(source, &["Cmma", "Mma", "Wgmma", "UnitKind"]);
    // CubeCL has a trait of the name `Scalar` too.
    for (index, line) in source.code.iter().enumerate() {
        if ["unit::", "scalar::"].iter().any(|path| has(line, path)) && has(line, "Scalar") {
            found.push(Finding {
                line: index + 1,
                what: "`Scalar`".to_owned(),
            });
        }
    }
    found
}

fn finite_sentinel(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    for float in ["f32", "f16", "bf16", "E", "F"] {
        for extreme in ["MAX", "MIN", "max_value", "min_value"] {
            found.extend(source.code_with(&format!("{float}::{extreme}")));
        }
    }
    found
}

fn code_with_any(source: &Source, needles: &[&str]) -> Vec<Finding> {
    let found = needles.iter().flat_map(|needle| source.code_with(needle));
    found.collect()
}
