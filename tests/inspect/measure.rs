//! What is measured of a kernel.

use std::collections::BTreeMap;

use flash_kernels::codegen::Target;

/// A number that is told about a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measure {
    /// Registers of a unit.
    Registers,
    /// Bytes of spill stores and loads.
    SpillBytes,
    /// Bytes of a unit's stack.
    StackBytes,
    /// Bytes of shared memory, as the code itself lays it out.
    SharedBytes,
    /// Units of a cube, as the code itself declares them.
    Threads,
    /// Storage buffers.
    Buffers,
    /// Cube barriers.
    Barriers,
    /// Matrix products of a plane: `HMMA`, `OpCooperativeMatrixMulAddKHR`.
    MatrixProducts,
    /// Matrix products of a warpgroup, `HGMMA`.
    WarpgroupProducts,
    /// Those in the walk over keys.
    WalkedProducts,
    /// Warnings that those are waited for one by one.
    Serializations,
    /// Moves to the registers from which they take their addresses, `R2UR`, in the walk over keys.
    AddressMoves,
    /// `MUFU` in the walk behind the last wait for a warpgroup's products.
    LateExponentials,
    /// Matrix loads: `LDSM`, `OpCooperativeMatrixLoadKHR`.
    MatrixLoads,
    /// Functions applied to the elements of a matrix, `OpCooperativeMatrixPerElementOpNV`.
    MatrixFunctions,
    /// Copies from global to shared memory, `LDGSTS`.
    AsyncCopies,
    /// Copies of boxes, `UTMALDG`.
    BoxCopies,
    /// `MUFU`: exponentials, logarithms, reciprocals.
    Elementary,
    /// `FFMA`.
    MultiplyAdds,
    /// `LDL` and `STL`.
    LocalAccesses,
    /// Those that are executed again and again.
    LoopedLocalAccesses,
    /// All instructions; lines of WGSL.
    Instructions,
    /// Registers of the kernel that merges parts of the keys.
    MergeRegisters,
    /// Bytes that it spills.
    MergeSpillBytes,
    /// Its storage buffers.
    MergeBuffers,
}

use Measure::*;

impl Measure {
    /// The head of its column for kernels in the language of `target`.
    pub const fn name(self, target: Target) -> &'static str {
        match (self, target) {
            (Registers, _) => "regs",
            (SpillBytes, _) => "spill",
            (StackBytes, _) => "stack",
            (SharedBytes, _) => "shared",
            (Threads, _) => "threads",
            (Buffers, _) => "buffers",
            (Barriers, _) => "barriers",
            (MatrixProducts, Target::Spirv) => "CoopMulAdd",
            (MatrixProducts, _) => "HMMA",
            (WarpgroupProducts, _) => "HGMMA",
            (WalkedProducts, _) => "in walk",
            (Serializations, _) => "serial",
            (AddressMoves, _) => "R2UR",
            (LateExponentials, _) => "late",
            (MatrixLoads, Target::Spirv) => "CoopLoad",
            (MatrixLoads, _) => "LDSM",
            (MatrixFunctions, _) => "CoopMap",
            (AsyncCopies, _) => "LDGSTS",
            (BoxCopies, _) => "UTMALDG",
            (Elementary, _) => "MUFU",
            (MultiplyAdds, _) => "FFMA",
            (LocalAccesses, _) => "LDL+STL",
            (LoopedLocalAccesses, _) => "looped",
            (Instructions, Target::Cuda) => "SASS",
            (Instructions, Target::Spirv) => "words",
            (Instructions, Target::Wgsl) => "lines",
            (MergeRegisters, _) => "merge regs",
            (MergeSpillBytes, _) => "merge spill",
            (MergeBuffers, _) => "merge buffers",
        }
    }

    /// The columns of a language's table.
    pub const fn columns(target: Target) -> &'static [Self] {
        match target {
            Target::Cuda => &[
                Registers,
                SpillBytes,
                StackBytes,
                SharedBytes,
                MatrixProducts,
                WarpgroupProducts,
                WalkedProducts,
                Serializations,
                AddressMoves,
                LateExponentials,
                MatrixLoads,
                AsyncCopies,
                BoxCopies,
                Elementary,
                MultiplyAdds,
                LocalAccesses,
                LoopedLocalAccesses,
                Instructions,
                MergeRegisters,
                MergeSpillBytes,
            ],
            Target::Wgsl => &[
                SharedBytes,
                Threads,
                Buffers,
                Barriers,
                Instructions,
                MergeBuffers,
            ],
            Target::Spirv => &[
                SharedBytes,
                MatrixProducts,
                MatrixLoads,
                MatrixFunctions,
                Barriers,
                Instructions,
            ],
        }
    }
}

/// What was measured of one kernel.
pub type Measures = BTreeMap<Measure, usize>;
