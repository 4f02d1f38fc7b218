//! Products of f32 in tf32, where the device has them: as exact as operands to the nearest allow, for
//! every size, mask and layout. Who gets them is in `precision`.

use burn::tensor::Tensor;
use burn_flash_attention::{
    AttentionPath, AttentionReport, Precision, UnitKind, attention_report, flash_attention,
};
use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{F32, Tf32};
use rstest::rstest;

use crate::gradients::{self, Three};
use crate::problem::{Got, Problem, Qkv};
use crate::runtime;
use crate::support::{Dims, Host, dims, download};

/// What a call for `problem` with this precision would run.
#[track_caller]
pub fn reported(problem: &Problem, precision: Precision) -> AttentionReport {
    let device = runtime::device();
    let Qkv { q, k, v } = problem.qkv(&device);
    let options = problem.options(&device).with_precision(precision);
    attention_report(&q, &k, &v, &options).expect("a valid problem")
}

/// The output of `problem` with this precision.
pub fn run(problem: &Problem, precision: Precision) -> Vec<f64> {
    let device = runtime::device();
    let options = problem.options(&device).with_precision(precision);
    download(F32, problem.run_tensors(problem.qkv(&device), options).out)
}

/// Asserts the rule of tf32 where the device has it, and elsewhere that nothing but `Full` would run.
#[track_caller]
fn check_tensors(problem: &Problem, qkv: Qkv) -> Option<Got> {
    let asked = reported(problem, Precision::Tf32);
    if !runtime::has_tf32() {
        assert_eq!(asked, reported(problem, Precision::Full));
        return None;
    }
    let got = problem.check_tensors(qkv, problem.options(&runtime::device()));
    assert_eq!(got.report.path, AttentionPath::Kernel(UnitKind::Mma));
    assert_eq!(got.report.precision, Some(Precision::Tf32));
    assert_eq!(got.report, asked);
    Some(got)
}

#[track_caller]
fn check(problem: &Problem) -> Option<Got> {
    check_tensors(problem, problem.qkv(&runtime::device()))
}

#[rstest]
fn every_kind_of_head_dim(
    #[values(1, 8, 40, 59, 64, 72, 80, 111, 128, 160, 192, 244, 256)] head_dim: usize,
    #[values(Full, Causal)] causality: Causality,
) {
    let problem = Problem::random(Tf32, dims(1, 2, 150, 290, head_dim));
    check(&problem.causality(causality));
}

#[rstest]
#[case::longer_than_keys(64, 128)]
#[case::shorter_than_keys(128, 64)]
#[case::uneven(40, 72)]
#[case::odd(59, 111)]
#[case::one_value(256, 1)]
#[case::one_feature(1, 256)]
fn val_dim_other_than_head_dim(#[case] head_dim: usize, #[case] val_dim: usize) {
    let dims = dims(1, 2, 150, 290, head_dim).val_dim(val_dim);
    check(&Problem::random(Tf32, dims));
}

/// One tile and several, of each row of the table, and lengths that end inside of one.
#[rstest]
fn of_every_length(
    #[values(
        (1, 1), (1, 300), (16, 33), (17, 5), (64, 64), (150, 290), (290, 150), (513, 1025)
    )]
    lengths: (usize, usize),
    #[values(64, 128, 256)] head_dim: usize,
    #[values(Full, Causal)] causality: Causality,
) {
    let dims = dims(1, 2, lengths.0, lengths.1, head_dim);
    check(&Problem::random(Tf32, dims).causality(causality));
}

#[rstest]
#[case::padding([2, 1, 1, 290])]
#[case::dense([2, 2, 150, 290])]
fn masks(
    #[case] shape: [usize; 4],
    #[values(64, 128)] head_dim: usize,
    #[values(Full, Causal)] causality: Causality,
) {
    let problem = Problem::random(Tf32, dims(2, 2, 150, 290, head_dim)).causality(causality);
    check(&problem.random_mask(shape, 0.4));
}

#[test]
fn rows_that_see_nothing() {
    let problem = Problem::random(Tf32, dims(1, 1, 70, 290, 64));
    check(&problem.mask([1, 1, 70, 1], |[_, _, i, _]| i % 3 == 0));
    check(&Problem::random(Tf32, dims(1, 1, 290, 70, 128)).causal());
}

/// Neither the output nor its bits depend on what a masked key holds.
#[rstest]
fn masked_keys_may_hold_nan(#[values(64, 128)] head_dim: usize) {
    let problem = Problem::random(Tf32, dims(1, 1, 70, 290, head_dim));
    let mut problem = problem.mask([1, 1, 1, 290], |[.., j]| j >= 150);
    let Some(clean) = check(&problem) else {
        return;
    };
    problem.k[150 * head_dim..].fill(f64::NAN);
    assert_eq!(run(&problem, Precision::Tf32), clean.out);
}

#[rstest]
fn heads_of_a_group(#[values(1, 2)] num_kv_heads: usize) {
    let dims = dims(2, 6, 150, 290, 128).kv_heads(num_kv_heads);
    check(&Problem::random(Tf32, dims).causal());
}

/// `[batch, seq, heads, dim]` in memory, cut out of a longer tensor.
#[rstest]
fn strides(#[values(40, 59, 128)] head_dim: usize) {
    let problem = Problem::random(Tf32, dims(2, 3, 150, 290, head_dim));
    let view = |tensor: Tensor<4>| {
        let by_token = tensor.swap_dims(1, 2);
        let longer = Tensor::cat(vec![by_token.clone(), by_token.clone()], 1);
        longer
            .narrow(1, by_token.dims()[1], by_token.dims()[1])
            .swap_dims(1, 2)
    };
    let Qkv { q, k, v } = problem.qkv(&runtime::device());
    let (q, k, v) = (view(q), view(k), view(v));
    check_tensors(&problem, Qkv { q, k, v });
}

#[rstest]
fn scales(#[values(-0.5, 0.0, 1.0, 20.0)] scale: f64, #[values(64, 128)] head_dim: usize) {
    let problem = Problem::random(Tf32, dims(1, 2, 150, 290, head_dim));
    check(&problem.scale(scale).causal());
}

/// Logits of -72 407, in f32 as far as they are sums; past the range of f16 besides.
#[rstest]
fn large_logits_and_values(#[values(64, 128)] head_dim: usize) {
    let dims = dims(1, 1, 150, 290, head_dim);
    let fill = |shape: [usize; 4], x| vec![x; shape.iter().product()];
    let v = Host::from_fn(dims.v(), |[_, _, j, _]| [1e5, 3e5][j % 2]).data;
    let (q, k) = (fill(dims.q(), 80.0), fill(dims.k(), -80.0));
    check(&Problem::new(Tf32, dims, q, k, v).scale(0.0884));
}

#[test]
fn runs_are_reproducible() {
    let problem = Problem::random(Tf32, dims(2, 3, 150, 290, 128)).causal();
    let first = run(&problem, Precision::Tf32);
    assert_eq!(first, run(&problem, Precision::Tf32));
}

/// A problem of `dims` with the same number in all of q, all of k and all of v.
fn constant(dims: Dims, [q, k, v]: [f64; 3]) -> Problem {
    let fill = |shape: [usize; 4], x| vec![x; shape.iter().product()];
    Problem::new(
        Tf32,
        dims,
        fill(dims.q(), q),
        fill(dims.k(), k),
        fill(dims.v(), v),
    )
}

/// 1 + 3/4096 has the neighbours 1 and 1 + 4/4096 in tf32: cut off, it would be 1.
const BETWEEN: f64 = 1.0 + 3.0 / 4096.0;

/// What it is to the nearest.
const NEAREST: f64 = 1.0 + 4.0 / 4096.0;

/// Each operand is rounded to the nearest, whatever way it takes to the tensor cores, and once. 64
/// features keep the queries in registers, 128 in shared memory where there is room for a large tile.
#[rstest]
fn operands_are_rounded_to_the_nearest(
    #[values(1, 40, 300)] seqlen_q: usize,
    #[values(59, 64, 128, 256)] head_dim: usize,
) {
    let dims = dims(1, 1, seqlen_q, 300, head_dim);
    let of = |precision, value| match precision {
        Precision::Tf32 if runtime::has_tf32() => NEAREST,
        _ => value,
    };
    for precision in [Precision::Full, Precision::Tf32] {
        let near = |got: f64, want: f64| {
            assert!(
                (got / want - 1.0).abs() < 2e-6,
                "{precision:?}: {got}, not {want}"
            );
        };
        let attend = |operands| {
            let problem = constant(dims, operands).scale(1.0);
            let device = runtime::device();
            let options = problem.options(&device).with_precision(precision);
            let output = problem.run_tensors(problem.qkv(&device), options);
            let lse = download(F32, output.lse.expect("asked for"));
            (download(F32, output.out)[0], lse[0])
        };
        near(attend([0.0, 0.0, BETWEEN]).0, of(precision, BETWEEN));
        let keys = 300f64.ln();
        let features = head_dim as f64;
        let (_, lse) = attend([BETWEEN, 1.0, 1.0]);
        near(lse, features * of(precision, BETWEEN) + keys);
        let (_, lse) = attend([1.0, BETWEEN, 1.0]);
        near(lse, features * of(precision, BETWEEN) + keys);
    }
}

/// Probabilities too: of two keys one has 0.7 of the other's weight, which is 1433.6/2048.
#[rstest]
fn probabilities_are_rounded_to_the_nearest(#[values(64, 128)] head_dim: usize) {
    let dims = dims(1, 1, 40, 2, head_dim);
    let mut problem = constant(dims, [0.0, 0.0, 0.0]).scale(-(0.7f64.ln()));
    for row in problem.q.chunks_mut(head_dim) {
        row[0] = 1.0;
    }
    // Exact in every format; the scale makes the logarithm of it.
    problem.k[head_dim] = -1.0;
    problem.v[head_dim..].fill(1.0);
    let weight = match runtime::has_tf32() {
        true => 1434.0 / 2048.0,
        false => 0.7,
    };
    let out = run(&problem, Precision::Tf32);
    let want = weight / 1.7;
    assert!(
        out.iter().all(|x| (x - want).abs() < 1e-5),
        "{}, not {want}",
        out[0]
    );
}

/// The output and the gradients of `problem` with this precision, tracked.
pub fn tracked(problem: &Problem, precision: Precision) -> (Vec<f64>, Three) {
    let device = runtime::device().autodiff();
    let options = problem.options(&device).with_precision(precision);
    let Qkv { q, k, v } = problem.qkv(&device);
    let out = flash_attention(q.require_grad(), k, v, options.clone()).out;
    let d_out = gradients::random_d_out(problem);
    let loss = gradients::weighted(problem, &d_out);
    let three = gradients::gradients_with(&device, problem, options, loss);
    (download(F32, out), three)
}

#[rstest]
fn gradients_keep_the_rule(
    #[values((20, 33), (150, 290), (290, 150))] lengths: (usize, usize),
    #[values(Full, Causal)] causality: Causality,
    #[values(40, 59, 64, 128, 256)] head_dim: usize,
) {
    let problem = Problem::random(Tf32, dims(1, 2, lengths.0, lengths.1, head_dim));
    let problem = problem.causality(causality);
    if !runtime::has_tf32() {
        let reports = [Precision::Full, Precision::Tf32].map(|it| reported(&problem, it));
        assert_eq!(reports[0], reports[1]);
        return;
    }
    gradients::check(&problem);
}

/// Neither the gradients nor their bits depend on what a masked key holds.
#[rstest]
fn gradients_of_masked_keys_that_hold_nan(#[values(64, 128)] head_dim: usize) {
    let problem = Problem::random(Tf32, dims(1, 2, 150, 290, head_dim)).causal();
    let mut problem = problem.mask([1, 1, 1, 290], |[.., j]| j % 7 == 3);
    if !runtime::has_tf32() {
        let reports = [Precision::Full, Precision::Tf32].map(|it| reported(&problem, it));
        assert_eq!(reports[0], reports[1]);
        return;
    }
    let clean = gradients::check(&problem);
    for (row, key) in problem.k.chunks_mut(head_dim).enumerate() {
        if row % 290 % 7 == 3 {
            key.fill(f64::NAN);
        }
    }
    let (_, dirty) = tracked(&problem, Precision::Tf32);
    assert_eq!(Some(dirty), clean);
}

/// Groups of heads and values of another length.
#[test]
fn gradients_over_the_heads_of_a_group() {
    let dims = dims(2, 6, 150, 200, 128).kv_heads(2).val_dim(72);
    if runtime::has_tf32() {
        gradients::check(&Problem::random(Tf32, dims).causal());
    } else {
        let problem = Problem::random(Tf32, dims);
        let reports = [Precision::Full, Precision::Tf32].map(|it| reported(&problem, it));
        assert_eq!(reports[0], reports[1]);
    }
}
