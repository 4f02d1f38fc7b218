//! Modules built on [`flash_attention`](crate::flash_attention).

mod attention;
#[cfg(all(test, feature = "flex", feature = "autodiff"))]
mod tests;

pub use attention::{FlashMhaInput, FlashMultiHeadAttention, FlashMultiHeadAttentionConfig};
