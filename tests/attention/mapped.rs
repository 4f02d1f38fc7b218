//! Gradients by functions of matrices' elements: which plans may have them, and what they compile to.

use flash_kernels::{
    AttentionError, Causality, DeviceClass, FloatKind, Isa, Masking, Pass, Plan, UnitKind,
    codegen::{self, Target},
};
use rstest::rstest;

use crate::{
    codegen::{
        check_spirv, every_plan,
        plans::{Ask, VULKAN, VULKAN_MAPPED},
        rows,
        spirv::{count, op},
    },
    runtime,
};

/// `OpCooperativeMatrixStoreKHR`.
const COOP_STORE: u16 = 4458;

fn ask(pass: Pass, dtype: FloatKind, head_dim: usize) -> Ask {
    Ask {
        pass,
        ..Ask::new(dtype, head_dim)
    }
}

/// Valid SPIR-V that applies functions and shows fewer matrices, for every size, edge and causality.
#[rstest]
fn its_spirv_is_valid_and_applies_functions(
    #[values(Pass::Dq, Pass::Dkv)] pass: Pass,
    #[values((40, 40), (59, 59), (64, 64), (72, 128), (128, 72), (128, 128))] dims: (usize, usize),
    #[values(Causality::Full, Causality::Causal)] causality: Causality,
) {
    let ask = Ask {
        causality,
        val_dim: dims.1,
        ..ask(pass, FloatKind::F16, dims.0)
    };
    let mapped = ask.plan(&VULKAN_MAPPED).expect("a plan");
    assert!(mapped.is_mapped(), "{mapped:?}");
    check_spirv(&ask, &mapped);
    let portable = ask.plan(&VULKAN).expect("a plan");
    assert!(!portable.is_mapped(), "{portable:?}");
    let words = |plan: &Plan| {
        let source = codegen::kernel(Target::Spirv, plan, ask.dtype);
        source.expect("a module").words
    };
    let (with, without) = (words(&mapped), words(&portable));
    assert_eq!(count(&without, op::COOP_PER_ELEMENT), 0);
    assert!(count(&with, op::COOP_PER_ELEMENT) > 0);
    // A matrix is stored only on its way out: 16 columns of a plane's 16 rows each.
    let leaving = match pass {
        Pass::Dq => mapped.tile.head_pad / 16,
        _ => (mapped.tile.head_pad + mapped.tile.val_pad) / 16,
    };
    assert_eq!(count(&with, COOP_STORE), leaving);
    assert!(count(&without, COOP_STORE) > leaving);
}

/// What functions cannot do is done as everywhere else: read a bool mask, round to bf16, find a row's
/// maximum.
#[rstest]
#[case::bool_mask(Ask { masking: Masking::Dense, ..ask(Pass::Dq, FloatKind::F16, 64) })]
#[case::bf16(ask(Pass::Dkv, FloatKind::Bf16, 128))]
#[case::forward(ask(Pass::Forward, FloatKind::F16, 128))]
#[case::wide(ask(Pass::Dkv, FloatKind::F16, 256))]
fn the_rest_is_portable(#[case] ask: Ask) {
    let plan = ask.plan(&VULKAN_MAPPED).expect("a plan");
    assert_eq!((plan.unit, plan.isa), (UnitKind::Cmma, Isa::Portable));
    assert_eq!(ask.plan(&VULKAN), Ok(plan));
}

fn refusal(plan: &Plan, device: &DeviceClass) -> String {
    let error: AttentionError = plan.check(device).expect_err("it cannot");
    error.to_string()
}

#[test]
fn a_plan_for_what_is_not_there_is_refused_by_name() {
    let plan = ask(Pass::Dq, FloatKind::F16, 64).plan(&VULKAN_MAPPED);
    let plan = plan.expect("a plan");
    assert_eq!(plan.check(&VULKAN_MAPPED), Ok(()));
    let refused = refusal(&plan, &VULKAN);
    assert!(refused.contains("VK_NV_cooperative_matrix2"), "{refused}");
    let (pass, masking) = (Pass::Forward, Masking::Dense);
    for changed in [Plan { pass, ..plan }, Plan { masking, ..plan }] {
        let refused = refusal(&changed, &VULKAN_MAPPED);
        let named = format!(
            "Mapped for {:?}, masking {:?}",
            changed.pass, changed.masking
        );
        assert!(refused.contains(&named), "{refused}");
    }
}

#[test]
fn sums_are_not_rounded_to_bf16() {
    let plan = ask(Pass::Dq, FloatKind::F16, 64).plan(&VULKAN_MAPPED);
    let plan = plan.expect("a plan");
    let refused = codegen::kernel(Target::Spirv, &plan, FloatKind::Bf16);
    assert!(refused.expect_err("it cannot").contains("bf16"));
}

/// Where a device has functions of elements, gradients in f16 are by them.
#[test]
fn a_device_that_has_functions_uses_them() {
    let Some(client) = runtime::client() else {
        return;
    };
    let device = DeviceClass::of(&client);
    let plan = ask(Pass::Dkv, FloatKind::F16, 64).plan(&device);
    let is_mapped = plan.is_ok_and(|plan| plan.is_mapped());
    let has = !client.properties().features.matmul.cube_mma.is_empty()
        && client
            .properties()
            .identity
            .fingerprint
            .starts_with("spirv");
    assert_eq!(is_mapped, has, "{device:?}");
}

/// Also by the rows for devices with less shared memory.
#[rstest]
fn spirv_of_every_gradient_plan_is_valid(
    #[values(Pass::Dq, Pass::Dkv)] pass: Pass,
    #[values((64, 64), (128, 128), (64, 128), (256, 256))] dims: (usize, usize),
    #[values((FloatKind::F16, VULKAN), (FloatKind::F16, VULKAN_MAPPED), (FloatKind::Bf16, VULKAN))]
    kind: (FloatKind, DeviceClass),
) {
    let ask = Ask {
        pass,
        val_dim: dims.1,
        causality: Causality::Causal,
        ..Ask::new(kind.0, dims.0)
    };
    let plans = every_plan(&ask, &kind.1);
    assert!(rows(&plans, UnitKind::Cmma) > 0, "{plans:?}");
    for (_, plan) in &plans {
        check_spirv(&ask, plan);
    }
}
