//! The gradient in the order of `GradientOrder::Fused`: as right as the deterministic one where the
//! device has it, and that very one elsewhere.

use burn_flash_attention::{GradientOrder, attention_report};
use flash_kernels::{
    Causality as KernelCausality, DeviceClass, FloatKind, Masking, Pass, UnitKind,
    codegen::{self, Target},
};
use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::codegen::plans::{AMPERE, Ask, HOPPER};
use crate::gradients::{Three, assert_right, gradients_with, random_d_out, weighted};
use crate::problem::{Problem, Qkv};
use crate::runtime;
use crate::support::dims;

/// The order that the report promises for `problem` when all gradients are tracked.
fn reported(problem: &Problem, order: GradientOrder) -> Option<GradientOrder> {
    let device = runtime::device().autodiff();
    let Qkv { q, k, v } = problem.qkv(&device);
    let options = problem.options(&device).with_gradient_order(order);
    let report = attention_report(&q.require_grad(), &k, &v, &options).expect("a valid problem");
    report.gradient
}

fn run(problem: &Problem, order: GradientOrder) -> Three {
    let device = runtime::device().autodiff();
    let options = problem.options(&device).with_gradient_order(order);
    let d_out = random_d_out(problem);
    gradients_with(&device, problem, options, weighted(problem, &d_out))
}

fn has_wgmma() -> bool {
    runtime::client().is_some_and(|client| DeviceClass::of(&client).wgmma)
}

/// The fused gradient of `problem` is right, and is reported where the device has it. dk and dv do
/// not depend on when cubes run.
#[track_caller]
fn check_fused(problem: &Problem) {
    if problem.is_refused() {
        return;
    }
    let order = match (runtime::has_kernels(), has_wgmma()) {
        (false, _) => None,
        (true, false) => Some(GradientOrder::Deterministic),
        (true, true) => Some(GradientOrder::Fused),
    };
    assert_eq!(reported(problem, GradientOrder::Fused), order);
    let got = run(problem, GradientOrder::Fused);
    assert_right(problem, &random_d_out(problem), &got);
    let again = run(problem, GradientOrder::Fused);
    assert_right(problem, &random_d_out(problem), &again);
    if runtime::has_kernels() {
        assert_eq!(got[1..], again[1..]);
    }
}

#[rstest]
fn is_right(
    #[values((200, 333), (333, 200), (1, 300), (256, 256))] lengths: (usize, usize),
    #[values(64, 128)] head_dim: usize,
    #[values(Full, Causal)] causality: Causality,
    #[values(F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(1, 2, lengths.0, lengths.1, head_dim));
    check_fused(&problem.causality(causality));
}

#[rstest]
#[case::narrow(40, 40)]
#[case::between(80, 80)]
#[case::values_of_another_length(128, 72)]
fn is_right_at_other_head_sizes(#[case] head_dim: usize, #[case] val_dim: usize) {
    let dims = dims(2, 2, 150, 290, head_dim).val_dim(val_dim);
    check_fused(&Problem::random(F16, dims).causal());
}

#[rstest]
fn sums_over_the_heads_of_a_group(#[values(64, 128)] head_dim: usize) {
    let dims = dims(2, 6, 150, 200, head_dim).kv_heads(2);
    check_fused(&Problem::random(F16, dims).causal());
}

#[rstest]
#[case::padding([2, 1, 1, 200])]
#[case::dense([2, 2, 150, 200])]
fn takes_a_mask(#[case] shape: [usize; 4], #[values(Full, Causal)] causality: Causality) {
    let problem = Problem::random(F16, dims(2, 2, 150, 200, 128)).causality(causality);
    check_fused(&problem.random_mask(shape, 0.4));
}

/// Logits of size 100: past the last key a probability would be infinite.
#[test]
fn keys_past_the_end_do_not_reach_dq() {
    let problem = Problem::random(F16, dims(1, 1, 100, 130, 128));
    let mut problem = problem.scale(1.0);
    for x in problem.q.iter_mut().chain(&mut problem.k) {
        *x *= 2.0;
    }
    check_fused(&problem);
}

/// Neither dq nor the other gradients depend on what a masked key holds.
#[test]
fn masked_keys_may_hold_nan() {
    let problem = Problem::random(F16, dims(1, 2, 150, 200, 128)).causal();
    let mut problem = problem.mask([1, 1, 1, 200], |[.., j]| j == 20);
    if problem.is_refused() || !runtime::has_kernels() {
        return;
    }
    let clean = run(&problem, GradientOrder::Fused);
    assert_right(&problem, &random_d_out(&problem), &clean);
    for head in 0..2 {
        let row = (head * 200 + 20) * 128;
        problem.k[row..row + 128].fill(f64::NAN);
    }
    let got = run(&problem, GradientOrder::Fused);
    assert_eq!(got[1..], clean[1..]);
    assert!(got[0].iter().all(|x| x.is_finite()));
}

/// What the fused kernel does not take runs the deterministic ones: the same bits, and the report
/// says so.
#[rstest]
#[case::of_f32(F32, 64, 64)]
#[case::odd_rows(F16, 59, 59)]
#[case::wide_keys(F16, 192, 64)]
#[case::wide_values(F16, 64, 128)]
fn what_it_does_not_take_is_deterministic(
    #[case] dtype: Dtype,
    #[case] head_dim: usize,
    #[case] val_dim: usize,
) {
    let dims = dims(1, 2, 150, 200, head_dim).val_dim(val_dim);
    let problem = Problem::random(dtype, dims).causal();
    if problem.is_refused() || !runtime::has_kernels() {
        return;
    }
    let deterministic = Some(GradientOrder::Deterministic);
    assert_eq!(reported(&problem, GradientOrder::Fused), deterministic);
    let got = run(&problem, GradientOrder::Fused);
    assert_right(&problem, &random_d_out(&problem), &got);
    assert_eq!(got, run(&problem, GradientOrder::Deterministic));
}

/// Nobody gets it unasked.
#[test]
fn it_is_not_the_default() {
    let problem = Problem::random(F16, dims(1, 2, 150, 200, 128));
    if problem.is_refused() {
        return;
    }
    let kernels = runtime::has_kernels();
    let order = kernels.then_some(GradientOrder::Deterministic);
    assert_eq!(reported(&problem, GradientOrder::default()), order);
}

fn ask(head_dim: usize) -> Ask {
    Ask {
        pass: Pass::Fused,
        ..Ask::new(FloatKind::F16, head_dim)
    }
}

#[test]
fn there_is_a_plan_for_what_fits_the_registers_of_sm_90() {
    let has = |ask: Ask| {
        ask.plan(&HOPPER)
            .is_ok_and(|plan| plan.unit == UnitKind::Wgmma)
    };
    let masking = Masking::Dense;
    for (head_dim, val_dim, is_taken) in [
        (8, 8, true),
        (64, 64, true),
        (80, 80, true),
        (128, 64, true),
        (128, 128, true),
        // Two warpgroups have a piece of 64 columns each.
        (64, 128, false),
        (59, 59, false),
        (192, 64, false),
        (64, 192, false),
    ] {
        let ask = Ask {
            val_dim,
            ..ask(head_dim)
        };
        assert_eq!(has(ask), is_taken, "{head_dim}, {val_dim}");
        let masked = Ask { masking, ..ask };
        assert_eq!(has(masked), is_taken && head_dim > 64, "{head_dim} masked");
        assert!(ask.plan(&AMPERE).is_err());
    }
    let dtype = FloatKind::F32;
    assert!(!has(Ask { dtype, ..ask(64) }));
}

#[rstest]
fn its_code_adds_in_bulk(
    #[values(64, 128)] head_dim: usize,
    #[values(KernelCausality::Full, KernelCausality::Causal)] causality: KernelCausality,
) {
    let ask = Ask {
        causality,
        ..ask(head_dim)
    };
    let plan = ask.plan(&HOPPER).expect("a plan");
    let text = codegen::kernel(Target::Cuda, &plan, ask.dtype)
        .expect("it compiles")
        .text;
    for instruction in [
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
        "cp.async.bulk.wait_group.read",
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
    ] {
        assert!(text.contains(instruction), "no {instruction} in {plan:?}");
    }
    let after = codegen::convert(Target::Cuda, &plan)
        .expect("it compiles")
        .text;
    assert!(after.contains("cvt.rn.f16x2.f32"));
}
