//! Shared memory that owned tiles lend to walked ones: which plans may, and what it saves.

use flash_kernels::{
    DeviceClass, FloatKind, Pass, Plan,
    plan::{QueryOperand, ValueBuffer},
};
use rstest::rstest;

use crate::codegen::plans::{Ask, HOPPER, VULKAN};

/// Memory is lent where the operands that came in it are in registers, and to tiles that fit.
#[rstest]
#[case::reread(HOPPER, Pass::Dq, |plan: &mut Plan| plan.queries = QueryOperand::Lent)]
#[case::one_tile(VULKAN, Pass::Forward, |plan: &mut Plan| plan.queries = QueryOperand::Lent)]
#[case::too_large(VULKAN, Pass::Dkv, |plan: &mut Plan| plan.tile.block_n = 128)]
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

/// Lent memory counts once.
#[test]
fn lent_memory_is_no_more_than_the_larger_of_two() {
    let ask = Ask {
        pass: Pass::Dq,
        ..Ask::new(FloatKind::F16, 128)
    };
    let lent = ask.plan(&VULKAN).expect("a plan");
    assert_eq!(lent.queries, QueryOperand::Lent);
    let kept = Plan {
        queries: QueryOperand::Resident,
        ..lent
    };
    // Two tiles of 32 keys, in rows of 16 bytes more.
    let walked = 2 * 32 * (128 + 8) * 2;
    assert_eq!(kept.shared_bytes() - lent.shared_bytes(), walked);
}
