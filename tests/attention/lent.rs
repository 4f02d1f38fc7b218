//! Shared memory that owned tiles lend to walked ones: which plans may, and what it saves.

use flash_kernels::{
    DeviceClass, FloatKind, Pass, Plan,
    plan::{CopyKind, QueryOperand, ValueBuffer},
};
use rstest::rstest;

use crate::codegen::plans::{Ask, HOPPER, VULKAN};

/// Memory is lent by matrices that are in registers, to tiles of their own.
#[rstest]
#[case::reread(HOPPER, Pass::Dq, |plan: &mut Plan| plan.queries = QueryOperand::Lent)]
#[case::in_two_stages(VULKAN, Pass::Forward, |plan: &mut Plan| plan.copy = CopyKind::Async)]
#[case::in_one_buffer(VULKAN, Pass::Dkv, |plan: &mut Plan| plan.values = ValueBuffer::OfKeys)]
fn what_cannot_be_lent_is_refused_by_name(
    #[case] device: DeviceClass,
    #[case] pass: Pass,
    #[case] change: fn(&mut Plan),
) {
    let ask = Ask {
        pass,
        ..Ask::new(FloatKind::F16, 128)
    };
    // Roomy, so that nothing else is refused.
    let device = DeviceClass {
        shared_bytes: 1 << 20,
        wgmma: false,
        ..device
    };
    let mut plan = ask.plan(&device).expect("a plan");
    assert_eq!(plan.check(&device), Ok(()));
    change(&mut plan);
    let refusal = plan.check(&device).expect_err("it cannot").to_string();
    assert!(refusal.contains("query operand is Lent"), "{refusal}");
}

/// Lent memory counts once: for the larger of the operands that come by it, or for both walked tiles.
#[rstest]
#[case::only_q(Pass::Forward, 64, 128, 32 * (72 + 136))]
#[case::only_q_but_wide(Pass::Forward, 128, 64, 64 * 136)]
#[case::values_are_wider(Pass::Dq, 64, 128, 64 * 136)]
#[case::keys_are_wider(Pass::Dkv, 128, 64, 64 * 136)]
#[case::as_wide(Pass::Dkv, 128, 128, 64 * 136)]
fn lent_memory_is_no_more_than_the_larger_of_two(
    #[case] pass: Pass,
    #[case] head_dim: usize,
    #[case] val_dim: usize,
    #[case] place: usize,
) {
    let ask = Ask {
        pass,
        val_dim,
        ..Ask::new(FloatKind::F16, head_dim)
    };
    let lent = ask.plan(&VULKAN).expect("a plan");
    assert_eq!((lent.queries, lent.tile.block_m), (QueryOperand::Lent, 64));
    let besides = |plan: &Plan| 4 * plan.scratch_len() + 8 * plan.stats_len();
    assert_eq!(lent.shared_bytes(), 2 * place + besides(&lent));
    let mut wide = lent;
    wide.tile.block_n = 64;
    let walked = 64 * (head_dim + 8 + val_dim + 8);
    assert_eq!(wide.shared_bytes(), 2 * walked + besides(&wide));
}
