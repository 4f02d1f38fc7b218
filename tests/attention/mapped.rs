//! Gradients by functions of matrices' elements: which plans may have them, and what they compile to.

use flash_kernels::{
    AttentionError, Causality, DeviceClass, FloatKind, Isa, Masking, Pass, Plan, UnitKind,
    codegen::{self, Target},
};
use rstest::rstest;

use crate::codegen::{
    check_spirv,
    plans::{Ask, VULKAN, VULKAN_MAPPED},
    spirv::{count, op},
};

fn ask(pass: Pass, dtype: FloatKind, head_dim: usize) -> Ask {
    Ask {
        pass,
        ..Ask::new(dtype, head_dim)
    }
}

/// Valid SPIR-V with fewer trips through shared memory, for every size, edge and causality.
#[rstest]
fn its_spirv_is_valid_and_applies_functions(
    #[values(Pass::Dq, Pass::Dkv)] pass: Pass,
    #[values(40, 59, 64, 72, 128)] head_dim: usize,
    #[values(Causality::Full, Causality::Causal)] causality: Causality,
) {
    let ask = Ask {
        causality,
        ..ask(pass, FloatKind::F16, head_dim)
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
    for changed in [
        Plan {
            masking: Masking::Dense,
            ..plan
        },
        Plan {
            pass: Pass::Forward,
            ..plan
        },
    ] {
        let refused = refusal(&changed, &VULKAN_MAPPED);
        let named = format!(
            "Mapped for {:?}, masking {:?}",
            changed.pass, changed.masking
        );
        assert!(refused.contains(&named), "{refused}");
    }
}
