//! The backward kernels in the ways a training loop uses them.

use burn::tensor::Tensor;
use burn_flash_attention::flash_attention;
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::gradients::{assert_right, check, gradients_on, random_d_out, weighted};
use crate::problem::{Problem, Qkv};
use crate::runtime;
use crate::support::{dims, download};

/// Rows, columns and padding of every kind, queries of two heads summed into one key head.
#[rstest]
fn every_kind_of_head_dim(
    #[values(1, 8, 40, 59, 96, 111, 128, 160, 256)] head_dim: usize,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    if runtime::is_software() && dtype == F16 && head_dim > 64 && head_dim != 111 {
        return runtime::skip(
            "more columns of a kernel that f32 has at this size and f16 at others",
        );
    }
    let dims = dims(1, 2, 70, 90, head_dim).kv_heads(1);
    check(&Problem::random(dtype, dims).causal());
}

#[rstest]
#[case::longer_than_keys(16, 80)]
#[case::shorter(64, 24)]
#[case::uneven(59, 7)]
fn val_dim_other_than_head_dim(
    #[case] head_dim: usize,
    #[case] val_dim: usize,
    #[values(F32, F16)] dtype: Dtype,
) {
    let dims = dims(2, 2, 70, 50, head_dim).val_dim(val_dim);
    check(&Problem::random(dtype, dims).random_mask([2, 1, 1, 50], 0.3));
}

/// No atomics: the order of every sum is fixed.
#[rstest]
fn fifty_runs_are_bit_equal(#[values(F32, F16)] dtype: Dtype) {
    let (heads, seqlen_q, seqlen_k) = runtime::on_card((4, 130, 150), (2, 70, 90));
    let dims = dims(2, heads, seqlen_q, seqlen_k, 32).kv_heads(heads / 2);
    let problem = Problem::random(dtype, dims).causal();
    if problem.is_refused() {
        return;
    }
    let d_out = random_d_out(&problem);
    let device = runtime::device().autodiff();
    let run = || gradients_on(&device, &problem, weighted(&problem, &d_out));
    let first = run();
    assert_right(&problem, &d_out, &first);
    for again in 1..50 {
        assert_eq!(run(), first, "run {again}");
    }
}

/// A strategy that recomputes activations gives the same gradients.
#[test]
fn checkpointing_changes_no_gradient() {
    let problem = Problem::random(F32, dims(1, 2, 70, 90, 16)).causal();
    let d_out = random_d_out(&problem);
    let device = runtime::device().autodiff();
    let kept = gradients_on(&device, &problem, weighted(&problem, &d_out));
    let device = device.gradient_checkpointing();
    let recomputed = gradients_on(&device, &problem, weighted(&problem, &d_out));
    assert_eq!(kept, recomputed);
    assert_right(&problem, &d_out, &kept);
}

/// Operations before and after, which Fusion may fuse: `6 · dQ(2q)` for `3 · attention(2q)`.
#[test]
fn neighbors_pass_the_gradient_on() {
    let problem = Problem::random(F32, dims(1, 2, 70, 90, 16)).causal();
    let d_out = random_d_out(&problem);
    let device = runtime::device().autodiff();
    let Qkv { q, k, v } = problem.qkv(&device);
    let leaves = [q, k, v].map(Tensor::require_grad);
    let [q, k, v] = leaves.clone();
    let out = flash_attention(q * 2.0, k, v, problem.options(&device)).out;
    let grads = weighted(&problem, &d_out)(out * 3.0).backward();
    let got = leaves.map(|leaf| download(F32, leaf.grad(&grads).expect("it takes part")));
    let mut doubled = problem.clone();
    doubled.q.iter_mut().for_each(|x| *x *= 2.0);
    let factors = [6.0, 3.0, 3.0];
    let mut factors = factors.into_iter();
    let got = got.map(|grad| {
        let factor = factors.next().expect("three");
        grad.iter().map(|x| x / factor).collect()
    });
    assert_right(&doubled, &d_out, &got);
}

/// q, k and v as slices of one tensor `[batch, seqlen, 3, heads, dim]`, with axes swapped: one leaf
/// receives the three gradients.
#[test]
fn one_packed_leaf_receives_all_three() {
    let problem = Problem::random(F32, dims(2, 3, 70, 70, 16)).causal();
    let d_out = random_d_out(&problem);
    let device = runtime::device().autodiff();
    let Qkv { q, k, v } = problem.qkv(&device);
    let packed: Vec<Tensor<5>> = [q, k, v]
        .into_iter()
        .map(|x| x.swap_dims(1, 2).unsqueeze_dim(2))
        .collect();
    let leaf = Tensor::cat(packed, 2).require_grad();
    let part = |index: usize| {
        let slice = leaf.clone().narrow(2, index, 1);
        slice.squeeze_dim::<4>(2).swap_dims(1, 2)
    };
    let out = flash_attention(part(0), part(1), part(2), problem.options(&device)).out;
    let grads = weighted(&problem, &d_out)(out).backward();
    let grad = leaf.grad(&grads).expect("it takes part");
    let got = [0, 1, 2].map(|index| {
        let part = grad.clone().narrow(2, index, 1).squeeze_dim::<4>(2);
        download(F32, part.swap_dims(1, 2))
    });
    assert_right(&problem, &d_out, &got);
}
