//! `mma.sync` with operands by `ldmatrix`; probabilities never leave registers.
//!
//! A plane owns `plan.rows` rows. Fragment layouts are those of the PTX manual: with
//! `g = lane / 4` and `t = lane % 4` an accumulator holds `(g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)`.
//! What depends on the element is behind `Operand`.

use core::marker::PhantomData;

use cubecl::prelude::*;

use super::{MatrixUnit, Operand, Right, ptx, stage_elements};
use crate::{
    kernel::tile::SharedTile,
    plan::{Plan, QueryOperand},
};

/// See the module.
pub struct Mma<E: Operand> {
    _element: PhantomData<E>,
}

/// Accumulators, `[m16, n8]`.
#[derive(CubeType)]
pub struct MmaFrag {
    pub(super) cells: Array<Vector<f32, Const<4>>>,
    #[cube(comptime)]
    pub(super) m_tiles: usize,
    #[cube(comptime)]
    pub(super) n_tiles: usize,
}

/// Left operands `[m16, 32 bytes]` in registers.
#[derive(CubeType)]
pub struct MmaHeld {
    cells: Array<Vector<u32, Const<4>>>,
}

/// The query operand: in registers, or where to read it again.
#[derive(CubeType)]
pub struct MmaLeft {
    cells: Array<Vector<u32, Const<4>>>,
    address: u32,
}

#[cube]
pub(super) fn lane() -> u32 {
    UNIT_POS % 32u32
}

#[cube]
fn plane_row(#[comptime] plan: Plan) -> u32 {
    let plane = UNIT_POS / 32u32;
    if comptime!(plan.is_divided()) {
        // Two warpgroups have the same rows.
        plane % 4u32 * comptime!(plan.rows as u32)
    } else {
        plane * comptime!(plan.rows as u32)
    }
}

/// Address from which this lane's rows of a block of 16 rows are read, for the lane order
/// (rows 0-7, rows 8-15, then the right half): left operands, and right ones transposed.
#[cube]
pub(super) fn row_first<S: Scalar, V: Size>(tile: &SharedTile<S, V>, first_row: u32) -> u32 {
    let row = first_row + lane() % 16u32;
    ptx::shared_address(&tile.data, tile.base)
        + (row * comptime!(tile.stride as u32) + lane() / 16u32) * 16u32
}

/// Likewise for the order (columns 0-7, columns 8-15, then the lower half): right operands as
/// they lie.
#[cube]
fn col_first<S: Scalar, V: Size>(tile: &SharedTile<S, V>) -> u32 {
    let row = (lane() / 16u32) * 8u32 + lane() % 8u32;
    ptx::shared_address(&tile.data, tile.base)
        + (row * comptime!(tile.stride as u32) + lane() / 8u32 % 2u32) * 16u32
}

/// Bytes from a tile's first block to the one at `row` and `block`; `stride` in vectors of 16 bytes.
pub(super) const fn block_offset(row: usize, block: usize, stride: usize) -> u32 {
    (16 * (row * stride + 2 * block)) as u32
}

/// Blocks of 32 bytes, the depth of an instruction, in `depth` elements.
const fn blocks(depth: usize, plan: Plan) -> usize {
    depth * plan.stage_bytes / 32
}

#[cube]
fn zeros(#[comptime] m_tiles: usize, #[comptime] n_tiles: usize) -> MmaFrag {
    let mut cells = Array::<Vector<f32, Const<4>>>::new(comptime!(m_tiles * n_tiles));
    #[unroll]
    for i in 0..comptime!(m_tiles * n_tiles) {
        cells[i] = Vector::<f32, Const<4>>::new(0.0);
    }
    MmaFrag {
        cells,
        m_tiles,
        n_tiles,
    }
}

/// Half of what one `ldmatrix` of a right operand brought: the block `half` of 8 columns.
#[cube]
fn right_half(both: Vector<u32, Const<4>>, #[comptime] half: usize) -> Vector<u32, Const<2>> {
    let mut out = Vector::<u32, Const<2>>::empty();
    out.insert(0usize, both.extract(comptime!(2 * half)));
    out.insert(1usize, both.extract(comptime!(2 * half + 1)));
    out
}

/// `frag[m, 2·pair ..] += a·both` for one left block and the two right blocks of a load.
#[cube]
fn multiply_pair<E: Operand>(
    frag: &mut MmaFrag,
    a: Vector<u32, Const<4>>,
    both: Vector<u32, Const<4>>,
    #[comptime] m: usize,
    #[comptime] pair: usize,
) {
    #[unroll]
    for half in 0..2usize {
        let i = comptime!(m * frag.n_tiles + 2 * pair + half);
        frag.cells[i] = E::multiply(a, right_half(both, half), frag.cells[i]);
    }
}

#[cube]
fn left_block(
    a: &MmaLeft,
    #[comptime] m: usize,
    #[comptime] k: usize,
    #[comptime] depth: usize,
    #[comptime] plan: Plan,
) -> Vector<u32, Const<4>> {
    if comptime!(plan.queries == QueryOperand::Resident) {
        a.cells[comptime!(m * blocks(depth, plan) + k)]
    } else {
        let stride = comptime!(plan.row_stride(depth) / plan.vector_elems());
        ptx::ldmatrix(a.address, comptime!(block_offset(16 * m, k, stride)))
    }
}

#[cube]
impl<E: Operand> MatrixUnit for Mma<E> {
    type Stage = E::Stage;
    type Width = E::Width;
    type Left = MmaLeft;
    type Held = MmaHeld;
    type Frag = MmaFrag;
    type Acc = MmaFrag;
    type Scratch = ();

    fn stage<L: Numeric, W: Size>(
        value: Vector<E::Stage, E::Width>,
        loaded: Vector<L, W>,
        #[comptime] j: usize,
        #[comptime] _plan: Plan,
    ) -> Vector<E::Stage, E::Width> {
        stage_elements::<E::Stage, E::Width, L, W>(value, loaded, j)
    }

    fn scratch(#[comptime] _plan: Plan) {}

    fn left(
        tile: &SharedTile<E::Stage, E::Width>,
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) -> MmaLeft {
        let address = row_first(tile, plane_row(plan));
        let m_tiles = comptime!(plan.rows / 16);
        let k_tiles = comptime!(blocks(depth, plan));
        let resident = comptime!(plan.queries == QueryOperand::Resident);
        let len = comptime!(if resident { m_tiles * k_tiles } else { 1 });
        let mut cells = Array::<Vector<u32, Const<4>>>::new(len);
        if resident {
            #[unroll]
            for m in 0..m_tiles {
                #[unroll]
                for k in 0..k_tiles {
                    let offset = comptime!(block_offset(16 * m, k, tile.stride));
                    let words = ptx::ldmatrix(address, offset);
                    cells[comptime!(m * k_tiles + k)] = E::taken(words, plan);
                }
            }
        } else {
            E::take_rows(tile, plane_row(plan), depth, plan);
        }
        MmaLeft { cells, address }
    }

    fn product(
        a: &MmaLeft,
        b: &SharedTile<E::Stage, E::Width>,
        _scratch: &mut (),
        #[comptime] depth: usize,
        #[comptime] plan: Plan,
    ) -> MmaFrag {
        let m_tiles = comptime!(plan.rows / 16);
        let n_tiles = comptime!(plan.tile.block_n / 8);
        let mut frag = zeros(m_tiles, n_tiles);
        let address = col_first(b);
        #[unroll]
        for k in 0..comptime!(blocks(depth, plan)) {
            let mut left = Array::<Vector<u32, Const<4>>>::new(m_tiles);
            #[unroll]
            for m in 0..m_tiles {
                left[m] = left_block(a, m, k, depth, plan);
            }
            #[unroll]
            for pair in 0..comptime!(n_tiles / 2) {
                let offset = comptime!(block_offset(16 * pair, k, b.stride));
                let both = E::taken(ptx::ldmatrix(address, offset), plan);
                #[unroll]
                for m in 0..m_tiles {
                    multiply_pair::<E>(&mut frag, left[m], both, m, pair);
                }
            }
        }
        frag
    }

    fn hold(frag: &MmaFrag, _scratch: &mut (), #[comptime] plan: Plan) -> MmaHeld {
        let k_tiles = comptime!(blocks(8 * frag.n_tiles, plan));
        let mut cells = Array::<Vector<u32, Const<4>>>::new(comptime!(frag.m_tiles * k_tiles));
        #[unroll]
        for m in 0..comptime!(frag.m_tiles) {
            #[unroll]
            for k in 0..k_tiles {
                cells[comptime!(m * k_tiles + k)] = E::held(frag, m, k, plan);
            }
        }
        MmaHeld { cells }
    }

    fn reuse(#[comptime] _plan: Plan) {}

    fn zero(#[comptime] cols: usize, #[comptime] plan: Plan) -> MmaFrag {
        zeros(comptime!(plan.rows / 16), comptime!(cols / 8))
    }

    fn accumulate(
        acc: &mut MmaFrag,
        a: &MmaHeld,
        b: &SharedTile<E::Stage, E::Width>,
        _scratch: &mut (),
        #[comptime] right: Right,
        #[comptime] plan: Plan,
    ) {
        let k_tiles = comptime!(blocks(plan.tile.block_n, plan));
        let address = E::right_address(b);
        #[unroll]
        for k in 0..k_tiles {
            #[unroll]
            for pair in 0..comptime!(acc.n_tiles / 2) {
                let both = E::right_pair(address, k, pair, comptime!(b.stride), right, plan);
                #[unroll]
                for m in 0..comptime!(acc.m_tiles) {
                    let left = a.cells[comptime!(m * k_tiles + k)];
                    multiply_pair::<E>(acc, left, both, m, pair);
                }
            }
        }
    }

    fn rescale(
        acc: &mut MmaFrag,
        alpha: &Array<f32>,
        stale: bool,
        _scratch: &mut (),
        #[comptime] _plan: Plan,
    ) {
        if stale {
            #[unroll]
            for m in 0..comptime!(acc.m_tiles) {
                let (upper, lower) = (alpha[comptime!(2 * m)], alpha[comptime!(2 * m + 1)]);
                #[unroll]
                for n in 0..comptime!(acc.n_tiles) {
                    let x = acc.cells[comptime!(m * acc.n_tiles + n)];
                    let mut y = Vector::<f32, Const<4>>::empty();
                    y.insert(0usize, x.extract(0usize) * upper);
                    y.insert(1usize, x.extract(1usize) * upper);
                    y.insert(2usize, x.extract(2usize) * lower);
                    y.insert(3usize, x.extract(3usize) * lower);
                    acc.cells[comptime!(m * acc.n_tiles + n)] = y;
                }
            }
        }
    }

    fn part_cols(#[comptime] cols: usize, #[comptime] _plan: Plan) -> comptime_type!(usize) {
        cols
    }

    fn read(
        acc: &MmaFrag,
        _scratch: &mut (),
        #[comptime] _part: usize,
        #[comptime] _cols: usize,
        #[comptime] _plan: Plan,
    ) -> MmaFrag {
        let (m_tiles, n_tiles) = comptime!((acc.m_tiles, acc.n_tiles));
        let mut cells = Array::<Vector<f32, Const<4>>>::new(comptime!(m_tiles * n_tiles));
        #[unroll]
        for i in 0..comptime!(m_tiles * n_tiles) {
            cells[i] = acc.cells[i];
        }
        MmaFrag {
            cells,
            m_tiles,
            n_tiles,
        }
    }

    fn frag_rows(#[comptime] plan: Plan) -> comptime_type!(usize) {
        comptime!(plan.rows / 8)
    }

    fn rows(frag: &MmaFrag) -> comptime_type!(usize) {
        comptime!(2 * frag.m_tiles)
    }

    fn cols(frag: &MmaFrag) -> comptime_type!(usize) {
        comptime!(2 * frag.n_tiles)
    }

    fn run(frag: &MmaFrag) -> comptime_type!(usize) {
        let _ = comptime!(frag.n_tiles);
        2usize
    }

    fn get(frag: &MmaFrag, #[comptime] r: usize, #[comptime] c: usize) -> f32 {
        frag.cells[comptime!(r / 2 * frag.n_tiles + c / 2)].extract(comptime!(r % 2 * 2 + c % 2))
    }

    fn set(frag: &mut MmaFrag, #[comptime] r: usize, #[comptime] c: usize, value: f32) {
        let i = comptime!(r / 2 * frag.n_tiles + c / 2);
        let mut cell = frag.cells[i];
        cell.insert(comptime!(r % 2 * 2 + c % 2), value);
        frag.cells[i] = cell;
    }

    fn row(frag: &MmaFrag, #[comptime] r: usize, #[comptime] plan: Plan) -> u32 {
        let _ = comptime!(frag.m_tiles);
        plane_row(plan) + comptime!((r / 2 * 16 + r % 2 * 8) as u32) + lane() / 4u32
    }

    fn col(frag: &MmaFrag, #[comptime] c: usize, #[comptime] _plan: Plan) -> u32 {
        let _ = comptime!(frag.n_tiles);
        (lane() % 4u32) * 2u32 + comptime!((c / 2 * 8 + c % 2) as u32)
    }

    fn reduce_max(values: &mut Array<f32>, _scratch: &mut (), #[comptime] plan: Plan) {
        #[unroll]
        for r in 0..comptime!(plan.rows / 8) {
            let x = max(values[r], ptx::shuffle_xor(values[r], 1u32));
            values[r] = max(x, ptx::shuffle_xor(x, 2u32));
        }
    }

    fn any(flag: bool) -> bool {
        ptx::any(u32::cast_from(flag))
    }

    fn reduce_sum(values: &mut Array<f32>, _scratch: &mut (), #[comptime] plan: Plan) {
        #[unroll]
        for r in 0..comptime!(plan.rows / 8) {
            let x = values[r] + ptx::shuffle_xor(values[r], 1u32);
            values[r] = x + ptx::shuffle_xor(x, 2u32);
        }
    }
}
