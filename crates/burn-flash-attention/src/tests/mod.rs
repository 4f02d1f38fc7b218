//! The composed path on the Flex backend against attention written out in f64.

mod case;

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};

use crate::*;
use case::{Case, assert_close, float, host, weight};

#[test]
fn grouped_heads_read_the_key_head_of_their_group() {
    Case::new([2, 6, 2, 5, 7, 4, 3]).check();
    Case::new([1, 4, 1, 3, 3, 4, 5]).check();
}

#[test]
fn causality_is_aligned_bottom_right() {
    for (seqlen_q, seqlen_k) in [(2, 5), (5, 2), (1, 7), (4, 4)] {
        let case = Case::new([2, 2, 1, seqlen_q, seqlen_k, 4, 4]);
        let causal = true;
        Case { causal, ..case }.check();
    }
}

#[test]
fn softcap_and_bias_apply_in_order() {
    let mut case = Case::new([1, 4, 2, 3, 5, 4, 4]);
    case.softcap = Some(0.5);
    case.bias = Some((0..case.scores_len()).map(weight).collect());
    case.mask = Some((0..case.scores_len()).map(|i| i % 5 == 1).collect());
    case.causal = true;
    case.check();
}

#[test]
fn rows_that_see_nothing_are_zero_and_give_zero_gradients() {
    let mut case = Case::new([1, 2, 1, 4, 6, 4, 4]);
    // Keys 0..3 are dropped for every row, so that causality empties row 0.
    case.mask = Some((0..case.scores_len()).map(|i| i % 6 < 3).collect());
    case.causal = true;
    case.check();

    let device = Device::flex().autodiff();
    let masked = case.options(&device);
    // The same by a bias of -∞, which no mask fill takes out of the backward pass.
    let ahead = |i: usize| i % 6 > 2 + (i / 6 % 4);
    let bias = (0..case.scores_len()).map(|i| match i % 6 < 3 || ahead(i) {
        true => f64::NEG_INFINITY,
        false => 0.0,
    });
    let bias: Vec<f64> = bias.collect();
    let biased = FlashOptions::new().with_bias(float(&bias, [1, 2, 4, 6], &device));
    for options in [masked, biased] {
        let tracked = case.tensors(&device).map(Tensor::require_grad);
        let [query, key, value] = tracked.clone();
        let out = flash_attention(query, key, value, options).out;
        // A large gradient: dividing it by a tiny sum would overflow.
        let grads = (out * 1e3).sum().backward();
        let [query, key, value] = tracked.map(|tensor| host(tensor.grad(&grads).unwrap()));
        for head in 0..2 {
            let rows: Vec<_> = query.chunks(4).skip(head * 4).collect();
            assert_eq!(rows[0], [0.0; 4]);
            assert_ne!(rows[3], [0.0; 4]);
        }
        assert!([query, key, value].iter().flatten().all(|x| x.is_finite()));
    }
}

#[test]
fn gradients_are_the_derivatives_of_the_definition() {
    let mut case = Case::new([1, 4, 2, 3, 4, 3, 2]);
    case.mask = Some((0..case.scores_len()).map(|i| i % 12 == 5).collect());
    case.causal = true;
    let device = Device::flex().autodiff();
    let tensors = case.tensors(&device).map(Tensor::require_grad);
    let [query, key, value] = tensors.clone();
    let out = flash_attention(query, key, value, case.options(&device)).out;
    let weights: Vec<f64> = (0..4 * 3 * 2).map(weight).collect();
    let grads = (out * float(&weights, [1, 4, 3, 2], &device))
        .sum()
        .backward();

    let step = 1e-5;
    let slope = |edit: &dyn Fn(&mut Case) -> &mut f64| {
        let mut moved = case.clone();
        *edit(&mut moved) += step;
        let above = moved.loss();
        *edit(&mut moved) -= 2.0 * step;
        (above - moved.loss()) / (2.0 * step)
    };
    let query: Vec<f64> = (0..36).map(|i| slope(&|c| &mut c.query[i])).collect();
    let key: Vec<f64> = (0..24).map(|i| slope(&|c| &mut c.key[i])).collect();
    let value: Vec<f64> = (0..16).map(|i| slope(&|c| &mut c.value[i])).collect();
    for (tensor, expected) in tensors.iter().zip([query, key, value]) {
        assert_close(&host(tensor.grad(&grads).unwrap()), &expected, 1e-5);
    }
}

#[test]
fn masks_broadcast_and_what_they_hide_may_be_nan() {
    let mut case = Case::new([2, 2, 1, 3, 4, 4, 4]);
    let padded = |i: usize| i % 4 == 3 && i >= 2 * 3 * 4;
    case.mask = Some((0..case.scores_len()).map(padded).collect());
    let (expected, _) = case.reference();

    let device = Device::flex().autodiff();
    for poison in [0.0, f64::NAN] {
        let mut case = case.clone();
        case.key[7 * 4] = poison;
        case.value[7 * 4] = poison;
        let [query, key, value] = case.tensors(&device).map(Tensor::require_grad);
        let pad = [[false; 4], [false, false, false, true]];
        let pad = Tensor::<2, Bool>::from_data(TensorData::from(pad), &device);
        let options = FlashOptions::new().with_mask(pad.reshape([2, 1, 1, 4]));
        let out = flash_attention(query.clone(), key.clone(), value.clone(), options).out;
        assert_close(&host(out.clone()), &expected, 1e-6);
        let grads = out.sum().backward();
        for tensor in [query, key, value] {
            let gradient = host(tensor.grad(&grads).unwrap());
            assert!(gradient.iter().all(|x| x.is_finite()), "{gradient:?}");
        }
    }
}

#[test]
fn half_precision_inputs_are_summed_in_f32() {
    let case = Case::new([1, 2, 2, 3, 9, 8, 8]);
    let (expected, lse) = case.reference();
    for (dtype, half_ulp) in [(DType::F16, 2f64.powi(-12)), (DType::BF16, 2f64.powi(-9))] {
        // The inputs are exact in both types, so that only the output is rounded; it is below 1.
        let [query, key, value] = case.tensors(&Device::flex()).map(|x| x.cast(dtype));
        let output = flash_attention(query, key, value, FlashOptions::new().with_lse());
        assert_eq!(output.out.dtype(), dtype);
        assert_close(&host(output.out), &expected, half_ulp + 1e-6);
        assert_eq!(output.lse.as_ref().unwrap().dtype(), DType::F32);
        assert_close(&host(output.lse.unwrap()), &lse, 1e-6);
    }
}

#[test]
fn no_keys_give_zeros_and_no_queries_give_nothing() {
    let device = Device::flex().autodiff();
    for (sizes, lse) in [
        ([1, 2, 1, 3, 0, 4, 4], vec![f64::NEG_INFINITY; 6]),
        ([1, 2, 1, 0, 3, 4, 4], vec![]),
        ([0, 2, 1, 3, 3, 4, 4], vec![]),
    ] {
        let case = Case::new(sizes);
        let tracked = case.tensors(&device).map(Tensor::require_grad);
        let [query, key, value] = tracked.clone();
        let output = flash_attention(query, key, value, FlashOptions::new().with_lse());
        let [batch, heads, _, seqlen_q, _, _, val_dim] = sizes;
        assert_eq!(output.out.dims(), [batch, heads, seqlen_q, val_dim]);
        assert!(host(output.out.clone()).iter().all(|&x| x == 0.0));
        assert_eq!(host(output.lse.unwrap()), lse);
        let grads = output.out.sum().backward();
        for tensor in tracked {
            let gradient = tensor.grad(&grads).unwrap();
            assert_eq!(gradient.dims(), tensor.dims());
            assert!(host(gradient).iter().all(|&x| x == 0.0));
        }
    }
}

#[test]
fn an_untracked_call_on_an_autodiff_device_stays_untracked() {
    let device = Device::flex().autodiff();
    let case = Case::new([1, 2, 1, 3, 5, 4, 4]);
    let [query, key, value] = case.tensors(&device);
    let out = flash_attention(query, key, value, FlashOptions::new()).out;
    assert!(!out.is_tracked());
    assert_close(&host(out), &case.reference().0, 1e-6);
}

#[test]
fn every_disagreement_names_the_argument() {
    let device = Device::flex();
    let zeros = |dims: [usize; 4]| Tensor::<4>::zeros(dims, &device);
    let refused = |q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: &FlashOptions| {
        let error = try_flash_attention(q.clone(), k.clone(), v.clone(), options.clone());
        let error = error.unwrap_err();
        assert_eq!(attention_report(&q, &k, &v, options), Err(error.clone()));
        match error {
            AttentionError::Argument { argument, .. } => argument,
            other => panic!("{other}"),
        }
    };
    let plain = FlashOptions::new();
    let (q, kv) = (zeros([2, 4, 3, 8]), zeros([2, 2, 5, 8]));
    let of = |options: FlashOptions| refused(q.clone(), kv.clone(), kv.clone(), &options);
    let with_key = |key: Tensor<4>| refused(q.clone(), key.clone(), key, &plain);

    assert_eq!(with_key(zeros([1, 2, 5, 8])), "key batch");
    assert_eq!(with_key(zeros([2, 3, 5, 8])), "key num_heads");
    assert_eq!(with_key(zeros([2, 2, 5, 7])), "key head_dim");
    assert_eq!(with_key(kv.clone().cast(DType::F64)), "key dtype");
    let empty = zeros([2, 2, 5, 0]);
    assert_eq!(
        refused(q.clone(), kv.clone(), empty, &plain),
        "value val_dim"
    );
    let short = zeros([2, 2, 4, 8]);
    assert_eq!(
        refused(q.clone(), kv.clone(), short, &plain),
        "value seqlen"
    );
    assert_eq!(of(plain.clone().with_scale(f64::NAN)), "scale");
    assert_eq!(of(plain.clone().with_scale(1e39)), "scale");
    assert_eq!(of(plain.clone().with_softcap(0.0)), "softcap");
    assert_eq!(
        of(plain.clone().with_bias(zeros([2, 2, 3, 5]))),
        "bias shape"
    );
    let mask = Tensor::<4, Bool>::full([2, 1, 2, 5], false, &device);
    assert_eq!(of(plain.clone().with_mask(mask)), "mask shape");
}

#[test]
fn burns_signature_is_a_drop_in() {
    let device = Device::flex();
    let case = Case::new([2, 2, 2, 4, 6, 4, 4]);
    let [query, key, value] = case.tensors(&device);
    let options = AttentionModuleOptions {
        scale: Some(0.3),
        softcap: Some(2.0),
        is_causal: true,
    };
    let mask = Tensor::<4, Bool>::full([2, 2, 4, 6], false, &device);
    let burn = burn::tensor::module::attention;
    let theirs = burn(
        query.clone(),
        key.clone(),
        value.clone(),
        Some(mask.clone()),
        None,
        options,
    );
    let ours = attention(query, key, value, Some(mask), None, options);
    assert_close(&host(ours), &host(theirs), 1e-6);
}
