//! Layouts: q, k, v and the mask by their strides, whatever they are views of.

use burn::tensor::{Tensor, s};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::problem::{Problem, Qkv};
use crate::runtime;
use crate::support::{Dims, Host, dims, upload, upload_mask};

fn tiles() -> Dims {
    dims(2, 3, 150, 290, 64)
}

/// A packed host tensor with two dimensions exchanged.
fn swapped<T: Copy>(shape: [usize; 4], values: &[T], a: usize, b: usize) -> Host<T> {
    let mut to = shape;
    to.swap(a, b);
    Host::from_fn(to, |mut index| {
        index.swap(a, b);
        values[(0..4).fold(0, |at, d| at * shape[d] + index[d])]
    })
}

/// `values` on the device, stored with dimensions `a` and `b` exchanged.
fn stored_swapped(
    problem: &Problem,
    shape: [usize; 4],
    values: &[f64],
    (a, b): (usize, usize),
) -> Tensor<4> {
    let Host { shape, data } = swapped(shape, values, a, b);
    upload(problem.dtype, shape, &data, &runtime::device()).swap_dims(a, b)
}

/// `[batch, seq, heads, dim]` in memory, as a projection leaves it.
#[rstest]
fn sequence_before_heads(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let problem = Problem::random(dtype, tiles()).causal();
    if problem.is_refused() {
        return;
    }
    let view = |shape, values| stored_swapped(&problem, shape, values, (1, 2));
    let dims = problem.dims;
    let qkv = Qkv {
        q: view(dims.q(), &problem.q),
        k: view(dims.k(), &problem.k),
        v: view(dims.v(), &problem.v),
    };
    problem.check_tensors(qkv, problem.options(&runtime::device()));
}

/// One operand whose last dimension is not the contiguous one, the others packed.
#[rstest]
#[case::q([true, false, false])]
#[case::k([false, true, false])]
#[case::case6_v_alone([false, false, true])]
#[case::all([true; 3])]
fn transposed_operand(#[case] transposed: [bool; 3], #[values(F32, F16, Bf16)] dtype: Dtype) {
    let problem = Problem::random(dtype, tiles());
    if problem.is_refused() {
        return;
    }
    let device = runtime::device();
    let view = |shape, values: &[f64], transposed| match transposed {
        true => stored_swapped(&problem, shape, values, (2, 3)),
        false => upload(dtype, shape, values, &device),
    };
    let dims = problem.dims;
    let qkv = Qkv {
        q: view(dims.q(), &problem.q, transposed[0]),
        k: view(dims.k(), &problem.k, transposed[1]),
        v: view(dims.v(), &problem.v, transposed[2]),
    };
    problem.check_tensors(qkv, problem.options(&device));
}

/// q, k and v as slices of one `[batch, seq, 3, heads, dim]` tensor, axes swapped, with a mask.
#[rstest]
#[case::small(2, 3, 20, 16)]
#[case::tiles(2, 3, 290, 64)]
#[case::odd_offsets(1, 3, 150, 59)]
fn case6_one_packed_tensor(
    #[case] batch: usize,
    #[case] num_heads: usize,
    #[case] seqlen: usize,
    #[case] head_dim: usize,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(batch, num_heads, seqlen, seqlen, head_dim);
    let problem = Problem::random(dtype, dims).random_mask([1, 1, seqlen, seqlen], 0.4);
    if problem.is_refused() {
        return;
    }
    let device = runtime::device();
    let tokens = [&problem.q, &problem.k, &problem.v].map(|x| swapped(dims.q(), x, 1, 2));
    let row = num_heads * head_dim;
    let packed: Vec<f64> = (0..batch * seqlen)
        .flat_map(|token| {
            tokens
                .iter()
                .flat_map(move |x| &x.data[token * row..][..row])
        })
        .copied()
        .collect();
    let packed = upload(
        dtype,
        [batch * seqlen, 3, num_heads, head_dim],
        &packed,
        &device,
    );
    let packed: Tensor<5> = packed.reshape([batch, seqlen, 3, num_heads, head_dim]);
    let part = |i: usize| {
        let part = packed.clone().slice(s![.., .., i..i + 1, .., ..]);
        part.squeeze_dim::<4>(2).swap_dims(1, 2)
    };
    let qkv = Qkv {
        q: part(0),
        k: part(1),
        v: part(2),
    };
    problem.check_tensors(qkv, problem.options(&device));
}

/// Heads, sequence and batch cut out of larger tensors, so every stride and the offset differ from
/// the packed ones. What lies around the view is NaN: reading past its end must not show.
#[rstest]
#[case::sequence([0, 0, 64, 0], [0, 0, 62, 0])]
#[case::sequence_end([0, 0, 0, 0], [0, 0, 62, 0])]
#[case::heads([0, 2, 0, 0], [0, 1, 0, 0])]
#[case::batch([1, 0, 0, 0], [1, 0, 0, 0])]
#[case::dim([0, 0, 0, 64], [0, 0, 0, 128])]
#[case::odd_dim([0, 0, 0, 3], [0, 0, 0, 5])]
#[case::everything([1, 1, 7, 8], [1, 2, 9, 16])]
fn view_with_nan_around_it(
    #[case] before: [usize; 4],
    #[case] after: [usize; 4],
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, tiles());
    if problem.is_refused() {
        return;
    }
    let device = runtime::device();
    let view = |shape: [usize; 4], values: &[f64]| {
        let outer = [0, 1, 2, 3].map(|d| before[d] + shape[d] + after[d]);
        let around = Host::from_fn(outer, |index| {
            let inside = |d| (before[d]..before[d] + shape[d]).contains(&index[d]);
            if !(0..4).all(inside) {
                return f64::NAN;
            }
            values[(0..4).fold(0, |at, d| at * shape[d] + index[d] - before[d])]
        });
        let range = |d: usize| before[d]..before[d] + shape[d];
        let around = upload(dtype, outer, &around.data, &device);
        around.slice([range(0), range(1), range(2), range(3)])
    };
    let dims = problem.dims;
    let qkv = Qkv {
        q: view(dims.q(), &problem.q),
        k: view(dims.k(), &problem.k),
        v: view(dims.v(), &problem.v),
    };
    problem.check_tensors(qkv, problem.options(&device));
}

#[rstest]
fn narrowed_keys_and_values(#[values(F32, F16, Bf16)] dtype: Dtype) {
    // A cache of 512 positions, of which 290 are filled.
    let problem = Problem::random(dtype, dims(2, 3, 1, 290, 64));
    if problem.is_refused() {
        return;
    }
    let device = runtime::device();
    let cache = |values: &[f64]| {
        let filled = |[b, h, j, c]: [usize; 4]| match j {
            0..290 => values[((b * 3 + h) * 290 + j) * 64 + c],
            _ => f64::NAN,
        };
        let cache = Host::from_fn([2, 3, 512, 64], filled);
        upload(dtype, cache.shape, &cache.data, &device).narrow(2, 0, 290)
    };
    let qkv = Qkv {
        q: upload(dtype, problem.dims.q(), &problem.q, &device),
        k: cache(&problem.k),
        v: cache(&problem.v),
    };
    problem.check_tensors(qkv, problem.options(&device));
}

/// One head of keys and values, or one batch entry of all three, expanded with stride 0.
#[rstest]
#[case::heads([2, 1])]
#[case::batch([1, 3])]
#[case::both([1, 1])]
fn expanded_operands(#[case] stored: [usize; 2], #[values(F32, F16, Bf16)] dtype: Dtype) {
    let dims = tiles();
    let small = Dims {
        batch: stored[0],
        num_heads: stored[1],
        num_kv_heads: stored[1],
        ..dims
    };
    let source = Problem::random(dtype, small);
    if source.is_refused() {
        return;
    }
    let whole = |shape: [usize; 4], values: &[f64], to: [usize; 4]| {
        let data = values.to_vec();
        Host { shape, data }.broadcast(to)
    };
    let q = whole(small.q(), &source.q, dims.q());
    let k = whole(small.k(), &source.k, dims.k());
    let v = whole(small.v(), &source.v, dims.v());
    let problem = Problem::new(dtype, dims, q, k, v).causal();
    let device = runtime::device();
    let Qkv { q, k, v } = source.qkv(&device);
    let qkv = Qkv {
        q: q.expand(dims.q()),
        k: k.expand(dims.k()),
        v: v.expand(dims.v()),
    };
    problem.check_tensors(qkv, problem.options(&device));
}

/// A mask stored with its last two dimensions exchanged, or cut out of a larger one.
#[rstest]
fn mask_as_a_view(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let dims = tiles();
    let problem = Problem::random(dtype, dims).random_mask(dims.scores(), 0.4);
    if problem.is_refused() {
        return;
    }
    let device = runtime::device();
    let options = problem.options(&device);
    let mask = &problem.mask.as_ref().expect("set").data;
    let exchanged = upload_mask(&swapped(dims.scores(), mask, 2, 3), &device).swap_dims(2, 3);
    let mut wide = dims.scores();
    wide[3] += 2 * 32;
    let around = Host::from_fn(wide, |[b, h, i, j]| {
        let inside = (32..32 + 290).contains(&j);
        inside && mask[((b * 3 + h) * 150 + i) * 290 + j - 32]
    });
    let cut = upload_mask(&around, &device).narrow(3, 32, 290);
    for mask in [exchanged, cut] {
        problem.check_tensors(problem.qkv(&device), options.clone().with_mask(mask));
    }
}

/// Attention reads its inputs and leaves them as they were, also when it holds the last reference
/// to none of them.
#[test]
fn inputs_are_unchanged() {
    let problem = Problem::random(F32, tiles());
    let device = runtime::device();
    let qkv = problem.qkv(&device);
    let output = problem.run_tensors(qkv.clone(), problem.options(&device));
    let again = Qkv {
        q: qkv.q.clone() * 1.0,
        k: qkv.k.clone() * 1.0,
        v: qkv.v.clone() * 1.0,
    };
    problem.check_output(output);
    problem.check_tensors(again, problem.options(&device));
    problem.check_tensors(qkv, problem.options(&device));
}
