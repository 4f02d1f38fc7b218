//! Many heads, long rows and far offsets: full size on a graphics card. A software device runs the
//! smallest size that shows the fault, or where only size shows it, the same code at a small one.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::{BoolDType, Device, Element, Tensor, TensorData, f16, s};
use burn_flash_attention::{FlashOptions, FlashOutput, flash_attention};
use flash_reference::Causality::{Causal, Full};
use flash_reference::rounding::Dtype::{F16, F32};
use rstest::rstest;

use crate::compare::{assert_within, limit};
use crate::gradients::{self, assert_right, gradient_tensors, random_d_out, weighted};
use crate::problem::{Problem, Qkv};
use crate::runtime::{self, Runtime};
use crate::support::{Dims, dims, download};

/// How much fits into one tensor of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    /// A software device: small.
    Small,
    /// wgpu on a card: it binds no buffer of 2^31 bytes, and CubeCL allocates none it cannot bind.
    /// Just below.
    Binding,
    /// No limit of this kind: past 2^32 elements.
    Unlimited,
}

fn size() -> Size {
    match (runtime::is_software(), runtime::current()) {
        (true, _) => Size::Small,
        (false, Runtime::Cuda) => Size::Unlimited,
        (false, _) => Size::Binding,
    }
}

/// Held by each test here: on a card they take tens of gigabytes, of host memory too.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed leaves nothing behind.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `full` on a card, `small` on a software device.
fn on_card<T>(full: T, small: T) -> T {
    match size() {
        Size::Small => small,
        Size::Binding | Size::Unlimited => full,
    }
}

/// `count` elements that repeat `pattern`.
fn cycle<E: Element>(pattern: &[E], count: usize) -> Vec<E> {
    let mut elements = Vec::with_capacity(count);
    while elements.len() < count {
        let rest = (count - elements.len()).min(pattern.len());
        elements.extend_from_slice(&pattern[..rest]);
    }
    elements
}

/// An f16 tensor whose packed elements repeat `pattern`.
fn repeating(shape: [usize; 4], pattern: &[f64], device: &Device) -> Tensor<4> {
    let pattern: Vec<f16> = pattern.iter().map(|&x| f16::from_f64(x)).collect();
    let data = TensorData::new(cycle(&pattern, shape.iter().product()), shape);
    Tensor::from_data(data, (device, runtime::burn_dtype(F16)))
}

/// Asserts the rule on a part of a larger output that `problem` describes alone.
#[track_caller]
fn check_part(problem: &Problem, whole: &FlashOutput, part: Tensor<4>) {
    problem.check_output(FlashOutput {
        out: part,
        lse: None,
        report: whole.report.clone(),
    });
}

/// `[1, 65536, 10, 16]`; small: one query each.
#[test]
fn case8_65536_heads() {
    let _turn = turn();
    let dims = on_card(dims(1, 65_536, 10, 10, 16), dims(1, 65_537, 1, 3, 8));
    Problem::random(F32, dims).check();
}

#[test]
fn case8_gradients_of_65536_heads() {
    let _turn = turn();
    let dims = on_card(dims(1, 65_536, 10, 10, 16), dims(1, 65_537, 1, 3, 8));
    let gradients = gradients::check(&Problem::random(F32, dims));
    assert!(gradients.is_some(), "every device has f32");
}

#[test]
fn case8_65536_batches_times_heads_of_one_query() {
    let _turn = turn();
    let dims = on_card(dims(4096, 16, 1, 20, 64), dims(8193, 8, 1, 3, 8));
    Problem::random(F16, dims).check();
}

/// `[65536, 8, 4, 64]` from 61 different batch entries: a prime number of them, so that an entry
/// taken for another shows. Small: one head and one query each.
#[test]
fn case8_65536_batch_entries() {
    let _turn = turn();
    let (batch, entry) = on_card(
        (65_536, dims(61, 8, 4, 4, 64)),
        (65_537, dims(61, 1, 1, 3, 8)),
    );
    let pattern = Problem::random(F16, entry);
    if pattern.is_refused() {
        return;
    }
    let device = runtime::device();
    let whole = Dims { batch, ..entry };
    let q = repeating(whole.q(), &pattern.q, &device);
    let k = repeating(whole.k(), &pattern.k, &device);
    let v = repeating(whole.v(), &pattern.v, &device);
    let out = flash_attention(q, k, v, FlashOptions::new()).out;
    assert_eq!(out.dims(), whole.out());
    let data = out.into_data();
    let got = data.as_slice::<f16>().expect("f16 in, f16 out");
    let want = pattern.want().out;
    let allowed = limit(F16, &want, &pattern.plain(F16).out);
    for (turn, got) in got.chunks(want.len()).enumerate() {
        let got: Vec<f64> = got.iter().map(|x| x.to_f64()).collect();
        let what = format!("output from batch entry {} on", turn * 61);
        assert_within(&what, &entry.out(), &got, &want[..got.len()], allowed);
    }
}

/// Queries and outputs past 2^32 elements, or up to what wgpu allocates.
#[test]
fn case9_query_offsets() {
    let _turn = turn();
    let (seqlen_q, head_dim) = match size() {
        Size::Small => (2500, 64),
        Size::Binding => (2_750_000, 128),
        Size::Unlimited => (5_600_000, 256),
    };
    // Rows repeat with a prime period; heads differ by their keys.
    const PERIOD: usize = 1009;
    let keys = Problem::random(F16, dims(1, 3, 1, 80, head_dim));
    let rows = Problem::random(F16, dims(1, 1, PERIOD, 80, head_dim));
    if rows.is_refused() {
        return;
    }
    let device = runtime::device();
    let Qkv { k, v, .. } = keys.qkv(&device);
    let q = repeating([1, 3, seqlen_q, head_dim], &rows.q, &device);
    let output = flash_attention(q, k, v, FlashOptions::new());
    for head in 0..3 {
        // The first row of each head, the last, and the rows around offsets 2^31 and 2^32.
        let around = |offset: usize| (offset / head_dim).saturating_sub(head * seqlen_q + 100);
        let last = seqlen_q - PERIOD;
        for start in [0, around(1 << 31), around(1 << 32), last].map(|start| start.min(last)) {
            let mut part = keys.head(0, head);
            let first = (head * seqlen_q + start) % PERIOD;
            let (end, begin) = rows.q.split_at(first * head_dim);
            part.q = [begin, end].concat();
            part.dims.seqlen_q = PERIOD;
            part.spec.seqlen_q = PERIOD;
            let got = output
                .out
                .clone()
                .narrow(1, head, 1)
                .narrow(2, start, PERIOD);
            check_part(&part, &output, got);
        }
    }
}

/// Keys a long way apart: their tensor is a view into one of 2^32 elements and more, or of the
/// largest tensor of wgpu. What lies between them is NaN.
#[test]
fn case9_key_strides() {
    let _turn = turn();
    let between = match size() {
        Size::Small => 801,
        Size::Binding => 200_001,
        Size::Unlimited => 900_001,
    };
    let problem = Problem::random(F16, dims(1, 1, 150, 80, 64));
    if problem.is_refused() {
        return;
    }
    let device = runtime::device();
    let far_apart = |values: &[f64]| {
        let mut elements = vec![f16::NAN; 80 * between * 64];
        for (row, values) in values.chunks(64).enumerate() {
            let at = (row * between + between - 1) * 64;
            let row = &mut elements[at..at + 64];
            row.iter_mut()
                .zip(values)
                .for_each(|(to, &x)| *to = f16::from_f64(x));
        }
        let data = TensorData::new(elements, [1, 80, between, 64]);
        let whole = Tensor::<4>::from_data(data, (&device, runtime::burn_dtype(F16)));
        whole
            .slice(s![.., .., between - 1..between, ..])
            .swap_dims(1, 2)
    };
    let Qkv { q, k, v } = problem.qkv(&device);
    let far_k = Qkv {
        q: q.clone(),
        k: far_apart(&problem.k),
        v,
    };
    problem.check_tensors(far_k, problem.options(&device));
    let far_v = Qkv {
        q,
        k,
        v: far_apart(&problem.v),
    };
    problem.check_tensors(far_v, problem.options(&device));
}

/// A materialized mask of 2^32 elements and more, or of what wgpu allocates.
#[test]
fn case9_mask_offsets() {
    let _turn = turn();
    let device = runtime::device();
    let seqlen = match (size(), device.settings().bool_dtype) {
        (Size::Small, _) => 330,
        (Size::Binding, BoolDType::U32) => 13_300,
        (Size::Binding, _) => 26_700,
        (Size::Unlimited, _) => 37_840,
    };
    let problem = Problem::random(F16, dims(1, 3, seqlen, seqlen, 64));
    if problem.is_refused() {
        return;
    }
    // A row of the mask is one of five.
    let drops = |h: usize, i: usize, j: usize| (i * 31 + j * 17 + h * 7).is_multiple_of(5);
    let patterns = [0, 1, 2, 3, 4].map(|i| (0..seqlen).map(|j| drops(0, i, j)).collect::<Vec<_>>());
    let mut mask = Vec::with_capacity(3 * seqlen * seqlen);
    for row in 0..3 * seqlen {
        let (h, i) = (row / seqlen, row % seqlen);
        mask.extend_from_slice(&patterns[(i + h * 7) % 5]);
    }
    let mask = TensorData::new(mask, problem.dims.scores());
    let mask = Tensor::from_data(mask, &device);
    let Qkv { q, k, v } = problem.qkv(&device);
    let output = flash_attention(q, k, v, FlashOptions::new().with_mask(mask));
    for head in 0..3 {
        for start in [0, seqlen / 2, seqlen - 64] {
            let mut part = problem.head(0, head);
            part.q = part.q[start * 64..][..64 * 64].to_vec();
            part.dims.seqlen_q = 64;
            part.spec.seqlen_q = 64;
            let part = part.mask([1, 1, 64, seqlen], |[_, _, i, j]| drops(head, start + i, j));
            let got = output.out.clone().narrow(1, head, 1).narrow(2, start, 64);
            check_part(&part, &output, got);
        }
    }
}

/// Scores of more than 4 GiB, were they ever in memory.
#[rstest]
fn case20_no_score_matrix() {
    let _turn = turn();
    let dims = on_card(dims(4, 32, 4096, 4096, 64), dims(1, 2, 600, 600, 64));
    let problem = Problem::random(F16, dims);
    if problem.is_refused() {
        return;
    }
    for causality in [Full, Causal] {
        let problem = problem.clone().causality(causality);
        let output = problem.run();
        for (batch, head) in [(0, 0), (dims.batch - 1, dims.num_heads - 1)] {
            let one = output.out.clone().narrow(0, batch, 1).narrow(1, head, 1);
            check_part(&problem.head(batch, head), &output, one);
        }
    }
}

/// Training without the score matrix, which is where Burn's own op gave wrong numbers silently.
#[test]
fn case20_gradients_without_a_score_matrix() {
    let _turn = turn();
    let dims = on_card(dims(4, 32, 4096, 4096, 64), dims(1, 2, 600, 600, 64));
    let problem = Problem::random(F16, dims).causal();
    if problem.is_refused() {
        return;
    }
    let d_out = random_d_out(&problem);
    let device = runtime::device().autodiff();
    let grads = gradient_tensors(&device, &problem, weighted(&problem, &d_out));
    for (batch, head) in [(0, 0), (dims.batch - 1, dims.num_heads - 1)] {
        let part = grads.clone().map(|grad| {
            let grad = grad.expect("the loss depends on all three");
            download(F16, grad.narrow(0, batch, 1).narrow(1, head, 1))
        });
        let rows = dims.seqlen_q * dims.val_dim;
        let d_out = &d_out[(batch * dims.num_heads + head) * rows..][..rows];
        assert_right(&problem.head(batch, head), d_out, &part);
    }
}

/// Rows of a length at which the accumulator of a whole row of probabilities must not overflow or
/// lose keys: every key counts.
#[test]
fn long_rows() {
    let _turn = turn();
    let seqlen_k = on_card(1_000_000, 20_000);
    let dims = dims(1, 1, 3, seqlen_k, 16);
    let problem = Problem::random(F32, dims);
    problem.check();
    let zero = |values: &[f64]| vec![0.0; values.len()];
    let ones = vec![1.0; problem.v.len()];
    let constant = Problem::new(F32, dims, zero(&problem.q), zero(&problem.k), ones);
    constant.check();
}

#[test]
fn a_pattern_repeats() {
    assert_eq!(
        cycle(&[1.0_f32, 2.0, 3.0], 7),
        [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0]
    );
    let device = runtime::device();
    let shape = [1, 1, 1, 5];
    let got = repeating(shape, &[1.0, 2.0], &device);
    assert_eq!(download(F16, got), [1.0, 2.0, 1.0, 2.0, 1.0]);
}
