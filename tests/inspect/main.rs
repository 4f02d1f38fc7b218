//! x
use flash_kernels::{codegen::*, select::*, *};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let n = |i: usize| a[i].parse::<usize>().unwrap();
    let (target, dev) = match a[1].as_str() {
        "cuda" => (
            Target::Cuda,
            DeviceClass {
                isa: Isa::Ptx,
                plane_size: Some(32),
                shared_bytes: 232448,
                max_threads: 1024,
                max_cubes: (1 << 31 - 1, 65535),
                max_vector: 8,
                f16: true,
                bf16: true,
                cmma_f16: true,
                cmma_bf16: true,
                wide_addresses: true,
            },
        ),
        "spirv" => (
            Target::Spirv,
            DeviceClass {
                isa: Isa::Portable,
                plane_size: Some(32),
                shared_bytes: 49152,
                max_threads: 1024,
                max_cubes: (65535, 65535),
                max_vector: 4,
                f16: true,
                bf16: true,
                cmma_f16: true,
                cmma_bf16: false,
                wide_addresses: true,
            },
        ),
        _ => (
            Target::Wgsl,
            DeviceClass {
                isa: Isa::Portable,
                plane_size: None,
                shared_bytes: 32768,
                max_threads: 1024,
                max_cubes: (65535, 65535),
                max_vector: 4,
                f16: true,
                bf16: false,
                cmma_f16: false,
                cmma_bf16: false,
                wide_addresses: false,
            },
        ),
    };
    let dt = match a[2].as_str() {
        "f32" => FloatKind::F32,
        "f16" => FloatKind::F16,
        _ => FloatKind::Bf16,
    };
    let p = AttentionProblem {
        shape: AttentionShape::new([1, 1, 128, n(3)], [1, 1, 128, n(3)], [1, 1, 128, n(3)])
            .unwrap(),
        dtype: dt,
        causality: if a[4] == "1" {
            Causality::Causal
        } else {
            Causality::Full
        },
        masking: if a[5] == "1" {
            Masking::Dense
        } else {
            Masking::None
        },
        scale: 0.1,
    };
    let pass = match a.get(6).map(|s| s.as_str()) {
        Some("dq") => Pass::Dq,
        Some("dkv") => Pass::Dkv,
        _ => Pass::Forward,
    };
    let plan = select(&dev, &p, pass, Alignment(8)).unwrap();
    eprintln!("{plan:?} shared {}", plan.shared_bytes());
    match codegen::kernel(target, &plan, dt) {
        Ok(s) => println!("{}", s.text),
        Err(e) => eprintln!("ERR {e}"),
    }
}
