//! Bool masks: `true` drops a key, any dimension broadcasts, and what is dropped leaves no trace.

use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rng::Rng;
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::gradients::{gradients_on, random_d_out, weighted};
use crate::problem::{Got, Problem};
use crate::runtime;
use crate::support::{Dims, Host, dims, download, upload_mask};

/// Lengths of several tiles.
fn tiles() -> Dims {
    dims(2, 3, 70, 290, 64)
}

#[rstest]
fn every_broadcast_shape(
    #[values(1, 2)] batch: usize,
    #[values(1, 3)] num_heads: usize,
    #[values(1, 70)] seqlen_q: usize,
    #[values(1, 290)] seqlen_k: usize,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let shape = [batch, num_heads, seqlen_q, seqlen_k];
    Problem::random(dtype, tiles())
        .random_mask(shape, 0.4)
        .check();
}

#[rstest]
#[case::drops_everything(true)]
#[case::drops_nothing(false)]
fn a_single_bool(#[case] drop: bool, #[values(Full, Causal)] causality: Causality) {
    let problem = Problem::random(F32, tiles()).causality(causality);
    problem.mask([1; 4], |_| drop).check();
}

#[rstest]
fn with_causal(
    #[values((70, 290), (290, 70), (150, 150))] lengths: (usize, usize),
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(2, 2, lengths.0, lengths.1, 64);
    let problem = Problem::random(dtype, dims).causal();
    problem.random_mask(dims.scores(), 0.4).check();
}

/// With the index trick one key too many or too few moves a mean or the LSE.
#[rstest]
fn index_trick(#[values(Full, Causal)] causality: Causality) {
    let problem = Problem::index_trick(F32, tiles()).causality(causality);
    problem.random_mask(tiles().scores(), 0.7).check();
}

/// A run of keys that no row sees: whole tiles are dropped, so a tile's maximum stays −∞.
#[rstest]
#[case::first_tiles(0, 200)]
#[case::middle_tiles(70, 270)]
#[case::last_tiles(130, 400)]
#[case::all_but_one_key(1, 400)]
#[case::all_but_the_last_key(0, 399)]
fn tiles_that_no_row_sees(
    #[case] from: usize,
    #[case] to: usize,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(1, 2, 150, 400, 64));
    problem
        .mask([1, 1, 1, 400], |[.., j]| (from..to).contains(&j))
        .check();
}

/// Rows of one tile that first see a key in different tiles, some never.
#[rstest]
fn rows_that_start_late(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(1, 2, 70, 290, 64));
    let mask = |[_, _, i, j]: [usize; 4]| j < i * 5;
    let problem = problem.mask([1, 1, 70, 290], mask);
    let empty = problem
        .want()
        .lse
        .iter()
        .filter(|x| x.is_infinite())
        .count();
    assert_eq!(empty, 2 * 12, "rows 58 and later see nothing");
    problem.check();
}

#[rstest]
fn random_rows_that_see_nothing(
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(2, 2, 150, 290, 64)).causality(causality);
    let mut rng = Rng::new(3);
    let shape = [2, 2, 150, 1];
    problem.mask(shape, |_| rng.uniform() < 0.3).check();
}

#[test]
fn case1_rows_that_see_nothing_are_zero() {
    let dims = dims(1, 1, 8, 8, 8);
    let mut rng = Rng::new(1);
    let [q, k, v] = [(); 3].map(|()| rng.uniforms(64));
    let problem = Problem::new(F32, dims, q, k, v);
    let problem = problem.mask([1, 1, 8, 8], |[_, _, i, j]| i >= 4 || j >= 4);
    let Got { out, lse, .. } = problem.check_output(problem.run());
    assert_eq!(out[32..], [0.0; 32], "rows 4 to 7");
    assert_eq!(lse.expect("asked for")[4..], [f64::NEG_INFINITY; 4]);
}

/// Mask and causal rule empty the top row together; alone neither does.
#[rstest]
#[case::square(4, 1, 1)]
#[case::more_keys(8, 5, 1)]
#[case::more_keys_none_empty(8, 1, 0)]
#[case::fewer_keys(3, 1, 2)]
fn case2_causal_and_mask_empty_a_row_together(
    #[case] seqlen_k: usize,
    #[case] dropped: usize,
    #[case] empty_rows: usize,
    #[values(F32, F16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(1, 1, 4, seqlen_k, 8)).causal();
    let problem = problem.mask([1, 1, 1, seqlen_k], |[.., j]| j < dropped);
    let lse = problem.want().lse;
    let empty = lse.iter().filter(|x| x.is_infinite()).count();
    assert_eq!(empty, empty_rows, "the specification's lse {lse:?}");
    problem.check();
}

/// A window of two keys and padding at the end, both as a bool mask: the last row of sample 1 has
/// its whole window in the padding.
#[rstest]
fn case3_padding_and_window_empty_a_row_together(#[values(F32, F16)] dtype: Dtype) {
    let mask = |[b, _, i, j]: [usize; 4]| j > i || j + 1 < i || (b == 1 && j >= 4);
    let problem = Problem::random(dtype, dims(2, 2, 6, 6, 16)).mask([2, 1, 6, 6], mask);
    let lse = problem.want().lse;
    let empty: Vec<_> = (0..lse.len())
        .filter(|&row| lse[row].is_infinite())
        .collect();
    assert_eq!(
        empty,
        [2 * 6 + 5, 3 * 6 + 5],
        "row 5 of both heads of sample 1"
    );
    problem.check();
}

#[rstest]
fn case16_one_mask_for_every_batch_and_head(#[values(F16, Bf16, F32)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(2, 3, 16, 16, 32));
    problem.random_mask([1, 1, 16, 16], 0.4).check();
}

/// A padding mask is the same whether attention broadcasts it, the caller expands it with stride 0,
/// or it is materialized.
#[rstest]
fn case16_padding_mask_in_every_form(
    #[values((16, 16, 32), (70, 290, 64))] size: (usize, usize, usize),
    #[values(F16, Bf16, F32)] dtype: Dtype,
) {
    let (seqlen_q, seqlen_k, head_dim) = size;
    let dims = dims(2, 3, seqlen_q, seqlen_k, head_dim);
    let kept = [seqlen_k / 2 + 1, seqlen_k - 3];
    let problem = Problem::random(dtype, dims);
    let problem = problem.mask([2, 1, 1, seqlen_k], |[b, .., j]| j >= kept[b]);
    if problem.is_refused() {
        return;
    }
    let device = runtime::device();
    let options = problem.options(&device);
    let small = options.mask.clone().expect("set");
    let whole = Host {
        shape: dims.scores(),
        data: problem.mask.as_ref().expect("set").broadcast(dims.scores()),
    };
    let forms = [
        small.clone(),
        small.expand(dims.scores()),
        upload_mask(&whole, &device),
    ];
    for mask in forms {
        problem.check_tensors(problem.qkv(&device), options.clone().with_mask(mask));
    }
}

/// What uninitialized memory may hold must not reach the result, which is the same, bit for bit, as
/// with numbers in the rows of K that are dropped for every query. (V of a dropped key is multiplied
/// by a weight of 0 and must be finite, as in other kernels: ARCHITECTURE.md.)
#[track_caller]
fn assert_poison_stays_out(problem: &Problem, dropped: impl Fn(usize) -> bool, poison: f64) {
    if problem.is_refused() {
        return;
    }
    let clean = problem.check_output(problem.run());
    let mut dirty = problem.clone();
    let rows = dirty.k.chunks_mut(problem.dims.head_dim);
    for (row, elements) in rows.enumerate() {
        if dropped(row % problem.dims.seqlen_k) {
            elements.fill(poison);
        }
    }
    let Got { out, lse, .. } = dirty.check_output(dirty.run());
    assert_eq!(out, clean.out, "the output without poison");
    assert_eq!(lse, clean.lse, "the lse without poison");
}

/// As reported: one element of one dropped key. Then all of its key.
#[rstest]
fn case4_nan_in_a_masked_key(#[values(f64::NAN, f64::INFINITY)] poison: f64) {
    let numbers = || (0..8).map(f64::from).collect::<Vec<_>>();
    let problem = Problem::new(F32, dims(1, 1, 2, 2, 4), numbers(), numbers(), numbers());
    let problem = problem.mask([1, 1, 1, 2], |[.., j]| j == 1);
    let mut one = problem.clone();
    one.k[4] = poison;
    one.check();
    assert_poison_stays_out(&problem, |j| j == 1, poison);
}

#[rstest]
fn poison_in_padding(
    #[values(f64::NAN, f64::INFINITY)] poison: f64,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(1, 2, 70, 290, 64));
    let padding = |j| j >= 100 || j == 7;
    let problem = problem.mask([1, 1, 1, 290], |[.., j]| padding(j));
    assert_poison_stays_out(&problem, padding, poison);
}

/// Keys in the future of every query but the last few must not reach the earlier ones.
#[rstest]
fn nan_in_future_keys(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let dims = dims(1, 1, 150, 150, 64);
    let mut problem = Problem::random(dtype, dims).causal();
    if problem.is_refused() {
        return;
    }
    let run = |problem: &Problem| download(dtype, problem.run().out)[..140 * 64].to_vec();
    let clean = run(&problem);
    problem.k[140 * 64..].fill(f64::NAN);
    assert_eq!(run(&problem), clean, "rows 0 to 139");
}

/// Nor their gradients: those of earlier queries do not feel a later key, those of later keys do not feel an
/// earlier query.
#[rstest]
fn nan_beyond_the_edge_of_a_gradient(
    #[values(F32, F16, Bf16)] dtype: Dtype,
    #[values(64, 128)] head_dim: usize,
) {
    let problem = Problem::random(dtype, dims(1, 1, 150, 150, head_dim)).causal();
    if problem.is_refused() || !runtime::has_kernels() {
        return;
    }
    let device = runtime::device().autodiff();
    let run = |problem: &Problem| {
        let d_out = random_d_out(problem);
        gradients_on(&device, problem, weighted(problem, &d_out))
    };
    let [dq, dk, dv] = run(&problem);
    let mut later_key = problem.clone();
    later_key.k[140 * head_dim..141 * head_dim].fill(f64::NAN);
    let felt = run(&later_key);
    let earlier = 140 * head_dim;
    assert_eq!(felt[0][..earlier], dq[..earlier], "dQ of rows 0 to 139");
    assert!(felt[0][earlier..].iter().all(|x| x.is_nan()));
    let mut earlier_query = problem.clone();
    earlier_query.q[20 * head_dim..21 * head_dim].fill(f64::NAN);
    let felt = run(&earlier_query);
    let later = 21 * head_dim;
    assert_eq!(felt[1][later..], dk[later..], "dK of rows 21 on");
    assert_eq!(felt[2][later..], dv[later..], "dV of rows 21 on");
    assert!(felt[1][..later].iter().all(|x| x.is_nan()));
}
