//! Attention inside a stream of lazy ops gives what it gives on its own.
//!
//! With Burn's fusion every device of a GPU runtime is lazy: nothing runs until a result is read.
//! The eager result is made by reading back and uploading again between any two steps.

use burn::tensor::Tensor;
use burn_flash_attention::{FlashOptions, flash_attention};
use flash_reference::rounding::Dtype::F32;
use flash_reference::rounding::ulp;
use rstest::rstest;

use crate::compare::{assert_within, limit};
use crate::problem::{Problem, Qkv};
use crate::runtime;
use crate::support::{Dims, dims, download};

/// What happens between two steps of a computation.
type Boundary = fn(Tensor<4>) -> Tensor<4>;

/// Leaves the steps in one stream.
fn lazy(tensor: Tensor<4>) -> Tensor<4> {
    tensor
}

/// Ends the stream: what follows starts from a plain tensor.
fn eager(tensor: Tensor<4>) -> Tensor<4> {
    let (device, dtype) = (tensor.device(), tensor.dtype());
    Tensor::from_data(tensor.into_data(), (&device, dtype))
}

/// Elementwise ops of the kind that fuse.
fn before(Qkv { q, k, v }: Qkv, boundary: Boundary) -> Qkv {
    Qkv {
        q: boundary((q * 1.5 + 0.25).tanh()),
        k: boundary(k.clone() * 2.0 - k.sin()),
        v: boundary(v.abs() + 0.5),
    }
}

/// The result of the steps from `qkv` on: the values that attention saw, its output, and
/// `2 · output + v'`, which is why `seqlen_q == seqlen_k` here.
fn whole(qkv: Qkv, options: FlashOptions, boundary: Boundary) -> (Qkv, Tensor<4>, Tensor<4>) {
    let seen = before(qkv, boundary);
    let Qkv { q, k, v } = seen.clone();
    let out = boundary(flash_attention(q, k, v, options).out);
    let after = boundary(out.clone() * 2.0 + seen.v.clone());
    (seen, out, after)
}

/// `problem` with the inputs that attention saw.
fn seen_by(problem: &Problem, seen: Qkv) -> Problem {
    let [q, k, v] = [seen.q, seen.k, seen.v].map(|tensor| download(F32, tensor));
    let mut same = Problem::new(F32, problem.dims, q, k, v);
    same.mask = problem.mask.clone();
    same.causality(problem.spec.causality)
}

#[track_caller]
fn check_lazy_against_eager(problem: &Problem) {
    let device = runtime::device();
    let run = |boundary| whole(problem.qkv(&device), problem.options(&device), boundary);

    // Read the end first: the lazy stream must reach it in one go.
    let (_, lazy_out, lazy_after) = run(lazy);
    let lazy_after = download(F32, lazy_after);
    let lazy_out = download(F32, lazy_out);

    let (seen, eager_out, eager_after) = run(eager);
    let v = download(F32, seen.v.clone());
    let problem = seen_by(problem, seen);
    let want = problem.want().out;
    let allowed = limit(F32, &want, &problem.plain(F32).out);
    let shape = problem.dims.out();
    assert_within(
        "eager output",
        &shape,
        &download(F32, eager_out),
        &want,
        allowed,
    );
    assert_within("lazy output", &shape, &lazy_out, &want, allowed);

    let want: Vec<f64> = want.iter().zip(&v).map(|(out, v)| 2.0 * out + v).collect();
    let largest = want
        .iter()
        .fold(0.0, |largest: f64, x| largest.max(x.abs()));
    let allowed = 2.0 * allowed + 2.0 * ulp(F32, largest);
    assert_within(
        "eager end",
        &shape,
        &download(F32, eager_after),
        &want,
        allowed,
    );
    assert_within("lazy end", &shape, &lazy_after, &want, allowed);
}

fn square() -> Dims {
    dims(2, 3, 200, 200, 64)
}

#[test]
fn ops_before_and_after() {
    check_lazy_against_eager(&Problem::random(F32, square()));
}

#[test]
fn ops_before_and_after_with_causal_and_mask() {
    let problem = Problem::random(F32, square()).causal();
    check_lazy_against_eager(&problem.random_mask([2, 1, 1, 200], 0.3));
}

/// Fusion recognizes a stream that it has seen and reuses what it compiled, with other shapes too.
#[test]
fn the_same_stream_with_other_shapes() {
    for (batch, heads, seqlen) in [
        (1, 2, 150),
        (1, 2, 150),
        (2, 2, 170),
        (1, 3, 300),
        (1, 2, 150),
    ] {
        let dims = dims(batch, heads, seqlen, seqlen, 64);
        check_lazy_against_eager(&Problem::random(F32, dims).causal());
    }
}

/// Output and LSE of two halves of the keys, merged by ops of the same stream, are the whole.
#[test]
fn halves_merge_by_their_lse() {
    let problem = Problem::random(F32, dims(2, 3, 150, 290, 64));
    let device = runtime::device();
    let Qkv { q, k, v } = problem.qkv(&device);
    let half = |from, length| {
        let [k, v] = [&k, &v].map(|tensor| tensor.clone().narrow(2, from, length));
        let half = flash_attention(q.clone(), k, v, FlashOptions::new().with_lse());
        (half.out, half.lse.expect("asked for").unsqueeze_dim::<4>(3))
    };
    let ((left, lse_left), (right, lse_right)) = (half(0, 130), half(130, 160));
    let weight = (lse_right - lse_left).exp();
    let merged = (left + right * weight.clone()) / (weight + 1.0);

    let want = problem.want().out;
    let allowed = limit(F32, &want, &problem.plain(F32).out);
    let merged = download(F32, merged);
    assert_within(
        "merged halves",
        &problem.dims.out(),
        &merged,
        &want,
        2.0 * allowed,
    );
}

/// The mask is the result of a comparison in the same stream, a tensor of no memory yet.
#[test]
fn mask_from_a_comparison() {
    let problem = Problem::random(F32, dims(2, 3, 150, 290, 64));
    let device = runtime::device();
    let keys = problem.qkv(&device).k;
    // The first feature of each key decides for the whole key, for every query of its head.
    let feature = keys.narrow(3, 0, 1).swap_dims(2, 3);
    let mask = (feature * 2.0).lower_elem(-1.0);
    let k = problem.k.clone();
    let drop = |[b, h, _, j]: [usize; 4]| 2.0 * k[((b * 3 + h) * 290 + j) * 64] < -1.0;
    let problem = problem.mask([2, 3, 1, 290], drop);
    problem.check_tensors(
        problem.qkv(&device),
        FlashOptions::new().with_mask(mask).with_lse(),
    );
}

/// One attention's output is the next one's query, with a residual around it, and all of its
/// inputs are used again.
#[test]
fn attention_after_attention() {
    let problem = Problem::random(F32, square());
    let device = runtime::device();
    let run = |boundary: Boundary| {
        let Qkv { q, k, v } = problem.qkv(&device);
        let first = flash_attention(q.clone(), k.clone(), v.clone(), FlashOptions::new());
        let q = boundary(first.out + q);
        let options = FlashOptions::new().causal();
        let out = flash_attention(q.clone(), k.clone(), v.clone(), options).out;
        (q, out, k + v)
    };
    let (_, lazy_out, lazy_sum) = run(lazy);
    let (lazy_sum, lazy_out) = (download(F32, lazy_sum), download(F32, lazy_out));
    let (q, eager_out, _) = run(eager);
    let Qkv { k, v, .. } = problem.qkv(&device);
    let second = seen_by(&problem.clone().causal(), Qkv { q, k, v });
    let want = second.want().out;
    let allowed = limit(F32, &want, &second.plain(F32).out);
    let shape = second.dims.out();
    assert_within("eager", &shape, &download(F32, eager_out), &want, allowed);
    assert_within("lazy", &shape, &lazy_out, &want, allowed);
    let sum: Vec<f64> = problem
        .k
        .iter()
        .zip(&problem.v)
        .map(|(k, v)| k + v)
        .collect();
    assert_within("k + v", &shape, &lazy_sum, &sum, 2.0 * ulp(F32, 8.0));
}

/// Inputs with pending ops, made on one thread and read on others.
#[rstest]
fn across_threads() {
    let problem = Problem::random(F32, square());
    let device = runtime::device();
    let Qkv { q, k, v } = problem.qkv(&device);
    let pending = Qkv {
        q: q * 1.0,
        k: k * 1.0,
        v: v * 1.0,
    };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (problem, qkv) = (&problem, pending.clone());
            scope.spawn(move || problem.check_tensors(qkv, problem.options(&runtime::device())));
        }
    });
    problem.check_tensors(pending, problem.options(&device));
}
