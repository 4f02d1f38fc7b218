//! Every refusal: what is refused, with which text, and that the plain form panics with the same.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Tensor};
use burn_flash_attention::{
    AttentionPath, FlashOptions, attention, attention_report, flash_attention, try_attention,
    try_flash_attention,
};
use flash_reference::rounding::Dtype::{self, F16, F32};
use rstest::rstest;

use crate::runtime;
use crate::support::upload;

const Q: [usize; 4] = [2, 6, 5, 16];
const K: [usize; 4] = [2, 3, 11, 16];

fn ones(dtype: Dtype, shape: [usize; 4]) -> Tensor<4> {
    upload(
        dtype,
        shape,
        &vec![1.0; shape.iter().product()],
        &runtime::device(),
    )
}

fn mask(shape: [usize; 4]) -> Tensor<4, Bool> {
    ones(F32, shape).equal_scalar(2.0)
}

/// The message that all four public functions give; they must agree.
#[track_caller]
fn refusal(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: FlashOptions) -> String {
    let message = try_flash_attention(q.clone(), k.clone(), v.clone(), options.clone())
        .expect_err("attention must refuse this")
        .to_string();
    let report = attention_report(&q, &k, &v, &options);
    let report = report
        .expect_err("the report must refuse it too")
        .to_string();
    assert_eq!(report, message, "attention_report");
    let panics = panic_message(|| {
        flash_attention(q, k, v, options);
    });
    assert!(
        panics.contains(&message),
        "the plain form panics with {panics:?}, not {message:?}"
    );
    message
}

/// What `f` panics with.
#[track_caller]
fn panic_message(f: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("must panic");
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string()))
        .expect("a panic with a text")
}

#[track_caller]
fn assert_mentions(message: &str, words: &[&str]) {
    let lower = message.to_lowercase();
    for word in words {
        assert!(
            lower.contains(&word.to_lowercase()),
            "{message:?} lacks {word:?}"
        );
    }
}

#[rstest]
#[case::batch_of_the_key([13, 3, 11, 16], K, "key batch is 13, allowed: 2")]
#[case::batch_of_the_value(K, [13, 3, 11, 16], "value batch is 13, allowed: 2")]
#[case::head_dim_of_the_key([2, 3, 11, 24], K, "key head_dim is 24, allowed: 16")]
#[case::heads_of_the_value(K, [2, 6, 11, 16], "value num_heads is 6, allowed: 3")]
#[case::length_of_the_value(K, [2, 3, 19, 16], "value seqlen is 19, allowed: 11")]
#[case::uneven_groups([2, 4, 11, 16], [2, 4, 11, 16], "key num_heads is 4, allowed: a div")]
#[case::more_key_heads([2, 12, 11, 16], [2, 12, 11, 16], "key num_heads is 12, allowed: a div")]
#[case::no_key_heads([2, 0, 11, 16], [2, 0, 11, 16], "key num_heads is 0, allowed: a div")]
fn shapes_that_disagree(#[case] k: [usize; 4], #[case] v: [usize; 4], #[case] text: &str) {
    let message = refusal(
        ones(F32, Q),
        ones(F32, k),
        ones(F32, v),
        FlashOptions::new(),
    );
    assert!(message.contains(text), "{message}");
}

#[rstest]
#[case::head_dim([2, 6, 5, 0], [2, 3, 11, 0], K, "query head_dim is 0, allowed: 1 or more")]
#[case::val_dim(Q, K, [2, 3, 11, 0], "value val_dim is 0, allowed: 1 or more")]
fn rows_without_elements(
    #[case] q: [usize; 4],
    #[case] k: [usize; 4],
    #[case] v: [usize; 4],
    #[case] text: &str,
) {
    let message = refusal(
        ones(F32, q),
        ones(F32, k),
        ones(F32, v),
        FlashOptions::new(),
    );
    assert!(message.contains(text), "{message}");
}

#[rstest]
#[case::key([F32, F16, F32], "key")]
#[case::value([F32, F32, F16], "value")]
fn dtypes_that_disagree(#[case] dtypes: [Dtype; 3], #[case] argument: &str) {
    let [q, k, v] = dtypes;
    let message = refusal(ones(q, Q), ones(k, K), ones(v, K), FlashOptions::new());
    let text = format!("{argument} dtype is f16, allowed: f32, as the query has");
    assert!(message.contains(&text), "{message}");
}

/// A dtype that the device cannot hold is refused, not narrowed: Burn would make the tensors and
/// fail, or worse, at the first op. One that it can hold is taken.
#[rstest]
#[case::f16(DType::F16, "f16")]
#[case::bf16(DType::BF16, "bf16")]
#[case::f64(DType::F64, "f64")]
fn dtype_that_the_device_lacks(#[case] dtype: DType, #[case] name: &str) {
    let device = runtime::device();
    let [q, k, v] = [Q, K, K].map(|shape| Tensor::<4>::empty(shape, (&device, dtype)));
    if runtime::stores(dtype) {
        let report = attention_report(&q, &k, &v, &FlashOptions::new());
        let path = report.expect("the device has it").path;
        let kernel = matches!(path, AttentionPath::Kernel(_));
        assert_eq!(
            kernel,
            runtime::has_kernels() && dtype != DType::F64,
            "{path:?}"
        );
    } else {
        let message = refusal(q, k, v, FlashOptions::new());
        assert_mentions(&message, &[&format!("query dtype is {name}"), "device"]);
    }
}

#[rstest]
#[case::nan(f64::NAN, "NaN")]
#[case::infinite(f64::INFINITY, "inf")]
#[case::minus_infinite(f64::NEG_INFINITY, "-inf")]
#[case::past_f32(-1e39, "-1000000000000000000000000000000000000000")]
fn scale_that_is_not_finite(#[case] scale: f64, #[case] value: &str) {
    let options = FlashOptions::new().with_scale(scale);
    let message = refusal(ones(F32, Q), ones(F32, K), ones(F32, K), options);
    let text = format!("scale is {value}, allowed: a finite f32");
    assert!(message.contains(&text), "{message}");
}

#[rstest]
#[case::zero(0.0, "0")]
#[case::negative(-1.5, "-1.5")]
#[case::nan(f64::NAN, "NaN")]
#[case::infinite(f64::INFINITY, "inf")]
#[case::zero_in_f32(1e-50, "0.00000000000000000000000000000000000000000000000001")]
#[case::infinite_in_f32(1e39, "1000000000000000000000000000000000000000")]
fn softcap_that_is_not_positive_and_finite(#[case] softcap: f64, #[case] value: &str) {
    let options = FlashOptions::new().with_softcap(softcap);
    let message = refusal(ones(F32, Q), ones(F32, K), ones(F32, K), options);
    let text = format!("softcap is {value}, allowed: a positive finite f32");
    assert!(message.contains(&text), "{message}");
}

#[rstest]
#[case::batch([7, 6, 5, 11])]
#[case::key_heads_instead_of_query_heads([2, 3, 5, 11])]
#[case::queries([2, 6, 7, 11])]
#[case::keys([2, 6, 5, 7])]
#[case::exchanged([2, 6, 11, 5])]
fn mask_that_does_not_broadcast(#[case] shape: [usize; 4]) {
    let options = FlashOptions::new().with_mask(mask(shape));
    let message = refusal(ones(F32, Q), ones(F32, K), ones(F32, K), options);
    let text = format!("mask shape is {shape:?}, allowed: [2, 6, 5, 11], each");
    assert!(message.contains(&text), "{message}");
}

#[rstest]
#[case::queries([2, 6, 7, 11])]
#[case::keys([2, 6, 5, 7])]
fn bias_that_does_not_broadcast(#[case] shape: [usize; 4]) {
    let options = FlashOptions::new().with_bias(ones(F32, shape));
    let message = refusal(ones(F32, Q), ones(F32, K), ones(F32, K), options);
    let text = format!("bias shape is {shape:?}, allowed: [2, 6, 5, 11], each");
    assert!(message.contains(&text), "{message}");
}

#[test]
fn bias_of_another_dtype() {
    let options = FlashOptions::new().with_bias(ones(F16, [2, 6, 5, 11]));
    let message = refusal(ones(F32, Q), ones(F32, K), ones(F32, K), options);
    let text = "bias dtype is f16, allowed: f32, as the query has";
    assert!(message.contains(text), "{message}");
}

/// Tensors on two devices: Burn's CPU backends stand in for the other one.
#[rstest]
#[case::key("key")]
#[case::value("value")]
#[case::mask("mask")]
#[case::bias("bias")]
fn devices_that_disagree(#[case] moved: &str) {
    let elsewhere = runtime::elsewhere();
    let place = |argument, shape: [usize; 4]| {
        let here = ones(F32, shape);
        if argument == moved {
            Tensor::from_data(here.into_data(), &elsewhere)
        } else {
            here
        }
    };
    let (k, v) = (place("key", K), place("value", K));
    let scores = [2, 6, 5, 11];
    let mut options = FlashOptions::new().with_mask(place("mask", scores).equal_scalar(2.0));
    options.bias = Some(place("bias", scores));
    let message = refusal(ones(F32, Q), k, v, options);
    assert!(
        message.contains(&format!("{moved} device is ")),
        "{message}"
    );
}

/// The drop-in function refuses what `flash_attention` refuses, in the same words.
#[rstest]
#[case::shape(|k: &mut [usize; 4], _: &mut AttentionModuleOptions| k[0] = 13)]
#[case::scale(|_: &mut [usize; 4], o: &mut AttentionModuleOptions| o.scale = Some(f64::NAN))]
#[case::softcap(|_: &mut [usize; 4], o: &mut AttentionModuleOptions| o.softcap = Some(0.0))]
fn drop_in_refuses_the_same(#[case] spoil: fn(&mut [usize; 4], &mut AttentionModuleOptions)) {
    let (mut k, mut options) = (K, AttentionModuleOptions::default());
    spoil(&mut k, &mut options);
    let flash = FlashOptions {
        scale: options.scale,
        softcap: options.softcap,
        ..Default::default()
    };
    let [q, k] = [ones(F32, Q), ones(F32, k)];
    let want = refusal(q.clone(), k.clone(), k.clone(), flash);
    let run = || try_attention(q.clone(), k.clone(), k.clone(), None, None, options);
    assert_eq!(run().expect_err("must refuse").to_string(), want);
    let panics = panic_message(|| {
        attention(q.clone(), k.clone(), k.clone(), None, None, options);
    });
    assert!(panics.contains(&want), "{panics}");
}
