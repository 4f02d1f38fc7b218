//! Fewer key heads than query heads: query head `h` reads key head `h / (H / Hkv)`.

use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32};
use rstest::rstest;

use crate::problem::{Got, Problem};
use crate::support::{Host, dims};

/// The same problem with every key and value head repeated for each query head of its group.
fn repeated(problem: &Problem) -> Problem {
    let wide = problem.dims.kv_heads(problem.dims.num_heads);
    let group = problem.dims.num_heads / problem.dims.num_kv_heads;
    let repeat = |values: &[f64], size: usize| -> Vec<f64> {
        let heads = values.chunks(problem.dims.seqlen_k * size);
        heads.flat_map(|head| head.repeat(group)).collect()
    };
    let k = repeat(&problem.k, wide.head_dim);
    let v = repeat(&problem.v, wide.val_dim);
    let same = Problem::new(problem.dtype, wide, problem.q.clone(), k, v);
    same.causality(problem.spec.causality)
}

#[rstest]
#[case::three_per_key_head(6, 2)]
#[case::four_per_key_head(8, 2)]
#[case::one_key_head(4, 1)]
#[case::many(32, 8)]
fn case12_equals_repeated_keys_and_values(
    #[case] num_heads: usize,
    #[case] num_kv_heads: usize,
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(2, num_heads, 65, 65, 64).kv_heads(num_kv_heads);
    let problem = Problem::random(dtype, dims).causality(causality);
    assert_eq!(
        problem.want(),
        repeated(&problem).want(),
        "the specification says so"
    );
    problem.check();
    repeated(&problem).check();
}

#[rstest]
fn groups_longer_than_a_tile(
    #[values((6, 2), (5, 1))] heads: (usize, usize),
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(1, heads.0, 150, 290, 64).kv_heads(heads.1);
    Problem::random(dtype, dims).causal().check();
}

/// Each key head's values are its own number, so each query head names the key head it read.
#[rstest]
fn each_query_head_reads_its_own_key_head(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let dims = dims(2, 12, 33, 129, 40).kv_heads(3);
    let mut problem = Problem::random(dtype, dims);
    let number = |batch, head| (3 * batch + head + 1) as f64;
    problem.v = Host::from_fn(dims.v(), |[b, h, _, _]| number(b, h)).data;
    if problem.is_refused() {
        return;
    }
    let Got { out, .. } = problem.check_output(problem.run());
    let want = Host::from_fn(dims.out(), |[b, h, _, _]| number(b, h / 4)).data;
    // The weights of a row sum to 1 up to rounding; neighbors differ by 1.
    let wrong = out
        .iter()
        .zip(&want)
        .position(|(x, number)| (x - number).abs() > 0.05);
    assert_eq!(wrong, None, "the first output of another key head");
}

/// Masks belong to query heads, also where several of them share a key head.
#[rstest]
fn mask_per_query_head(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let dims = dims(2, 6, 70, 150, 64).kv_heads(2);
    let problem = Problem::random(dtype, dims).random_mask(dims.scores(), 0.4);
    problem.clone().check();
    problem.causal().check();
}
