//! The gradient of heads beyond 128 columns, whose dk and dv two warpgroups divide among them on sm_90:
//! as right as any other, for every mask, length and group, and the same from run to run.

use flash_kernels::{
    Causality as KernelCausality, FloatKind, Masking, Pass, UnitKind,
    codegen::{self, Target},
};
use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{self, Bf16, F16};
use rstest::rstest;

use crate::codegen::plans::{AMPERE, Ask, HOPPER};
use crate::gradients::{Three, assert_right, check, gradients_on, random_d_out, weighted};
use crate::problem::Problem;
use crate::runtime;
use crate::support::dims;

#[rstest]
fn is_right(
    #[values((200, 333), (333, 200), (1, 300), (256, 256))] lengths: (usize, usize),
    #[values(136, 160, 192, 256)] head_dim: usize,
    #[values(Full, Causal)] causality: Causality,
    #[values(F16, Bf16)] dtype: Dtype,
) {
    if runtime::is_software() && (lengths, causality, dtype) != ((200, 333), Full, F16) {
        return runtime::skip(ONE_KERNEL);
    }
    if spared(head_dim) {
        return;
    }
    let lengths = runtime::on_card(lengths, (70, 90));
    let problem = Problem::random(dtype, dims(1, 2, lengths.0, lengths.1, head_dim));
    check(&problem.causality(causality));
}

#[rstest]
#[case::latent_attention(192, 128)]
#[case::narrow_keys(64, 256)]
#[case::narrow_values(256, 40)]
#[case::of_no_whole_box(248, 200)]
fn values_may_have_another_length(#[case] head_dim: usize, #[case] val_dim: usize) {
    if runtime::is_software() && (head_dim, val_dim) != (192, 128) {
        return runtime::skip(ONE_KERNEL);
    }
    let (seqlen_q, seqlen_k) = runtime::on_card((150, 290), (70, 90));
    let dims = dims(2, 2, seqlen_q, seqlen_k, head_dim).val_dim(val_dim);
    check(&Problem::random(F16, dims).causal());
}

#[rstest]
fn sums_over_the_heads_of_a_group(#[values(192, 256)] head_dim: usize) {
    if spared(head_dim) {
        return;
    }
    let (seqlen_q, seqlen_k) = runtime::on_card((150, 200), (70, 90));
    let dims = dims(2, 6, seqlen_q, seqlen_k, head_dim).kv_heads(2);
    check(&Problem::random(F16, dims).causal());
}

#[rstest]
#[case::padding([2, 1, 1, 200])]
#[case::dense([2, 2, 150, 200])]
fn takes_a_mask(
    #[case] shape: [usize; 4],
    #[values(192, 256)] head_dim: usize,
    #[values(Full, Causal)] causality: Causality,
) {
    if spared(head_dim) {
        return;
    }
    let (seqlen_q, seqlen_k) = runtime::on_card((150, 200), (70, 90));
    let [batch, heads, ..] = shape;
    let shape = [batch, heads, shape[2].min(seqlen_q), seqlen_k];
    let problem = Problem::random(F16, dims(2, 2, seqlen_q, seqlen_k, head_dim));
    check(&problem.causality(causality).random_mask(shape, 0.4));
}

/// A software device has the same kernel for all head sizes, and compiles it for a minute at 256
/// columns: `training` sees to the sizes, `gradients` to lengths and masks.
const ONE_KERNEL: &str = "a software device has one kernel for all head sizes";

/// Whether this device leaves the test to another head size; if so, it has said so.
fn spared(head_dim: usize) -> bool {
    let spared = runtime::is_software() && head_dim != 192;
    if spared {
        runtime::skip(ONE_KERNEL);
    }
    spared
}

fn run(problem: &Problem) -> Three {
    let device = runtime::device().autodiff();
    gradients_on(&device, problem, weighted(problem, &random_d_out(problem)))
}

/// A query that sees nothing: what multiplies it is 0, and must stay 0.
#[rstest]
fn masked_queries_may_hold_nan(#[values(192, 256)] head_dim: usize) {
    if spared(head_dim) {
        return;
    }
    let (seqlen_q, seqlen_k) = runtime::on_card((150, 200), (70, 90));
    let problem = Problem::random(F16, dims(1, 2, seqlen_q, seqlen_k, head_dim));
    let mut problem = problem.mask([1, 1, seqlen_q, 1], |[.., i, _]| i == 20);
    let Some(clean) = check(&problem) else {
        return;
    };
    if !runtime::has_kernels() {
        return;
    }
    for head in 0..2 {
        let row = (head * seqlen_q + 20) * head_dim;
        problem.q[row..row + head_dim].fill(f64::NAN);
    }
    assert_eq!(run(&problem)[1..], clean[1..]);
}

/// Neither dq nor the other gradients depend on what a masked key holds.
#[rstest]
fn masked_keys_may_hold_nan(#[values(192, 256)] head_dim: usize) {
    if spared(head_dim) {
        return;
    }
    let (seqlen_q, seqlen_k, masked) = runtime::on_card((150, 200, 120), (70, 90, 50));
    let problem = Problem::random(F16, dims(1, 2, seqlen_q, seqlen_k, head_dim)).causal();
    let mut problem = problem.mask([1, 1, 1, seqlen_k], |[.., j]| j == masked);
    let Some(clean) = check(&problem) else {
        return;
    };
    if !runtime::has_kernels() {
        return;
    }
    for head in 0..2 {
        let row = (head * seqlen_k + masked) * head_dim;
        problem.k[row..row + head_dim].fill(f64::NAN);
    }
    assert_eq!(run(&problem), clean);
}

#[rstest]
fn fifty_runs_are_bit_equal(#[values(192, 256)] head_dim: usize) {
    if spared(head_dim) {
        return;
    }
    let (seqlen_q, seqlen_k) = runtime::on_card((330, 350), (70, 90));
    let dims = dims(2, 4, seqlen_q, seqlen_k, head_dim).kv_heads(2);
    let problem = Problem::random(F16, dims).causal();
    if problem.is_refused() || !runtime::has_kernels() {
        return;
    }
    // A software device is asked for small shapes 50 times elsewhere (`gradients`).
    let runs = if runtime::is_software() { 2 } else { 50 };
    let first = run(&problem);
    assert_right(&problem, &random_d_out(&problem), &first);
    for again in 1..runs {
        assert_eq!(run(&problem), first, "run {again}");
    }
}

fn ask(head_dim: usize, val_dim: usize) -> Ask {
    Ask {
        pass: Pass::Dkv,
        val_dim,
        ..Ask::new(FloatKind::F16, head_dim)
    }
}

#[test]
fn two_warpgroups_divide_what_one_cannot_hold() {
    for (head_dim, val_dim, divided) in [
        (128, 128, false),
        (136, 136, true),
        (192, 64, true),
        (64, 136, true),
        (256, 256, true),
    ] {
        for masking in [Masking::None, Masking::Dense] {
            let ask = Ask {
                masking,
                ..ask(head_dim, val_dim)
            };
            let plan = ask.plan(&HOPPER).expect("a plan");
            assert_eq!(plan.unit, UnitKind::Wgmma, "{head_dim}, {val_dim}");
            assert_eq!(plan.is_divided(), divided, "{head_dim}, {val_dim}");
            assert_eq!((plan.consumers(), plan.threads), (2, 384));
            // Of a divided plan no warpgroup waits for the tile that the other is about to leave.
            assert_eq!(plan.stages(), if divided { 3 } else { 2 });
            let plan = ask.plan(&AMPERE).expect("a plan");
            assert_eq!((plan.unit, plan.is_divided()), (UnitKind::Mma, false));
        }
    }
    let odd = ask(203, 203).plan(&HOPPER).expect("a plan");
    assert_eq!((odd.unit, odd.is_divided()), (UnitKind::Mma, false));
    let single = Ask {
        dtype: FloatKind::F32,
        ..ask(256, 256)
    };
    assert_eq!(single.plan(&HOPPER).expect("a plan").unit, UnitKind::Scalar);
}

/// The sum over the keys of a step runs in the next one, when two more tiles of keys are wanted.
#[rstest]
#[case(64, 2)]
#[case(128, 2)]
#[case(192, 2)]
#[case(256, 1)]
fn dq_has_three_stages_for_keys(#[case] head_dim: usize, #[case] of_values: usize) {
    let ask = Ask {
        pass: Pass::Dq,
        ..Ask::new(FloatKind::F16, head_dim)
    };
    let plan = ask.plan(&HOPPER).expect("a plan");
    assert_eq!(plan.unit, UnitKind::Wgmma);
    assert_eq!((plan.head_stages(), plan.stages()), (3, of_values));
    let barriers = 2 * (2 + 3 + of_values);
    assert_eq!(plan.barriers(), barriers);
}

/// Only dkv of 64 keys is divided: other tiles of 64 rows leave a warpgroup without work.
#[test]
fn no_other_pass_takes_64_rows() {
    for pass in [Pass::Forward, Pass::Dq, Pass::Fused] {
        let ask = Ask {
            pass,
            ..Ask::new(FloatKind::F16, 128)
        };
        let mut plan = ask.plan(&HOPPER).expect("a plan");
        plan.tile.block_m = 64;
        let error = plan.check(&HOPPER).unwrap_err().to_string();
        assert!(error.contains("block_m"), "{error}");
    }
}

/// Both sums take their left operands from registers: of the products with operands in shared memory
/// alone there are those of the scores and of the values, one for each 16 columns.
#[rstest]
fn left_operands_of_the_sums_stay_in_registers(
    #[values((FloatKind::F16, "f16"), (FloatKind::Bf16, "bf16"))] dtype: (FloatKind, &str),
    #[values((192, 192), (256, 256), (192, 128))] sizes: (usize, usize),
) {
    let ask = Ask {
        dtype: dtype.0,
        causality: KernelCausality::Full,
        ..ask(sizes.0, sizes.1)
    };
    let plan = ask.plan(&HOPPER).expect("a plan");
    let text = codegen::kernel(Target::Cuda, &plan, ask.dtype)
        .expect("it compiles")
        .text;
    let count = |cols: usize, tail: &str| {
        let name = format!(
            "wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{0}.{0} ",
            dtype.1
        );
        text.split(&name)
            .skip(1)
            .filter(|rest| rest.split(';').next().is_some_and(|it| it.ends_with(tail)))
            .count()
    };
    // The first product of each warpgroup, a masked step and one that is not.
    let both = (plan.tile.head_pad + plan.tile.val_pad) / 16;
    assert_eq!(count(plan.tile.block_n, ", 0"), 3 * both);
    let sum = 2 * plan.tile.block_n / 16;
    let equal = sizes.0 == sizes.1;
    assert_eq!(
        count(sizes.0, ", 1, 1, 1, 1"),
        if equal { 2 * sum } else { sum }
    );
    assert_eq!(
        count(sizes.1, ", 1, 1, 1, 1"),
        if equal { 2 * sum } else { sum }
    );
}
