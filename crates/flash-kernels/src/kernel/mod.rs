//! Device code. The recurrence is written once (`softmax`); what multiplies is behind
//! `unit::MatrixUnit`; what a query sees is in `mask` alone.

// The `cube` macros generate public items beside each function and type, without docs.
#![allow(missing_docs)]

pub(crate) mod backward;
pub(crate) mod combine;
pub(crate) mod epilogue;
pub(crate) mod forward;
pub(crate) mod forward_overlapped;
pub(crate) mod mask;
pub(crate) mod math;
pub mod owned;
pub mod pipeline;
pub(crate) mod ring;
pub mod rows;
pub(crate) mod score;
pub(crate) mod seq;
pub(crate) mod softmax;
pub(crate) mod split;
pub(crate) mod supply;
pub(crate) mod tile;
pub mod unit;
pub(crate) mod walk;
