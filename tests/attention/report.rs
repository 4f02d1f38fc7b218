//! Which path ran can be asked, before and after, and the answer is the truth as far as the
//! runtime allows to know it.

use burn::backend::DispatchDevice;
use burn_flash_attention::{AttentionPath, AttentionReport, UnitKind, attention_report};
use flash_kernels::{
    AttentionProblem, AttentionShape, DeviceClass, FloatKind, Masking, Precision, plan_forward,
};
use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::problem::{Problem, Qkv};
use crate::runtime::{self, Runtime};
use crate::support::dims;

/// The report before and after running `problem`, which must be the same.
#[track_caller]
fn report(problem: &Problem) -> AttentionReport {
    let device = runtime::device();
    let (qkv, options) = (problem.qkv(&device), problem.options(&device));
    let Qkv { q, k, v } = &qkv;
    let before = attention_report(q, k, v, &options).expect("a valid problem");
    let after = problem.check_tensors(qkv, options).report;
    assert_eq!(before, after);
    after
}

#[track_caller]
fn assert_consistent(report: &AttentionReport) {
    match report.path {
        AttentionPath::Kernel(unit) => {
            assert_eq!(report.plan.map(|plan| plan.unit), Some(unit), "{report:?}");
            assert_eq!(report.reason, None, "{report:?}");
        }
        AttentionPath::Composed => {
            assert_eq!(report.plan, None, "{report:?}");
            assert!(
                report
                    .reason
                    .as_ref()
                    .is_some_and(|reason| !reason.is_empty()),
                "{report:?}"
            );
        }
    }
}

#[rstest]
fn there_is_a_kernel_for_what_a_kernel_can(
    #[values(Full, Causal)] causality: Causality,
    #[values(1, 40, 64, 128, 256)] head_dim: usize,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(1, 2, 150, 290, head_dim));
    let problem = problem.causality(causality).scale(0.25);
    if problem.is_refused() {
        return;
    }
    let problem = problem.random_mask([1, 1, 1, 290], 0.3);
    let device = runtime::device();
    let Qkv { q, k, v } = problem.qkv(&device);
    let report = attention_report(&q, &k, &v, &problem.options(&device)).expect("a valid problem");
    assert_consistent(&report);
    let kernel = matches!(report.path, AttentionPath::Kernel(_));
    assert_eq!(kernel, runtime::has_kernels(), "{report:?}");
}

/// Does the device multiply by warpgroups?
fn has_wgmma() -> bool {
    match runtime::device().as_dispatch() {
        DispatchDevice::Cube(device) => DeviceClass::of(&device.client()).wgmma,
        _ => false,
    }
}

/// Half precision goes to the matrix units of the runtime: wgmma or mma.sync on CUDA, cooperative
/// matrices on Vulkan. WGSL has none. f32 must not go to a unit of less precision.
#[rstest]
fn the_unit_is_the_best_of_the_runtime(
    #[values(64, 128)] head_dim: usize,
    #[values(F32, F16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(1, 2, 150, 290, head_dim));
    if problem.is_refused() {
        return;
    }
    let report = report(&problem);
    assert_consistent(&report);
    let unit = match (runtime::current(), dtype) {
        (Runtime::Flex, _) => {
            assert_eq!(report.path, AttentionPath::Composed);
            return;
        }
        (Runtime::Cuda, F16) if has_wgmma() => UnitKind::Wgmma,
        (Runtime::Cuda, F16) => UnitKind::Mma,
        (Runtime::Vulkan, F16) => UnitKind::Cmma,
        _ => UnitKind::Scalar,
    };
    assert_eq!(report.path, AttentionPath::Kernel(unit), "{report:?}");
}

/// Lengths, heads, scale and strides are no part of a plan: new ones must not recompile.
#[test]
fn the_plan_does_not_depend_on_lengths_or_scale() {
    let plan = |problem: Problem| report(&problem).plan;
    let want = plan(Problem::random(F32, dims(1, 2, 150, 290, 64)));
    for (batch, heads, seqlen_q, seqlen_k) in [(2, 3, 151, 289), (1, 1, 290, 150), (3, 2, 400, 77)]
    {
        let problem = Problem::random(F32, dims(batch, heads, seqlen_q, seqlen_k, 64));
        assert_eq!(plan(problem.scale(0.5)), want);
    }
}

/// Every way to the fallback names its reason.
#[rstest]
#[case::bias(|p: Problem| p.random_bias([1, 1, 20, 33]), "bias")]
#[case::softcap(|p: Problem| p.softcap(3.0), "softcap")]
fn the_fallback_names_its_reason(#[case] change: fn(Problem) -> Problem, #[case] culprit: &str) {
    let problem = change(Problem::random(F32, dims(1, 2, 20, 33, 16)));
    let device = runtime::device();
    let Qkv { q, k, v } = problem.qkv(&device);
    let report = attention_report(&q, &k, &v, &problem.options(&device)).expect("a valid problem");
    assert_consistent(&report);
    assert_eq!(report.path, AttentionPath::Composed);
    let reason = report.reason.expect("a fallback has a reason");
    assert!(
        reason.contains(culprit) || !runtime::has_kernels(),
        "{reason}"
    );
}

/// Tensors on an autodiff device that need no gradient run the kernel.
#[rstest]
fn constants_under_autodiff_run_the_kernel(#[values(F32, F16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(1, 2, 150, 290, 64)).causal();
    let problem = problem.random_mask([1, 1, 1, 290], 0.3);
    if problem.is_refused() {
        return;
    }
    let device = runtime::device().autodiff();
    let output = problem.run_tensors(problem.qkv(&device), problem.options(&device));
    let kernel = matches!(output.report.path, AttentionPath::Kernel(_));
    assert_eq!(kernel, runtime::has_kernels(), "{:?}", output.report);
    problem.check_output(output);
}

/// Tensors that need a gradient run the kernels too, which have one.
#[test]
fn tracked_tensors_run_the_kernels() {
    let problem = Problem::random(F32, dims(1, 2, 20, 33, 16));
    let device = runtime::device().autodiff();
    let Qkv { q, k, v } = problem.qkv(&device);
    let q = q.require_grad();
    let report = attention_report(&q, &k, &v, &problem.options(&device)).expect("a valid problem");
    assert_consistent(&report);
    let kernel = matches!(report.path, AttentionPath::Kernel(_));
    assert_eq!(kernel, runtime::has_kernels(), "{report}");
}

/// What a launch would refuse is no plan, so that the report does not promise a kernel.
#[rstest]
#[case::too_many_cubes([1 << 20, 1 << 20, 64, 64], "number of cubes")]
#[case::too_far_apart([1, 1, 1 << 27, 64], "address type")]
fn what_a_launch_refuses_is_no_plan(#[case] shape: [usize; 4], #[case] lack: &str) {
    let Some(client) = runtime::client() else {
        assert!(!runtime::has_kernels());
        return;
    };
    let problem = AttentionProblem {
        shape: AttentionShape::new(shape, shape, shape).expect("they agree"),
        dtype: FloatKind::F32,
        causality: flash_kernels::Causality::Full,
        masking: Masking::None,
        scale: 1.0,
        precision: Precision::Full,
    };
    match plan_forward(&client, &problem) {
        Err(error) => assert!(error.to_string().contains(lack), "{error}"),
        Ok(_) => assert!(lack == "address type" && DeviceClass::of(&client).wide_addresses),
    }
}
