use flash_reference::{Causality, Inputs, Output, Spec, backward, forward};

use crate::case::{Case, distance, every_option, max_abs, single_head, small};

/// The defining fraction `Σ exp(s) v / Σ exp(s)`, one scalar at a time and without a maximum,
/// which the small scores of the cases allow.
fn textbook(case: &Case) -> Output {
    let spec = &case.spec;
    let (dim, val_dim) = (spec.head_dim, spec.val_dim);
    let mut out = Vec::new();
    let mut lse = Vec::new();
    for row in 0..case.num_rows() {
        let i = row % spec.seqlen_q;
        let h = row / spec.seqlen_q % spec.num_heads;
        let b = row / spec.seqlen_q / spec.num_heads;
        let kv_head = b * spec.num_kv_heads + h * spec.num_kv_heads / spec.num_heads;
        let mut total = 0.0;
        let mut weighted = vec![0.0; val_dim];
        for j in 0..spec.seqlen_k {
            let key = kv_head * spec.seqlen_k + j;
            let dot: f64 = (0..dim)
                .map(|d| case.q[row * dim + d] * case.k[key * dim + d])
                .sum();
            let mut s = spec.scale * dot;
            if let Some(cap) = spec.softcap {
                s = cap * (s / cap).tanh();
            }
            let score = row * spec.seqlen_k + j;
            if case.mask.as_ref().is_some_and(|mask| mask[score]) {
                continue;
            }
            let offset = spec.seqlen_k as i64 - spec.seqlen_q as i64;
            if spec.causality == Causality::Causal && j as i64 - offset > i as i64 {
                continue;
            }
            s += case.bias.as_ref().map_or(0.0, |bias| bias[score]);
            total += s.exp();
            for (e, weighted) in weighted.iter_mut().enumerate() {
                *weighted += s.exp() * case.v[key * val_dim + e];
            }
        }
        let mean = |weighted| if total == 0.0 { 0.0 } else { weighted / total };
        out.extend(weighted.into_iter().map(mean));
        lse.push(total.ln());
    }
    Output { out, lse }
}

#[test]
fn every_option_follows_the_textbook_formula() {
    for case in every_option() {
        let expected = textbook(&case);
        let found = forward(&case.spec, &case.inputs());
        let error = distance(&found.out, &expected.out).max(distance(&found.lse, &expected.lse));
        // A few dozen roundings of numbers of magnitude one.
        assert!(error < 100.0 * f64::EPSILON, "{}: {error:e}", case.name);
        assert!(max_abs(&found.out) > 0.1, "{}: all is zero", case.name);
    }
}

#[test]
fn query_heads_read_the_key_head_of_their_group() {
    for num_kv_heads in [1, 2, 3, 6] {
        let spec = Spec {
            num_heads: 6,
            num_kv_heads,
            ..single_head(1, 1)
        };
        let v: Vec<f64> = (0..num_kv_heads).map(|head| head as f64).collect();
        let x = Inputs {
            q: &[0.0; 6],
            k: &vec![0.0; num_kv_heads],
            v: &v,
            mask: None,
            bias: None,
        };
        let expected: Vec<f64> = (0..6).map(|h| (h / (6 / num_kv_heads)) as f64).collect();
        assert_eq!(forward(&spec, &x).out, expected);
    }
}

#[test]
fn logits_far_below_zero_keep_their_weights() {
    let spec = Spec {
        head_dim: 128,
        scale: 1.0 / 128.0_f64.sqrt(),
        ..single_head(1, 2)
    };
    let x = Inputs {
        q: &[80.0; 128],
        k: &[-80.0; 256],
        v: &[1.0, 3.0],
        mask: None,
        bias: None,
    };
    let found = forward(&spec, &x);
    assert_eq!(found.out, [2.0]);
    assert!((found.lse[0] + 72_407.0).abs() < 1.0, "{}", found.lse[0]);
}

#[test]
fn softcap_leaves_the_causal_rule_alone() {
    let spec = Spec {
        softcap: Some(1.0),
        causality: Causality::Causal,
        ..single_head(4, 4)
    };
    let x = Inputs {
        q: &[0.0; 4],
        k: &[0.0; 4],
        v: &[0.0, 0.0, 0.0, 1000.0],
        mask: None,
        bias: None,
    };
    assert_eq!(forward(&spec, &x).out, [0.0, 0.0, 0.0, 250.0]);
}

#[test]
fn softcap_bounds_the_score() {
    let lse = |softcap| {
        let spec = Spec {
            softcap,
            ..single_head(1, 1)
        };
        let x = Inputs {
            q: &[4.0],
            k: &[5.0],
            v: &[1.0],
            mask: None,
            bias: None,
        };
        forward(&spec, &x).lse[0]
    };
    // With one key the log-sum-exp is its score.
    assert_eq!(lse(None), 20.0);
    assert!((lse(Some(5.0)) - 5.0 * 4.0_f64.tanh()).abs() < 1e-14);
    assert!((lse(Some(50.0)) - 50.0 * 0.4_f64.tanh()).abs() < 1e-14);
}

#[test]
fn lengths_of_zero_give_empty_rows_or_nothing() {
    let check = |spec: Spec| {
        let case = Case::new("", spec).with_mask().with_bias();
        let found = forward(&case.spec, &case.inputs());
        assert_eq!(found.out, vec![0.0; case.num_rows() * case.spec.val_dim]);
        assert_eq!(found.lse, vec![f64::NEG_INFINITY; case.num_rows()]);
        let grads = backward(&case.spec, &case.inputs(), &case.d_out());
        assert_eq!(grads.dq, vec![0.0; case.q.len()]);
        assert_eq!(grads.dk, vec![0.0; case.k.len()]);
        assert_eq!(grads.dv, vec![0.0; case.v.len()]);
        assert_eq!(grads.dbias, Some(vec![0.0; case.num_scores()]));
    };
    for causality in [Causality::Full, Causality::Causal] {
        let spec = Spec {
            causality,
            ..small()
        };
        check(Spec {
            batch: 0,
            ..spec.clone()
        });
        check(Spec {
            seqlen_q: 0,
            ..spec.clone()
        });
        check(Spec {
            seqlen_k: 0,
            ..spec.clone()
        });
        check(Spec {
            num_heads: 0,
            ..spec
        });
    }
}

#[test]
fn values_of_length_zero_leave_the_lse() {
    let case = Case::new("", small());
    let empty = Case::new(
        "",
        Spec {
            val_dim: 0,
            ..small()
        },
    );
    let found = forward(&empty.spec, &empty.inputs());
    assert!(found.out.is_empty());
    assert_eq!(found.lse, forward(&case.spec, &case.inputs()).lse);
}

#[test]
fn more_heads_than_a_16_bit_grid_dimension() {
    let heads = 65_537;
    let spec = Spec {
        num_heads: heads,
        num_kv_heads: heads,
        ..single_head(1, 1)
    };
    let v: Vec<f64> = (0..heads).map(|head| head as f64).collect();
    let zeros = vec![0.0; heads];
    let x = Inputs {
        q: &zeros,
        k: &zeros,
        v: &v,
        mask: None,
        bias: None,
    };
    assert_eq!(forward(&spec, &x).out, v);
}

#[test]
#[should_panic(expected = "length of k")]
fn a_wrong_length_is_refused() {
    let mut case = Case::new("", small());
    case.k.pop();
    forward(&case.spec, &case.inputs());
}

#[test]
#[should_panic(expected = "length of d_out")]
fn a_wrong_length_of_the_output_gradient_is_refused() {
    let case = Case::new("", small());
    backward(&case.spec, &case.inputs(), &case.d_out()[1..]);
}

#[test]
#[should_panic(expected = "multiple of num_kv_heads")]
fn heads_that_do_not_divide_are_refused() {
    let case = Case::new(
        "",
        Spec {
            num_kv_heads: 3,
            ..small()
        },
    );
    forward(&case.spec, &case.inputs());
}

#[test]
#[should_panic(expected = "softcap must be positive")]
fn a_softcap_of_zero_is_refused() {
    let case = Case::new(
        "",
        Spec {
            softcap: Some(0.0),
            ..small()
        },
    );
    forward(&case.spec, &case.inputs());
}
