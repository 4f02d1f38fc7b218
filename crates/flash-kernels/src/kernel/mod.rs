//! Device code. The recurrence is written once (`softmax`); what multiplies is behind
//! `unit::MatrixUnit`; what a query sees is in `mask` alone.

// The `cube` macros generate public items beside each function and type, without docs.
#![allow(missing_docs)]

pub mod backward;
pub mod combine;
pub mod epilogue;
pub mod forward;
pub mod forward_overlapped;
pub mod mask;
pub mod math;
pub mod owned;
pub mod pipeline;
pub mod ring;
pub mod rows;
pub mod score;
pub mod seq;
pub mod softmax;
pub mod split;
pub mod supply;
pub mod tile;
pub mod unit;
pub mod walk;
