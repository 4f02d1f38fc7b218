//! What no kernel does yet is composed from Burn's ops: it says so, and it is right.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_flash_attention::{AttentionPath, AttentionReport, attention_report, flash_attention};
use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::compare::assert_within;
use crate::problem::{Got, Problem, Qkv};
use crate::runtime;
use crate::support::{Host, dims};

/// Asserts that `problem` is right, and that the device under test composes it because of
/// `culprit`.
#[track_caller]
fn check_composed(problem: &Problem, culprit: &str) -> Vec<f64> {
    let device = runtime::device();
    let Qkv { q, k, v } = problem.qkv(&device);
    let report = attention_report(&q, &k, &v, &problem.options(&device));
    assert_blames(&report.expect("a valid problem"), culprit);
    let device = runtime::composed_device();
    let got = problem.check_tensors(problem.qkv(&device), problem.options(&device));
    assert_eq!(got.report.path, AttentionPath::Composed);
    got.out
}

/// Asserts that the report says composed, because of `culprit`. Where nothing has a kernel, that is
/// the reason for everything.
#[track_caller]
fn assert_blames(report: &AttentionReport, culprit: &str) {
    assert_eq!(report.path, AttentionPath::Composed, "{report:?}");
    assert_eq!(report.plan, None, "{report:?}");
    let reason = report.reason.as_ref().expect("a fallback has a reason");
    if runtime::has_kernels() {
        assert!(
            reason.to_lowercase().contains(culprit),
            "{reason:?} lacks {culprit:?}"
        );
    }
}

/// Everything at once, on the device under test.
#[rstest]
fn on_the_device_itself(#[values(F32, F16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(2, 4, 20, 33, 16).kv_heads(2)).causal();
    let problem = problem.random_mask([2, 1, 1, 33], 0.3).softcap(3.0);
    let problem = problem.random_bias([1, 4, 20, 33]);
    if !problem.is_refused() {
        let Got { report, .. } = problem.check_output(problem.run());
        assert_blames(&report, "");
    }
}

#[rstest]
fn bias(
    #[values([2, 3, 20, 33], [1, 3, 20, 33], [2, 1, 1, 33], [1, 1, 20, 1])] shape: [usize; 4],
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(2, 3, 20, 33, 16)).causality(causality);
    let problem = problem.random_bias(shape);
    if !problem.is_refused() {
        check_composed(&problem, "bias");
    }
}

#[test]
fn bias_with_mask_and_grouped_heads() {
    let dims = dims(2, 6, 20, 33, 16).kv_heads(2);
    let problem = Problem::random(F32, dims).random_mask([2, 1, 20, 33], 0.4);
    check_composed(&problem.random_bias([1, 6, 20, 33]), "bias");
}

/// A bias of −∞ drops its key, and a row of nothing else sees nothing.
#[test]
fn bias_of_minus_infinity() {
    let mut problem = Problem::random(F32, dims(1, 2, 6, 9, 16));
    let bias = |[_, _, i, j]: [usize; 4]| match i == 2 || j % 3 == 0 {
        true => f64::NEG_INFINITY,
        false => 0.5 * j as f64,
    };
    problem.bias = Some(Host::from_fn([1, 1, 6, 9], bias));
    check_composed(&problem, "bias");
}

#[rstest]
fn softcap(
    #[values(0.5, 5.0, 50.0)] cap: f64,
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(2, 3, 20, 33, 16)).causality(causality);
    let problem = problem.scale(2.0).softcap(cap);
    if !problem.is_refused() {
        check_composed(&problem, "softcap");
    }
}

/// The cap comes before the mask: tanh would turn −∞ into −1 and let every key in.
#[rstest]
fn case14_softcap_does_not_lift_the_causal_rule(#[values(F32, F16)] dtype: Dtype) {
    let dims = dims(1, 1, 4, 4, 1);
    let zeros = || vec![0.0; 4];
    let v = vec![0.0, 0.0, 0.0, 1000.0];
    let problem = Problem::new(dtype, dims, zeros(), zeros(), v)
        .causal()
        .softcap(1.0);
    if !problem.is_refused() {
        let out = check_composed(&problem, "softcap");
        assert_eq!(out[..3], [0.0; 3], "only the last row sees the last value");
    }
}

#[test]
fn case14_caps_differ() {
    let dims = dims(1, 1, 20, 33, 16);
    // Logits of size 20.
    let base = Problem::random(F32, dims).scale(5.0);
    let device = runtime::composed_device();
    let none = base
        .check_tensors(base.qkv(&device), base.options(&device))
        .out;
    let [five, fifty] =
        [5.0, 50.0].map(|cap| check_composed(&base.clone().softcap(cap), "softcap"));
    let apart = |a: &[f64], b: &[f64]| {
        let distance = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        distance.fold(0.0, f64::max)
    };
    for (a, b) in [(&none, &five), (&none, &fifty), (&five, &fifty)] {
        assert!(apart(a, b) > 1e-2, "only {} apart", apart(a, b));
    }
}

/// Composed in f64, not narrowed on the way.
#[rstest]
fn f64_stays_f64(#[values(Full, Causal)] causality: Causality) {
    let dims = dims(1, 2, 20, 33, 16);
    let problem = Problem::random(F32, dims).causality(causality);
    let device = Device::flex();
    let f64s = |shape, values: &[f64]| {
        let data = TensorData::new(values.to_vec(), shape);
        Tensor::<4>::from_data(data, (&device, DType::F64))
    };
    let q = f64s(dims.q(), &problem.q);
    let k = f64s(dims.k(), &problem.k);
    let v = f64s(dims.v(), &problem.v);
    let output = flash_attention(q, k, v, problem.options(&device));
    assert_eq!(output.report.path, AttentionPath::Composed);
    let out = output
        .out
        .into_data()
        .try_into_vec::<f64>()
        .expect("f64 in, f64 out");
    // Far below what f32 resolves, far above what f64 loses.
    assert_within(
        "output in f64",
        &dims.out(),
        &out,
        &problem.want().out,
        1e-12,
    );
}

#[rstest]
#[case::just_over(257, 257)]
#[case::long_keys(320, 64)]
#[case::long_values(64, 320)]
fn head_of_more_than_256(#[case] head_dim: usize, #[case] val_dim: usize) {
    let problem = Problem::random(F32, dims(1, 2, 20, 33, head_dim).val_dim(val_dim)).causal();
    check_composed(&problem, "dim");
}

/// Burn's CPU backends have no kernel at all, whatever the runtime under test.
#[rstest]
fn flex(#[values(Full, Causal)] causality: Causality) {
    check_cpu(&Device::flex(), causality);
}

#[test]
fn flex_at_the_edges() {
    check_cpu_at_the_edges(&Device::flex());
}

#[cfg(feature = "ndarray")]
mod ndarray {
    use super::*;

    #[rstest]
    fn of_either_causality(#[values(Full, Causal)] causality: Causality) {
        check_cpu(&runtime::ndarray(), causality);
    }

    #[test]
    fn at_the_edges() {
        check_cpu_at_the_edges(&runtime::ndarray());
    }
}

#[track_caller]
fn check_cpu(device: &Device, causality: Causality) {
    let dims = dims(2, 6, 33, 65, 16).kv_heads(2);
    let problem = Problem::random(F32, dims).causality(causality);
    let problem = problem.random_mask([2, 1, 1, 65], 0.4);
    let Got { report, .. } = problem.check_tensors(problem.qkv(device), problem.options(device));
    assert_eq!(report.path, AttentionPath::Composed);
    assert!(report.reason.is_some(), "{report:?}");
}

/// Rows that see nothing, poison in masked keys and absent keys, on the CPU.
#[track_caller]
fn check_cpu_at_the_edges(device: &Device) {
    let check = |problem: &Problem| {
        problem.check_tensors(problem.qkv(device), problem.options(device));
    };
    let problem = Problem::random(F32, dims(1, 2, 6, 9, 16));
    check(
        &problem
            .clone()
            .mask([1, 1, 6, 1], |[_, _, i, _]| i % 2 == 0),
    );
    check(&Problem::random(F32, dims(1, 2, 9, 6, 16)).causal());
    check(&Problem::random(F32, dims(1, 2, 6, 0, 16)));
    check(&Problem::random(F32, dims(0, 2, 6, 9, 16)));
    let mut poisoned = problem.mask([1, 1, 1, 9], |[.., j]| j >= 7);
    poisoned.k[7 * 16..9 * 16].fill(f64::NAN);
    check(&poisoned);
}
