//! Which keys reach a result, and that dropped ones do not.

use flash_reference::rounding::{Dtype, backward_plain, forward_plain};
use flash_reference::{Causality, Gradients, Inputs, Output, Spec, backward, forward};

use crate::case::{Case, bits, max_abs, single_head, small};

/// The index trick: with equal scores and `v_j = j` the output is the mean index of the keys a
/// row sees, and the log-sum-exp the logarithm of their number.
fn causal_means_and_counts(seqlen_q: usize, seqlen_k: usize) -> (Vec<f64>, Vec<f64>) {
    let spec = Spec {
        causality: Causality::Causal,
        ..single_head(seqlen_q, seqlen_k)
    };
    let v: Vec<f64> = (0..seqlen_k).map(|j| j as f64).collect();
    let x = Inputs {
        q: &vec![0.0; seqlen_q],
        k: &vec![0.0; seqlen_k],
        v: &v,
        mask: None,
        bias: None,
    };
    let Output { out, lse } = forward(&spec, &x);
    let counts = lse.iter().map(|lse| lse.exp().round()).collect();
    (out, counts)
}

#[test]
fn causal_is_aligned_to_the_bottom_right() {
    let fewer_queries = causal_means_and_counts(2, 5);
    assert_eq!(fewer_queries, (vec![1.5, 2.0], vec![4.0, 5.0]));
    let fewer_keys = causal_means_and_counts(5, 2);
    assert_eq!(fewer_keys.0, [0.0, 0.0, 0.0, 0.0, 0.5]);
    assert_eq!(fewer_keys.1, [0.0, 0.0, 0.0, 1.0, 2.0]);
    let (means, counts) = causal_means_and_counts(1, 7);
    assert!((means[0] - 3.0).abs() < 1e-15);
    assert_eq!(counts, [7.0]);
    let square = causal_means_and_counts(3, 3);
    assert_eq!(square.1, [1.0, 2.0, 3.0]);
}

#[test]
fn a_mask_and_the_causal_rule_can_empty_a_row_together() {
    // The mask drops the first keys of every row; the causal rule hides the others from the first
    // rows.
    for (seqlen_q, seqlen_k, dropped, empty) in
        [(4, 4, 1, 1), (4, 8, 1, 0), (4, 8, 5, 1), (8, 4, 1, 5)]
    {
        let spec = Spec {
            causality: Causality::Causal,
            ..single_head(seqlen_q, seqlen_k)
        };
        let mut case = Case::new("", spec);
        case.mask = Some(
            (0..case.num_scores())
                .map(|at| at % seqlen_k < dropped)
                .collect(),
        );
        let found = forward(&case.spec, &case.inputs());
        for i in 0..seqlen_q {
            assert_eq!(found.lse[i] == f64::NEG_INFINITY, i < empty, "row {i}");
            assert_eq!(found.out[i] == 0.0, i < empty, "row {i}");
        }
    }
}

fn all_finite(grads: &Gradients) -> bool {
    let Gradients { dq, dk, dv, dbias } = grads;
    let dbias = dbias.as_deref().unwrap_or_default();
    [dq, dk, dv, dbias]
        .into_iter()
        .flatten()
        .all(|x| x.is_finite())
}

fn assert_same_bits(a: &Gradients, b: &Gradients) {
    assert_eq!(bits(&a.dq), bits(&b.dq));
    assert_eq!(bits(&a.dk), bits(&b.dk));
    assert_eq!(bits(&a.dv), bits(&b.dv));
    let dbias = |grads: &Gradients| grads.dbias.as_deref().map(bits);
    assert_eq!(dbias(a), dbias(b));
}

/// Row 1 of every head sees nothing, see `Case::with_mask`.
fn empties_row_one() -> Case {
    Case::new("", small()).with_mask().with_bias()
}

#[test]
fn an_empty_row_is_exactly_zero() {
    let case = empties_row_one();
    let found = forward(&case.spec, &case.inputs());
    let grads = backward(&case.spec, &case.inputs(), &case.d_out());
    let Spec {
        seqlen_q,
        seqlen_k,
        val_dim,
        head_dim,
        ..
    } = case.spec;
    let (dbias, mask) = (grads.dbias.unwrap(), case.mask.as_ref().unwrap());
    for row in 0..case.num_rows() {
        let of_row = |x: &[f64], length: usize| max_abs(&x[row * length..][..length]);
        let dropped = &mask[row * seqlen_k..][..seqlen_k];
        let kept = dropped.iter().filter(|dropped| !**dropped).count();
        if row % seqlen_q == 1 {
            assert_eq!(kept, 0);
        }
        assert_eq!(found.lse[row] == f64::NEG_INFINITY, kept == 0);
        assert_eq!(of_row(&found.out, val_dim) == 0.0, kept == 0);
        // With a single key the probability is 1 whatever the score.
        if kept != 1 {
            assert_eq!(of_row(&grads.dq, head_dim) == 0.0, kept == 0);
            assert_eq!(of_row(&dbias, seqlen_k) == 0.0, kept == 0);
        }
    }
}

#[test]
fn what_an_empty_row_holds_reaches_nothing() {
    let clean = empties_row_one();
    let mut poisoned = clean.clone();
    let mut poisoned_d_out = clean.d_out();
    let Spec {
        seqlen_q,
        val_dim,
        head_dim,
        ..
    } = clean.spec;
    for row in (0..clean.num_rows()).filter(|row| row % seqlen_q == 1) {
        poisoned.q[row * head_dim..][..head_dim].fill(f64::NAN);
        poisoned_d_out[row * val_dim..][..val_dim].fill(f64::NAN);
    }
    assert_eq!(
        forward(&clean.spec, &clean.inputs()),
        forward(&clean.spec, &poisoned.inputs())
    );
    let expected = backward(&clean.spec, &clean.inputs(), &clean.d_out());
    let found = backward(&clean.spec, &poisoned.inputs(), &poisoned_d_out);
    assert_same_bits(&expected, &found);
    assert!(all_finite(&found));
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let expected = backward_plain(dtype, &clean.spec, &clean.inputs(), &clean.d_out());
        let found = backward_plain(dtype, &clean.spec, &poisoned.inputs(), &poisoned_d_out);
        assert_same_bits(&expected, &found);
        assert!(all_finite(&found));
    }
}

/// `case` with key 2 of every head dropped by `drop`, and the same with that key and its value
/// NaN or infinite.
fn assert_key_two_reaches_nothing(mut clean: Case, drop: impl Fn(&mut Case, usize)) {
    let Spec {
        seqlen_k,
        val_dim,
        head_dim,
        ..
    } = clean.spec;
    for at in (0..clean.num_scores()).filter(|at| at % seqlen_k == 2) {
        drop(&mut clean, at);
    }
    let d_out = clean.d_out();
    let expected = forward(&clean.spec, &clean.inputs());
    let expected_grads = backward(&clean.spec, &clean.inputs(), &d_out);
    assert!(all_finite(&expected_grads));
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300] {
        let mut poisoned = clean.clone();
        let keys = poisoned.k.len() / head_dim;
        for key in (0..keys).filter(|key| key % seqlen_k == 2) {
            poisoned.k[key * head_dim..][..head_dim].fill(poison);
            poisoned.v[key * val_dim..][..val_dim].fill(poison);
        }
        let (spec, x) = (&poisoned.spec, &poisoned.inputs());
        let found = forward(spec, x);
        assert_eq!(bits(&expected.out), bits(&found.out), "{poison}");
        assert_eq!(bits(&expected.lse), bits(&found.lse), "{poison}");
        assert_same_bits(&expected_grads, &backward(spec, x, &d_out));
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let expected = forward_plain(dtype, spec, &clean.inputs());
            assert_eq!(expected, forward_plain(dtype, spec, x), "{poison}");
            let expected = backward_plain(dtype, spec, &clean.inputs(), &d_out);
            assert_same_bits(&expected, &backward_plain(dtype, spec, x, &d_out));
            assert!(all_finite(&expected));
        }
    }
}

#[test]
fn what_a_masked_key_holds_reaches_nothing() {
    let capped = Spec {
        softcap: Some(0.8),
        ..small()
    };
    assert_key_two_reaches_nothing(Case::new("", capped).with_mask().with_bias(), |case, at| {
        case.mask.as_mut().unwrap()[at] = true;
    });
}

#[test]
fn what_a_key_with_a_bias_of_minus_infinity_holds_reaches_nothing() {
    assert_key_two_reaches_nothing(Case::new("", small()).with_bias(), |case, at| {
        case.bias.as_mut().unwrap()[at] = f64::NEG_INFINITY;
    });
}

#[test]
fn what_a_masked_bias_holds_reaches_nothing() {
    let clean = empties_row_one();
    let mut poisoned = clean.clone();
    for (bias, dropped) in poisoned
        .bias
        .iter_mut()
        .flatten()
        .zip(clean.mask.iter().flatten())
    {
        if *dropped {
            *bias = f64::NAN;
        }
    }
    assert_eq!(
        forward(&clean.spec, &clean.inputs()),
        forward(&clean.spec, &poisoned.inputs())
    );
    let expected = backward(&clean.spec, &clean.inputs(), &clean.d_out());
    let found = backward(&clean.spec, &poisoned.inputs(), &clean.d_out());
    assert_same_bits(&expected, &found);
}

#[test]
fn a_bias_of_minus_infinity_drops_as_the_mask_does() {
    let masked = empties_row_one();
    let mut biased = masked.clone();
    let mask = biased.mask.take().unwrap();
    for (bias, dropped) in biased.bias.iter_mut().flatten().zip(mask) {
        if dropped {
            *bias = f64::NEG_INFINITY;
        }
    }
    assert_eq!(
        forward(&masked.spec, &masked.inputs()),
        forward(&biased.spec, &biased.inputs())
    );
    assert_same_bits(
        &backward(&masked.spec, &masked.inputs(), &masked.d_out()),
        &backward(&biased.spec, &biased.inputs(), &masked.d_out()),
    );
}

#[test]
fn a_key_in_the_causal_future_reaches_only_the_rows_that_see_it() {
    let spec = Spec {
        causality: Causality::Causal,
        ..small()
    };
    let clean = Case::new("", spec);
    let mut poisoned = clean.clone();
    let Spec {
        seqlen_q,
        seqlen_k,
        head_dim,
        val_dim,
        ..
    } = clean.spec;
    // The last key, which only the last query sees.
    for key in (0..poisoned.k.len() / head_dim).filter(|key| key % seqlen_k == seqlen_k - 1) {
        poisoned.k[key * head_dim..][..head_dim].fill(f64::NAN);
        poisoned.v[key * val_dim..][..val_dim].fill(f64::NAN);
    }
    let expected = forward(&clean.spec, &clean.inputs());
    let found = forward(&clean.spec, &poisoned.inputs());
    let expected_dq = backward(&clean.spec, &clean.inputs(), &clean.d_out()).dq;
    let found_dq = backward(&clean.spec, &poisoned.inputs(), &clean.d_out()).dq;
    for row in 0..clean.num_rows() {
        let of_row = |x: &[f64], length: usize| x[row * length..][..length].to_vec();
        if row % seqlen_q == seqlen_q - 1 {
            // Seen, so it must show: a specification that hides NaN would excuse a kernel that does.
            assert!(of_row(&found.out, val_dim).iter().all(|x| x.is_nan()));
            assert!(found.lse[row].is_nan());
            assert!(of_row(&found_dq, head_dim).iter().all(|x| x.is_nan()));
        } else {
            assert_eq!(of_row(&expected.out, val_dim), of_row(&found.out, val_dim));
            assert_eq!(expected.lse[row], found.lse[row]);
            assert_eq!(of_row(&expected_dq, head_dim), of_row(&found_dq, head_dim));
        }
    }
}

#[test]
fn a_row_that_sees_only_nan_is_nan_and_not_empty() {
    let x = Inputs {
        q: &[1.0],
        k: &[f64::NAN],
        v: &[1.0],
        mask: None,
        bias: None,
    };
    let spec = single_head(1, 1);
    for found in [forward(&spec, &x), forward_plain(Dtype::F16, &spec, &x)] {
        assert!(found.out[0].is_nan() && found.lse[0].is_nan());
    }
}

#[test]
fn a_row_whose_scores_are_all_minus_infinity_is_empty() {
    let x = Inputs {
        q: &[1.0],
        k: &[f64::NEG_INFINITY; 2],
        v: &[1.0, 2.0],
        mask: None,
        bias: Some(&[0.0, 0.0]),
    };
    let spec = single_head(1, 2);
    for found in [forward(&spec, &x), forward_plain(Dtype::F16, &spec, &x)] {
        assert_eq!((found.out, found.lse), (vec![0.0], vec![f64::NEG_INFINITY]));
    }
    for grads in [
        backward(&spec, &x, &[1.0]),
        backward_plain(Dtype::F16, &spec, &x, &[1.0]),
    ] {
        assert_eq!(grads.dq, [0.0]);
        assert_eq!((grads.dk, grads.dv), (vec![0.0; 2], vec![0.0; 2]));
        assert_eq!(grads.dbias, Some(vec![0.0; 2]));
    }
}
