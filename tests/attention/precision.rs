//! How exactly products of f32 are computed: as asked for, told by the report, and never less exact
//! than that.

use burn_flash_attention::{AttentionPath, FlashOptions, Precision, UnitKind, flash_attention};
use cubecl::client::Client;
use flash_kernels::{
    Causality as KernelCausality, DeviceClass, FloatKind, GradientOrder, Masking, Pass, Plan,
    TensorView,
    codegen::{self, Target},
    launch::{
        BackwardInputs, BackwardPlans, Wanted, backward_with, forward, forward_with, plan_backward,
    },
    plan::Rounding,
};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32, Tf32};
use rstest::rstest;

use crate::codegen::plans::{AMPERE, Ask, HOPPER, VULKAN, WEBGPU, WGSL, WGSL_PLANES};
use crate::compare::limit;
use crate::problem::{Problem, Qkv};
use crate::runtime;
use crate::support::{dims, download};
use crate::tf32::{reported, run, tracked};

/// Queries and keys with more bits than tf32 has, and logits of 8000 that differ by less than 1.
fn many_bits() -> Problem {
    let dims = dims(1, 2, 150, 290, 64);
    let problem = Problem::random(Tf32, dims);
    let spread = |values: &[f64], base: f64, step: f64| {
        values.iter().map(|x| base + x * step).collect::<Vec<_>>()
    };
    let q = spread(&problem.q, 1000.0, 1.0);
    let k = spread(&problem.k, 1.0, 1.0 / 2048.0);
    Problem::new(Tf32, dims, q, k, problem.v)
}

/// The one precision does not leak into the other, in whatever order they are asked for, and the request
/// changes the result where there is tf32 and nowhere else.
#[test]
fn the_request_alone_makes_it_less_exact() {
    let problem = many_bits();
    let want = problem.want().out;
    let allowed = limit(F32, &want, &problem.plain(F32).out);
    let error = |got: &[f64]| {
        let errors = got.iter().zip(&want).map(|(x, y)| (x - y).abs());
        errors.fold(0.0, f64::max)
    };
    let before = run(&problem, Precision::Full);
    let asked = run(&problem, Precision::Tf32);
    let after = run(&problem, Precision::Full);
    assert_eq!(before, after);
    assert!(
        error(&before) <= allowed,
        "{:e} > {allowed:e}",
        error(&before)
    );
    if runtime::has_tf32() {
        assert!(error(&asked) > 4.0 * allowed, "{:e} is f32", error(&asked));
    } else {
        assert_eq!(before, asked);
    }
}

#[rstest]
fn the_default_is_full(#[values(40, 64, 128, 256)] head_dim: usize) {
    let problem = Problem::random(F32, dims(1, 2, 150, 290, head_dim));
    let default = reported(&problem, Precision::default());
    assert_eq!(FlashOptions::new().precision, Precision::Full);
    assert_eq!(
        default.precision,
        runtime::has_kernels().then_some(Precision::Full)
    );
    assert_ne!(default.path, AttentionPath::Kernel(UnitKind::Mma));
    assert!(!default.to_string().contains("tf32"), "{default}");
}

#[test]
fn the_report_says_which_ran() {
    let asked = reported(
        &Problem::random(Tf32, dims(1, 2, 150, 290, 64)),
        Precision::Tf32,
    );
    let precision = match (runtime::has_kernels(), runtime::has_tf32()) {
        (false, _) => None,
        (true, false) => Some(Precision::Full),
        (true, true) => Some(Precision::Tf32),
    };
    assert_eq!(asked.precision, precision);
    assert_eq!(asked.plan.map(|plan| plan.precision), precision);
    assert_eq!(
        asked.to_string().contains("in tf32"),
        runtime::has_tf32(),
        "{asked}"
    );
}

/// Of 16-bit elements there is nothing to round: the same report and the same bits.
#[rstest]
fn other_dtypes_are_not_concerned(#[values(F16, Bf16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(1, 2, 150, 290, 64));
    if problem.is_refused() {
        return;
    }
    let reports = [Precision::Full, Precision::Tf32].map(|it| reported(&problem, it));
    assert_eq!(reports[0], reports[1]);
    let device = runtime::device();
    let bits = [Precision::Full, Precision::Tf32].map(|precision| {
        let options = problem.options(&device).with_precision(precision);
        download(
            dtype,
            problem.run_tensors(problem.qkv(&device), options).out,
        )
    });
    assert_eq!(bits[0], bits[1]);
}

/// Composed operations multiply as Burn does; the request is no error, and the report claims nothing.
#[test]
fn composed_operations_claim_no_precision() {
    let problem = Problem::random(Tf32, dims(1, 2, 20, 33, 16)).random_bias([1, 1, 20, 33]);
    let report = reported(&problem, Precision::Tf32);
    assert_eq!(
        (report.path, report.precision),
        (AttentionPath::Composed, None)
    );
}

/// q, k and v of `Ask::new(FloatKind::F32, 64)`.
fn zeros(client: &Client) -> [TensorView; 3] {
    [[2, 4, 1024, 64]; 3].map(|shape| {
        let bytes = vec![0; 4 * shape.iter().product::<usize>()];
        TensorView::packed(client.create_from_slice(&bytes), shape)
    })
}

/// What a kernel computes is its plan's: one for another pass, mask or head is refused by name.
#[rstest]
#[case("plan pass is Dq", |plan: &mut Plan| plan.pass = Pass::Dq)]
#[case("plan causality is Causal", |plan: &mut Plan| plan.causality = KernelCausality::Causal)]
#[case("plan masking is Dense", |plan: &mut Plan| plan.masking = Masking::Dense)]
#[case("plan head_pad is 32", |plan: &mut Plan| plan.tile.head_pad = 32)]
#[case("plan val_pad is 32", |plan: &mut Plan| plan.tile.val_pad = 32)]
fn a_plan_for_something_else_is_refused(#[case] said: &str, #[case] change: fn(&mut Plan)) {
    let Some(client) = runtime::client() else {
        assert!(!runtime::has_kernels());
        return;
    };
    let ask = Ask::new(FloatKind::F32, 64);
    let mut plan = ask.plan(&DeviceClass::of(&client)).expect("a plan");
    let problem = ask.problem().expect("they agree");
    let [q, k, v] = zeros(&client);
    let run = |plan: &Plan| forward_with(&client, &problem, plan, &q, &k, &v, None);
    assert!(run(&plan).is_ok());
    change(&mut plan);
    let refusal = run(&plan).expect_err("another's").to_string();
    assert!(refusal.contains(said), "{refusal}");
}

/// Likewise those of a gradient.
#[test]
fn plans_of_a_gradient_that_are_exchanged_are_refused() {
    let Some(client) = runtime::client() else {
        assert!(!runtime::has_kernels());
        return;
    };
    let problem = Ask::new(FloatKind::F32, 64).problem().expect("they agree");
    let plans = plan_backward(&client, &problem, GradientOrder::Deterministic).expect("plans");
    let exchanged = BackwardPlans {
        dq: plans.dkv,
        dkv: plans.dq,
        ..plans
    };
    let [q, k, v] = zeros(&client);
    let forward = forward(&client, &problem, &q, &k, &v, None).expect("an output");
    let inputs = BackwardInputs {
        q: &q,
        k: &k,
        v: &v,
        mask: None,
        forward: &forward,
        d_out: &v,
    };
    let run = |plans| backward_with(&client, &problem, plans, inputs, Wanted::All);
    assert!(run(&plans).is_ok());
    let refusal = run(&exchanged).expect_err("exchanged").to_string();
    assert!(refusal.contains("plan pass is Dkv"), "{refusal}");
}

/// A plan that rounds is refused where the problem does not let it.
#[test]
fn a_plan_does_not_round_unasked() {
    let Some(client) = runtime::client() else {
        assert!(!runtime::has_kernels());
        return;
    };
    let ask = Ask::new(FloatKind::F32, 64);
    let device = DeviceClass::of(&client);
    let full = ask.plan(&device).expect("every device has f32");
    let rounding = Plan {
        precision: Precision::Tf32,
        ..full
    };
    let unasked = ask.problem().expect("they agree");
    let mut asked = unasked;
    asked.precision = Precision::Tf32;
    let plan = Ask {
        precision: Precision::Tf32,
        ..ask
    };
    let wrong = match runtime::has_tf32() {
        true => plan.plan(&device).expect("a plan"),
        false => rounding,
    };
    let [q, k, v] = zeros(&client);
    let run = |problem, plan: &Plan| forward_with(&client, problem, plan, &q, &k, &v, None);
    let refusal = run(&unasked, &wrong).expect_err("unasked");
    assert!(
        refusal.to_string().contains("plan precision is Tf32"),
        "{refusal}"
    );
    // A unit that does not round must not claim it either.
    let claim = run(&asked, &rounding).expect_err("an empty claim");
    assert!(claim.to_string().contains("Full"), "{claim}");
    assert_eq!(run(&asked, &wrong).is_ok(), runtime::has_tf32());
}

/// Through a lazy stream: the same bits, and not those of `Full` where there is tf32.
#[test]
fn a_lazy_stream_passes_it_on() {
    let problem = many_bits();
    let device = runtime::device();
    let alone = run(&problem, Precision::Tf32);
    let in_stream = |precision| {
        let Qkv { q, k, v } = problem.qkv(&device);
        let options = FlashOptions::new().with_precision(precision);
        let out = flash_attention(q * 1.0, k * 1.0, v * 1.0, options).out;
        download(F32, out * 1.0)
    };
    let lazy = in_stream(Precision::Tf32);
    assert_eq!(lazy, alone);
    assert_eq!(lazy != in_stream(Precision::Full), runtime::has_tf32());
}

/// Through autodiff: the output is that of an untracked call, and the gradients are not those of `Full`
/// where there is tf32.
#[test]
fn autodiff_passes_it_on() {
    let problem = many_bits();
    let (out, gradients) = tracked(&problem, Precision::Tf32);
    assert_eq!(out, run(&problem, Precision::Tf32));
    let (full, full_gradients) = tracked(&problem, Precision::Full);
    assert_eq!(out != full, runtime::has_tf32());
    for (of, tf32) in gradients.iter().enumerate() {
        assert_eq!(*tf32 != full_gradients[of], runtime::has_tf32(), "{of}");
    }
}

/// Devices with tf32 take it for every head size, at every length, and only when asked.
#[rstest]
fn every_problem_has_a_plan_where_there_is_tf32(
    #[values(HOPPER, AMPERE)] device: DeviceClass,
    #[values(1, 59, 64, 96, 128, 160, 256)] head_dim: usize,
    #[values(1, 16, 17, 64, 65, 1024)] queries: usize,
    #[values(Masking::None, Masking::Dense)] masking: Masking,
    #[values(Pass::Forward, Pass::Dq, Pass::Dkv)] pass: Pass,
) {
    let ask = Ask {
        pass,
        queries: Some(queries),
        masking,
        ..Ask::new(FloatKind::F32, head_dim)
    };
    let precision = Precision::Tf32;
    let plan = Ask { precision, ..ask }.plan(&device).expect("a plan");
    assert_eq!((plan.unit, plan.precision), (UnitKind::Mma, precision));
    assert_eq!(plan.check(&device), Ok(()));
    let unasked = ask.plan(&device).expect("a plan");
    assert_eq!(unasked.unit, UnitKind::Scalar);
    assert_eq!(unasked.precision, Precision::Full);
}

/// The one instruction of sm_90 is not on sm_80.
#[test]
fn a_plan_for_sm_90_is_refused_on_sm_80() {
    let precision = Precision::Tf32;
    let ask = Ask {
        queries: Some(1),
        precision,
        ..Ask::new(FloatKind::F32, 64)
    };
    let plan = ask.plan(&HOPPER).expect("a plan");
    assert_eq!(plan.rounding, Rounding::Even);
    let refusal = plan.check(&AMPERE).expect_err("no such instruction");
    assert!(
        refusal.to_string().contains("rounding to tf32"),
        "{refusal}"
    );
    assert_eq!(ask.plan(&AMPERE).expect("a plan").check(&HOPPER), Ok(()));
}

#[rstest]
fn elsewhere_plans_are_those_without_the_request(
    #[values(VULKAN, WGSL_PLANES, WGSL, WEBGPU)] device: DeviceClass,
    #[values(Pass::Forward, Pass::Dq, Pass::Dkv)] pass: Pass,
    #[values(64, 256)] head_dim: usize,
) {
    let ask = Ask {
        pass,
        ..Ask::new(FloatKind::F32, head_dim)
    };
    let precision = Precision::Tf32;
    assert_eq!(Ask { precision, ..ask }.plan(&device), ask.plan(&device));
}

#[rstest]
fn halves_get_the_plans_without_the_request(
    #[values(HOPPER, AMPERE)] device: DeviceClass,
    #[values(FloatKind::F16, FloatKind::Bf16)] dtype: FloatKind,
    #[values(59, 128)] head_dim: usize,
) {
    let ask = Ask::new(dtype, head_dim);
    let precision = Precision::Tf32;
    assert_eq!(Ask { precision, ..ask }.plan(&device), ask.plan(&device));
}

#[rstest]
fn its_code_rounds_and_multiplies_on_tensor_cores(
    #[values(59, 64, 128, 256)] head_dim: usize,
    #[values(HOPPER, AMPERE)] device: DeviceClass,
    #[values(Pass::Forward, Pass::Dq, Pass::Dkv)] pass: Pass,
    #[values(
        (KernelCausality::Full, Masking::None), (KernelCausality::Causal, Masking::Dense)
    )]
    mask: (KernelCausality, Masking),
) {
    let ask = Ask {
        pass,
        causality: mask.0,
        masking: mask.1,
        precision: Precision::Tf32,
        ..Ask::new(FloatKind::F32, head_dim)
    };
    let plan = ask.plan(&device).expect("a plan");
    let text = codegen::kernel(Target::Cuda, &plan, ask.dtype).expect("it compiles");
    let count = |words: &str| text.text.matches(words).count();
    let products = count("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 ");
    assert!(products > 0, "{plan:?}");
    let (rounds, others) = match plan.rounding {
        Rounding::Even => ("cvt.rn.tf32.f32 ", "cvt.rna.tf32.f32 "),
        Rounding::Away => ("cvt.rna.tf32.f32 ", "cvt.rn.tf32.f32 "),
    };
    assert_eq!(plan.rounding, device.rounding);
    // An operand that two products share is rounded once.
    assert!(count(rounds) >= products, "{plan:?}");
    assert_eq!(count(others), 0, "{plan:?}");
    assert!(count("ldmatrix.sync.aligned.m8n8.x4.shared.b16") > 0);
    assert!(count("ld.shared.b32") > 0);
    // Turned, it would take 16-bit elements apart.
    assert_eq!(count(".trans."), 0);
    let unasked = Ask {
        precision: Precision::Full,
        ..ask
    };
    let plan = unasked.plan(&device).expect("a plan");
    let text = codegen::kernel(Target::Cuda, &plan, ask.dtype).expect("it compiles");
    assert!(!text.text.contains("tf32"), "{plan:?}");
}
