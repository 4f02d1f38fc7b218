//! What burn-flash-attention promises, one module per promise, against the f64 specification.
//!
//! One binary for every runtime: `FLASH_RUNTIME=wgpu|vulkan|cuda|flex` picks the device, the
//! default is the first that is compiled in. A single claim runs by its name:
//!
//! ```text
//! cargo test --test attention masks::tiles
//! cargo test --test attention -- --exact runtime::describe
//! ```
//!
//! A result is right when it is at most twice as far from the specification as the plain
//! computation in the same dtype, plus a few units in the last place (`compare.rs`). The expected
//! values are always computed on the host: a framework's own ops have been wrong too. A dtype that
//! the device cannot hold must be refused, and every test of that dtype asserts it.
//!
//! "Case N" in a name is a row of the list of inputs that broke other attention kernels; the test
//! carries its shapes. Feature `exhaustive` adds the wide products.

// The benchmarks have no harness of their own to run the tests of what they share.
#[allow(dead_code, unused_imports)]
#[path = "../../benches/common/mod.rs"]
mod benches;
mod codegen;
mod compare;
mod dropin;
mod errors;
mod fallback;
mod fused;
mod fusion;
mod gqa;
mod gradients;
mod lag;
mod large;
mod lent;
mod mapped;
mod masks;
mod numerics;
mod precision;
mod problem;
mod regression;
mod report;
mod runtime;
mod shapes;
mod split_choice;
mod splits;
mod strides;
mod support;
mod tf32;
mod training;
mod verbs;
mod wide;
