//! What a plan chooses between, each a plain value.

/// Which implementation of `MatrixUnit` multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnitKind {
    /// Register tiles of f32 on any device.
    Scalar,
    /// Cooperative matrices with an opaque layout (Vulkan).
    Cmma,
    /// `mma.sync` with a known layout (CUDA, sm_80 and later).
    Mma,
    /// `wgmma` by warpgroups, asynchronous, under the softmax of the step before (CUDA, sm_90).
    Wgmma,
}

/// Instructions a kernel may use beyond those of every device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// None: the kernel must compile for every runtime.
    Portable,
    /// Functions of the elements of cooperative matrices (VK_NV_cooperative_matrix2).
    Mapped,
    /// PTX of sm_80 and later.
    Ptx,
}

/// How a tile travels from global to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyKind {
    /// Through registers, converted on the way; one stage.
    Vector,
    /// Through registers, in which the next tile waits while this one is computed; one stage.
    Ahead,
    /// `cp.async` of 16 bytes; two stages, the next tile travels while this one is computed.
    Async,
    /// Boxes of 64 columns by the tensor memory accelerator, asked for by a warpgroup of their own;
    /// two to four stages. Rows and columns past the end become zeros on the way.
    Boxes,
}

/// How units that share a row reduce over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// Plane shuffles.
    Plane,
    /// Shared memory and cube barriers, where the device has no plane operations.
    Shared,
}

/// How the softmax computes its exponents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Exponent {
    /// `c·(s - m)`.
    Exact,
    /// `c·s - c·m` by a fused multiply-add, while `c·m` is small.
    Fused,
}

/// Where V's tile lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ValueBuffer {
    /// In shared memory of its own.
    Own,
    /// In K's, loaded once the scores are done: half the shared memory, two barriers more.
    OfKeys,
}

/// Where the owned operands (Q; Q and dO; K and V) are during the walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueryOperand {
    /// In registers.
    Resident,
    /// In registers, where one comes after the other by the same place; what is walked lies there then.
    Lent,
    /// In shared memory, read again in each step: registers go to the accumulators.
    Reread,
}

/// How f32 becomes tf32: to the nearest either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// Of two equally near, away from zero: two instructions, of sm_80.
    Away,
    /// Of two equally near, the even one: one instruction, of sm_90.
    Even,
}

/// When the scale is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScaleKind {
    /// Inside the exponential, `exp2(s·c - m·c)`: needs `c > 0`.
    Folded,
    /// To each score before the mask: any finite scale.
    Before,
}

/// Which kernel a plan is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Owns queries, walks keys; leaves the output and the log-sum-exp.
    Forward,
    /// Owns queries, walks keys; leaves dq.
    Dq,
    /// Owns keys, walks the queries of their head group; leaves dk and dv.
    Dkv,
    /// As `Dkv`, and adds what its keys give to dq: five products where `Dq` and `Dkv` have seven.
    Fused,
}
