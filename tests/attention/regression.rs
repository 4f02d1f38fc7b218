//! One test per bug that was found and fixed, named by what went wrong.

use burn::tensor::DType;
use burn_flash_attention::{FlashOptions, try_flash_attention};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::gradients::{self, random_d_out, weighted};
use crate::problem::{Got, Problem, Qkv};
use crate::runtime;
use crate::support::{dims, download};

/// The exponent `c·s - c·m` by one multiply-add has the rounding error of `c·m` in it: 8192 for
/// logits of 1e11, so a weight of 1 became 0 or infinite (CUDA, 16 bits). One key leaves the rest of
/// the arithmetic exact.
#[rstest]
fn rounding_of_a_huge_maximum_reached_the_weights(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let dims = dims(1, 1, 40, 1, 64);
    let (q, k) = (vec![30_000.0; 40 * 64], vec![29_952.0; 64]);
    let v: Vec<f64> = (0..64).map(f64::from).collect();
    let problem = Problem::new(dtype, dims, q, k, v.clone());
    if problem.is_refused() {
        return;
    }
    let Got { out, .. } = problem.check_output(problem.run());
    assert_eq!(out, v.repeat(40), "the only value, for every query");
}

/// A row far from 0 that meets a tile of which it sees nothing: `c·m` is infinite here, and
/// `-inf·c - c·m` was no number. All its keys are alike, so it has the mean of the values that it sees.
#[rstest]
fn a_far_row_met_a_tile_that_it_does_not_see(
    #[values(300, 2100)] len: usize,
    #[values(F32, Bf16)] dtype: Dtype,
) {
    if runtime::is_software() && len > 300 {
        return runtime::skip("a software device has one tile for all lengths");
    }
    let dims = dims(1, 1, len, len, 80);
    let random = Problem::random(dtype, dims);
    let first = |x| move |i: usize| if i.is_multiple_of(80) { x } else { 0.0 };
    let (q, k) = (0..len * 80)
        .map(|i| (first(1e19)(i), first(-1e19)(i)))
        .unzip();
    let problem = Problem::new(dtype, dims, q, k, random.v)
        .causal()
        .scale(4.0);
    if problem.is_refused() {
        return;
    }
    let out = download(dtype, problem.run().out);
    let mut sum = [0.0; 80];
    for (row, (got, v)) in out.chunks(80).zip(problem.v.chunks(80)).enumerate() {
        for (col, (got, v)) in got.iter().zip(v).enumerate() {
            sum[col] += v;
            let want = sum[col] / (row + 1) as f64;
            assert!(
                (got - want).abs() < 0.02,
                "{got} instead of {want} at {row}, {col}"
            );
        }
    }
}

/// Without a fused multiply-add (lavapipe rounds twice) the same form loses 5 digits of f32 with
/// logits of a few hundred.
#[test]
fn two_roundings_of_large_logits_did_not_cancel() {
    let dims = dims(1, 1, 70, 290, 16);
    let first = |index: usize, x| if index.is_multiple_of(16) { x } else { 0.0 };
    let q = (0..70 * 16).map(|i| first(i, 1.0)).collect();
    let k = (0..290 * 16)
        .map(|i| first(i, 500.0 + (i / 16) as f64 / 64.0))
        .collect();
    let v = Problem::random(F32, dims).v;
    Problem::new(F32, dims, q, k, v).scale(1.0).check();
}

/// CubeCL prints -inf as `-Inf`, which is no WGSL: every kernel with a mask failed to compile there.
#[test]
fn minus_infinity_did_not_parse_as_wgsl() {
    let problem = Problem::random(F32, dims(1, 1, 70, 40, 16)).causal();
    let Got { lse, .. } = problem.check_output(problem.run());
    assert!(
        lse.expect("asked for")[..30]
            .iter()
            .all(|&x| x == f64::NEG_INFINITY)
    );
}

/// Burn copies any bytes to a device; bf16 on WGSL then computed garbage without an error.
#[test]
fn a_dtype_that_the_device_lacks_was_taken() {
    let problem = Problem::random(Bf16, dims(1, 1, 20, 20, 16));
    let device = runtime::device();
    let Qkv { q, k, v } = problem.qkv(&device);
    let taken = try_flash_attention(q, k, v, FlashOptions::new()).is_ok();
    assert_eq!(taken, runtime::stores(DType::BF16));
}

/// The kernels multiplied a dropped key's K, and a blind query's Q, by a gradient of 0: 0 · NaN.
#[rstest]
fn nan_of_a_dropped_pair_reached_the_gradients(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let clean = Problem::random(dtype, dims(1, 2, 150, 150, 16));
    if clean.is_refused() {
        return;
    }
    // Query 3 and key 5 see each other and nothing else.
    let mask = |[_, _, i, j]: [usize; 4]| (i == 3) != (j == 5);
    let clean = clean.mask([1, 1, 150, 150], mask);
    let mut poisoned = clean.clone();
    for head in 0..2 {
        poisoned.q[(head * 150 + 3) * 16] = f64::NAN;
        poisoned.k[(head * 150 + 5) * 16 + 1] = f64::NAN;
    }
    let d_out = random_d_out(&clean);
    let device = runtime::device().autodiff();
    let run = |problem| gradients::gradients_on(&device, problem, weighted(problem, &d_out));
    let (want, got) = (run(&clean), run(&poisoned));
    for (name, alone, want, got) in [
        ("dQ", 3, &want[0], &got[0]),
        ("dK", 5, &want[1], &got[1]),
        ("dV", 5, &want[2], &got[2]),
    ] {
        for (row, (want, got)) in want.chunks(16).zip(got.chunks(16)).enumerate() {
            if row % 150 == alone {
                assert!(
                    got.iter().all(|x| x.is_nan()),
                    "{name} of row {row}: {got:?}"
                );
            } else if runtime::has_kernels() {
                assert_eq!(got, want, "{name} of row {row}");
            }
        }
    }
}

/// With a bool mask, queries past the end of the last tile saw every key: a NaN key that is dropped for
/// all queries reached its own dK and dV, which must be 0.
#[rstest]
fn padding_queries_saw_dropped_keys(#[values(F32, F16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(1, 1, 20, 33, 16));
    let mut problem = problem.mask([1, 1, 20, 33], |[.., j]| j == 7);
    problem.k[7 * 16] = f64::NAN;
    let d_out = random_d_out(&problem);
    let device = runtime::device().autodiff();
    let [_, dk, dv] = gradients::gradients_on(&device, &problem, weighted(&problem, &d_out));
    assert_eq!(dk[7 * 16..8 * 16], [0.0; 16], "dK");
    assert_eq!(dv[7 * 16..8 * 16], [0.0; 16], "dV");
}
