//! Products of f32 in tf32: on request, where the device has them, to the nearest; nowhere else, and
//! never unasked.

use burn::tensor::Tensor;
use burn_flash_attention::{
    AttentionPath, AttentionReport, FlashOptions, Precision, UnitKind, attention_report,
    flash_attention,
};
use flash_kernels::{
    Causality as KernelCausality, DeviceClass, FloatKind, Masking, Pass, Plan,
    codegen::{self, Target},
    launch::forward_with,
};
use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32, Tf32};
use rstest::rstest;

use crate::codegen::plans::{AMPERE, Ask, HOPPER, VULKAN, WEBGPU, WGSL, WGSL_PLANES};
use crate::compare::limit;
use crate::gradients::{self, Three};
use crate::problem::{Got, Problem, Qkv};
use crate::runtime;
use crate::support::{Dims, Host, dims, download};

/// What a call for `problem` with this precision would run.
#[track_caller]
fn reported(problem: &Problem, precision: Precision) -> AttentionReport {
    let device = runtime::device();
    let Qkv { q, k, v } = problem.qkv(&device);
    let options = problem.options(&device).with_precision(precision);
    attention_report(&q, &k, &v, &options).expect("a valid problem")
}

/// The output of `problem` with this precision.
fn run(problem: &Problem, precision: Precision) -> Vec<f64> {
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
    let view = |shape: [usize; 4]| {
        let bytes = vec![0; 4 * shape.iter().product::<usize>()];
        flash_kernels::TensorView::packed(client.create_from_slice(&bytes), shape)
    };
    let [q, k, v] = [[2, 4, 1024, 64]; 3].map(view);
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

/// The output and the gradients of `problem` with this precision, tracked.
fn tracked(problem: &Problem, precision: Precision) -> (Vec<f64>, Three) {
    let device = runtime::device().autodiff();
    let options = problem.options(&device).with_precision(precision);
    let Qkv { q, k, v } = problem.qkv(&device);
    let out = flash_attention(q.require_grad(), k, v, options.clone()).out;
    let d_out = gradients::random_d_out(problem);
    let loss = gradients::weighted(problem, &d_out);
    let three = gradients::gradients_with(&device, problem, options, loss);
    (download(F32, out), three)
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
    // An operand that two products share is rounded once.
    assert!(count("cvt.rna.tf32.f32 ") >= products, "{plan:?}");
    assert!(count("ldmatrix.sync.aligned.m8n8.x4.shared.b16") > 0);
    assert!(count("ld.shared.v2.b32") > 0);
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
