//! What is generated: the table of kernels.

use flash_kernels::{Causality, DeviceClass, FloatKind, Masking, Pass, Precision, codegen::Target};

use super::plans::{AMPERE, Ask, HOPPER, VULKAN, VULKAN_MAPPED, WEBGPU, WGSL, WGSL_PLANES};

/// A kind of device, by what its code is compiled for.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// What the table calls it. For CUDA it is the architecture.
    pub name: &'static str,
    /// Language.
    pub target: Target,
    /// What decides on the plan.
    pub class: DeviceClass,
}

const CUDA_MACHINES: [Machine; 2] = [
    Machine {
        name: "sm_80",
        target: Target::Cuda,
        class: AMPERE,
    },
    Machine {
        name: "sm_90a",
        target: Target::Cuda,
        class: HOPPER,
    },
];

/// A Hopper whose own products are not told of, as `DeviceClass::of` has it for now.
const PLAIN_HOPPER: Machine = Machine {
    name: "sm_90",
    target: Target::Cuda,
    class: DeviceClass {
        wgmma: false,
        ..HOPPER
    },
};

const WGSL_MACHINES: [Machine; 3] = [
    Machine {
        name: "webgpu",
        target: Target::Wgsl,
        class: WEBGPU,
    },
    Machine {
        name: "software",
        target: Target::Wgsl,
        class: WGSL,
    },
    Machine {
        name: "planes",
        target: Target::Wgsl,
        class: WGSL_PLANES,
    },
];

const VULKAN_MAPPED_MACHINE: Machine = Machine {
    name: "vulkan2",
    class: VULKAN_MAPPED,
    ..VULKAN_MACHINE
};

const VULKAN_MACHINE: Machine = Machine {
    name: "vulkan",
    target: Target::Spirv,
    class: VULKAN,
};

/// One kernel.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// What it is compiled for.
    pub machine: Machine,
    /// What it computes.
    pub ask: Ask,
}

impl Case {
    /// Language, machine and problem in words.
    pub fn label(&self) -> String {
        let target = target_name(self.machine.target);
        format!("{target} {} {}", self.machine.name, self.ask.label())
    }

    /// The label as the name of a file.
    pub fn file_name(&self) -> String {
        self.label().replace([' ', '/'], "-")
    }
}

/// The name of a language on the command line.
pub const fn target_name(target: Target) -> &'static str {
    match target {
        Target::Cuda => "cuda",
        Target::Wgsl => "wgsl",
        Target::Spirv => "spirv",
    }
}

/// Every kernel that is looked at, those of a language together.
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for machine in CUDA_MACHINES {
        cases.extend(asks_of_cuda().into_iter().map(|ask| Case { machine, ask }));
        if machine.class.wgmma {
            let asks = asks_of_wgmma().into_iter();
            cases.extend(asks.map(|ask| Case { machine, ask }));
        }
    }
    let halves = asks_of_cuda()
        .into_iter()
        .filter(|ask| ask.dtype != FloatKind::F32);
    cases.extend(halves.map(|ask| Case {
        machine: PLAIN_HOPPER,
        ask,
    }));
    for ask in asks_of_vulkan() {
        let machine = VULKAN_MACHINE;
        cases.push(Case { machine, ask });
    }
    for ask in gradients_of_mapped() {
        let machine = VULKAN_MAPPED_MACHINE;
        cases.push(Case { machine, ask });
    }
    for machine in WGSL_MACHINES {
        let stored = asks_of_wgsl()
            .into_iter()
            .filter(|ask| machine.class.f16 || ask.dtype == FloatKind::F32);
        cases.extend(stored.map(|ask| Case { machine, ask }));
    }
    cases
}

/// Full and causal for each size.
fn both(dtype: FloatKind, head_dims: &[usize]) -> Vec<Ask> {
    let asks = head_dims.iter().flat_map(|&head_dim| {
        let full = Ask::new(dtype, head_dim);
        let causality = Causality::Causal;
        [full, Ask { causality, ..full }]
    });
    asks.collect()
}

/// `asks` and, at the head sizes given, rows that no wide copy suits (59) and a bool mask.
fn with_edges(mut asks: Vec<Ask>, dtype: FloatKind, masked: usize) -> Vec<Ask> {
    asks.extend(both(dtype, &[59]));
    let masking = Masking::Dense;
    asks.extend(
        both(dtype, &[masked])
            .into_iter()
            .map(|ask| Ask { masking, ..ask }),
    );
    asks
}

/// The kernels of the gradient, causal.
fn gradients(dtype: FloatKind, head_dims: &[usize]) -> Vec<Ask> {
    gradients_by(&[Pass::Dq, Pass::Dkv], dtype, head_dims)
}

fn gradients_by(passes: &[Pass], dtype: FloatKind, head_dims: &[usize]) -> Vec<Ask> {
    let asks = head_dims.iter().flat_map(|&head_dim| {
        let causality = Causality::Causal;
        passes.iter().map(move |&pass| Ask {
            pass,
            causality,
            ..Ask::new(dtype, head_dim)
        })
    });
    asks.collect()
}

/// Keys in parts: few queries, as many as a tile of their row has and more.
fn split(dtype: FloatKind, head_dims: &[usize], queries: &[usize]) -> Vec<Ask> {
    let asks = head_dims.iter().flat_map(|&head_dim| {
        queries.iter().map(move |&queries| Ask {
            queries: Some(queries),
            splits: Some(4),
            ..Ask::new(dtype, head_dim)
        })
    });
    let causality = Causality::Causal;
    asks.flat_map(|ask| [ask, Ask { causality, ..ask }])
        .collect()
}

fn asks_of_cuda() -> Vec<Ask> {
    let mut asks = with_edges(both(FloatKind::F16, &[64, 128, 256]), FloatKind::F16, 64);
    // At 256 columns dk and dv do not fit the register file together: dkv spills there.
    asks.extend(gradients(FloatKind::F16, &[64, 128]));
    asks.extend(both(FloatKind::Bf16, &[64, 128, 256]));
    asks.extend(both(FloatKind::F32, &[64, 128]));
    asks.extend(split(FloatKind::F16, &[64, 128, 256], &[1]));
    asks.extend(split(FloatKind::Bf16, &[128], &[1, 64]));
    asks.extend(split(FloatKind::F32, &[64, 128], &[1]));
    asks.extend(asks_of_tf32());
    asks
}

/// Products of f32 in tf32: as those of f16, and an output narrower than the keys.
fn asks_of_tf32() -> Vec<Ask> {
    let mut asks = with_edges(both(FloatKind::F32, &[64, 128, 256]), FloatKind::F32, 64);
    asks.extend(split(FloatKind::F32, &[64, 128, 256], &[1]));
    asks.extend(split(FloatKind::F32, &[128], &[64]));
    asks.push(Ask {
        val_dim: 64,
        ..Ask::new(FloatKind::F32, 128)
    });
    let causal = gradients(FloatKind::F32, &[64, 128, 256]).into_iter();
    // As of f16, dkv spills at 256 columns.
    asks.extend(causal.filter(|ask| ask.pass == Pass::Dq || ask.head_dim < 256));
    let masking = Masking::Dense;
    let masked = gradients(FloatKind::F32, &[64, 128]).into_iter();
    asks.extend(masked.map(|ask| Ask { masking, ..ask }));
    let precision = Precision::Tf32;
    asks.into_iter()
        .map(|ask| Ask { precision, ..ask })
        .collect()
}

/// What only rows for warpgroups tell apart: head sizes of each row and between them, long sequences,
/// masks where registers are scarcest, and a scale that is not folded into the exponent.
fn asks_of_wgmma() -> Vec<Ask> {
    let mut asks = both(FloatKind::F16, &[40, 80, 96, 192]);
    let long = both(FloatKind::F16, &[64, 128]).into_iter();
    asks.extend(long.map(|ask| Ask {
        seqlen: 16_384,
        ..ask
    }));
    let masking = Masking::Dense;
    let masked = both(FloatKind::F16, &[128, 192, 256]).into_iter();
    asks.extend(masked.map(|ask| Ask { masking, ..ask }));
    asks.extend(gradients_of_wgmma());
    asks.extend(split(FloatKind::F16, &[64, 128, 256], &[128]));
    let parts = split(FloatKind::Bf16, &[96], &[128]).into_iter();
    asks.extend(parts.flat_map(|ask| [ask, Ask { masking, ..ask }]));
    let scale = -0.125;
    let full = Ask::new(FloatKind::Bf16, 128);
    asks.extend([
        Ask { scale, ..full },
        Ask {
            val_dim: 64,
            ..full
        },
    ]);
    asks
}

/// The gradient's kernels: full as well, between the head sizes of rows, and with a mask.
fn gradients_of_wgmma() -> Vec<Ask> {
    let passes = [Pass::Dq, Pass::Dkv, Pass::Fused];
    let halves = |dims| gradients_by(&passes, FloatKind::F16, dims).into_iter();
    let mut asks = gradients_by(&passes, FloatKind::Bf16, &[40, 80, 96, 128]);
    asks.extend(gradients_by(&[Pass::Fused], FloatKind::F16, &[64, 128]));
    asks.extend(wide_gradients_of_wgmma());
    let causality = Causality::Full;
    asks.extend(halves(&[64, 128]).map(|ask| Ask { causality, ..ask }));
    let masking = Masking::Dense;
    // With 128 queries to a step the fused kernel has no registers for a mask.
    let masked = halves(&[64, 128]).filter(|ask| ask.pass != Pass::Fused || ask.head_dim > 64);
    asks.extend(masked.map(|ask| Ask { masking, ..ask }));
    asks
}

/// Beyond 128 columns, where two warpgroups divide the products of dkv.
fn wide_gradients_of_wgmma() -> Vec<Ask> {
    let mut asks = gradients(FloatKind::F16, &[192, 256]);
    asks.extend(gradients(FloatKind::Bf16, &[136, 256]));
    let dkv = |head_dim, val_dim| Ask {
        pass: Pass::Dkv,
        val_dim,
        ..Ask::new(FloatKind::F16, head_dim)
    };
    let masking = Masking::Dense;
    let causality = Causality::Causal;
    let uneven = [dkv(192, 128), dkv(64, 256)].map(|ask| Ask { causality, ..ask });
    asks.push(dkv(256, 256));
    asks.extend(uneven);
    let masked = gradients(FloatKind::F16, &[192, 256]).into_iter();
    asks.extend(masked.map(|ask| Ask { masking, ..ask }));
    asks
}

fn asks_of_vulkan() -> Vec<Ask> {
    let mut asks = with_edges(both(FloatKind::F16, &[64, 128, 256]), FloatKind::F16, 64);
    asks.extend(gradients(FloatKind::F16, &[64, 128, 256]));
    asks.extend(both(FloatKind::F32, &[64, 128]));
    asks.extend(both(FloatKind::Bf16, &[64, 128]));
    asks.extend(split(FloatKind::F32, &[64], &[1]));
    asks.extend(split(FloatKind::F16, &[128], &[1]));
    asks
}

/// Gradients by functions of matrices' elements, with every kind of mask.
fn gradients_of_mapped() -> Vec<Ask> {
    let kinds = [FloatKind::F16, FloatKind::Bf16];
    let causal = kinds
        .into_iter()
        .flat_map(|kind| gradients(kind, &[64, 128]));
    let mut asks: Vec<_> = causal.collect();
    let causality = Causality::Full;
    let full: Vec<_> = asks.iter().map(|ask| Ask { causality, ..*ask }).collect();
    let masking = Masking::Dense;
    let masked: Vec<_> = full.iter().map(|ask| Ask { masking, ..*ask }).collect();
    asks.extend(full);
    asks.extend(masked);
    asks
}

fn asks_of_wgsl() -> Vec<Ask> {
    let kinds = [FloatKind::F32, FloatKind::F16];
    let asks = kinds.map(|dtype| with_edges(both(dtype, &[64, 128, 256]), dtype, 64));
    let mut asks = asks.concat();
    asks.extend(kinds.into_iter().flat_map(|kind| split(kind, &[64], &[1])));
    let masking = Masking::Dense;
    let masked = gradients(FloatKind::F32, &[64, 128]).into_iter();
    asks.extend(masked.map(|ask| Ask { masking, ..ask }));
    asks
}
