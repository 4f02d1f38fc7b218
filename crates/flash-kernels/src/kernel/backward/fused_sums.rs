//! Before and after the kernel that adds up dq: zeros, and f32 to elements.
//!
//! The sums are `[batch·heads, rows / 64, columns / 64, 4 planes, 8, 32 lanes, 4]`, pieces of 64 × 64 as a
//! warpgroup's registers hold them, so that a plane adds its 4 KB at once. Rows are rounded up to
//! `block_n`, columns to 64.

use cubecl::prelude::*;

use crate::{
    kernel::{
        epilogue::{Place, store_scaled_pieces},
        seq::position,
        unit::{
            HalfFloat,
            wgmma::{PIECE, load_pieces},
        },
    },
    plan::Plan,
};

/// Units of a cube.
pub const THREADS: usize = 128;

/// Vectors that a unit of `clear` writes.
pub const CLEARED: usize = 8;

/// Vectors of four f32 in a piece.
pub const PIECE_LEN: usize = PIECE * PIECE / 4;

/// `sums = 0`, of `len` vectors.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn clear(sums: &mut [Vector<f32, Const<4>>], len: usize) {
    let first = position() as usize * comptime!(THREADS * CLEARED) + UNIT_POS as usize;
    #[unroll]
    for i in 0..CLEARED {
        let at = first + comptime!(i * THREADS);
        if at < len {
            sums[at] = Vector::<f32, Const<4>>::new(0.0);
        }
    }
}

/// `d_q = scale·sums`, in elements.
///
/// Shapes: `sums` as in the module; d_q `[lines, seqlen_q, head_dim]` packed, `head_dim` a multiple of 8.
/// A cube has 64 queries, 16 to a plane; nothing is shared.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn convert<E: HalfFloat>(
    sums: &[Vector<f32, Const<4>>],
    d_q: &mut [Vector<u32, Const<4>>],
    cubes: u32,
    seqlen_q: u32,
    head_dim: u32,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let position = position();
    if position < cubes {
        let boxes = comptime!(plan.head_boxes());
        let tiles = seqlen_q.div_ceil(comptime!(plan.tile.block_n as u32));
        let parts = tiles * comptime!((plan.tile.block_n / PIECE) as u32);
        let (line, start) = (position / parts, position % parts * comptime!(PIECE as u32));
        if start < seqlen_q {
            let first = position as usize * comptime!(boxes * PIECE_LEN);
            let dq = load_pieces(sums, first, boxes);
            let dim = head_dim as usize;
            let place = Place {
                first: (line as usize * seqlen_q as usize + start as usize) * dim,
                rows: seqlen_q - start,
                dim,
            };
            store_scaled_pieces::<E>(&dq, scale, d_q, &place, comptime!(boxes * PIECE), plan);
        }
    }
}
