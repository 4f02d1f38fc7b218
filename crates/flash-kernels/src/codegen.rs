//! Offline code generation: the text of a plan's kernel for any target, without a device.
//!
//! What the runtimes do at launch, minus the launch: used to count registers, spills and
//! instructions, and to validate WGSL and SPIR-V on a machine without a GPU.

// A scalar's compilation argument is the unit value, and CubeCL's constructors take it as one.
#![allow(clippy::unit_arg)]

use std::sync::Arc;

use cubecl::{
    Compiler, VulkanCompilationOptions, WgpuCompilationOptions,
    frontend::TensorMetaCompilationArg,
    ir::{ElemType, UIntKind},
    prelude::*,
};
use cubecl_cpp::{
    shared::{CompilationOptions, CppCompiler},
    target::Cuda,
};
use half::{bf16, f16};

use crate::{
    FloatKind, Isa, Masking, Pass, Plan, UnitKind,
    kernel::{
        backward::{delta, dkv, dkv_mapped, dq, dq_mapped},
        combine, forward,
        unit::{Cmma, HalfFloat, MappedUnit, MatrixUnit, Mma, Scalar, Tf32},
    },
};

mod overlapped;
mod properties;

use properties::properties;

/// A compiler and what it is told of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// CUDA C++ for NVRTC.
    Cuda,
    /// WGSL.
    Wgsl,
    /// SPIR-V for Vulkan.
    Spirv,
}

/// A generated kernel.
#[derive(Clone, Debug)]
pub struct Source {
    /// CUDA C++, WGSL, or the disassembly of SPIR-V.
    pub text: String,
    /// SPIR-V words; empty for the other targets.
    pub words: Vec<u32>,
}

/// Generates the kernel of `plan` for tensors of `dtype`.
///
/// # Errors
///
/// The compiler's message, or that the plan's unit cannot multiply `dtype`.
pub fn kernel(target: Target, plan: &Plan, dtype: FloatKind) -> Result<Source, String> {
    match (plan.unit, dtype) {
        (UnitKind::Scalar, FloatKind::F32) => generate::<Scalar, f32, f32>(target, plan),
        (UnitKind::Scalar, FloatKind::F16) => generate::<Scalar, f16, f16>(target, plan),
        (UnitKind::Scalar, FloatKind::Bf16) => generate::<Scalar, bf16, bf16>(target, plan),
        (UnitKind::Cmma, FloatKind::F16) => cmma::<f16>(target, plan),
        (UnitKind::Cmma, FloatKind::Bf16) if plan.is_mapped() => {
            Err("functions of elements do not round to bf16".to_owned())
        }
        (UnitKind::Cmma, FloatKind::Bf16) => cmma::<bf16>(target, plan),
        (UnitKind::Mma, FloatKind::F16) => generate::<Mma<f16>, f16, f16>(target, plan),
        (UnitKind::Mma, FloatKind::Bf16) => generate::<Mma<bf16>, bf16, bf16>(target, plan),
        (UnitKind::Mma, FloatKind::F32) => generate::<Mma<Tf32>, f32, f32>(target, plan),
        (UnitKind::Wgmma, FloatKind::F16) => overlapped::generate::<f16>(target, plan),
        (UnitKind::Wgmma, FloatKind::Bf16) => overlapped::generate::<bf16>(target, plan),
        (unit, FloatKind::F32) => Err(format!("{unit:?} does not multiply f32")),
    }
}

/// Generates the kernel that reduces dO∘O, for tensors of `dtype` read in vectors of `width` by `lanes`
/// units to a row.
///
/// # Errors
///
/// The compiler's message.
pub fn delta(
    target: Target,
    isa: Isa,
    dtype: FloatKind,
    width: usize,
    lanes: usize,
) -> Result<Source, String> {
    match dtype {
        FloatKind::F32 => delta_of::<f32>(target, isa, width, lanes),
        FloatKind::F16 => delta_of::<f16>(target, isa, width, lanes),
        FloatKind::Bf16 => delta_of::<bf16>(target, isa, width, lanes),
    }
}

fn delta_of<E: Float>(
    target: Target,
    isa: Isa,
    width: usize,
    lanes: usize,
) -> Result<Source, String> {
    let kernel = delta::delta::Delta::<E>::new(
        settings(delta::THREADS),
        properties(target),
        Arc::new(TargetProperties::default()),
        tensor(),
        tensor(),
        buffer(),
        buffer(),
        Default::default(),
        width,
        isa,
        lanes,
    );
    compile(target, kernel.define())
}

/// Generates the kernel that makes dq of the sums of `plan`, which is of [`Pass::Fused`], for tensors of
/// f16.
///
/// # Errors
///
/// The compiler's message.
pub fn convert(target: Target, plan: &Plan) -> Result<Source, String> {
    overlapped::convert::<f16>(target, plan)
}

/// Generates the kernel that merges the parts of a split, for an output of `dtype` written in vectors
/// of `width`.
///
/// # Errors
///
/// The compiler's message.
pub fn combine(target: Target, isa: Isa, dtype: FloatKind, width: usize) -> Result<Source, String> {
    match dtype {
        FloatKind::F32 => combine_into::<f32>(target, isa, width),
        FloatKind::F16 => combine_into::<f16>(target, isa, width),
        FloatKind::Bf16 => combine_into::<bf16>(target, isa, width),
    }
}

fn combine_into<E: Float>(target: Target, isa: Isa, width: usize) -> Result<Source, String> {
    let kernel = combine::combine::Combine::<E>::new(
        settings(combine::THREADS),
        properties(target),
        Arc::new(TargetProperties::default()),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        width,
        isa,
    );
    compile(target, kernel.define())
}

fn settings(threads: usize) -> KernelSettings {
    KernelSettings::new(
        *CubeDim::new_1d(threads as u32),
        ExecutionMode::Unchecked,
        AddressType::U32,
    )
}

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

fn tensor() -> TensorCompilationArg {
    TensorCompilationArg {
        meta: TensorMetaCompilationArg {
            len: Default::default(),
            rank: Default::default(),
        },
        buffer: buffer(),
    }
}

fn cmma<E: HalfFloat>(target: Target, plan: &Plan) -> Result<Source, String> {
    if plan.is_mapped() {
        return match plan.loads_words() {
            true => mapped::<Cmma<E>, u32, E>(target, plan),
            false => mapped::<Cmma<E>, E, E>(target, plan),
        };
    }
    if plan.loads_words() {
        generate::<Cmma<E>, u32, E>(target, plan)
    } else {
        generate::<Cmma<E>, E, E>(target, plan)
    }
}

/// A kernel of dq for `$plan`: all take the same arguments.
macro_rules! dq_kernel {
    ($kernel:ty, $target:expr, $plan:expr) => {
        <$kernel>::new(
            settings($plan.threads),
            properties($target),
            Arc::new(TargetProperties::default()),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            buffer(),
            mask($plan),
            tensor(),
            Default::default(),
            Default::default(),
            Default::default(),
            $plan.load_components(),
            $plan.store_width,
            *$plan,
            ElemType::UInt(UIntKind::U32),
        )
        .define()
    };
}

/// A kernel of dk and dv for `$plan`: all take the same arguments.
macro_rules! dkv_kernel {
    ($kernel:ty, $target:expr, $plan:expr) => {
        <$kernel>::new(
            settings($plan.threads),
            properties($target),
            Arc::new(TargetProperties::default()),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            buffer(),
            mask($plan),
            buffer(),
            Default::default(),
            Default::default(),
            Default::default(),
            Default::default(),
            $plan.load_components(),
            $plan.store_width,
            *$plan,
            ElemType::UInt(UIntKind::U32),
        )
        .define()
    };
}

fn generate<U: MatrixUnit, L: Numeric, E: Float>(
    target: Target,
    plan: &Plan,
) -> Result<Source, String> {
    let kernel = match plan.pass {
        Pass::Forward => forward::forward::Forward::<U, L, E>::new(
            settings(plan.threads),
            properties(target),
            Arc::new(TargetProperties::default()),
            tensor(),
            tensor(),
            tensor(),
            mask(plan),
            tensor(),
            buffer(),
            Default::default(),
            Default::default(),
            Default::default(),
            plan.load_components(),
            plan.store_width,
            plan.compiled(),
            ElemType::UInt(UIntKind::U32),
        )
        .define(),
        Pass::Dq => dq_kernel!(dq::dq::Dq::<U, L, E>, target, plan),
        Pass::Dkv => dkv_kernel!(dkv::dkv::Dkv::<U, L, E>, target, plan),
        Pass::Fused => return Err(format!("{:?} has no fused gradient", plan.unit)),
    };
    compile(target, kernel)
}

/// The gradient of `plan` whose products stay where they are.
fn mapped<U: MappedUnit, L: Numeric, E: Float>(
    target: Target,
    plan: &Plan,
) -> Result<Source, String> {
    let kernel = match plan.pass {
        Pass::Dq => dq_kernel!(dq_mapped::dq_mapped::DqMapped::<U, L, E>, target, plan),
        Pass::Dkv => dkv_kernel!(dkv_mapped::dkv_mapped::DkvMapped::<U, L, E>, target, plan),
        Pass::Forward | Pass::Fused => return Err(format!("{:?} is not mapped", plan.pass)),
    };
    compile(target, kernel)
}

fn mask<M: CubePrimitive>(plan: &Plan) -> ComptimeOptionCompilationArg<OwnedTensor<M>> {
    match plan.masking {
        Masking::None => ComptimeOptionCompilationArg::None,
        Masking::Dense => ComptimeOptionCompilationArg::Some(tensor()),
    }
}

fn compile(target: Target, kernel: KernelDefinition) -> Result<Source, String> {
    match target {
        Target::Cuda => {
            let mut options = CompilationOptions::default();
            options.supports_features.grid_constants = true;
            options.supports_features.fast_tanh = true;
            let code = CppCompiler::<Cuda>::default()
                .compile(kernel, &options)
                .map_err(|e| e.to_string())?;
            Ok(Source {
                text: code.source,
                words: Vec::new(),
            })
        }
        Target::Wgsl => {
            let code = cubecl_wgpu::WgslCompiler
                .compile(kernel, &WgpuCompilationOptions::default())
                .map_err(|e| e.to_string())?;
            Ok(Source {
                text: code.to_string(),
                words: Vec::new(),
            })
        }
        Target::Spirv => {
            let options = WgpuCompilationOptions {
                supports_vulkan_compiler: true,
                vulkan: VulkanCompilationOptions {
                    max_spirv_version: (1, 6),
                    max_vector_size: 4,
                    push_constant_size: 128,
                    // As on every device with workgroupMemoryExplicitLayout; without it CubeCL
                    // 0.11.3 declares shared memory in a way that SPIR-V does not allow.
                    supports_explicit_smem: true,
                    ..Default::default()
                },
                ..Default::default()
            };
            let code = cubecl_spirv::SpirvCompiler
                .compile(kernel, &options)
                .map_err(|e| e.to_string())?;
            Ok(Source {
                text: code.to_string(),
                words: code.assembled_module.clone(),
            })
        }
    }
}
