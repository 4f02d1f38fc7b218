//! The devices that code is generated for.

use std::sync::Arc;

use cubecl::{
    ir::{
        DeviceIdentity, DeviceProperties, ElemType, FloatKind as CubeFloat, HardwareProperties,
        MemoryDeviceProperties,
        features::{Features, MmaConfig},
    },
    prelude::*,
};

use super::Target;

/// A device with what the target's large devices have.
pub(super) fn properties(target: Target) -> Arc<DeviceProperties> {
    let (fingerprint, shared, vector) = match target {
        Target::Cuda => ("ptx_sm90", 232_448, VectorSize::MAX),
        Target::Wgsl | Target::Spirv => ("offline", 49_152, 4),
    };
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 32,
        max_shared_memory_size: shared,
        max_cube_count: (u32::MAX, u16::MAX as u32, u16::MAX as u32),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: vector,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: "offline".into(),
        fingerprint: fingerprint.into(),
        physical: None,
    };
    let mut features = Features::default();
    let [f16, bf16, f32] = [CubeFloat::F16, CubeFloat::BF16, CubeFloat::F32].map(ElemType::Float);
    for (element, sum) in [(f16, f32), (bf16, f32), (f16, f16)] {
        features.matmul.cmma.insert(MmaConfig {
            a_type: element,
            b_type: element,
            cd_type: sum,
            m: 16,
            n: 16,
            k: 16,
        });
    }
    Arc::new(DeviceProperties::new(
        features,
        MemoryDeviceProperties::new(u64::MAX, 256),
        hardware,
        cubecl::profile::TimingMethod::Device,
        identity,
    ))
}
