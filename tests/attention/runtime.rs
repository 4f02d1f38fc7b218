//! Which device the suite runs on.

use std::io::Write;
use std::sync::OnceLock;

use burn::backend::{Backend, DTypeUsage, Dispatch, DispatchDevice};
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
use burn::tensor::{DType, Device};
use cubecl::client::Client;
use flash_kernels::{DeviceClass, Isa};
use flash_reference::rounding::Dtype;

/// Chooses the runtime by its name.
const VARIABLE: &str = "FLASH_RUNTIME";

/// A way to reach a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "a binary has those that it was built with")]
pub enum Runtime {
    /// wgpu with WGSL shaders.
    Wgpu,
    /// wgpu with SPIR-V shaders.
    Vulkan,
    /// CUDA.
    Cuda,
    /// Burn's CPU backend, where attention is composed from Burn's ops.
    Flex,
}

/// What this binary can run, in the order of preference. wgpu compiles to SPIR-V as soon as Burn's
/// `vulkan` is enabled, so one binary never offers both.
const COMPILED_IN: &[Runtime] = &[
    #[cfg(all(feature = "wgpu", not(feature = "vulkan")))]
    Runtime::Wgpu,
    #[cfg(feature = "vulkan")]
    Runtime::Vulkan,
    #[cfg(feature = "cuda")]
    Runtime::Cuda,
    Runtime::Flex,
];

impl Runtime {
    /// The value of `FLASH_RUNTIME` that picks this runtime.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Cuda => "cuda",
            Self::Flex => "flex",
        }
    }

    /// The runtime called `name`, if this binary has it.
    fn parse(name: &str) -> Result<Self, String> {
        let known = COMPILED_IN.iter().find(|runtime| runtime.name() == name);
        known.copied().ok_or_else(|| {
            let names: Vec<_> = COMPILED_IN.iter().map(|runtime| runtime.name()).collect();
            let names = names.join(", ");
            format!("{VARIABLE}={name}: this binary was built for {names}")
        })
    }
}

/// The runtime under test.
pub fn current() -> Runtime {
    static CURRENT: OnceLock<Runtime> = OnceLock::new();
    *CURRENT.get_or_init(|| match std::env::var(VARIABLE) {
        Ok(name) => Runtime::parse(&name).unwrap_or_else(|message| panic!("{message}")),
        Err(_) => COMPILED_IN[0],
    })
}

/// The device under test.
pub fn device() -> Device {
    match current() {
        #[cfg(all(feature = "wgpu", not(feature = "vulkan")))]
        Runtime::Wgpu => Device::wgpu(DeviceKind::DefaultDevice),
        #[cfg(feature = "vulkan")]
        Runtime::Vulkan => Device::vulkan(DeviceKind::DefaultDevice),
        #[cfg(feature = "cuda")]
        Runtime::Cuda => Device::cuda(0),
        Runtime::Flex => Device::flex(),
        #[allow(unreachable_patterns, reason = "with every runtime compiled in")]
        absent => unreachable!("{absent:?} is not compiled in"),
    }
}

/// The CubeCL client of the device under test; none on the CPU backend.
pub fn client() -> Option<Client> {
    match device().as_dispatch() {
        DispatchDevice::Cube(device) => Some(device.client()),
        _ => None,
    }
}

/// A device other than the one under test.
pub fn elsewhere() -> Device {
    if has_kernels() {
        return Device::flex();
    }
    #[cfg(feature = "ndarray")]
    return ndarray();
    #[cfg(all(feature = "wgpu", not(feature = "ndarray")))]
    return Device::wgpu(DeviceKind::DefaultDevice);
    #[cfg(not(any(feature = "ndarray", feature = "wgpu")))]
    panic!("a second device needs the feature ndarray or wgpu");
}

/// Burn's other CPU backend: on its way out, but the library serves it.
#[cfg(feature = "ndarray")]
#[allow(deprecated)]
pub fn ndarray() -> Device {
    Device::ndarray()
}

/// Where attention that is composed from Burn's ops is checked, which are the same ops on every
/// backend: on the CPU, since on a GPU runtime Burn first tries dozens of variants of its matrix
/// product for each new shape, half a minute of it on a software device. The device itself runs one
/// test of each kind, and with feature `exhaustive` all of them if it is a card.
pub fn composed_device() -> Device {
    if cfg!(feature = "exhaustive") && !is_software() {
        device()
    } else {
        Device::flex()
    }
}

/// Whether Burn's own matmul may round f32 operands to tf32 here.
pub fn multiplies_in_tf32() -> bool {
    current() == Runtime::Cuda
}

/// Whether our kernels multiply f32 in tf32 here if they may.
pub fn has_tf32() -> bool {
    client().is_some_and(|client| DeviceClass::of(&client).isa == Isa::Ptx)
}

/// Whether attention runs as one of our kernels here, rather than composed from Burn's ops.
pub fn has_kernels() -> bool {
    current() != Runtime::Flex
}

/// Whether the device is a CPU that plays GPU: right, but too slow and too small for the large
/// cases at their full size.
pub fn is_software() -> bool {
    !is_card()
}

/// `full` on a card, `small` on a software device, which takes a minute for what a card does in a
/// millisecond. `small` has to reach what `full` does: more than one tile, an uneven end.
pub fn on_card<T>(full: T, small: T) -> T {
    match is_software() {
        true => small,
        false => full,
    }
}

/// Says that the running test asserts nothing here, and why: `cargo xtask test` counts it as skipped.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    writeln!(std::io::stdout(), "\nskipped: {name}: {reason}").expect("stdout is open");
}

/// Whether the device holds tensors of `dtype`.
pub fn supports(dtype: Dtype) -> bool {
    stores(burn_dtype(dtype))
}

/// Whether the device can store elements of `dtype` and convert them. Arithmetic is not asked for,
/// since the kernels compute in f32 (Vulkan has bf16 in memory only). Burn itself does not ask: it
/// copies any bytes to the device, and fails at the first op that would read them there.
pub fn stores(dtype: DType) -> bool {
    let usage = Dispatch::dtype_usage(device().as_dispatch(), dtype);
    usage.contains(DTypeUsage::Storage)
}

/// Burn's name of `dtype`.
pub fn burn_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 | Dtype::Tf32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
    }
}

/// Whether there is a graphics card behind the device.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn is_card() -> bool {
    let identity = device().identity();
    identity.is_some_and(|identity| identity.physical.is_some())
}

#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
fn is_card() -> bool {
    false
}

/// Name of the device, a card or not.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn device_name() -> String {
    let identity = device().identity();
    identity.map_or_else(|| "the CPU".to_string(), |identity| identity.name)
}

#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
fn device_name() -> String {
    "the CPU".to_string()
}

/// Prints, past the test harness's capture, what this run covers.
#[test]
fn describe() {
    let supported = |dtype| if supports(dtype) { "yes" } else { "no" };
    let line = format!(
        "runtime: {} on {}, f16 {}, bf16 {}",
        current().name(),
        device_name(),
        supported(Dtype::F16),
        supported(Dtype::Bf16),
    );
    // Its own line, also where the harness has just printed "test ... ".
    writeln!(std::io::stdout(), "\n{line}").expect("stdout is open");
    assert!(COMPILED_IN.contains(&current()), "{line}");
    assert!(supports(Dtype::F32), "every runtime has f32: {line}");
    assert_eq!(
        Runtime::parse(current().name()),
        Ok(current()),
        "the name picks it again"
    );
}

#[test]
fn an_unknown_or_absent_runtime_is_an_error_that_lists_the_present_ones() {
    for absent in ["", "metal", "WGPU", "wgpu ", "flexible"] {
        let message = Runtime::parse(absent).expect_err("no such runtime");
        assert!(
            message.contains(&format!("{VARIABLE}={absent}:")),
            "{message}"
        );
        assert!(message.contains(COMPILED_IN[0].name()), "{message}");
    }
}

#[cfg(feature = "vulkan")]
#[test]
fn wgpu_is_an_error_in_a_binary_built_for_spirv() {
    let message = Runtime::parse("wgpu").expect_err("wgpu would run SPIR-V here");
    assert!(message.contains("vulkan"), "{message}");
}
