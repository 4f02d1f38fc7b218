//! Every size: head dimensions, values of another length than keys, even and uneven lengths, 0, 1.
//!
//! Lengths pass one tile of every plan unless a case has its own: within one tile a missing
//! rescale of the accumulator cannot show.

use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32, Tf32};
use rstest::rstest;

use crate::problem::{Got, Problem};
use crate::runtime;
use crate::support::dims;

/// One causality per dtype: each pair with each head size is another kernel, and compiling is what
/// takes the time on a software device. Feature `exhaustive` runs the product.
fn one_causality(dtype: Dtype) -> Causality {
    match dtype {
        F16 => Full,
        F32 | Tf32 | Bf16 => Causal,
    }
}

#[rstest]
fn every_kind_of_head_dim(
    #[values(F32, F16, Bf16)] dtype: Dtype,
    #[values(1, 8, 40, 59, 64, 72, 80, 88, 96, 111, 128, 160, 192, 256)] head_dim: usize,
) {
    let problem = Problem::random(dtype, dims(1, 2, 150, 290, head_dim));
    problem.causality(one_causality(dtype)).check();
}

/// The scale follows the true head dimension, not the one a plan pads it to.
#[rstest]
fn case13_head_dim_at_97_tokens(
    #[values(F32, F16, Bf16)] dtype: Dtype,
    #[values(40, 59, 72, 80, 88, 111, 160, 192, 256)] head_dim: usize,
) {
    let problem = Problem::random(dtype, dims(1, 2, 97, 97, head_dim));
    problem.causality(one_causality(dtype)).check();
}

/// The most shared memory a plan can need: a smaller plan or the fallback, right either way.
#[rstest]
fn case18_head_dim_256_in_f32(#[values(Full, Causal)] causality: Causality) {
    let problem = Problem::random(F32, dims(1, 1, 200, 333, 256));
    problem.causality(causality).check();
}

#[rstest]
#[case::longer_than_keys(64, 128)]
#[case::shorter_than_keys(128, 64)]
#[case::latent_attention(192, 128)]
#[case::uneven(40, 72)]
#[case::odd(59, 111)]
#[case::one_value(256, 1)]
#[case::one_feature(1, 256)]
fn val_dim_other_than_head_dim(
    #[case] head_dim: usize,
    #[case] val_dim: usize,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(1, 2, 150, 290, head_dim).val_dim(val_dim);
    let problem = Problem::random(dtype, dims);
    problem.causality(one_causality(dtype)).check();
}

/// Rows for which a table has tiles of their own, no multiple of a tile.
#[rstest]
fn long_rows(
    #[values((2048, 290), (2100, 2100))] lengths: (usize, usize),
    #[values(72, 128)] head_dim: usize,
    #[values(Full, Causal)] causality: Causality,
) {
    if runtime::is_software() && lengths.0 == lengths.1 {
        return runtime::skip("a software device has one tile for all lengths");
    }
    let dims = dims(1, 1, lengths.0, lengths.1, head_dim);
    Problem::random(F16, dims).causality(causality).check();
}

#[rstest]
fn case17_causal_on_every_head(#[values(F32, F16, Bf16)] dtype: Dtype) {
    Problem::random(dtype, dims(2, 4, 16, 16, 32))
        .causal()
        .check();
}

#[rstest]
fn case5_causal_with_few_queries_and_many_keys(#[values(F16, Bf16)] dtype: Dtype) {
    Problem::random(dtype, dims(4, 12, 32, 1024, 64))
        .causal()
        .check();
}

/// flash-attn's own shape list, as far as it fits a software device.
#[rstest]
fn flash_attn_shape(
    #[values(
        (1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)
    )]
    lengths: (usize, usize),
    #[values((2, 2), (2, 1), (4, 2))] heads: (usize, usize),
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(1, heads.0, lengths.0, lengths.1, 64).kv_heads(heads.1);
    Problem::random(dtype, dims).causality(causality).check();
}

/// The long end of the same list, with one head.
#[rstest]
fn flash_attn_long_shape(
    #[values((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048))] lengths: (usize, usize),
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(1, 1, lengths.0, lengths.1, 64);
    Problem::random(dtype, dims).causality(causality).check();
}

/// Bottom-right alignment, by the index trick: query `i` sees the first `i + 1 + Sk - Sq` keys, so
/// the output is the mean of their indices and the LSE the logarithm of their number.
#[rstest]
#[case::case5_more_keys(2, 5)]
#[case::case5_more_queries(5, 2)]
#[case::case5_one_query(1, 7)]
#[case::tiles_more_keys(200, 333)]
#[case::tiles_more_queries(333, 200)]
#[case::tiles_square(257, 257)]
fn causal_is_bottom_right_aligned(
    #[case] seqlen_q: usize,
    #[case] seqlen_k: usize,
    #[values(F32, F16)] dtype: Dtype,
) {
    let problem = Problem::index_trick(dtype, dims(1, 2, seqlen_q, seqlen_k, 8)).causal();
    if problem.is_refused() {
        return;
    }
    let Got { out, lse, .. } = problem.check_output(problem.run());
    for (row, lse) in lse.expect("asked for").into_iter().enumerate() {
        let seen = (row % seqlen_q + 1 + seqlen_k).saturating_sub(seqlen_q);
        let mean = seen.saturating_sub(1) as f64 / 2.0;
        for x in &out[row * 8..][..8] {
            // One key more or less moves the mean by a half; the values are below 2^9, where f16
            // has steps of a quarter.
            assert!(
                (x - mean).abs() <= 0.125,
                "row {row} gives {x}, the mean is {mean}"
            );
        }
        let ln = (seen as f64).ln();
        assert!(
            lse == ln || (lse - ln).abs() < 1e-3,
            "row {row}: lse {lse}, want {ln}"
        );
    }
}

/// Which tiles need masking depends on where the causal edge crosses them: every offset of two tiles.
#[rstest]
#[case::f32(F32, 8)]
#[case::f16(F16, 64)]
#[case::bf16(Bf16, 128)]
fn causal_at_every_offset(#[case] dtype: Dtype, #[case] head_dim: usize) {
    // Two tiles of a software device are 64 keys.
    let (all, first) = (12..=272, 12..=80);
    for seqlen_k in runtime::on_card(all, first) {
        Problem::random(dtype, dims(1, 1, 142, seqlen_k, head_dim))
            .causal()
            .check();
    }
}

/// A last tile of every size, of keys and of queries. Two heads: the rows of one that a tile has
/// too many would be the first of the other.
#[rstest]
#[case::f32(F32, 8)]
#[case::f16(F16, 64)]
#[case::bf16(Bf16, 128)]
fn last_tile_of_every_size(#[case] dtype: Dtype, #[case] head_dim: usize) {
    for length in 1..=runtime::on_card(136, 70) {
        Problem::random(dtype, dims(1, 2, 3, length, head_dim)).check();
        Problem::random(dtype, dims(1, 2, length, 3, head_dim)).check();
    }
}

#[rstest]
#[case::one_token(1, 1)]
#[case::one_query(1, 300)]
#[case::one_key(300, 1)]
#[case::two_by_one(2, 1)]
fn seqlen_one(
    #[case] seqlen_q: usize,
    #[case] seqlen_k: usize,
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(2, 3, seqlen_q, seqlen_k, 64));
    problem.causality(causality).check();
}

/// The softmax over one key is 1, so the values come back.
#[rstest]
fn case15_one_token_gives_its_value(#[values(F32, F16, Bf16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(2, 3, 1, 1, 64));
    assert_eq!(problem.want().out, problem.v, "the specification says so");
    problem.check();
}

/// Without keys every row sees nothing; without queries or batch entries there is no row.
#[rstest]
#[case::no_keys(1, 2, 5, 0)]
#[case::no_queries(1, 2, 0, 5)]
#[case::neither(1, 2, 0, 0)]
#[case::no_batch(0, 2, 5, 5)]
#[case::no_heads(1, 0, 5, 5)]
fn case15_nothing_to_attend(
    #[case] batch: usize,
    #[case] num_heads: usize,
    #[case] seqlen_q: usize,
    #[case] seqlen_k: usize,
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let dims = dims(batch, num_heads, seqlen_q, seqlen_k, 64);
    let problem = Problem::random(dtype, dims).causality(causality);
    if problem.is_refused() {
        return;
    }
    let Got { out, lse, .. } = problem.check_output(problem.run());
    let rows = batch * num_heads * seqlen_q;
    let expected_rows = if seqlen_k == 0 { rows } else { 0 };
    assert_eq!(out, vec![0.0; expected_rows * 64]);
    assert_eq!(lse, Some(vec![f64::NEG_INFINITY; expected_rows]));
}

#[cfg(feature = "exhaustive")]
mod exhaustive {
    use super::*;

    #[rstest]
    fn every_head_dim(
        #[values(F32, F16, Bf16)] dtype: Dtype,
        #[values(Full, Causal)] causality: Causality,
    ) {
        for head_dim in 1..=256 {
            let problem = Problem::random(dtype, dims(1, 1, 150, 290, head_dim));
            problem.causality(causality).check();
        }
    }

    #[rstest]
    fn every_val_dim_in_steps_of_eight(#[values(F32, F16, Bf16)] dtype: Dtype) {
        for val_dim in (8..=256).step_by(8) {
            let dims = dims(1, 1, 150, 290, 264 - val_dim).val_dim(val_dim);
            Problem::random(dtype, dims).check();
        }
    }

    #[rstest]
    fn flash_attn_shape_with_many_head_dims(
        #[values(
            (1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)
        )]
        lengths: (usize, usize),
        #[values((6, 6), (6, 1), (6, 2))] heads: (usize, usize),
        #[values(Full, Causal)] causality: Causality,
        #[values(F32, F16, Bf16)] dtype: Dtype,
        #[values(32, 59, 64, 80, 128, 160, 192, 256)] head_dim: usize,
    ) {
        let dims = dims(2, heads.0, lengths.0, lengths.1, head_dim).kv_heads(heads.1);
        Problem::random(dtype, dims).causality(causality).check();
    }

    #[rstest]
    fn flash_attn_long_shape_with_many_head_dims(
        #[values((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048))] lengths: (usize, usize),
        #[values(Full, Causal)] causality: Causality,
        #[values(F32, F16, Bf16)] dtype: Dtype,
        #[values(59, 128, 256)] head_dim: usize,
    ) {
        let dims = dims(1, 2, lengths.0, lengths.1, head_dim).kv_heads(1);
        Problem::random(dtype, dims).causality(causality).check();
    }

    #[rstest]
    fn every_kind_of_head_dim_with_the_other_causality(
        #[values(F32, F16, Bf16)] dtype: Dtype,
        #[values(1, 8, 40, 59, 64, 72, 80, 88, 96, 111, 128, 160, 192, 256)] head_dim: usize,
    ) {
        let other = match one_causality(dtype) {
            Full => Causal,
            Causal => Full,
        };
        let problem = Problem::random(dtype, dims(1, 2, 150, 290, head_dim));
        problem.causality(other).check();
    }

    /// Every length around the edges of tiles, one against the other.
    #[rstest]
    fn lengths_around_tile_edges(
        #[values(F32, F16, Bf16)] dtype: Dtype,
        #[values(Full, Causal)] causality: Causality,
    ) {
        let lengths = [
            1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257,
        ];
        for seqlen_q in lengths {
            for seqlen_k in lengths {
                let problem = Problem::random(dtype, dims(1, 1, seqlen_q, seqlen_k, 64));
                problem.causality(causality).check();
            }
        }
    }
}
