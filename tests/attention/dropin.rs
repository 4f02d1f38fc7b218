//! `attention` takes Burn's own arguments and gives what `flash_attention` gives for them.

use burn::tensor::ops::AttentionModuleOptions;
use burn_flash_attention::{attention, flash_attention, try_attention};
use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::compare::{assert_within, limit};
use crate::problem::{Problem, Qkv};
use crate::runtime;
use crate::support::{dims, download};

/// Runs `problem` through the drop-in function and asserts the rule.
#[track_caller]
fn check(problem: &Problem) {
    if problem.is_refused() {
        return;
    }
    let device = match problem.spec.softcap {
        Some(_) => runtime::composed_device(),
        None => runtime::device(),
    };
    let Qkv { q, k, v } = problem.qkv(&device);
    let flash = problem.options(&device);
    let options = AttentionModuleOptions {
        scale: flash.scale,
        softcap: flash.softcap,
        is_causal: problem.spec.causality == Causal,
    };
    let out = attention(q, k, v, flash.mask, flash.bias, options);
    assert_eq!(out.dims(), problem.dims.out());
    let want = problem.want().out;
    let allowed = limit(problem.dtype, &want, &problem.plain(problem.dtype).out);
    let out = download(problem.dtype, out);
    assert_within(
        &problem.describe(),
        &problem.dims.out(),
        &out,
        &want,
        allowed,
    );
}

#[rstest]
fn plain(#[values(Full, Causal)] causality: Causality, #[values(F32, F16, Bf16)] dtype: Dtype) {
    check(&Problem::random(dtype, dims(2, 3, 150, 290, 64)).causality(causality));
}

#[rstest]
fn with_mask_and_scale(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(2, 3, 150, 290, 64)).scale(0.3);
    check(&problem.random_mask([2, 1, 1, 290], 0.4));
}

#[test]
fn with_bias_and_softcap() {
    let problem = Problem::random(F32, dims(2, 3, 20, 33, 16)).softcap(2.0);
    check(&problem.random_bias([2, 3, 20, 33]));
}

#[test]
fn with_grouped_heads() {
    check(&Problem::random(F32, dims(2, 6, 150, 290, 64).kv_heads(2)).causal());
}

#[test]
fn gives_what_flash_attention_gives() {
    let problem = Problem::random(F32, dims(1, 2, 150, 290, 64));
    let device = runtime::device();
    let Qkv { q, k, v } = problem.qkv(&device);
    let options = AttentionModuleOptions::default();
    let drop_in = try_attention(q.clone(), k.clone(), v.clone(), None, None, options);
    let drop_in = download(F32, drop_in.expect("a plain problem"));
    let flash = flash_attention(q, k, v, Default::default());
    assert_eq!(drop_in, download(F32, flash.out));
}
