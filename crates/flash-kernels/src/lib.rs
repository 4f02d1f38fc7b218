//! FlashAttention kernels written once in CubeCL and compiled for CUDA and WGPU.
//!
//! This crate knows nothing of Burn: it takes raw device buffers with shapes and strides
//! ([`TensorView`]), chooses a [`Plan`] for the device from one table ([`select`]) and launches.
//! Everything under [`kernel`] runs on the device, everything beside it on the host.

// CubeCL's operation macros name it.
extern crate alloc;

#[cfg(feature = "codegen")]
pub mod codegen;
pub mod device;
pub mod error;
pub mod kernel;
pub mod launch;
pub mod plan;
pub mod problem;
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
