//! The tolerance rule and what a failure says.

use flash_reference::rounding::{Dtype, ulp};

/// Units in the last place of the largest expected value, granted on top of the rule.
///
/// The 16-bit formats need one for the final rounding and one for rounding the probabilities
/// before the second product, which the plain computation may by luck escape. In f32 the
/// exponential function is the reason: WGSL promises `3 + 2|x|` units. tf32 needs the one for the
/// probabilities: results are f32.
fn few_ulp(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 8.0,
        Dtype::Tf32 => 1.0,
        Dtype::F16 | Dtype::Bf16 => 2.0,
    }
}

/// `max |ours − f64| ≤ 2 · max |plain − f64| + a few ulp`: how far results in `dtype` may be from
/// `want` when the plain computation gives `plain`.
///
/// # Panics
///
/// If `plain` is not finite where `want` is: such a yardstick would allow anything.
#[track_caller]
pub fn limit(dtype: Dtype, want: &[f64], plain: &[f64]) -> f64 {
    limit_with(few_ulp(dtype), dtype, want, plain)
}

/// The same for gradients, with four times the units: dQ and dK sum differences of products of
/// which each has its own rounding, and those are larger than what remains of them.
#[track_caller]
pub fn gradient_limit(dtype: Dtype, want: &[f64], plain: &[f64]) -> f64 {
    limit_with(4.0 * few_ulp(dtype), dtype, want, plain)
}

#[track_caller]
fn limit_with(few_ulp: f64, dtype: Dtype, want: &[f64], plain: &[f64]) -> f64 {
    assert_eq!(want.len(), plain.len());
    let mut largest = 0.0_f64;
    let mut error = 0.0_f64;
    for (&want, &plain) in want.iter().zip(plain) {
        if want.is_finite() {
            assert!(
                plain.is_finite(),
                "the plain computation gives {plain} for {want}"
            );
            largest = largest.max(want.abs());
            error = error.max((plain - want).abs());
        }
    }
    2.0 * error + few_ulp * ulp(dtype, largest)
}

/// Whether `plain` is close enough to `want` to measure others by: finite where `want` is, and not
/// off by the size of the values themselves, as when an intermediate result overflows.
pub fn is_yardstick(want: &[f64], plain: &[f64]) -> bool {
    let finite = || want.iter().zip(plain).filter(|(want, _)| want.is_finite());
    let largest = finite().fold(0.0_f64, |largest, (want, _)| largest.max(want.abs()));
    finite().all(|(want, plain)| (plain - want).abs() <= largest / 4.0)
}

/// Asserts that `got` is within `limit` of `want` everywhere, and equal to it where `want` is
/// infinite or NaN. `shape` only serves the message.
#[track_caller]
pub fn assert_within(what: &str, shape: &[usize], got: &[f64], want: &[f64], limit: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let distance = |index: usize| {
        let (got, want) = (got[index], want[index]);
        let same = got == want || (got.is_nan() && want.is_nan());
        let distance = if same { 0.0 } else { (got - want).abs() };
        // A NaN or an infinity that is not expected is as wrong as can be.
        if distance.is_nan() {
            f64::INFINITY
        } else {
            distance
        }
    };
    let wrong: Vec<usize> = (0..got.len()).filter(|&i| distance(i) > limit).collect();
    let Some(&first) = wrong.first() else {
        return;
    };
    let worst = *wrong
        .iter()
        .max_by(|&&a, &&b| distance(a).total_cmp(&distance(b)))
        .expect("not empty");
    let at = |index| {
        format!(
            "at {:?} got {:e}, want {:e}",
            position(shape, index),
            got[index],
            want[index],
        )
    };
    panic!(
        "{what} of shape {shape:?}: {} of {} elements are off by more than {limit:e}\n  \
         first {}\n  worst {} (off by {:e})",
        wrong.len(),
        got.len(),
        at(first),
        at(worst),
        distance(worst),
    );
}

/// Indices of the element at `index` of a packed tensor.
fn position(shape: &[usize], mut index: usize) -> Vec<usize> {
    let mut position: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&size| {
            let coordinate = index % size.max(1);
            index /= size.max(1);
            coordinate
        })
        .collect();
    position.reverse();
    position
}

#[test]
fn the_limit_is_twice_the_plain_error_and_a_few_ulp() {
    let limit = limit(
        Dtype::F16,
        &[1.0, -2.0, f64::NEG_INFINITY],
        &[1.5, -2.0, 0.0],
    );
    assert_eq!(limit, 2.0 * 0.5 + 2.0 * ulp(Dtype::F16, 2.0));
}

#[test]
#[should_panic(expected = "the plain computation gives inf for 70000")]
fn a_plain_computation_that_overflows_sets_no_limit() {
    limit(Dtype::F16, &[70_000.0], &[f64::INFINITY]);
}

#[test]
fn a_plain_computation_that_is_not_near_is_no_yardstick() {
    let want = [70_000.0, -2.0, f64::NEG_INFINITY];
    assert!(is_yardstick(&want, &[60_000.0, -10.0, 0.0]));
    assert!(!is_yardstick(
        &want,
        &[f64::INFINITY, -2.0, f64::NEG_INFINITY]
    ));
    assert!(!is_yardstick(&want, &[f64::NAN, -2.0, f64::NEG_INFINITY]));
    assert!(!is_yardstick(&want, &[0.0, -2.0, f64::NEG_INFINITY]));
    assert!(is_yardstick(&[0.0], &[0.0]));
}

#[test]
#[should_panic(expected = "first at [1, 0] got NaN, want 3e0")]
fn an_unexpected_nan_is_found() {
    assert_within(
        "x",
        &[2, 2],
        &[1.0, 2.0, f64::NAN, 4.0],
        &[1.0, 2.0, 3.0, 4.0],
        1e9,
    );
}

#[test]
#[should_panic(expected = "worst at [0, 1] got 2.5e0, want 2e0 (off by 5e-1)")]
fn the_worst_element_is_named() {
    assert_within("x", &[1, 3], &[1.25, 2.5, 3.0], &[1.0, 2.0, 3.0], 0.1);
}

#[test]
#[should_panic(expected = "1 of 1 elements")]
fn a_finite_value_where_minus_infinity_is_due_is_found() {
    assert_within("x", &[1], &[-1e30], &[f64::NEG_INFINITY], 1e9);
}
