//! The device that examples, tests and benchmarks run on. Included by `#[path]`, so that
//! `FLASH_RUNTIME` means the same everywhere.

use burn::tensor::{Device, DeviceKind};

/// A device and the name of the runtime behind it.
pub struct Chosen {
    /// `wgpu`, `vulkan`, `cuda` or `flex`.
    pub runtime: &'static str,
    /// The runtime's default device.
    pub device: Device,
}

/// The runtimes compiled into this binary, the default first. `flex` is Burn's CPU backend, which
/// has no fused kernel: attention takes the composed path there.
pub fn runtimes() -> Vec<&'static str> {
    let mut names = Vec::new();
    if cfg!(feature = "vulkan") {
        names.push("vulkan");
    } else if cfg!(feature = "wgpu") {
        names.push("wgpu");
    }
    if cfg!(feature = "cuda") {
        names.push("cuda");
    }
    names.push("flex");
    names
}

/// The device of the runtime that the environment variable `FLASH_RUNTIME` names, or of the
/// default one if it is unset or empty.
///
/// # Errors
///
/// If the runtime is unknown or not compiled in. A binary with the feature `vulkan` refuses `wgpu`:
/// there `Device::wgpu` compiles to SPIR-V as well, and the name would claim that WGSL ran.
pub fn from_env() -> Result<Chosen, String> {
    let wanted = std::env::var("FLASH_RUNTIME").unwrap_or_default();
    let compiled = runtimes();
    let runtime = if wanted.is_empty() {
        compiled[0]
    } else {
        compiled
            .iter()
            .copied()
            .find(|name| *name == wanted)
            .ok_or_else(|| {
                let names = compiled.join(", ");
                format!("FLASH_RUNTIME={wanted}: this binary was built for {names}")
            })?
    };
    let device = match runtime {
        #[cfg(feature = "vulkan")]
        "vulkan" => Device::vulkan(DeviceKind::DefaultDevice),
        #[cfg(feature = "wgpu")]
        "wgpu" => Device::wgpu(DeviceKind::DefaultDevice),
        #[cfg(feature = "cuda")]
        "cuda" => Device::cuda(0),
        _ => Device::flex(),
    };
    Ok(Chosen { runtime, device })
}
