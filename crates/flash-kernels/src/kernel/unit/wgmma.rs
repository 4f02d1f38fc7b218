//! Products of a warpgroup, four planes of 16 rows each, that run while the planes go on.
//!
//! A warpgroup's accumulator is what four planes of [`Mma`] hold of an m16 tile each: softmax, mask,
//! score and epilogue see it as [`Seen`]. What is here is only what that border has no word for:
//! operands that lie in shared memory by descriptor, and a product that is not there yet.

use cubecl::prelude::*;

use super::{
    HalfFloat, hopper,
    mma::{Mma, MmaFrag},
    ptx, wgmma_ops,
};
use crate::plan::{BOX_COLS, Plan, WARPGROUP_ROWS};

/// The unit whose view of a product a warpgroup's accumulator has.
pub type Seen<E> = Mma<E>;

/// A product as its planes see it.
pub type SeenFrag = MmaFrag;

#[cube]
fn is_bf16<E: HalfFloat>() -> comptime_type!(usize) {
    comptime!((E::PTX == "bf16") as usize)
}

/// Low word of the descriptor of a tile at `address` of shared memory, `leading` bytes from one
/// box to the next where the instruction walks across boxes.
#[cube]
fn descriptor(address: u32, #[comptime] leading: usize) -> u32 {
    ((address & 0x3ffffu32) >> 4u32) | comptime!(((leading / 16) as u32) << 16)
}

/// Starts `s = a·bᵀ`: rows `[64·warpgroup, 64·(warpgroup + 1))` of the tile `[block_m, depth]` at
/// address `a`, and the tile `[block_n, depth]` at `b`.
///
/// Nothing may touch the result before `settled` returned it. Both tiles must be visible, and
/// stay as they are until then.
#[cube]
pub fn start_product<E: HalfFloat, S: Size>(
    a: u32,
    b: u32,
    warpgroup: u32,
    #[comptime] depth: usize,
    #[comptime] plan: Plan,
) -> Vector<f32, S> {
    let slice = comptime!((2 * BOX_COLS * WARPGROUP_ROWS) as u32);
    // Along the depth the instruction stays inside a box.
    let left = descriptor(a + warpgroup * slice, 16usize);
    let right = descriptor(b, 16usize);
    wgmma_ops::product::<S>(
        Vector::<f32, S>::empty(),
        left,
        right,
        comptime!(plan.tile.block_n),
        depth,
        comptime!(plan.tile.block_m),
        wgmma_ops::ALONG_DEPTH,
        is_bf16::<E>(),
    )
}

/// Rows and columns of what a warpgroup computes by `start_piece`.
pub const PIECE: usize = 64;

/// Starts a piece of 64 columns of `a·b`: 64 rows of the tile `[block_n, block_m]` at address `a`, and
/// 64 columns, a box, of the tile `[block_m, ..]` at `b`.
///
/// As `start_product`.
#[cube]
pub fn start_piece<E: HalfFloat>(a: u32, b: u32, #[comptime] plan: Plan) -> Vector<f32, Const<32>> {
    let depth = comptime!(plan.tile.block_m);
    wgmma_ops::product::<Const<32>>(
        Vector::<f32, Const<32>>::empty(),
        descriptor(a, 16usize),
        descriptor(b, comptime!(2 * BOX_COLS * depth)),
        PIECE,
        depth,
        comptime!(plan.tile.block_n),
        wgmma_ops::ALONG_COLS,
        is_bf16::<E>(),
    )
}

/// Starts `acc + p·b`: `p` `[64, block_n]` in registers, the tile `[block_n, cols]` at address `b`.
///
/// As `start_product`.
#[cube]
pub fn start_accumulate<E: HalfFloat, A: Size, P: Size>(
    acc: &SeenFrag,
    p: Vector<u32, P>,
    b: u32,
    #[comptime] cols: usize,
    #[comptime] plan: Plan,
) -> Vector<f32, A> {
    let depth = comptime!(plan.tile.block_n);
    let right = descriptor(b, comptime!(2 * BOX_COLS * depth));
    wgmma_ops::accumulate::<A, P>(registers::<A>(acc), p, right, cols, depth, is_bf16::<E>())
}

/// The product of `cols` columns once all but the latest `pending` are done.
#[cube]
pub fn settled<N: Size>(
    product: Vector<f32, N>,
    #[comptime] pending: usize,
    #[comptime] cols: usize,
) -> SeenFrag {
    let done = wgmma_ops::wait::<N>(product, pending, cols);
    let mut frag = fragment(cols);
    put::<N>(&mut frag, done);
    frag
}

/// `acc` of `cols` columns, once all products but the latest `pending` are done: `product` was one.
#[cube]
pub fn settle<N: Size>(
    acc: &mut SeenFrag,
    product: Vector<f32, N>,
    #[comptime] pending: usize,
    #[comptime] cols: usize,
) {
    let done = wgmma_ops::wait::<N>(product, pending, cols);
    put::<N>(acc, done);
}

/// A product of zeros, `[64, cols]`.
#[cube]
pub fn zeros(#[comptime] cols: usize) -> SeenFrag {
    let mut frag = fragment(cols);
    clear(&mut frag);
    frag
}

#[cube]
fn fragment(#[comptime] cols: usize) -> SeenFrag {
    let (m_tiles, n_tiles) = comptime!((1usize, cols / 8));
    MmaFrag {
        cells: Array::<Vector<f32, Const<4>>>::new(n_tiles),
        m_tiles,
        n_tiles,
    }
}

/// `frag = 0`.
#[cube]
pub fn clear(frag: &mut SeenFrag) {
    #[unroll]
    for i in 0..comptime!(frag.n_tiles) {
        frag.cells[i] = Vector::<f32, Const<4>>::new(0.0);
    }
}

#[cube]
fn put<N: Size>(frag: &mut SeenFrag, from: Vector<f32, N>) {
    #[unroll]
    for i in 0..comptime!(frag.n_tiles) {
        let mut cell = Vector::<f32, Const<4>>::empty();
        #[unroll]
        for e in 0..4usize {
            cell.insert(e, from.extract(comptime!(4 * i + e)));
        }
        frag.cells[i] = cell;
    }
}

#[cube]
fn registers<N: Size>(frag: &SeenFrag) -> Vector<f32, N> {
    let mut out = Vector::<f32, N>::empty();
    #[unroll]
    for i in 0..comptime!(frag.n_tiles) {
        let cell = frag.cells[i];
        #[unroll]
        for e in 0..4usize {
            out.insert(comptime!(4 * i + e), cell.extract(e));
        }
    }
    out
}

/// Not 0 if this unit has something of the product that is not finite. Where a row of an operand holds
/// such a thing, all that it takes part in is of that kind: what all units find finite comes from
/// finite operands.
#[cube]
pub fn suspect(frag: &SeenFrag) -> u32 {
    // Only of what is finite a product with 0 is 0, so the compiler must not know the factor.
    let zero = f32::reinterpret(ptx::opaque(0u32));
    let mut sum = zero;
    #[unroll]
    for i in 0..comptime!(frag.n_tiles) {
        #[unroll]
        for e in 0..4usize {
            sum += frag.cells[i].extract(e) * zero;
        }
    }
    u32::reinterpret(sum) & 0x7fff_ffffu32
}

/// A product as a left operand, rounded to `E`: neighbouring columns share a register.
#[cube]
pub fn packed<E: HalfFloat, P: Size>(frag: &SeenFrag) -> Vector<u32, P> {
    let mut out = Vector::<u32, P>::empty();
    #[unroll]
    for i in 0..comptime!(frag.n_tiles) {
        let x = frag.cells[i];
        let upper = ptx::pack(x.extract(0usize), x.extract(1usize), comptime!(E::PTX));
        let lower = ptx::pack(x.extract(2usize), x.extract(3usize), comptime!(E::PTX));
        out.insert(comptime!(2 * i), upper);
        out.insert(comptime!(2 * i + 1), lower);
    }
    out
}

/// Writes a left operand `[64, cols]` of this warpgroup, transposed, to a box `[cols, 64]` at
/// `address` of shared memory.
#[cube]
pub fn store_transposed<P: Size>(packed: Vector<u32, P>, address: u32, #[comptime] cols: usize) {
    let lane = UNIT_POS % 32u32;
    let plane = UNIT_POS / 32u32 % 4u32;
    // Matrices in order: the plane's first 8 rows and its next 8, then those of 8 columns further.
    let (matrix, row) = (lane / 8u32, lane % 8u32);
    let piece = 2u32 * plane + matrix % 2u32;
    // Pieces of 16 bytes are swizzled by the row.
    let first = address + (matrix / 2u32 * 8u32 + row) * 128u32 + (piece ^ row) * 16u32;
    #[unroll]
    for i in 0..comptime!(cols / 16) {
        hopper::store_transposed(
            first,
            packed.extract(comptime!(4 * i)),
            packed.extract(comptime!(4 * i + 1)),
            packed.extract(comptime!(4 * i + 2)),
            packed.extract(comptime!(4 * i + 3)),
            comptime!((i * 16 * 128) as u32),
        );
    }
}

/// Writes a left operand `[64, cols]` to `address` of shared memory, 16 bytes of each unit after the
/// other's, for `load_packed` of another warpgroup.
#[cube]
pub fn store_packed<P: Size>(packed: Vector<u32, P>, address: u32, #[comptime] cols: usize) {
    let first = address + UNIT_POS % 128u32 * 16u32;
    #[unroll]
    for i in 0..comptime!(cols / 16) {
        let mut words = Vector::<u32, Const<4>>::empty();
        #[unroll]
        for e in 0..4usize {
            words.insert(e, packed.extract(comptime!(4 * i + e)));
        }
        hopper::store_words(first + comptime!((i * 2048) as u32), words);
    }
}

/// The product of `cols` columns that the unit in this one's place wrote by `store_packed`.
#[cube]
pub fn load_packed<E: HalfFloat>(address: u32, #[comptime] cols: usize) -> SeenFrag {
    let first = address + UNIT_POS % 128u32 * 16u32;
    let mut frag = fragment(cols);
    #[unroll]
    for i in 0..comptime!(cols / 16) {
        let words = hopper::load_words(first + comptime!((i * 2048) as u32));
        let values = Vector::<f32, Const<8>>::cast_from(Vector::<E, Const<8>>::reinterpret(words));
        #[unroll]
        for n in 0..2usize {
            let mut cell = Vector::<f32, Const<4>>::empty();
            #[unroll]
            for e in 0..4usize {
                cell.insert(e, values.extract(comptime!(4 * n + e)));
            }
            frag.cells[comptime!(2 * i + n)] = cell;
        }
    }
    frag
}

/// Bytes of a plane's part of a piece of f32.
pub const PLANE_BYTES: u32 = (PIECE * PIECE) as u32;

/// Writes this plane's part of a piece to `address`, in the order in which `load_piece` reads it:
/// blocks of 8 columns, within them by lane.
#[cube]
pub fn store_piece(piece: &SeenFrag, address: u32) {
    let first = address + UNIT_POS % 32u32 * 16u32;
    #[unroll]
    for i in 0..comptime!(PIECE / 8) {
        hopper::store_floats(first, piece.cells[i], comptime!((i * 512) as u32));
    }
}

/// Rows of `boxes` pieces side by side, which lie one behind the other from `from[first]` on. Each of
/// the four planes of the cube reads its 16 rows.
#[cube]
pub fn load_pieces(
    from: &[Vector<f32, Const<4>>],
    first: usize,
    #[comptime] boxes: usize,
) -> SeenFrag {
    let mut out = fragment(comptime!(boxes * PIECE));
    let lane = first + (UNIT_POS / 32u32 * 256u32 + UNIT_POS % 32u32) as usize;
    #[unroll]
    for i in 0..comptime!(boxes * PIECE / 8) {
        out.cells[i] = from[lane + comptime!(i / 8 * 1024 + i % 8 * 32)];
    }
    out
}

/// Columns of an accumulator that the four units of a row hold of a `piece` each.
pub const PIECE_COLS: usize = 32;

/// Which 8 columns this unit's piece `part` are: `[8·at, 8·at + 8)`.
#[cube]
pub fn piece_at(#[comptime] part: usize) -> u32 {
    UNIT_POS % 4u32 + comptime!((part * PIECE_COLS / 8) as u32)
}

/// Eight neighbouring columns of this unit's row `r`, times `factor`, rounded to `E`, in order; zeros
/// past the accumulator's columns. The four units of a row exchange pairs for it: all take part.
#[cube]
pub fn piece<E: HalfFloat>(
    acc: &SeenFrag,
    factor: f32,
    #[comptime] r: usize,
    #[comptime] part: usize,
) -> Vector<u32, Const<4>> {
    let x0 = pair::<E>(acc, factor, r, comptime!(4 * part));
    let x1 = pair::<E>(acc, factor, r, comptime!(4 * part + 1));
    let x2 = pair::<E>(acc, factor, r, comptime!(4 * part + 2));
    let x3 = pair::<E>(acc, factor, r, comptime!(4 * part + 3));
    // A 4×4 transpose: neighbours first, then those that are two apart.
    let odd = UNIT_POS & 1u32 != 0u32;
    let high = UNIT_POS & 2u32 != 0u32;
    let low_pair = ptx::shuffle_xor_u32(select(odd, x0, x1), 1u32);
    let high_pair = ptx::shuffle_xor_u32(select(odd, x2, x3), 1u32);
    let y0 = select(odd, low_pair, x0);
    let y1 = select(odd, x1, low_pair);
    let y2 = select(odd, high_pair, x2);
    let y3 = select(odd, x3, high_pair);
    let even = ptx::shuffle_xor_u32(select(high, y0, y2), 2u32);
    let uneven = ptx::shuffle_xor_u32(select(high, y1, y3), 2u32);
    let mut out = Vector::<u32, Const<4>>::empty();
    out.insert(0usize, select(high, even, y0));
    out.insert(1usize, select(high, uneven, y1));
    out.insert(2usize, select(high, y2, even));
    out.insert(3usize, select(high, y3, uneven));
    out
}

/// The first of the four neighbouring columns that this unit has of the `part`-th 16.
#[cube]
pub fn quad_at(#[comptime] part: usize) -> u32 {
    let unit = UNIT_POS % 4u32;
    comptime!(16 * part as u32) + unit % 2u32 * 8u32 + unit / 2u32 * 4u32
}

/// Four neighbouring columns of this unit's row `r`, in f32, in order, as bits. Neighbouring units
/// exchange pairs for it: all take part.
#[cube]
pub fn quad(
    acc: &SeenFrag,
    #[comptime] r: usize,
    #[comptime] part: usize,
) -> Vector<u32, Const<4>> {
    let (left, right) = (
        acc.cells[comptime!(2 * part)],
        acc.cells[comptime!(2 * part + 1)],
    );
    let odd = UNIT_POS & 1u32 != 0u32;
    let mut out = Vector::<u32, Const<4>>::empty();
    #[unroll]
    for e in 0..2usize {
        let (x, y) = (
            left.extract(comptime!(2 * r + e)),
            right.extract(comptime!(2 * r + e)),
        );
        let other = ptx::shuffle_xor(select(odd, x, y), 1u32);
        out.insert(e, u32::reinterpret(select(odd, other, x)));
        out.insert(comptime!(2 + e), u32::reinterpret(select(odd, y, other)));
    }
    out
}

/// This unit's two columns of row `r` in the block `n` of 8 columns.
#[cube]
fn pair<E: HalfFloat>(
    acc: &SeenFrag,
    factor: f32,
    #[comptime] r: usize,
    #[comptime] n: usize,
) -> u32 {
    if comptime!(n < acc.n_tiles) {
        let cell = acc.cells[n];
        let low = cell.extract(comptime!(2 * r)) * factor;
        let high = cell.extract(comptime!(2 * r + 1)) * factor;
        ptx::pack(low, high, comptime!(E::PTX))
    } else {
        0u32.runtime()
    }
}
