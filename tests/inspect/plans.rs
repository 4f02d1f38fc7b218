//! Devices that code is generated for, and the plans they get. The test binary uses it too.

use flash_kernels::{
    AttentionError, AttentionProblem, AttentionShape, Causality, DeviceClass, FloatKind, Isa,
    Masking, Pass, Plan, Precision,
    plan::Rounding,
    select::{Alignment, select, widest},
};

/// An H100 or H200.
pub const HOPPER: DeviceClass = DeviceClass {
    isa: Isa::Ptx,
    plane_size: Some(32),
    shared_bytes: 227 * 1024,
    max_threads: 1024,
    max_cubes: (i32::MAX as u32, 65_535),
    max_vector: 8,
    f16: true,
    bf16: true,
    cmma_f16: true,
    cmma_bf16: true,
    wgmma: true,
    rounding: Rounding::Even,
    processors: 132,
    wide_addresses: true,
};

/// An A100: less shared memory.
pub const AMPERE: DeviceClass = DeviceClass {
    shared_bytes: 163 * 1024,
    wgmma: false,
    rounding: Rounding::Away,
    processors: 108,
    ..HOPPER
};

/// A GPU with cooperative matrices of f16 behind CubeCL's own SPIR-V.
pub const VULKAN: DeviceClass = DeviceClass {
    isa: Isa::Portable,
    shared_bytes: 48 * 1024,
    max_cubes: (65_535, 65_535),
    max_vector: 4,
    wgmma: false,
    rounding: Rounding::Away,
    processors: 1,
    ..HOPPER
};

/// One that has functions of the elements of such matrices.
pub const VULKAN_MAPPED: DeviceClass = DeviceClass {
    isa: Isa::Mapped,
    ..VULKAN
};

/// A GPU with plane operations behind WGSL.
pub const WGSL_PLANES: DeviceClass = DeviceClass {
    bf16: false,
    cmma_f16: false,
    wide_addresses: false,
    ..VULKAN
};

/// A software driver behind WGSL: no plane operations.
pub const WGSL: DeviceClass = DeviceClass {
    plane_size: None,
    shared_bytes: 32 * 1024,
    ..WGSL_PLANES
};

/// What every WebGPU device has.
pub const WEBGPU: DeviceClass = DeviceClass {
    shared_bytes: 16 * 1024,
    max_threads: 256,
    f16: false,
    ..WGSL
};

/// What a kernel is wanted for. Sequences are long, tensors packed.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Which kernel.
    pub pass: Pass,
    /// Element type.
    pub dtype: FloatKind,
    /// Features of q and k.
    pub head_dim: usize,
    /// Features of v.
    pub val_dim: usize,
    /// Queries and keys.
    pub seqlen: usize,
    /// Queries, where there are fewer than keys.
    pub queries: Option<usize>,
    /// Parts of the keys; what the table says if there is none.
    pub splits: Option<usize>,
    /// Positional mask.
    pub causality: Causality,
    /// Bool mask.
    pub masking: Masking,
    /// Scale of the scores.
    pub scale: f32,
    /// What may become of products of f32.
    pub precision: Precision,
}

impl Ask {
    /// Plain attention: every key in one part, no mask, a positive scale, values as long as keys.
    pub fn new(dtype: FloatKind, head_dim: usize) -> Self {
        Self {
            pass: Pass::Forward,
            dtype,
            head_dim,
            val_dim: head_dim,
            seqlen: 1024,
            queries: None,
            splits: Some(1),
            causality: Causality::Full,
            masking: Masking::None,
            scale: 0.125,
            precision: Precision::Full,
        }
    }

    /// The plan that `device` gets for it.
    ///
    /// # Errors
    ///
    /// That of [`select`].
    pub fn plan(&self, device: &DeviceClass) -> Result<Plan, AttentionError> {
        // Rows of packed tensors begin wherever their lengths put them.
        let aligned = widest(self.head_dim, 8).min(widest(self.val_dim, 8));
        let plan = select(device, &self.problem()?, self.pass, Alignment(aligned))?;
        Ok(Plan {
            splits: self.splits.unwrap_or(plan.splits),
            ..plan
        })
    }

    /// It, as the kernels are asked: two batch entries of four heads.
    ///
    /// # Errors
    ///
    /// That of [`AttentionShape::new`].
    pub fn problem(&self) -> Result<AttentionProblem, AttentionError> {
        let shape = |seqlen, dim| [2, 4, seqlen, dim];
        Ok(AttentionProblem {
            shape: AttentionShape::new(
                shape(self.queries.unwrap_or(self.seqlen), self.head_dim),
                shape(self.seqlen, self.head_dim),
                shape(self.seqlen, self.val_dim),
            )?,
            dtype: self.dtype,
            causality: self.causality,
            masking: self.masking,
            scale: self.scale,
            precision: self.precision,
        })
    }

    /// A few words, for tables and messages: `f16 d64 causal`.
    pub fn label(&self) -> String {
        let mut words = vec![match self.dtype {
            FloatKind::F32 if self.precision == Precision::Tf32 => "tf32".to_owned(),
            FloatKind::F32 => "f32".to_owned(),
            FloatKind::F16 => "f16".to_owned(),
            FloatKind::Bf16 => "bf16".to_owned(),
        }];
        words.push(match self.head_dim == self.val_dim {
            true => format!("d{}", self.head_dim),
            false => format!("d{}/{}", self.head_dim, self.val_dim),
        });
        if self.seqlen != 1024 {
            words.push(format!("n{}", self.seqlen));
        }
        if let Some(queries) = self.queries {
            words.push(format!("q{queries}"));
        }
        if let Some(splits) = self.splits.filter(|it| *it > 1) {
            words.push(format!("in {splits}"));
        }
        match self.pass {
            Pass::Forward => {}
            Pass::Dq => words.push("dq".to_owned()),
            Pass::Dkv => words.push("dkv".to_owned()),
            Pass::Fused => words.push("fused".to_owned()),
        }
        words.push(match self.causality {
            Causality::Full => "full".to_owned(),
            Causality::Causal => "causal".to_owned(),
        });
        if self.masking == Masking::Dense {
            words.push("mask".to_owned());
        }
        if self.scale <= 0.0 {
            words.push("negative".to_owned());
        }
        words.join(" ")
    }
}
