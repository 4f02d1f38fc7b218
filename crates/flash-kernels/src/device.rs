//! What a device can do, in the terms in which plans ask.

use cubecl::{
    client::Client,
    features::{MmaConfig, Plane, Tma, TypeUsage},
    ir::{AddressType, DeviceProperties, ElemType, FloatKind as CubeFloat},
};

use crate::{FloatKind, Isa, plan::Rounding};

/// What a device can do, as far as the table asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceClass {
    /// Instructions beyond CubeCL's own.
    pub isa: Isa,
    /// Units of a plane, if it is fixed and has plane operations.
    pub plane_size: Option<usize>,
    /// Shared memory of a cube in bytes.
    pub shared_bytes: usize,
    /// Units of a cube.
    pub max_threads: usize,
    /// Cubes along x and y.
    pub max_cubes: (u32, u32),
    /// Widest vector in global memory.
    pub max_vector: usize,
    /// f16 can be stored and converted.
    pub f16: bool,
    /// bf16 can be stored and converted.
    pub bf16: bool,
    /// 16×16×16 cooperative matrices of f16.
    pub cmma_f16: bool,
    /// 16×16×16 cooperative matrices of bf16.
    pub cmma_bf16: bool,
    /// Warpgroup products and boxed copies of sm_90, which no other architecture has.
    pub wgmma: bool,
    /// How f32 is rounded to tf32, where products are.
    pub rounding: Rounding,
    /// Cubes that can run at the same time if each fills a processor; 1 where it is not known.
    pub processors: usize,
    /// Buffers of more than 2^32 elements can be addressed.
    pub wide_addresses: bool,
}

impl DeviceClass {
    /// The class of the device behind `client`.
    pub fn of(client: &Client) -> Self {
        Self::from_properties(client.properties())
    }

    /// The class of a device with these properties.
    pub fn from_properties(device: &DeviceProperties) -> Self {
        let hardware = &device.hardware;
        let plane = &device.features.plane;
        let fixed = hardware.plane_size_min == hardware.plane_size_max;
        let [f16, bf16, f32] =
            [CubeFloat::F16, CubeFloat::BF16, CubeFloat::F32].map(ElemType::Float);
        let isa = isa(device);
        Self {
            isa,
            // CubeCL reports `Plane::Sync` where a plane can synchronise by itself; CUDA always
            // can.
            plane_size: (fixed && plane.contains(Plane::Ops))
                .then_some(hardware.plane_size_max as usize),
            shared_bytes: hardware.max_shared_memory_size,
            max_threads: hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize,
            max_cubes: (hardware.max_cube_count.0, hardware.max_cube_count.1),
            max_vector: hardware.max_vector_size.min(8),
            f16: storable(device, f16),
            bf16: storable(device, bf16),
            cmma_f16: plane.contains(Plane::Sync) && has_cmma(device, f16, f32),
            cmma_bf16: plane.contains(Plane::Sync) && has_cmma(device, bf16, f32),
            wgmma: isa == Isa::Ptx
                && sm(device) == Some(90)
                && device.features.tma.contains(Tma::Base),
            rounding: match sm(device) {
                Some(90..) => Rounding::Even,
                _ => Rounding::Away,
            },
            processors: hardware.num_streaming_multiprocessors.unwrap_or(1) as usize,
            wide_addresses: device.supports_address(AddressType::U64),
        }
    }

    pub(crate) fn cmma(&self, dtype: FloatKind) -> bool {
        match dtype {
            FloatKind::F32 => false,
            FloatKind::F16 => self.cmma_f16,
            FloatKind::Bf16 => self.cmma_bf16,
        }
    }

    pub(crate) fn stores(&self, dtype: FloatKind) -> bool {
        match dtype {
            FloatKind::F32 => true,
            FloatKind::F16 => self.f16,
            FloatKind::Bf16 => self.bf16,
        }
    }
}

/// PTX of sm_80 or later. The LLVM compiler reports the same fingerprint but has no inline
/// assembly; it also clears `copy_async`, which tells the two apart.
fn isa(device: &DeviceProperties) -> Isa {
    match sm(device) {
        Some(sm) if sm >= 80 && device.features.copy_async => Isa::Ptx,
        _ if has_matrix_functions(device) => Isa::Mapped,
        _ => Isa::Portable,
    }
}

/// VK_NV_cooperative_matrix2, and sums of f16, by which products are rounded.
///
/// CubeCL reports matrices of a whole cube where it has found that extension. It does not tell whether
/// functions of elements and changes of a matrix's use came with them; one driver of NVIDIA's was seen to have all.
fn has_matrix_functions(device: &DeviceProperties) -> bool {
    let f16 = ElemType::Float(CubeFloat::F16);
    has_cmma(device, f16, f16) && !device.features.matmul.cube_mma.is_empty()
}

/// The architecture's number, as in `sm_90`, of a CUDA device.
fn sm(device: &DeviceProperties) -> Option<u32> {
    let sm = device.identity.fingerprint.strip_prefix("ptx_sm")?;
    sm.trim_end_matches(|c: char| !c.is_ascii_digit())
        .parse()
        .ok()
}

fn storable(device: &DeviceProperties, element: ElemType) -> bool {
    let usage = device.type_usage(element);
    usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
}

fn has_cmma(device: &DeviceProperties, element: ElemType, sum: ElemType) -> bool {
    // The unit loads matrices of elements from memory that is declared as words, which SPIR-V
    // allows and C++ does not.
    let spirv = device.identity.fingerprint.starts_with("spirv");
    let config = MmaConfig {
        a_type: element,
        b_type: element,
        cd_type: sum,
        m: 16,
        n: 16,
        k: 16,
    };
    spirv && device.features.matmul.cmma.contains(&config)
}
