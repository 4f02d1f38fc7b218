//! Shared memory that owned tiles lend to walked ones: which plans may, and what it saves.

use flash_kernels::{
    DeviceClass, FloatKind, Pass, Plan,
    plan::{QueryOperand, ValueBuffer},
};
use rstest::rstest;

use crate::codegen::plans::{Ask, HOPPER, VULKAN};

/// Memory is lent by matrices that are in registers, to tiles of their own.
#[rstest]
#[case::reread(HOPPER, Pass::Dq, |plan: &mut Plan| plan.queries = QueryOperand::Lent)]
#[case::in_registers(HOPPER, Pass::Forward, |plan: &mut Plan| plan.queries = QueryOperand::Lent)]
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

/// Lent memory counts once: for the tile of an operand, or for both walked tiles.
#[rstest]
#[case(Pass::Forward, 64 * 136 * 2)]
#[case(Pass::Dq, 64 * 136 * 2)]
#[case(Pass::Dkv, 64 * 136 * 2)]
fn lent_memory_is_no_more_than_the_larger_of_two(#[case] pass: Pass, #[case] place: usize) {
    let ask = Ask {
        pass,
        ..Ask::new(FloatKind::F16, 128)
    };
    let lent = ask.plan(&VULKAN).expect("a plan");
    assert_eq!((lent.queries, lent.tile.block_m), (QueryOperand::Lent, 64));
    let visible = 4 * lent.scratch_len();
    let pairs = 8 * lent.stats_len();
    assert_eq!(lent.shared_bytes(), place + visible + pairs);
    let mut wide = lent;
    wide.tile.block_n = 64;
    let walked = 2 * 64 * 136 * 2;
    assert_eq!(
        wide.shared_bytes(),
        walked + 4 * wide.scratch_len() + 8 * wide.stats_len()
    );
}
