//! FlashAttention kernels written once in CubeCL and compiled for CUDA and WGPU.
//!
//! This crate knows nothing of Burn: it takes raw device buffers with shapes and strides
//! ([`TensorView`]), chooses a [`Plan`] for the device from one table ([`select`]) and launches.
//! Everything in the module `kernel` runs on the device, everything beside it on the host.
//!
//! What these pages hide is public for the tests and the inspection of the kernels: it may change in
//! any release.

// CubeCL's operation macros name it.
extern crate alloc;

// Hidden: for the offline inspection and the tests of these kernels.
#[cfg(feature = "codegen")]
#[doc(hidden)]
pub mod codegen;
mod device;
mod error;
// Hidden: the tests call the verbs of its units; the way in is `launch`.
#[doc(hidden)]
pub mod kernel;
pub mod launch;
pub mod plan;
mod problem;
pub mod select;

pub use device::DeviceClass;
pub use error::AttentionError;
pub use launch::{
    BackwardInputs, BackwardPlans, ForwardOutput, Gradients, MaskKind, MaskView, TensorView,
    Wanted, backward, forward, plan_backward, plan_forward,
};
pub use plan::{CopyKind, Isa, Pass, Plan, Reduction, TileShape, UnitKind};
pub use problem::{
    AttentionProblem, AttentionShape, Causality, FloatKind, GradientOrder, Masking, Precision,
};
