//! The plain computation in a GPU's formats.

use flash_reference::rounding::{Dtype, backward_plain, forward_plain, round, round_all, ulp};
use flash_reference::{Inputs, Spec, backward, forward};

use crate::case::{Case, distance, every_option, max_abs, noise, single_head, small};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// `case` with inputs that `dtype` can hold.
fn rounded(dtype: Dtype, mut case: Case) -> Case {
    for x in [&mut case.q, &mut case.k, &mut case.v] {
        *x = round_all(dtype, x);
    }
    case.bias = case.bias.map(|bias| round_all(dtype, &bias));
    case
}

/// The distance of `plain` from `exact`, in units of the last place of the largest element.
fn error_in_ulp(dtype: Dtype, plain: &[f64], exact: &[f64]) -> f64 {
    distance(plain, exact) / ulp(dtype, max_abs(exact))
}

#[test]
fn every_option_is_a_few_roundings_from_the_specification() {
    let cases = every_option().into_iter();
    // With one key every probability is 1 and most results are exact.
    for case in cases.filter(|case| case.spec.seqlen_k > 1) {
        for dtype in DTYPES {
            let case = rounded(dtype, case.clone());
            let d_out = round_all(dtype, &case.d_out());
            let (spec, x) = (&case.spec, &case.inputs());
            let exact = forward(spec, x);
            let plain = forward_plain(dtype, spec, x);
            let exact_grads = backward(spec, x, &d_out);
            let plain_grads = backward_plain(dtype, spec, x, &d_out);
            assert_eq!(plain_grads.dbias.is_some(), case.bias.is_some());
            let mut pairs = vec![
                ("out", plain.out, exact.out),
                ("dq", plain_grads.dq, exact_grads.dq),
                ("dk", plain_grads.dk, exact_grads.dk),
                ("dv", plain_grads.dv, exact_grads.dv),
            ];
            if let (Some(plain), Some(exact)) = (plain_grads.dbias, exact_grads.dbias) {
                pairs.push(("dbias", plain, exact));
            }
            for (tensor, plain, exact) in pairs {
                let error = error_in_ulp(dtype, &plain, &exact);
                // Each result follows from about ten rounded ones of its own magnitude, and the
                // chance that none of dozens of elements is off by a tenth is nil.
                assert!(
                    (0.1..8.0).contains(&error),
                    "{dtype:?} {}: {tensor} is off by {error} ulp",
                    case.name
                );
                assert_eq!(round_all(dtype, &plain), plain, "{tensor} fits {dtype:?}");
            }
            assert_eq!(round_all(Dtype::F32, &plain.lse), plain.lse);
            let error = error_in_ulp(dtype, &plain.lse, &exact.lse);
            assert!(error < 8.0, "{dtype:?} {}: lse, {error} ulp", case.name);
        }
    }
}

#[test]
fn inputs_are_rounded_first() {
    let case = Case::new("", small()).with_mask();
    for dtype in DTYPES.into_iter().chain([Dtype::Tf32]) {
        let case = match dtype {
            // No operand of a product.
            Dtype::Tf32 => case.clone(),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => case.clone().with_bias(),
        };
        let rounded = rounded(dtype, case.clone());
        let d_out = round_all(dtype, &case.d_out());
        assert_eq!(
            forward_plain(dtype, &case.spec, &case.inputs()),
            forward_plain(dtype, &case.spec, &rounded.inputs())
        );
        assert_eq!(
            backward_plain(dtype, &case.spec, &case.inputs(), &case.d_out()),
            backward_plain(dtype, &case.spec, &rounded.inputs(), &d_out)
        );
    }
}

#[test]
fn tf32_rounds_operands_and_no_result() {
    let case = rounded(Dtype::Tf32, Case::new("", small()).with_mask());
    let (spec, x) = (&case.spec, &case.inputs());
    let [full, tf32] = [Dtype::F32, Dtype::Tf32].map(|dtype| forward_plain(dtype, spec, x));
    // Operands of the scores are exact, those of the output are probabilities.
    assert_eq!(full.lse, tf32.lse);
    assert_ne!(round_all(Dtype::Tf32, &tf32.lse), tf32.lse);
    assert_ne!(round_all(Dtype::Tf32, &tf32.out), tf32.out);
    let error = distance(&tf32.out, &full.out);
    let half_unit = max_abs(&case.v) / 2048.0;
    assert!(error > half_unit / 64.0 && error < half_unit, "{error:e}");

    let d_out = round_all(Dtype::Tf32, &case.d_out());
    let gradients = |dtype| backward_plain(dtype, spec, x, &d_out);
    let (full, tf32) = (gradients(Dtype::F32), gradients(Dtype::Tf32));
    for (full, tf32) in [
        (&full.dq, &tf32.dq),
        (&full.dk, &tf32.dk),
        (&full.dv, &tf32.dv),
    ] {
        assert_ne!(&round_all(Dtype::Tf32, tf32), tf32);
        let error = error_in_ulp(Dtype::Tf32, tf32, full);
        assert!(error > 0.01 && error < 2.0, "{error} ulp");
    }
}

#[test]
fn what_every_format_holds_is_exact() {
    // Four equal scores: the probabilities are 1/4, the mean of the values is 3, the score 6.
    let spec = Spec {
        head_dim: 2,
        ..single_head(2, 4)
    };
    let x = Inputs {
        q: &[1.0, 2.0, 2.0, 1.0],
        k: &[2.0; 8],
        v: &[0.0, 2.0, 4.0, 6.0],
        mask: None,
        bias: None,
    };
    let d_out = [8.0, 16.0];
    let exact = forward(&spec, &x);
    let exact_grads = backward(&spec, &x, &d_out);
    assert_eq!(exact.out, [3.0, 3.0]);
    assert_eq!(exact_grads.dv, [6.0; 4]);
    for dtype in DTYPES {
        let plain = forward_plain(dtype, &spec, &x);
        assert_eq!(plain.out, exact.out);
        assert_eq!(plain.lse, round_all(Dtype::F32, &exact.lse));
        assert_eq!(backward_plain(dtype, &spec, &x, &d_out), exact_grads);
    }
}

/// The score of a single key, which is its log-sum-exp.
fn score(dtype: Dtype, spec: &Spec, q: &[f64], k: &[f64], bias: Option<&[f64]>) -> f64 {
    let spec = Spec {
        head_dim: q.len(),
        ..spec.clone()
    };
    let x = Inputs {
        q,
        k,
        v: &[1.0],
        mask: None,
        bias,
    };
    forward_plain(dtype, &spec, &x).lse[0]
}

#[test]
fn scores_are_rounded_at_every_operation_and_summed_in_f32() {
    let spec = single_head(1, 1);
    let scaled = Spec {
        scale: 683.0,
        ..spec.clone()
    };
    let f16 = Dtype::F16;
    // 2049 is a tie between 2048 and 2050 in f16: after the product, the scale and the bias.
    assert_eq!(score(f16, &spec, &[1.0, 1.0], &[2048.0, 1.0], None), 2048.0);
    assert_eq!(score(f16, &scaled, &[1.0], &[3.0], None), 2048.0);
    assert_eq!(score(f16, &spec, &[1.0], &[2048.0], Some(&[1.0])), 2048.0);
    assert_eq!(
        score(Dtype::F32, &spec, &[1.0, 1.0], &[2048.0, 1.0], None),
        2049.0
    );
    // A sum in f16 would have stopped at 2048.
    let ones = [1.0, 1.0, 1.0];
    assert_eq!(score(f16, &spec, &ones, &[2048.0, 1.0, 1.0], None), 2050.0);
    // The scale acts on the rounded product: 2049 · 3 = 6147 would round to 6148.
    let tripled = Spec { scale: 3.0, ..spec };
    assert_eq!(
        score(f16, &tripled, &[1.0, 1.0], &[2048.0, 1.0], None),
        6144.0
    );
}

#[test]
fn softcap_is_three_rounded_operations() {
    let cap = 3.0;
    let spec = Spec {
        softcap: Some(cap),
        ..single_head(1, 1)
    };
    let mut differs = false;
    for q in round_all(Dtype::F16, &noise(100, 8)) {
        let fit = |x| round(Dtype::F16, x);
        let expected = fit(cap * fit(fit(4.0 * q / cap).tanh()));
        assert_eq!(score(Dtype::F16, &spec, &[q], &[4.0], None), expected);
        differs |= expected != fit(cap * (4.0 * q / cap).tanh());
    }
    assert!(differs, "rounding once gave the same every time");
}

#[test]
fn probabilities_are_rounded() {
    let spec = single_head(1, 11);
    let x = Inputs {
        q: &[0.0],
        k: &[0.0; 11],
        v: &[1.0; 11],
        mask: None,
        bias: None,
    };
    let expected = round(Dtype::F16, 11.0 * round(Dtype::F16, 1.0 / 11.0));
    assert!(expected < 1.0);
    assert_eq!(forward_plain(Dtype::F16, &spec, &x).out, [expected]);
}

#[test]
fn bf16_keeps_its_range_and_f16_overflows() {
    let out = |dtype| {
        let spec = Spec {
            head_dim: 64,
            val_dim: 64,
            scale: 0.125,
            ..single_head(1, 1)
        };
        let x = Inputs {
            q: &[133_120.0; 64],
            k: &[133_120.0; 64],
            v: &[133_120.0; 64],
            mask: None,
            bias: None,
        };
        forward_plain(dtype, &spec, &x).out
    };
    assert_eq!(out(Dtype::Bf16), [133_120.0; 64]);
    assert_eq!(out(Dtype::F32), [133_120.0; 64]);
    assert!(out(Dtype::F16).iter().all(|x| x.is_nan()));
}

#[test]
fn gradients_of_probabilities_are_rounded() {
    // dP is 2049 and 2048, which are equal in f16.
    let spec = Spec {
        val_dim: 2,
        ..single_head(1, 2)
    };
    let x = Inputs {
        q: &[0.0],
        k: &[1.0, 2.0],
        v: &[2048.0, 1.0, 2048.0, 0.0],
        mask: None,
        bias: Some(&[0.0, 0.0]),
    };
    let dbias = |dtype| backward_plain(dtype, &spec, &x, &[1.0, 1.0]).dbias;
    assert_eq!(dbias(Dtype::F32), Some(vec![0.25, -0.25]));
    assert_eq!(dbias(Dtype::F16), Some(vec![0.0, 0.0]));
}

#[test]
fn key_and_value_gradients_are_rounded_before_and_after_the_sum_over_the_group() {
    let spec = Spec {
        num_heads: 2,
        ..single_head(2, 1)
    };
    let x = Inputs {
        q: &[0.0; 4],
        k: &[0.0],
        v: &[0.0],
        mask: None,
        bias: None,
    };
    let dv = |dtype, d_out: [f64; 4]| backward_plain(dtype, &spec, &x, &d_out).dv;
    // The first head's 2049 becomes 2048 before the second head's 1 makes it 2049 again.
    assert_eq!(dv(Dtype::F16, [2048.0, 1.0, 1.0, 0.0]), [2048.0]);
    assert_eq!(dv(Dtype::F32, [2048.0, 1.0, 1.0, 0.0]), [2050.0]);
    assert_eq!(dv(Dtype::F16, [2048.0, 0.0, 1.0, 1.0]), [2050.0]);
}

/// One f16 query head after another that reads two keys, 3 and 0, with values 1 and 0 and a bias of
/// zero, so that `dbias` tells what the plain computation took for dS.
fn two_key_gradients(spec: &Spec, q: &[f64], d_out: &[f64]) -> (Vec<f64>, f64, Vec<f64>) {
    let x = Inputs {
        q,
        k: &[3.0, 0.0],
        v: &[1.0, 0.0],
        mask: None,
        bias: Some(&vec![0.0; 2 * q.len()]),
    };
    let grads = backward_plain(Dtype::F16, spec, &x, d_out);
    let ds = grads.dbias.unwrap().into_iter().step_by(2).collect();
    (grads.dq, grads.dk[0], ds)
}

#[test]
fn the_gradient_of_the_score_is_rounded_at_every_operation() {
    let (cap, scale) = (3.0, 0.6875);
    let spec = Spec {
        softcap: Some(cap),
        scale,
        ..single_head(1, 2)
    };
    let fit = |x| round(Dtype::F16, x);
    let noise = round_all(Dtype::F16, &noise(200, 9));
    let mut differs = [false; 4];
    for pair in noise.chunks(2) {
        let (dq, _, ds) = two_key_gradients(&spec, &pair[..1], &pair[1..]);
        let tanh = fit(fit(fit(fit(3.0 * pair[0]) * scale) / cap).tanh());
        // The chain with one of its four roundings left out, or with all of them at 4.
        let chain = |left_out: usize| {
            let step = |at, x| if at == left_out { x } else { fit(x) };
            let d_tanh = step(0, ds[0] * cap);
            let d_ratio = step(1, d_tanh * (1.0 - tanh * tanh));
            let d_score = step(2, d_ratio / cap);
            fit(3.0 * step(3, d_score * scale))
        };
        assert_eq!(dq, [chain(4)]);
        for (left_out, differs) in differs.iter_mut().enumerate() {
            *differs |= chain(left_out) != dq[0];
        }
    }
    assert_eq!(
        differs, [true; 4],
        "leaving one out gave the same every time"
    );
}

#[test]
fn key_gradients_are_sums_of_the_rounded_gradients_of_the_heads() {
    let scale = 0.6875;
    let spec = Spec {
        num_heads: 2,
        scale,
        ..single_head(1, 2)
    };
    let fit = |x| round(Dtype::F16, x);
    let noise = round_all(Dtype::F16, &noise(400, 10));
    let mut differs = false;
    for four in noise.chunks(4) {
        let (q, d_out) = four.split_at(2);
        let (_, dk, ds) = two_key_gradients(&spec, q, d_out);
        let of_head = |h: usize| fit(ds[h] * scale) * q[h];
        assert_eq!(dk, fit(fit(of_head(0)) + fit(of_head(1))));
        differs |= dk != fit(of_head(0) + of_head(1));
    }
    assert!(differs, "one rounding gave the same every time");
}
