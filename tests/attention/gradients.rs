//! Gradients under autodiff are the specification's, within the same rule as the output.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, Tensor};
use burn_flash_attention::{FlashOptions, flash_attention};
use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rng::Rng;
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32, Tf32};
use flash_reference::rounding::{backward_plain, round_all};
use flash_reference::{Gradients, backward};
use rstest::rstest;

use crate::compare::{assert_within, gradient_limit};
use crate::problem::{Problem, Qkv};
use crate::runtime;
use crate::support::{dims, download, upload};

/// The device under test, where its kernels have the gradient; a bias and a softcap are composed.
fn device(problem: &Problem) -> Device {
    let composed = problem.bias.is_some() || problem.spec.softcap.is_some();
    let device = match composed {
        true => runtime::composed_device(),
        false => runtime::device(),
    };
    device.autodiff()
}

/// dQ, dK and dV of one run.
pub type Three = [Vec<f64>; 3];

/// The gradients of `loss` of the attention output.
fn gradients(problem: &Problem, loss: impl FnOnce(Tensor<4>) -> Tensor<1>) -> Three {
    gradients_on(&device(problem), problem, loss)
}

pub fn gradients_on(
    device: &Device,
    problem: &Problem,
    loss: impl FnOnce(Tensor<4>) -> Tensor<1>,
) -> Three {
    gradients_with(device, problem, problem.options(device), loss)
}

/// With options of the caller's choice.
pub fn gradients_with(
    device: &Device,
    problem: &Problem,
    options: FlashOptions,
    loss: impl FnOnce(Tensor<4>) -> Tensor<1>,
) -> Three {
    let shapes = [problem.dims.q(), problem.dims.k(), problem.dims.v()];
    let mut shapes = shapes.into_iter();
    gradient_tensors_with(device, problem, options, loss).map(|grad| {
        let shape = shapes.next().expect("three");
        match grad {
            Some(grad) => {
                assert_eq!(grad.dims(), shape);
                download(problem.dtype, grad)
            }
            // Burn has no entry for a leaf that the loss does not depend on.
            None => vec![0.0; shape.iter().product()],
        }
    })
}

/// dQ, dK and dV where they are, as far as the loss depends on q, k and v.
pub fn gradient_tensors(
    device: &Device,
    problem: &Problem,
    loss: impl FnOnce(Tensor<4>) -> Tensor<1>,
) -> [Option<Tensor<4>>; 3] {
    gradient_tensors_with(device, problem, problem.options(device), loss)
}

fn gradient_tensors_with(
    device: &Device,
    problem: &Problem,
    options: FlashOptions,
    loss: impl FnOnce(Tensor<4>) -> Tensor<1>,
) -> [Option<Tensor<4>>; 3] {
    let Qkv { q, k, v } = problem.qkv(device);
    let leaves = [q, k, v].map(Tensor::require_grad);
    let [q, k, v] = leaves.clone();
    let out = flash_attention(q, k, v, options).out;
    let grads = loss(out).backward();
    leaves.map(|leaf| leaf.grad(&grads))
}

/// `Σ d_out ∘ out`, whose gradient with respect to the output is `d_out`.
///
/// bf16 in f32: on Vulkan Burn 0.22.1 multiplies bf16 though SPIR-V has no such product, so a wrong
/// gradient may reach the kernels.
pub fn weighted(problem: &Problem, d_out: &[f64]) -> impl FnOnce(Tensor<4>) -> Tensor<1> {
    let dtype = match problem.dtype.stored() {
        Bf16 => F32,
        dtype => dtype,
    };
    move |out| {
        let weights = upload(dtype, problem.dims.out(), d_out, &out.device());
        (out.cast(runtime::burn_dtype(dtype)) * weights).sum()
    }
}

/// Random output gradient of `problem`.
pub fn random_d_out(problem: &Problem) -> Vec<f64> {
    let values = Rng::new(21).normals(problem.dims.out().iter().product());
    round_all(problem.dtype.stored(), &values)
}

/// Asserts the rule on each gradient.
#[track_caller]
pub fn assert_right(problem: &Problem, d_out: &[f64], got: &Three) {
    let three = |Gradients { dq, dk, dv, .. }: Gradients| [dq, dk, dv];
    let want = three(problem.with_inputs(|spec, x| backward(spec, x, d_out)));
    let dtype = match problem.dtype {
        Tf32 if !runtime::has_tf32() => F32,
        dtype => dtype,
    };
    let plain = three(problem.with_inputs(|spec, x| backward_plain(dtype, spec, x, d_out)));
    let shapes = [problem.dims.q(), problem.dims.k(), problem.dims.v()];
    for (i, name) in ["dQ", "dK", "dV"].iter().enumerate() {
        let allowed = gradient_limit(dtype, &want[i], &plain[i]);
        let what = format!("{name} ({})", problem.describe());
        assert_within(&what, &shapes[i], &got[i], &want[i], allowed);
    }
}

/// Runs `problem` with a random output gradient and asserts the rule.
#[track_caller]
pub fn check(problem: &Problem) -> Option<Three> {
    if problem.is_refused() {
        return None;
    }
    let d_out = random_d_out(problem);
    let got = gradients(problem, weighted(problem, &d_out));
    assert_right(problem, &d_out, &got);
    Some(got)
}

/// Composed on the device under test too; in f16, since Burn may multiply f32 as tf32 there.
#[test]
fn composed_on_the_device_itself() {
    let problem = Problem::random(F16, dims(2, 4, 20, 33, 16).kv_heads(2)).causal();
    let problem = problem.random_mask([2, 1, 1, 33], 0.3).softcap(3.0);
    let d_out = random_d_out(&problem);
    let device = runtime::device().autodiff();
    let got = gradients_on(&device, &problem, weighted(&problem, &d_out));
    assert_right(&problem, &d_out, &got);
}

#[rstest]
fn full_and_causal(
    #[values((20, 33), (33, 20), (150, 290), (290, 150))] lengths: (usize, usize),
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(1, 2, lengths.0, lengths.1, 64));
    check(&problem.causality(causality));
}

#[test]
fn values_of_another_length_and_a_scale() {
    check(&Problem::random(F32, dims(1, 2, 20, 33, 16).val_dim(24)).scale(-0.5));
}

#[rstest]
#[case::padding([2, 1, 1, 33])]
#[case::dense([2, 2, 20, 33])]
fn with_mask(#[case] shape: [usize; 4], #[values(Full, Causal)] causality: Causality) {
    let problem = Problem::random(F32, dims(2, 2, 20, 33, 16)).causality(causality);
    check(&problem.random_mask(shape, 0.4));
}

#[test]
fn case1_rows_that_see_nothing_get_no_gradient() {
    let mut rng = Rng::new(1);
    let [q, k, v] = [(); 3].map(|()| rng.uniforms(64));
    let problem = Problem::new(F32, dims(1, 1, 8, 8, 8), q, k, v);
    let problem = problem.mask([1, 1, 8, 8], |[_, _, i, j]| i >= 4 || j >= 4);
    let [dq, dk, dv] = check(&problem).expect("every device has f32");
    assert_eq!(dq[32..], [0.0; 32], "dQ of rows 4 to 7");
    // Keys 4 to 7 are seen by nobody.
    assert_eq!(dk[32..], [0.0; 32]);
    assert_eq!(dv[32..], [0.0; 32]);
}

#[test]
fn case2_row_emptied_by_mask_and_causal_rule() {
    let problem = Problem::random(F32, dims(1, 1, 4, 4, 8)).causal();
    let [dq, ..] = check(&problem.mask([1, 1, 1, 4], |[.., j]| j == 0)).expect("f32");
    assert_eq!(dq[..8], [0.0; 8], "dQ of row 0");
}

/// Padding and a window leave one row without a key: the parameters' gradients are finite and do
/// not depend on that row's part of the loss.
#[test]
fn case3_parameters_do_not_feel_an_empty_row() {
    let dims = dims(2, 1, 6, 6, 16);
    let mask = |[b, _, i, j]: [usize; 4]| j > i || j + 1 < i || (b == 1 && j >= 4);
    let problem = Problem::random(F32, dims).mask([2, 1, 6, 6], mask);
    let whole = random_d_out(&problem);
    let mut without = whole.clone();
    without[(6 + 5) * 16..].fill(0.0);
    let parameters = |d_out: &[f64]| -> Vec<Vec<f64>> {
        let device = device(&problem);
        let mut rng = Rng::new(4);
        let mut weight = || {
            let values = round_all(F32, &rng.normals(16 * 16));
            upload(F32, [1, 1, 16, 16], &values, &device).require_grad()
        };
        let weights = [weight(), weight(), weight()];
        let x = problem.qkv(&device).q;
        let [q, k, v] = weights.clone().map(|weight| x.clone().matmul(weight));
        let out = flash_attention(q, k, v, problem.options(&device)).out;
        let grads = weighted(&problem, d_out)(out).backward();
        let grad = |weight: Tensor<4>| download(F32, weight.grad(&grads).expect("a leaf"));
        weights.map(grad).to_vec()
    };
    let (whole, without) = (parameters(&whole), parameters(&without));
    assert_eq!(whole, without);
    for grad in whole {
        assert!(grad.iter().all(|x| x.is_finite()), "{grad:?}");
        assert!(grad.iter().any(|x| *x != 0.0), "{grad:?}");
    }
}

/// The gradient of a sum is a 1 expanded with stride 0.
#[rstest]
fn case7_gradient_of_a_sum(#[values(Full, Causal)] causality: Causality) {
    let problem = Problem::random(F32, dims(2, 2, 20, 33, 16)).causality(causality);
    let got = gradients(&problem, Tensor::sum);
    let d_out = vec![1.0; problem.dims.out().iter().product()];
    assert_right(&problem, &d_out, &got);
}

/// The gradient of one part of a concatenation is a view into the whole's.
#[rstest]
fn case7_gradient_from_a_concatenation(#[values(1, 2, 3)] dim: usize) {
    let problem = Problem::random(F32, dims(2, 2, 20, 33, 16));
    let d_out = random_d_out(&problem);
    let loss = |out: Tensor<4>| {
        let device = out.device();
        let weights = upload(F32, problem.dims.out(), &d_out, &device);
        let [before, after] = [(); 2].map(|()| Tensor::zeros(out.shape(), &device));
        let weights = Tensor::cat(vec![weights.clone() * 3.0, weights.clone(), weights], dim);
        (Tensor::cat(vec![before, out, after], dim) * weights).sum()
    };
    let got = gradients(&problem, loss);
    assert_right(&problem, &d_out, &got);
}

#[rstest]
#[case::three_per_key_head(6, 2)]
#[case::four_per_key_head(8, 2)]
#[case::one_key_head(4, 1)]
#[case::many(32, 8)]
fn case12_key_gradients_sum_over_the_group(#[case] num_heads: usize, #[case] num_kv_heads: usize) {
    let dims = dims(2, num_heads, 65, 65, 64).kv_heads(num_kv_heads);
    check(&Problem::random(F32, dims).causal());
}

/// With a cap of 5 on logits of size 20 the factor 1 − tanh² is far from 1 nearly everywhere.
#[rstest]
fn case14_softcap_damps_the_gradient(#[values(5.0, 50.0)] cap: f64) {
    let problem = Problem::random(F32, dims(1, 1, 20, 33, 16)).scale(5.0);
    let capped = check(&problem.clone().softcap(cap)).expect("f32");
    let plain = check(&problem).expect("f32");
    assert_ne!(capped[0], plain[0]);
}

#[test]
fn through_a_bias() {
    let problem = Problem::random(F32, dims(2, 2, 20, 33, 16)).causal();
    check(&problem.random_bias([2, 2, 20, 33]));
}

/// The bias itself gets a gradient, summed over what it was broadcast to.
#[test]
fn of_a_bias() {
    let problem = Problem::random(F32, dims(2, 2, 20, 33, 16)).random_bias([2, 2, 20, 33]);
    let device = device(&problem);
    let Qkv { q, k, v } = problem.qkv(&device);
    let mut options = problem.options(&device);
    let bias = options.bias.take().expect("set").require_grad();
    let out = flash_attention(q, k, v, options.with_bias(bias.clone())).out;
    let d_out = random_d_out(&problem);
    let grads = weighted(&problem, &d_out)(out).backward();
    let got = download(F32, bias.grad(&grads).expect("a leaf"));
    let want = problem
        .with_inputs(|spec, x| backward(spec, x, &d_out))
        .dbias
        .expect("had one");
    let plain = problem.with_inputs(|spec, x| backward_plain(F32, spec, x, &d_out));
    let allowed = gradient_limit(F32, &want, &plain.dbias.expect("had one"));
    assert_within("dbias", &problem.dims.scores(), &got, &want, allowed);
}

/// Without keys the output is the constant zero; without queries nobody reads the keys. Going
/// backward from there is no error.
#[rstest]
#[case::no_keys(5, 0)]
#[case::no_queries(0, 5)]
fn case15_nothing_to_attend(#[case] seqlen_q: usize, #[case] seqlen_k: usize) {
    let problem = Problem::random(F32, dims(1, 2, seqlen_q, seqlen_k, 64));
    let [dq, dk, dv] = gradients(&problem, Tensor::sum);
    assert_eq!(dq, vec![0.0; problem.q.len()]);
    assert_eq!(dk, vec![0.0; problem.k.len()]);
    assert_eq!(dv, vec![0.0; problem.v.len()]);
}

#[test]
fn case15_one_token() {
    let problem = Problem::random(F32, dims(2, 3, 1, 1, 64));
    let d_out = random_d_out(&problem);
    let [dq, dk, dv] = gradients(&problem, weighted(&problem, &d_out));
    // The softmax over one key is constant. Zero but for rounding of dP - delta, two sums of the same
    // products in different orders; the rule of `check` has no room for it, where plain gives 0.
    assert!(
        dq.iter().chain(&dk).all(|x| x.abs() < 1e-5),
        "{dq:?} {dk:?}"
    );
    assert_eq!(dv, d_out);
}

#[test]
fn case17_causal_on_every_head() {
    check(&Problem::random(F32, dims(2, 4, 16, 16, 32)).causal());
}

/// Burn differentiates once: a gradient is no part of a graph, and saying otherwise is an error.
#[test]
fn case19_gradient_of_a_gradient_is_a_clear_error() {
    let problem = Problem::random(F32, dims(1, 1, 4, 4, 8));
    let device = device(&problem);
    let Qkv { q, k, v } = problem.qkv(&device);
    let q = q.require_grad();
    let out = flash_attention(q.clone(), k, v, problem.options(&device)).out;
    let grads = out.sum().backward();
    let dq = q.grad(&grads).expect("a leaf");
    assert!(!dq.is_tracked());
    let again = catch_unwind(AssertUnwindSafe(|| dq.sum().backward()));
    let payload = again.err().expect("Burn refuses");
    let text = payload.downcast_ref::<String>().cloned();
    let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string()));
    let text = text.expect("a panic with a text");
    assert!(text.contains("tracked autodiff tensor"), "{text}");
}

/// A constant operand has no gradient, and the others' do not change.
#[test]
fn of_one_operand_alone() {
    let problem = Problem::random(F32, dims(1, 2, 20, 33, 16)).causal();
    let d_out = random_d_out(&problem);
    let all = gradients(&problem, weighted(&problem, &d_out));
    for (tracked, want) in all.iter().enumerate() {
        let device = device(&problem);
        let Qkv { q, k, v } = problem.qkv(&device);
        let mut leaves = [q, k, v];
        leaves[tracked] = leaves[tracked].clone().require_grad();
        let [q, k, v] = leaves.clone();
        let out = flash_attention(q, k, v, problem.options(&device)).out;
        let grads = weighted(&problem, &d_out)(out).backward();
        for (i, leaf) in leaves.iter().enumerate() {
            let grad = leaf.grad(&grads).map(|grad| download(F32, grad));
            assert_eq!(grad.as_ref(), (i == tracked).then_some(want), "operand {i}");
        }
    }
}
