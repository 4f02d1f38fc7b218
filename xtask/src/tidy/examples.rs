//! For each rule, code that violates it and code that comes close and does not.

use super::rules::{RULES, Rule};
use super::source::Source;
use super::violations;

struct Example {
    rule: &'static str,
    path: &'static str,
    /// Violates the rule at each of these lines, and nowhere else.
    violating: &'static str,
    lines: &'static [usize],
    fine: &'static str,
}

const DEVICE: &str = "crates/flash-kernels/src/kernel/forward.rs";
const NONE: [usize; 0] = [];

const EXAMPLES: &[Example] = &[
    Example {
        rule: "unfinished",
        path: "tests/attention/main.rs",
        violating: "fn a() { todo!() }\nfn b() { unimplemented!(\"x\") }\nlet x = dbg!(y);\n\
                    #[ignore = \"slow\"]\n// FIXME: later\n/* TODO */\n",
        lines: &[1, 2, 3, 4, 5, 6],
        fine: "let what = \"todo!() and FIXME\";\n// Nothing to do here.\nmytodo!();\n",
    },
    Example {
        rule: "bool-parameter",
        path: "crates/burn-flash-attention/src/lib.rs",
        violating: "pub fn a(x: u32, causal: bool) {}\n#[inline]\npub const fn b(\n    on: bool,\n) {}\n",
        lines: &[1, 3],
        fine: "fn a(x: bool) {}\npub fn b(x: &[bool], y: fn(u32) -> bool) -> bool { x }\n\
               pub(crate) fn c(x: bool) {}\npub fn d(mask: Option<Tensor<4, Bool>>) {}\n",
    },
    Example {
        rule: "reference-alone",
        path: "crates/flash-reference/Cargo.toml",
        violating: "[dependencies]\nhalf.workspace = true\n# why\n[dev-dependencies]\nrstest = \"1\"\n\
                    [build-dependencies.cc]\n",
        lines: &[2, 5, 6],
        fine: "[package]\nname = \"flash-reference\"\n[dependencies]\n\n# none\n[lints]\nworkspace = true\n",
    },
    Example {
        rule: "kernels-know-no-burn",
        path: "crates/flash-kernels/src/launch.rs",
        violating: "use burn::tensor::Tensor;\nfn a(x: burn_cubecl::CubeTensor) {}\n",
        lines: &[1, 2],
        fine: "//! Knows nothing of burn::anything.\nlet side_burn = auburn::x();\nlet x = \"burn_\";\n",
    },
    Example {
        rule: "kernels-know-no-burn",
        path: "crates/flash-kernels/Cargo.toml",
        violating: "[dependencies]\ncubecl.workspace = true\nburn-cubecl.workspace = true\n",
        lines: &[3],
        fine: "[package]\ndescription = \"no burn\"\n[dependencies]\ncubecl.workspace = true\n",
    },
    Example {
        rule: "device-header",
        path: DEVICE,
        violating: "use cubecl::prelude::*;\n//! Late.\n",
        lines: &[1],
        fine: "//! The forward pass.\nuse cubecl::prelude::*;\n",
    },
    Example {
        rule: "barrier-reason",
        path: DEVICE,
        violating: "a();\nsync_cube();\n// sync\nsync_plane();\n// The tile was written by all.\n\nx.wait(y);\n",
        lines: &[2, 4, 7],
        fine: "// The tile was written by other units.\nsync_cube();\n\
               sync_plane(); // lanes exchange the maximum\npub fn sync_cube() {}\n\
               /* all of them have landed */ copied.wait(token);\n",
    },
    Example {
        rule: "unit-names",
        path: DEVICE,
        violating: "use super::unit::{scalar::Scalar};\ntype U = unit::Mma<f16>;\n\
                    if plan.unit == UnitKind::Cmma {}\nlet w: Wgmma;\n",
        lines: &[1, 2, 3, 3, 4],
        fine: "fn a<S: Scalar, U: MatrixUnit>() {}\n// as Mma does\ncmma::load();\nlet x: MmaDefinition;\n",
    },
    Example {
        rule: "mask-kinds",
        path: DEVICE,
        violating: "if comptime!(plan.masking == Masking::Dense) {}\nlet kind: MaskKind;\n",
        lines: &[1, 2],
        fine: "let mask = Mask::new();\nlet keep = mask.keep(row, col); // no Masking\n",
    },
    Example {
        rule: "finite-sentinel",
        path: DEVICE,
        violating: "let m = f32::new(f32::MIN);\nlet m = -f32::MAX;\nlet m = E::min_value();\n",
        lines: &[1, 2, 3],
        fine: "let m = f32::NEG_INFINITY;\nlet t = f32::MIN_POSITIVE;\nlet n = u32::MAX;\n// not f32::MIN\n",
    },
    Example {
        rule: "atomics",
        path: DEVICE,
        violating: "fn a(x: &Tensor<Atomic<f32>>) {}\n",
        lines: &[1],
        fine: "// No Atomic here.\nfn a(x: &Tensor<f32>) {}\n",
    },
    Example {
        rule: "unordered-sums",
        path: DEVICE,
        violating: "use super::hopper::add_to_global;\nhopper::add_to_global(to, at, from, 1, 4);\n",
        lines: &[1, 2],
        fine: "// Not add_to_global.\nlet address = to_global(at);\n",
    },
];

fn rule(name: &str) -> &'static Rule {
    let found = RULES.iter().find(|rule| rule.name == name);
    found.unwrap_or_else(|| panic!("no rule {name}"))
}

/// The lines at which `text`, as the content of `path`, violates a rule.
fn lines(name: &str, path: &str, text: &str) -> Vec<usize> {
    let source = Source::new(path, text).expect("tokens");
    let messages = violations(rule(name), &source);
    let mut lines: Vec<usize> = messages
        .iter()
        .map(|message| {
            let start = format!("{path}:");
            let rest = message.strip_prefix(&start).expect("a path");
            assert!(rest.contains(&format!("[{name}]")), "{message}");
            rest.split(':').next().unwrap().parse().expect("a line")
        })
        .collect();
    lines.sort();
    lines
}

#[test]
fn violations_are_found_where_they_are() {
    for example in EXAMPLES {
        let found = lines(example.rule, example.path, example.violating);
        assert_eq!(found, example.lines, "{} in {}", example.rule, example.path);
    }
}

#[test]
fn what_comes_close_is_fine() {
    for example in EXAMPLES {
        let found = lines(example.rule, example.path, example.fine);
        assert_eq!(found, NONE, "{} in {}", example.rule, example.path);
    }
}

#[test]
fn every_rule_has_an_example_or_a_test_here() {
    let tested = [
        "file-length",
        "function-length",
        "kernel-length",
        "machine-path",
    ];
    for rule in RULES {
        let has_example = EXAMPLES.iter().any(|example| example.rule == rule.name);
        assert!(has_example || tested.contains(&rule.name), "{}", rule.name);
    }
}

#[test]
fn rules_for_the_device_leave_other_files_alone() {
    for (name, path) in [
        ("device-header", "crates/flash-kernels/src/launch.rs"),
        ("atomics", "crates/burn-flash-attention/src/cube.rs"),
        ("unit-names", "crates/flash-kernels/src/kernel/unit/mma.rs"),
        ("mask-kinds", "crates/flash-kernels/src/kernel/mask.rs"),
        (
            "unordered-sums",
            "crates/flash-kernels/src/kernel/backward/fused_overlapped.rs",
        ),
        (
            "kernels-know-no-burn",
            "crates/burn-flash-attention/src/cube.rs",
        ),
        ("reference-alone", "crates/flash-kernels/Cargo.toml"),
        ("bool-parameter", "crates/flash-kernels/src/kernel/mask.rs"),
    ] {
        let example = EXAMPLES.iter().find(|example| example.rule == name);
        let violating = example.expect("an example").violating;
        assert_eq!(lines(name, path, violating), NONE, "{name} in {path}");
    }
}

#[test]
fn files_may_have_400_lines() {
    assert_eq!(lines("file-length", "a.rs", &"\n".repeat(400)), NONE);
    assert_eq!(lines("file-length", "a.rs", &"\n".repeat(401)), [401]);
    assert_eq!(lines("file-length", "a.md", &"\n".repeat(401)), NONE);
}

#[test]
fn functions_may_have_80_lines() {
    let function = |body: usize| format!("\nfn long() {{\n{}}}\n", "    x();\n".repeat(body));
    assert_eq!(lines("function-length", "a.rs", &function(78)), NONE);
    assert_eq!(lines("function-length", "a.rs", &function(79)), [2]);
    // Braces in a comment or a literal end nothing.
    let odd = function(79).replacen("x();", "let x = '}'; // }", 1);
    assert_eq!(lines("function-length", "a.rs", &odd), [2]);
}

#[test]
fn kernel_bodies_may_have_60_lines() {
    let kernel = |attribute: &str, body: usize| {
        let body = "    x();\n".repeat(body);
        format!("{attribute}\npub fn kernel<E: Float>(\n    x: u32,\n) {{\n{body}}}\n")
    };
    for launched in ["#[cube(launch)]", "#[cube(\n    launch_unchecked,\n)]"] {
        assert_eq!(lines("kernel-length", DEVICE, &kernel(launched, 60)), NONE);
        assert_eq!(
            lines("kernel-length", DEVICE, &kernel(launched, 61)).len(),
            1
        );
    }
    assert_eq!(lines("kernel-length", DEVICE, &kernel("#[cube]", 61)), NONE);
}

#[test]
fn paths_of_one_machine_are_found_in_code_text_and_scripts() {
    let path = |dir: &str| format!("{}{dir}/x", '/');
    for dir in ["root", "work", "tmp", "home"] {
        for file in ["a.rs", "README.md", ".ci/run"] {
            let text = format!("cd {}\n", path(dir));
            assert_eq!(lines("machine-path", file, &text), [1], "{text}");
        }
    }
    let fine = format!(
        "target{}\n$HOME{}\n/usr/local/cuda\n",
        path("tmp"),
        path("work")
    );
    assert_eq!(lines("machine-path", "a.rs", &fine), NONE);
    assert_eq!(lines("machine-path", "a.json", &path("root")), NONE);
}
