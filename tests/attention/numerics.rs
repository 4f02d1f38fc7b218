//! Range and accuracy: large values, large logits, scales, and the log-sum-exp.

use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rng::Rng;
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::problem::{Got, Problem};
use crate::runtime;
use crate::support::{Dims, Host, dims, download};

/// Every element of q, k and v of `dims` is the given number.
fn constant(dtype: Dtype, dims: Dims, [q, k, v]: [f64; 3]) -> Problem {
    let fill = |shape: [usize; 4], x| vec![x; shape.iter().product()];
    Problem::new(
        dtype,
        dims,
        fill(dims.q(), q),
        fill(dims.k(), k),
        fill(dims.v(), v),
    )
}

/// 133120 is past the range of f16: bf16 must stay bf16 from end to end.
#[rstest]
fn case10_133120_comes_back(
    #[values((1, 1), (150, 290))] lengths: (usize, usize),
    #[values(Bf16, F32)] dtype: Dtype,
) {
    let problem = constant(dtype, dims(1, 1, lengths.0, lengths.1, 64), [133_120.0; 3]);
    if problem.is_refused() {
        return;
    }
    let Got { out, .. } = problem.check_output(problem.run());
    if dtype == Bf16 {
        assert_eq!(
            out.iter().find(|&&x| x != 133_120.0),
            None,
            "neighbors are 1024 away"
        );
    }
}

/// Scaled logits of -72 407 each: a finite stand-in for −∞ would beat them.
#[rstest]
#[case::one_tile(1, 2)]
#[case::tiles(150, 290)]
fn case11_logits_of_minus_72_000(
    #[case] seqlen_q: usize,
    #[case] seqlen_k: usize,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(1, 1, seqlen_q, seqlen_k, 128);
    let mut problem = constant(dtype, dims, [80.0, -80.0, 0.0]);
    problem.v = Host::from_fn(dims.v(), |[_, _, j, _]| [1.0, 3.0][j % 2]).data;
    assert!(problem.want().out.iter().all(|x| (x - 2.0).abs() < 1e-9));
    problem.check();
}

/// Some keys masked, the others at -72 407: the visible ones decide, not the masked.
#[rstest]
fn masked_keys_beside_logits_of_minus_72_000(#[values(F32, Bf16)] dtype: Dtype) {
    let dims = dims(1, 1, 70, 290, 128);
    let mut problem = constant(dtype, dims, [80.0, -80.0, 0.0]);
    problem.v = Host::from_fn(dims.v(), |[_, _, j, _]| [1.0, 3.0][j / 145]).data;
    problem.mask([1, 1, 1, 290], |[.., j]| j >= 145).check();
}

/// Values that differ from the 20th bit on: f32 attention on tensor cores with fewer bits, or with
/// probabilities rounded to 16 bits, cannot tell them apart.
#[rstest]
fn f32_stays_f32(#[values(Full, Causal)] causality: Causality, #[values(64, 111)] head_dim: usize) {
    let dims = dims(1, 2, 150, 290, head_dim);
    let mut problem = Problem::random(F32, dims).causality(causality);
    problem.v = Host::from_fn(dims.v(), |[_, _, j, _]| 1.0 + j as f64 / (1 << 20) as f64).data;
    let Got { out, .. } = problem.check_output(problem.run());
    let want = problem.want().out;
    let errors = out.iter().zip(&want).map(|(x, y)| (x - y).abs());
    let error = errors.fold(0.0, f64::max);
    assert!(error < 1.0 / f64::from(1 << 19), "{error:e} is not f32");
}

/// Queries and keys with more bits than tensor cores keep of f32: products must not lose them.
#[test]
fn f32_logits_keep_their_bits() {
    let dims = dims(1, 1, 70, 290, 64);
    let mut problem = Problem::random(F32, dims);
    let mut rng = Rng::new(9);
    // Logits are around 8000, and those of one row differ by less than 1: the 12th bit and below.
    problem.q = rng
        .uniforms(problem.q.len())
        .iter()
        .map(|x| 1000.0 + x)
        .collect();
    problem.k = rng
        .uniforms(problem.k.len())
        .iter()
        .map(|x| 1.0 + x / 2048.0)
        .collect();
    Problem::new(F32, dims, problem.q, problem.k, problem.v).check();
}

/// `q · k` is past the range of f16 before the scale, and the sum of the values is too.
#[rstest]
fn large_values_in_f16(#[values(Full, Causal)] causality: Causality) {
    constant(F16, dims(1, 1, 150, 290, 64), [40.0, 40.0, 60_000.0])
        .causality(causality)
        .check();
}

#[rstest]
#[case::zero(0.0)]
#[case::negative(-0.5)]
#[case::one(1.0)]
#[case::minus_one(-1.0)]
#[case::tiny(1e-6)]
#[case::large(20.0)]
fn custom_scale(
    #[case] scale: f64,
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(1, 2, 150, 290, 64));
    problem.scale(scale).causality(causality).check();
}

/// A negative scale turns the largest product into the smallest logit: a mask that multiplied −∞
/// by the scale would let dropped keys in.
#[rstest]
fn negative_scale_with_mask(#[values(-2.0, 0.0)] scale: f64) {
    let dims = dims(1, 2, 150, 290, 64);
    let problem = Problem::random(F32, dims).scale(scale).causal();
    problem.random_mask([1, 1, 1, 290], 0.5).check();
}

/// Logits that rise, fall or peak along the keys: the running maximum changes in every tile, in
/// none, and in the middle. Where it lags behind, sums must not care.
#[rstest]
#[case::rising(|j: usize| j as f64 / 8.0)]
#[case::falling(|j: usize| -(j as f64) / 8.0)]
#[case::peak(|j: usize| if j == 200 { 300.0 } else { 0.0 })]
#[case::far_below_zero(|j: usize| -1000.0 - j as f64)]
#[case::far_above_zero(|j: usize| 1000.0 - j as f64 / 16.0)]
#[case::from_far_below_to_far_above(|j: usize| 5.0 * j as f64 - 1000.0)]
#[case::far_in_the_middle(|j: usize| if j == 200 { 900.0 } else { j as f64 / 100.0 })]
#[case::stairs_within_the_lag(|j: usize| 5.0 * (j / 128) as f64)]
#[case::peaks_that_one_lane_sees(|j: usize| if j % 64 == 37 { j as f64 / 8.0 } else { 0.0 })]
fn running_maximum(#[case] logit: fn(usize) -> f64, #[values(F32, F16, Bf16)] dtype: Dtype) {
    let dims = dims(1, 1, 70, 400, 16);
    let mut problem = Problem::random(dtype, dims);
    let first = |index: usize, x| if index.is_multiple_of(16) { x } else { 0.0 };
    let q = (0..problem.q.len()).map(|i| first(i, 1.0)).collect();
    let k = (0..problem.k.len())
        .map(|i| first(i, logit(i / 16)))
        .collect();
    problem = Problem::new(dtype, dims, q, k, problem.v);
    problem.scale(1.0).check();
}

/// Rows of one tile whose maxima rise at different keys, by little and by much: a kernel may put
/// off rescaling a row, but then for that row alone.
#[rstest]
fn running_maximum_of_each_row(
    #[values(0.02, 0.3, 3.0, 40.0)] step: f64,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(1, 2, 70, 400, 16);
    let problem = Problem::random(dtype, dims);
    // The logits of row i rise to step · (i + 1) along the keys, on top of a little noise.
    let feature = |index: usize| (index / 16, index % 16);
    let q = (0..problem.q.len()).map(|index| match feature(index) {
        (row, 0) => step * (row % 70 + 1) as f64,
        (_, 1) => 1.0,
        _ => 0.0,
    });
    let mut rng = Rng::new(8);
    let k = (0..problem.k.len()).map(|index| match feature(index) {
        (key, 0) => (key % 400) as f64 / 400.0,
        (_, 1) => rng.uniform(),
        _ => 0.0,
    });
    let (q, k) = (q.collect(), k.collect());
    let problem = Problem::new(dtype, dims, q, k, problem.v).scale(1.0);
    problem.clone().check();
    problem.causal().check();
}

#[rstest]
fn lse_is_f32_in_natural_units(
    #[values(F32, F16, Bf16)] dtype: Dtype,
    #[values(Full, Causal)] causality: Causality,
) {
    // The same logit everywhere, so the LSE is the logit plus the logarithm of the keys seen.
    let problem = constant(dtype, dims(2, 3, 290, 150, 64), [0.5, 2.0, 1.0]);
    let problem = problem.causality(causality);
    if problem.is_refused() {
        return;
    }
    let lse = problem.check_output(problem.run()).lse.expect("asked for");
    for (row, lse) in lse.iter().enumerate() {
        let seen = match causality {
            Full => 150,
            Causal => (row % 290 + 1 + 150_usize).saturating_sub(290),
        };
        let want = if seen == 0 {
            f64::NEG_INFINITY
        } else {
            8.0 + (seen as f64).ln()
        };
        let same = *lse == want || (lse - want).abs() < 1e-2;
        assert!(same, "row {row}: lse {lse}, want {want}");
    }
}

/// The output does not depend on whether the LSE is asked for.
#[rstest]
fn lse_is_absent_unless_asked_for(#[values(F32, F16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(1, 2, 150, 290, 64));
    if problem.is_refused() {
        return;
    }
    let device = runtime::device();
    let qkv = problem.qkv(&device);
    let without = problem.run_tensors(qkv.clone(), Default::default());
    assert!(without.lse.is_none());
    let with = problem.run_tensors(qkv, problem.options(&device));
    assert!(with.lse.is_some());
    let [without, with] = [without, with].map(|output| problem.check_output(output).out);
    assert_eq!(without, with);
}

/// The same call twice gives the same bits.
#[rstest]
fn runs_are_reproducible(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(2, 3, 150, 290, 64)).causal();
    if problem.is_refused() {
        return;
    }
    let [first, second] = [(); 2].map(|()| problem.check_output(problem.run()));
    assert_eq!(first.out, second.out);
    assert_eq!(first.lse, second.lse);
}

/// What a query holds changes its own row and not a bit of another one, be it no number, far from all
/// others or just large enough to raise a maximum late, by the key that stands out: planes decide together
/// what rows have to do.
#[rstest]
fn a_query_changes_its_own_row(
    #[values(f64::NAN, 60_000.0, -60_000.0, 16.0)] value: f64,
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let mut problem = Problem::random(dtype, dims(1, 1, 70, 290, 64)).causality(causality);
    if problem.is_refused() {
        return;
    }
    problem.k[250 * 64 + 5] = 8.0;
    let mut before = download(dtype, problem.run().out);
    problem.q[33 * 64 + 5] = value;
    let mut after = download(dtype, problem.run().out);
    for out in [&mut before, &mut after] {
        out.drain(33 * 64..34 * 64);
    }
    assert_eq!(after, before, "rows other than 33");
}

/// Under a causal mask no bit of a row depends on keys and values that come later.
#[rstest]
fn later_keys_leave_a_row_as_it_is(
    #[values(60_000.0, 30.0, 10.0)] value: f64,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let lengths = dims(1, 2, 290, 290, 64);
    let mut problem = Problem::random(dtype, lengths).causal();
    if problem.is_refused() {
        return;
    }
    let before = download(dtype, problem.run().out);
    for line in 0..2 {
        for at in (line * 290 + 201) * 64..(line + 1) * 290 * 64 {
            problem.k[at] = if at % 2 == 0 { value } else { -value };
            problem.v[at] = value;
        }
    }
    let after = download(dtype, problem.run().out);
    let earlier = |out: &[f64]| {
        let lines = out.chunks(290 * 64);
        lines
            .flat_map(|line| line[..201 * 64].to_vec())
            .collect::<Vec<_>>()
    };
    assert_eq!(earlier(&after), earlier(&before), "rows before 201");
}
