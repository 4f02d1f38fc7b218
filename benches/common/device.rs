//! The runtime that `FLASH_RUNTIME` names, as Burn's device and as CubeCL's client.

use burn::tensor::Device;
use cubecl::client::Client;

/// A runtime that this program was built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// CUDA, device 0.
    Cuda,
    /// WGPU with SPIR-V on Vulkan.
    Vulkan,
    /// WGPU with WGSL.
    Wgpu,
}

impl Runtime {
    /// The value of `FLASH_RUNTIME` that names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Vulkan => "vulkan",
            Self::Wgpu => "wgpu",
        }
    }

    /// The runtimes in this program, the default one first. A build with `vulkan` compiles every
    /// WGPU device to SPIR-V, so it has no `wgpu` of its own.
    pub fn available() -> Vec<Self> {
        let mut all = Vec::new();
        if cfg!(feature = "vulkan") {
            all.push(Self::Vulkan);
        } else if cfg!(feature = "wgpu") {
            all.push(Self::Wgpu);
        }
        if cfg!(feature = "cuda") {
            all.push(Self::Cuda);
        }
        all
    }

    /// What `FLASH_RUNTIME` asks for, or the default.
    ///
    /// # Errors
    ///
    /// When it names a runtime that this program was not built for.
    pub fn from_environment() -> Result<Self, String> {
        let all = Self::available();
        let names = || {
            all.iter()
                .map(|it| it.name())
                .collect::<Vec<_>>()
                .join(", ")
        };
        match std::env::var("FLASH_RUNTIME") {
            Ok(name) => all
                .iter()
                .copied()
                .find(|runtime| runtime.name() == name)
                .ok_or_else(|| format!("FLASH_RUNTIME={name}: this program has {}", names())),
            Err(_) => all.first().copied().ok_or_else(|| {
                "this program was built for no runtime: use the feature wgpu, vulkan or cuda".into()
            }),
        }
    }
}

/// One device, seen from Burn and from CubeCL. Both reach the same memory pools.
pub struct Target {
    /// Burn's device.
    pub device: Device,
    /// CubeCL's client of it.
    pub client: Client,
}

impl Target {
    /// Opens the first device of `runtime`.
    ///
    /// # Panics
    ///
    /// Where the machine has none, as CubeCL does.
    pub fn open(runtime: Runtime) -> Self {
        let (device, cube) = match runtime {
            #[cfg(feature = "cuda")]
            Runtime::Cuda => (
                Device::cuda(0),
                cubecl::Device::Cuda(cubecl::device::CudaDevice::new(0)),
            ),
            #[cfg(feature = "vulkan")]
            Runtime::Vulkan => (
                Device::vulkan(burn::tensor::DeviceKind::DefaultDevice),
                cubecl::Device::Wgpu(
                    cubecl::device::WgpuDevice::default().on(cubecl::device::WgpuBackend::Vulkan),
                ),
            ),
            #[cfg(feature = "wgpu")]
            Runtime::Wgpu => (
                Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
                cubecl::Device::Wgpu(cubecl::device::WgpuDevice::default()),
            ),
            #[allow(unreachable_patterns, reason = "reachable where a feature is off")]
            other => unreachable!("{} is not in this program", other.name()),
        };
        Self {
            device,
            client: cube.client(),
        }
    }

    /// The device's own name.
    pub fn name(&self) -> String {
        self.client.properties().identity.name.clone()
    }

    /// Bytes that the device's memory pools hold, free slices included, on all streams; staging
    /// and uniform buffers are left out.
    pub fn reserved_bytes(&self) -> u64 {
        Pools::of(&self.client).reserved
    }
}

/// What the device's memory pools hold on all streams; staging and uniform buffers are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pools {
    /// Bytes that they got from the driver, free slices included.
    pub reserved: u64,
    /// Bytes of the slices that a tensor holds.
    pub in_use: u64,
}

impl Pools {
    /// What they hold now. Waits for the launches that this process has asked for to be queued,
    /// not for the device.
    pub fn of(client: &Client) -> Self {
        let report = client.memory_report(cubecl::MemoryScope::Device);
        let pools = report.streams.iter().map(|stream| stream.pools.usage());
        pools.fold(Self::default(), |sum, usage| Self {
            reserved: sum.reserved + usage.bytes_reserved,
            in_use: sum.in_use + usage.bytes_in_use,
        })
    }

    /// The larger of each.
    pub fn max(self, other: Self) -> Self {
        Self {
            reserved: self.reserved.max(other.reserved),
            in_use: self.in_use.max(other.in_use),
        }
    }
}
