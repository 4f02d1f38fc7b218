//! The analytic gradients against finite differences of the forward pass.

use flash_reference::{Spec, backward, forward};

use crate::case::{Case, distance, every_option, max_abs, noise, small};

/// A tensor of a case, to be changed.
type Select = fn(&mut Case) -> &mut Vec<f64>;

/// `Σ d_out ∘ out` after `step` is added to element `at` of the selected tensor.
fn loss(case: &Case, d_out: &[f64], select: Select, at: usize, step: f64) -> f64 {
    let mut case = case.clone();
    select(&mut case)[at] += step;
    let out = forward(&case.spec, &case.inputs()).out;
    out.iter().zip(d_out).map(|(out, d_out)| out * d_out).sum()
}

/// The gradient of the loss with respect to the selected tensor by the five-point central
/// difference, whose error is of the order of `STEP^4`.
fn differences(case: &Case, d_out: &[f64], select: Select) -> Vec<f64> {
    const STEP: f64 = 1e-3;
    let length = select(&mut case.clone()).len();
    let derivative = |at| {
        let slope = |step| {
            let after = loss(case, d_out, select, at, step);
            let before = loss(case, d_out, select, at, -step);
            (after - before) / (2.0 * step)
        };
        (4.0 * slope(STEP) - slope(2.0 * STEP)) / 3.0
    };
    (0..length).map(derivative).collect()
}

fn assert_close(name: &str, tensor: &str, found: &[f64], expected: &[f64]) {
    let error = distance(found, expected);
    // A loss of magnitude ten has rounding errors of 1e-15, divided by a step of 1e-3.
    assert!(error < 1e-10, "{name}: {tensor} is off by {error:e}");
}

#[test]
fn every_option_has_the_gradients_of_finite_differences() {
    for case in every_option() {
        let d_out = case.d_out();
        let found = backward(&case.spec, &case.inputs(), &d_out);
        // With one key the probability is 1 whatever the score.
        let one_key = case.spec.seqlen_k == 1;
        for (tensor, found, select) in [
            ("dq", &found.dq, (|case| &mut case.q) as Select),
            ("dk", &found.dk, |case| &mut case.k),
            ("dv", &found.dv, |case| &mut case.v),
        ] {
            assert_close(
                case.name,
                tensor,
                found,
                &differences(&case, &d_out, select),
            );
            let is_zero = max_abs(found) < 1e-10;
            assert_eq!(
                is_zero,
                one_key && tensor != "dv",
                "{}: {tensor}",
                case.name
            );
        }
        assert_eq!(found.dbias.is_some(), case.bias.is_some());
        if let Some(dbias) = found.dbias {
            let expected = differences(&case, &d_out, |case| case.bias.as_mut().unwrap());
            assert_close(case.name, "dbias", &dbias, &expected);
        }
    }
}

/// The elements of head `head` of `x`, which has `heads` heads.
fn head_of(x: &[f64], heads: usize, head: usize) -> &[f64] {
    let length = x.len() / heads;
    &x[head * length..][..length]
}

#[test]
fn grouped_heads_are_repeated_key_heads_with_summed_gradients() {
    for (num_heads, num_kv_heads) in [(6, 2), (8, 2), (4, 1), (32, 8)] {
        let grouped = Case::new(
            "",
            Spec {
                num_heads,
                num_kv_heads,
                ..small()
            },
        );
        let group = num_heads / num_kv_heads;
        let (kv_heads, heads) = (2 * num_kv_heads, 2 * num_heads);
        let repeat = |x: &[f64]| -> Vec<f64> {
            (0..heads)
                .flat_map(|head| head_of(x, kv_heads, head / group))
                .copied()
                .collect()
        };
        let repeated = Case {
            spec: Spec {
                num_kv_heads: num_heads,
                ..grouped.spec.clone()
            },
            k: repeat(&grouped.k),
            v: repeat(&grouped.v),
            ..grouped.clone()
        };
        assert_eq!(
            forward(&grouped.spec, &grouped.inputs()),
            forward(&repeated.spec, &repeated.inputs())
        );
        let found = backward(&grouped.spec, &grouped.inputs(), &grouped.d_out());
        let expected = backward(&repeated.spec, &repeated.inputs(), &repeated.d_out());
        assert_eq!(found.dq, expected.dq);
        let summed = |x: &[f64]| -> Vec<f64> {
            let mut sums = vec![0.0; x.len() / group];
            let length = x.len() / heads;
            for (at, x) in x.iter().enumerate() {
                sums[at / length / group * length + at % length] += x;
            }
            sums
        };
        assert!(distance(&found.dk, &summed(&expected.dk)) < 1e-13);
        assert!(distance(&found.dv, &summed(&expected.dv)) < 1e-13);
    }
}

#[test]
fn a_row_without_weight_in_the_loss_is_a_row_without_gradient() {
    // Dropping every key of a row and leaving that row out of the loss are the same thing.
    let case = Case::new("", small());
    let masked = case.clone().with_mask();
    let mut seen = masked.clone();
    let mut d_out = case.d_out();
    let Spec {
        seqlen_q,
        seqlen_k,
        val_dim,
        ..
    } = case.spec;
    for row in (0..case.num_rows()).filter(|row| row % seqlen_q == 1) {
        seen.mask.as_mut().unwrap()[row * seqlen_k..][..seqlen_k].fill(false);
        d_out[row * val_dim..][..val_dim].fill(0.0);
    }
    let expected = backward(&seen.spec, &seen.inputs(), &d_out);
    let found = backward(&masked.spec, &masked.inputs(), &case.d_out());
    assert_eq!(found, expected);
}

#[test]
fn gradients_are_linear_in_the_output_gradient() {
    let case = Case::new("", small()).with_bias();
    let (a, b) = (case.d_out(), noise(case.d_out().len(), 7));
    let sum: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + 2.0 * b).collect();
    let gradient = |d_out: &[f64]| backward(&case.spec, &case.inputs(), d_out).dk;
    let expected: Vec<f64> = gradient(&a)
        .iter()
        .zip(gradient(&b))
        .map(|(a, b)| a + 2.0 * b)
        .collect();
    assert!(distance(&gradient(&sum), &expected) < 1e-13);
}

#[test]
fn many_heads_on_many_threads_give_what_each_gives_alone() {
    let single = Spec {
        batch: 1,
        num_heads: 1,
        num_kv_heads: 1,
        seqlen_q: 48,
        seqlen_k: 64,
        head_dim: 16,
        val_dim: 24,
        ..small()
    };
    let spec = Spec {
        batch: 3,
        num_heads: 5,
        num_kv_heads: 5,
        ..single.clone()
    };
    let case = Case::new("", spec).with_mask().with_bias();
    let d_out = case.d_out();
    let (out, grads) = (
        forward(&case.spec, &case.inputs()),
        backward(&case.spec, &case.inputs(), &d_out),
    );
    for head in 0..15 {
        let of_head = |x: &[f64]| head_of(x, 15, head).to_vec();
        let scores = single.seqlen_q * single.seqlen_k;
        let alone = Case {
            name: "",
            spec: single.clone(),
            q: of_head(&case.q),
            k: of_head(&case.k),
            v: of_head(&case.v),
            mask: case
                .mask
                .as_ref()
                .map(|mask| mask[head * scores..][..scores].to_vec()),
            bias: case.bias.as_deref().map(of_head),
        };
        let expected = forward(&single, &alone.inputs());
        assert_eq!(of_head(&out.out), expected.out);
        assert_eq!(of_head(&out.lse), expected.lse);
        let expected = backward(&single, &alone.inputs(), &of_head(&d_out));
        assert_eq!(of_head(&grads.dq), expected.dq);
        assert_eq!(of_head(&grads.dk), expected.dk);
        assert_eq!(of_head(&grads.dv), expected.dv);
        assert_eq!(grads.dbias.as_deref().map(of_head), expected.dbias);
    }
}
