//! What the kernels compile to, for devices that are not here: text for every plan of the table,
//! accepted by who reads it next. `cargo xtask inspect` goes on to machine code.

#[path = "../inspect/plans.rs"]
pub mod plans;
#[path = "../inspect/spirv.rs"]
pub mod spirv;
#[path = "../inspect/wgsl.rs"]
mod wgsl;

use std::collections::HashSet;

use flash_kernels::{
    Causality::{self, Causal, Full},
    CopyKind, DeviceClass, FloatKind,
    FloatKind::{Bf16, F16, F32},
    Isa, Masking, Pass, Plan, UnitKind,
    codegen::{self, Source, Target},
};
use rstest::rstest;

use plans::{AMPERE, Ask, HOPPER, VULKAN, WEBGPU, WGSL, WGSL_PLANES};
use spirv::{SpirvVal, op};

/// Every plan that devices like `device`, but with less shared memory or fewer units, get.
pub fn every_plan(ask: &Ask, device: &DeviceClass) -> Vec<(DeviceClass, Plan)> {
    let mut found: Vec<(DeviceClass, Plan)> = Vec::new();
    for max_threads in [256, 128, 64, 32, 8] {
        for kilobytes in (4..=256).rev() {
            let class = DeviceClass {
                shared_bytes: kilobytes * 1024,
                max_threads,
                ..*device
            };
            if let Ok(plan) = ask.plan(&class)
                && found.iter().all(|(_, known)| *known != plan)
            {
                found.push((class, plan));
            }
        }
    }
    found
}

/// The rows of the table that `plans` are made of.
pub fn rows(plans: &[(DeviceClass, Plan)], unit: UnitKind) -> usize {
    let plans = plans.iter().filter(|(_, plan)| plan.unit == unit);
    let rows = plans.map(|(_, plan)| {
        let tile = plan.tile;
        (tile.block_m, tile.block_n, plan.threads, plan.values)
    });
    rows.collect::<HashSet<_>>().len()
}

#[track_caller]
fn generate(target: Target, ask: &Ask, plan: &Plan) -> Source {
    let source = codegen::kernel(target, plan, ask.dtype);
    source.unwrap_or_else(|error| panic!("{} {plan:?}: {error}", ask.label()))
}

#[track_caller]
fn check_wgsl(ask: &Ask, device: &DeviceClass, plan: &Plan) {
    let source = generate(Target::Wgsl, ask, plan);
    let shader = wgsl::validate(&source.text, device, plan)
        .unwrap_or_else(|error| panic!("{} {plan:?}: {error}", ask.label()));
    assert_eq!(
        shader.shared_bytes,
        plan.shared_bytes(),
        "shared bytes of {plan:?}"
    );
    assert_eq!(shader.threads, plan.threads, "threads of {plan:?}");
    assert!(
        shader.buffers <= wgsl::MOST_BUFFERS,
        "{shader:?} of {plan:?}"
    );
    assert!(shader.barriers > 0, "{shader:?} of {plan:?}");
}

/// The module of `plan` is valid and holds cooperative matrices if the unit works with them.
/// Without `spirv-val` a test fails, but on systems for which nobody packages it.
#[track_caller]
pub fn check_spirv(ask: &Ask, plan: &Plan) {
    let words = generate(Target::Spirv, ask, plan).words;
    match SpirvVal::find() {
        Ok(validator) => validator
            .validate(&words)
            .unwrap_or_else(|error| panic!("{} {plan:?}: {error}", ask.label())),
        Err(missing) if cfg!(target_os = "linux") => panic!("{missing}"),
        Err(_) => {}
    }
    assert_eq!(
        spirv::shared_bytes(&words),
        Ok(plan.shared_bytes()),
        "{plan:?}"
    );
    let products = spirv::count(&words, op::COOP_MUL_ADD);
    assert_eq!(products > 0, plan.unit == UnitKind::Cmma, "{plan:?}");
    let loads = spirv::count(&words, op::COOP_LOAD);
    assert_eq!(loads > 0, plan.unit == UnitKind::Cmma, "{plan:?}");
    assert!(spirv::count(&words, op::CONTROL_BARRIER) > 0, "{plan:?}");
}

/// The seven rows of the table for devices without PTX.
#[track_caller]
fn check_wgsl_of_every_row(ask: &Ask, device: &DeviceClass) {
    let plans = every_plan(ask, device);
    assert!(
        rows(&plans, UnitKind::Scalar) >= 7,
        "rows reached: {plans:?}"
    );
    for (class, plan) in &plans {
        check_wgsl(ask, class, plan);
    }
}

#[rstest]
fn wgsl_of_every_scalar_plan_is_valid(
    #[values(F32, F16)] dtype: FloatKind,
    #[values(Full, Causal)] causality: Causality,
    #[values(Masking::None, Masking::Dense)] masking: Masking,
) {
    let ask = Ask {
        pass: Pass::Forward,
        causality,
        masking,
        ..Ask::new(dtype, 64)
    };
    check_wgsl_of_every_row(&ask, &WGSL);
}

#[rstest]
fn wgsl_with_plane_operations_is_valid(
    #[values((F16, Full), (F32, Causal))] kind: (FloatKind, Causality),
) {
    let ask = Ask {
        pass: Pass::Forward,
        causality: kind.1,
        ..Ask::new(kind.0, 64)
    };
    check_wgsl_of_every_row(&ask, &WGSL_PLANES);
}

#[rstest]
#[case::one(1, 1, 0.125)]
#[case::odd(59, 59, 0.125)]
#[case::values_shorter(80, 24, 0.125)]
#[case::values_longer(16, 100, 0.125)]
#[case::large(256, 256, 0.125)]
#[case::negative_scale(64, 64, -0.5)]
fn wgsl_of_any_head_size_is_valid(
    #[case] head_dim: usize,
    #[case] val_dim: usize,
    #[case] scale: f32,
    #[values(WEBGPU, WGSL, WGSL_PLANES)] device: DeviceClass,
) {
    let ask = Ask {
        pass: Pass::Forward,
        val_dim,
        scale,
        causality: Causal,
        ..Ask::new(F32, head_dim)
    };
    let plan = ask.plan(&device).expect("a plan for every WebGPU device");
    check_wgsl(&ask, &device, &plan);
}

#[test]
fn wgsl_has_no_bf16() {
    let refusal = Ask::new(Bf16, 64).plan(&WGSL_PLANES).unwrap_err();
    assert!(refusal.to_string().contains("Bf16"), "{refusal}");
}

#[rstest]
#[case::f16(F16, WGSL, WEBGPU)]
#[case::plane_operations(F32, WGSL_PLANES, WGSL)]
fn wgsl_that_a_device_cannot_take_is_refused(
    #[case] dtype: FloatKind,
    #[case] device: DeviceClass,
    #[case] lesser: DeviceClass,
) {
    let ask = Ask::new(dtype, 64);
    let plan = ask.plan(&device).expect("a plan");
    let text = generate(Target::Wgsl, &ask, &plan).text;
    assert!(wgsl::validate(&text, &lesser, &plan).is_err());
    let broken = text.replace("workgroupBarrier();", "workgroupBarrier(1);");
    assert!(wgsl::validate(&broken, &device, &plan).is_err());
}

#[rstest]
fn spirv_of_every_plan_is_valid(
    #[values((F32, 64), (F16, 64), (F16, 128), (F16, 256), (Bf16, 64))] kind: (FloatKind, usize),
    #[values((Full, Masking::None), (Causal, Masking::Dense))] mask: (Causality, Masking),
) {
    let ask = Ask {
        pass: Pass::Forward,
        causality: mask.0,
        masking: mask.1,
        ..Ask::new(kind.0, kind.1)
    };
    let plans = every_plan(&ask, &VULKAN);
    let cmma_rows = match kind {
        (F16, 256) => 3,
        (F16 | Bf16, _) => 5,
        _ => 0,
    };
    assert_eq!(rows(&plans, UnitKind::Cmma), cmma_rows, "{plans:?}");
    for (_, plan) in &plans {
        check_spirv(&ask, plan);
    }
}

#[rstest]
fn spirv_with_planes_of_other_sizes_is_valid(
    #[values(8, 16, 64)] plane: usize,
    #[values(64)] head_dim: usize,
    #[values(Pass::Forward, Pass::Dq, Pass::Dkv)] pass: Pass,
) {
    let device = DeviceClass {
        plane_size: Some(plane),
        ..VULKAN
    };
    let ask = Ask {
        pass,
        ..Ask::new(F16, head_dim)
    };
    let plan = ask.plan(&device).expect("a plan");
    if plan.unit == UnitKind::Cmma {
        assert_eq!(plan.threads, plan.tile.block_m / plan.rows * plane);
        assert!(plane <= 2 * plan.rows, "{plan:?}");
    } else {
        // The backward passes keep two operands: 32 rows of each are too much for a plane.
        assert!(plane == 64 && pass != Pass::Forward, "{plan:?}");
    }
    check_spirv(&ask, &plan);
}

#[rstest]
fn spirv_of_f16_without_cooperative_matrices_is_valid(
    #[values(59, 64)] head_dim: usize,
    #[values(Full, Causal)] causality: Causality,
) {
    let device = DeviceClass {
        cmma_f16: false,
        ..VULKAN
    };
    let ask = Ask {
        pass: Pass::Forward,
        causality,
        ..Ask::new(F16, head_dim)
    };
    let plan = ask.plan(&device).expect("a Scalar plan");
    assert_eq!(plan.unit, UnitKind::Scalar);
    check_spirv(&ask, &plan);
}

/// Exponentials are `ex2.approx`; nothing calls the library's, which is slow and takes registers.
#[track_caller]
fn check_exponentials(text: &str) {
    assert!(text.contains("ex2.approx.ftz.f32"));
    for call in ["exp(", "expf(", "exp2(", "exp2f("] {
        assert!(!text.contains(call), "a call of {call}..)");
    }
}

#[rstest]
fn cuda_of_every_mma_plan_has_its_instructions(
    #[values((F16, "f16"), (Bf16, "bf16"))] dtype: (FloatKind, &str),
    #[values(59, 64, 128, 256)] head_dim: usize,
    #[values((Full, Masking::None), (Causal, Masking::Dense))] mask: (Causality, Masking),
) {
    let ask = Ask {
        pass: Pass::Forward,
        causality: mask.0,
        masking: mask.1,
        ..Ask::new(dtype.0, head_dim)
    };
    // The two differ where shared memory is scarce.
    let without = DeviceClass {
        wgmma: false,
        ..HOPPER
    };
    let plans = [without, AMPERE].map(|device| ask.plan(&device).expect("a plan"));
    for plan in HashSet::from(plans) {
        assert_eq!(plan.unit, UnitKind::Mma);
        let text = generate(Target::Cuda, &ask, &plan).text;
        let instructions = [
            &format!(
                "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 ",
                dtype.1
            ),
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
        ];
        for instruction in instructions {
            assert!(text.contains(instruction), "no {instruction} in {plan:?}");
        }
        let copies = text.contains("cp.async.cg.shared.global");
        assert_eq!(copies, plan.copy == CopyKind::Async, "{plan:?}");
        assert_eq!(copies, head_dim.is_multiple_of(8), "{plan:?}");
        check_exponentials(&text);
    }
}

#[rstest]
fn cuda_of_every_wgmma_plan_has_its_instructions(
    #[values((F16, "f16"), (Bf16, "bf16"))] dtype: (FloatKind, &str),
    #[values(40, 64, 128, 192, 256)] head_dim: usize,
    #[values((Full, Masking::None), (Causal, Masking::Dense))] mask: (Causality, Masking),
    #[values(1024, 16_384)] seqlen: usize,
) {
    let ask = Ask {
        causality: mask.0,
        masking: mask.1,
        seqlen,
        ..Ask::new(dtype.0, head_dim)
    };
    let plan = ask.plan(&HOPPER).expect("a plan");
    assert_eq!((plan.unit, plan.copy), (UnitKind::Wgmma, CopyKind::Boxes));
    let text = generate(Target::Cuda, &ask, &plan).text;
    let tile = plan.tile;
    let instructions = [
        format!(
            "wgmma.mma_async.sync.aligned.m64n{}k16.f32.{1}.{1} ",
            tile.block_n, dtype.1
        ),
        format!(
            "wgmma.mma_async.sync.aligned.m64n{}k16.f32.{1}.{1} ",
            tile.val_pad, dtype.1
        ),
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile".to_owned(),
        "setmaxnreg.inc.sync.aligned.u32".to_owned(),
        "attribute__((launch_bounds(n, 1)))".to_owned(),
    ];
    for instruction in instructions {
        assert!(text.contains(&instruction), "no {instruction} in {plan:?}");
    }
    check_exponentials(&text);
}

/// Rows of an odd number of elements, tensors without a key, f32 and other devices.
#[test]
fn what_warpgroups_cannot_take_goes_to_other_units() {
    let unit = |ask: Ask, device: &DeviceClass| ask.plan(device).expect("a plan").unit;
    assert_eq!(unit(Ask::new(F16, 64), &HOPPER), UnitKind::Wgmma);
    assert_eq!(unit(Ask::new(F16, 59), &HOPPER), UnitKind::Mma);
    assert_eq!(unit(Ask::new(F16, 64), &AMPERE), UnitKind::Mma);
    assert_eq!(unit(Ask::new(F32, 64), &HOPPER), UnitKind::Scalar);
    let empty = Ask {
        seqlen: 0,
        ..Ask::new(F16, 64)
    };
    assert_eq!(unit(empty, &HOPPER), UnitKind::Mma);
}

#[rstest]
fn cuda_of_every_scalar_plan_has_its_instructions(
    #[values(59, 64, 128, 256)] head_dim: usize,
    #[values(Full, Causal)] causality: Causality,
) {
    let ask = Ask {
        pass: Pass::Forward,
        causality,
        ..Ask::new(F32, head_dim)
    };
    for (class, plan) in every_plan(&ask, &HOPPER) {
        assert_eq!(
            (plan.unit, plan.isa),
            (UnitKind::Scalar, Isa::Ptx),
            "{class:?}"
        );
        let text = generate(Target::Cuda, &ask, &plan).text;
        let copies = text.contains("cp.async.cg.shared.global");
        assert_eq!(copies, plan.copy == CopyKind::Async, "{plan:?}");
        check_exponentials(&text);
    }
}

#[rstest]
fn delta_compiles(
    #[values(F32, F16, Bf16)] dtype: FloatKind,
    #[values(1, 4, 8)] width: usize,
    #[values(1, 16)] lanes: usize,
) {
    let source = |target, isa| {
        let source = codegen::delta(target, isa, dtype, width, lanes);
        source.unwrap_or_else(|error| panic!("{target:?} {dtype:?} {width}: {error}"))
    };
    let cuda = source(Target::Cuda, Isa::Ptx);
    let shuffles = cuda.text.matches("__shfl_xor_sync").count();
    assert_eq!(shuffles, lanes.trailing_zeros() as usize, "{}", cuda.text);
    let words = source(Target::Spirv, Isa::Portable).words;
    match SpirvVal::find() {
        Ok(validator) => validator
            .validate(&words)
            .unwrap_or_else(|error| panic!("{dtype:?} {width}: {error}")),
        Err(missing) if cfg!(target_os = "linux") => panic!("{missing}"),
        Err(_) => {}
    }
}
