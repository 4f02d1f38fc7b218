//! Tiles that one warpgroup has copied and others multiply: stages in a ring, a pair of barriers
//! each.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

use super::unit::{HalfFloat, hopper, operand::clamped};
use crate::plan::{BOX_COLS, Plan};

/// A ring of stages in shared memory. Tiles are counted through from the beginning: tile `at` lies
/// in stage `at % stages`, in its turn `at / stages`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Ring {
    /// Address of the first stage.
    data: u32,
    /// Address of the barriers: full ones of each stage, then empty ones.
    barriers: u32,
    #[cube(comptime)]
    stages: u32,
    #[cube(comptime)]
    rows: u32,
    #[cube(comptime)]
    cols: u32,
}

/// The rings of a cube.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Rings {
    /// Query tiles.
    pub queries: Ring,
    /// Key tiles.
    pub keys: Ring,
    /// Value tiles.
    pub values: Ring,
}

/// Where a tile lies in global memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Place {
    /// Batch entry.
    pub batch: u32,
    /// Head of that entry.
    pub head: u32,
    /// First row.
    pub row: u32,
}

#[cube]
impl Rings {
    /// Allocates the rings and makes their barriers. Synchronises the cube.
    pub fn new(#[comptime] plan: Plan) -> Rings {
        let barriers = comptime!(plan.barriers());
        let bytes = comptime!(plan.shared_bytes() - 8 * barriers);
        // Swizzled boxes lie at multiples of 1024 bytes.
        let tiles =
            Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(bytes / 16), 1024usize);
        let pairs = Shared::<[u64]>::new_slice(barriers);
        let data = address::<Vector<u32, Const<4>>>(unsafe { tiles.as_ptr_unchecked() });
        let barrier = address::<u64>(unsafe { pairs.as_ptr_unchecked() });
        let (rows, steps) = comptime!((plan.tile.block_m as u32, plan.tile.block_n as u32));
        let (head, val) = comptime!((plan.tile.head_pad as u32, plan.tile.val_pad as u32));
        let (owned, walked) = comptime!((plan.owned_stages() as u32, plan.stages() as u32));
        let queries = ring(data, barrier, owned, rows, head);
        let keys = ring(queries.end(), queries.barriers_end(), walked, steps, head);
        let values = ring(keys.end(), keys.barriers_end(), walked, steps, val);
        if UNIT_POS == 0u32 {
            let readers = comptime!(4 * plan.consumers() as u32);
            queries.init(1u32, readers);
            keys.init(1u32, readers);
            values.init(1u32, readers);
            hopper::barrier_fence();
        }
        // The barriers were made by one unit, and all units wait at them.
        sync_cube();
        Rings {
            queries,
            keys,
            values,
        }
    }
}

/// The rings of a cube of the gradient. Q and K have `head_dim` columns, dO and V `val_dim`: two of
/// them are owned and come once, two are walked.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct GradientRings {
    /// The owned tile of Q or K.
    pub own_head: Ring,
    /// The owned tile of dO or V.
    pub own_val: Ring,
    /// Tiles of K or Q.
    pub head: Ring,
    /// Tiles of V or dO.
    pub val: Ring,
    /// What warpgroups exchange. [`Pass::Fused`]: gradients of scores, queries by keys, that all
    /// multiply. Where a plan [divides](Plan::is_divided) the products: probabilities of the first, in
    /// the order of the registers.
    ///
    /// [`Pass::Fused`]: crate::plan::Pass::Fused
    pub exchange: Ring,
    /// Address of what is added to dq, likewise: a piece of each warpgroup.
    pub addend: u32,
}

#[cube]
impl GradientRings {
    /// Allocates the rings and makes their barriers. Synchronises the cube.
    pub fn new(#[comptime] plan: Plan) -> GradientRings {
        let barriers = comptime!(plan.barriers());
        let pairs = comptime!(8 * plan.stats_len());
        let bytes = comptime!(plan.shared_bytes() - 8 * barriers - pairs);
        let tiles =
            Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(bytes / 16), 1024usize);
        let states = Shared::<[u64]>::new_slice(barriers);
        let data = address::<Vector<u32, Const<4>>>(unsafe { tiles.as_ptr_unchecked() });
        let barrier = address::<u64>(unsafe { states.as_ptr_unchecked() });
        let (rows, steps) = comptime!((plan.tile.block_m as u32, plan.tile.block_n as u32));
        let (cols, val_cols) = comptime!((plan.tile.head_pad as u32, plan.tile.val_pad as u32));
        let (head_stages, stages) = comptime!((plan.head_stages() as u32, plan.stages() as u32));
        let own_head = ring(data, barrier, 1u32, rows, cols);
        let own_val = ring(
            own_head.end(),
            own_head.barriers_end(),
            1u32,
            rows,
            val_cols,
        );
        let head = ring(
            own_val.end(),
            own_val.barriers_end(),
            head_stages,
            steps,
            cols,
        );
        let val = ring(head.end(), head.barriers_end(), stages, steps, val_cols);
        let exchanged = comptime!(plan.exchange_stages() as u32);
        let exchange = ring(val.end(), val.barriers_end(), exchanged, steps, rows);
        if UNIT_POS == 0u32 {
            let planes = comptime!(4 * plan.consumers() as u32);
            // Of a divided plan the first warpgroup writes what the second reads, and who has read
            // that is through with the first one's tile of Q and its statistics too.
            let one = comptime!(if plan.is_divided() { 4 } else { planes });
            own_head.init(1u32, planes);
            own_val.init(1u32, planes);
            // With a tile of Q, a plane brings the statistics of its rows.
            head.init(comptime!(1 + u32::from(plan.stats_len() > 0)), one);
            val.init(1u32, planes);
            exchange.init(one, one);
            hopper::barrier_fence();
        }
        // The barriers were made by one unit, and all units wait at them.
        sync_cube();
        GradientRings {
            own_head,
            own_val,
            head,
            val,
            exchange,
            addend: exchange.end(),
        }
    }
}

#[cube]
fn address<T: CubePrimitive>(p: *const T) -> u32 {
    generic_to_shared::<T>(p)
}

#[cube]
fn ring(
    data: u32,
    barriers: u32,
    #[comptime] stages: u32,
    #[comptime] rows: u32,
    #[comptime] cols: u32,
) -> Ring {
    Ring {
        data,
        barriers,
        stages,
        rows,
        cols,
    }
}

/// Boxes side by side in a tile of `cols` columns.
const fn boxes(cols: u32) -> u32 {
    cols.div_ceil(BOX_COLS as u32)
}

/// Bytes of a box of `rows` rows.
const fn box_bytes(rows: u32) -> u32 {
    rows * 2 * BOX_COLS as u32
}

#[cube]
impl Ring {
    fn bytes(&self) -> comptime_type!(u32) {
        comptime!(boxes(self.cols) * box_bytes(self.rows))
    }

    fn end(&self) -> u32 {
        self.data + comptime!(self.stages * boxes(self.cols) * box_bytes(self.rows))
    }

    fn barriers_end(&self) -> u32 {
        self.barriers + comptime!(16 * self.stages)
    }

    /// Makes the barriers: the full ones for so many `sources` of a tile, the empty ones for so many
    /// planes that read it.
    fn init(&self, #[comptime] sources: u32, #[comptime] readers: u32) {
        #[unroll]
        for stage in 0..comptime!(self.stages) {
            hopper::barrier_init(self.barriers + comptime!(8 * stage), sources);
            hopper::barrier_init(
                self.barriers + comptime!(8 * (self.stages + stage)),
                readers,
            );
        }
    }

    fn full(&self, at: u32) -> u32 {
        self.barriers + 8u32 * (at % comptime!(self.stages))
    }

    fn empty(&self, at: u32) -> u32 {
        self.full(at) + comptime!(8 * self.stages)
    }

    /// Address of tile `at`.
    pub fn tile(&self, at: u32) -> u32 {
        self.data + (at % comptime!(self.stages)) * self.bytes()
    }

    /// Waits until tile `at` is there.
    pub fn await_full(&self, at: u32) {
        hopper::barrier_wait(self.full(at), (at / comptime!(self.stages)) & 1u32);
    }

    /// Says that this plane has read tile `at` for the last time.
    pub fn release(&self, at: u32) {
        hopper::barrier_arrive(self.empty(at));
    }

    /// `release`, if `last`, which is the same in all units: without a branch.
    pub fn release_if(&self, at: u32, last: bool) {
        hopper::barrier_arrive_if(self.empty(at), u32::cast_from(last));
    }

    /// Waits until the stage of tile `at` may be written, like `fill`.
    pub fn await_empty(&self, at: u32) {
        let turn = (at / comptime!(self.stages)) & 1u32;
        hopper::barrier_wait(self.empty(at), turn ^ 1u32);
    }

    /// Says that this plane has brought its part of tile `at`.
    pub fn arrive_full(&self, at: u32) {
        hopper::barrier_arrive(self.full(at));
    }

    /// Makes what is not finite in tile `at` finite, in shared memory. The units that multiply
    /// share the work, and all of them must have read the tile as it was; it is visible to their
    /// products on return. They are synchronised twice.
    pub fn make_finite<E: HalfFloat>(&self, at: u32, #[comptime] plan: Plan) {
        let units = comptime!(plan.consumers() as u32 * 128);
        // A plane that is ahead must not change what another still multiplies.
        hopper::consumer_barrier(units);
        self.clamp::<E>(at, units);
    }

    /// `make_finite` by the units of the first warpgroup, if one of them finds the tile `suspect`: not
    /// 0. Else they are synchronised once. The second one sees the tile by the next barrier between
    /// them.
    pub fn make_finite_if<E: HalfFloat>(&self, at: u32, suspect: u32) {
        if hopper::any_consumer(suspect, 128u32) {
            self.clamp::<E>(at, 128u32);
        }
    }

    fn clamp<E: HalfFloat>(&self, at: u32, #[comptime] units: u32) {
        let first = self.tile(at) + 16u32 * UNIT_POS;
        #[unroll]
        for i in 0..comptime!(boxes(self.cols) * box_bytes(self.rows) / 16 / units) {
            let word = first + comptime!(16 * units * i);
            hopper::store_words(word, clamped::<E>(hopper::load_words(word)));
        }
        hopper::async_fence();
        // Products read what all units wrote.
        hopper::consumer_barrier(units);
    }

    /// Has tile `at` copied from `place` of the tensor behind `map`, once its stage is empty. One
    /// unit of the cube calls it.
    pub fn fill(&self, at: u32, map: u64, place: Place) {
        // In the first turn the phase before the first counts as done.
        self.await_empty(at);
        let full = self.full(at);
        let bytes = self.bytes();
        hopper::barrier_expect(full, bytes);
        let tile = self.tile(at);
        #[unroll]
        for i in 0..comptime!(boxes(self.cols)) {
            hopper::copy_box(
                tile + comptime!(i * box_bytes(self.rows)),
                map,
                full,
                comptime!(i * BOX_COLS as u32).runtime(),
                place.row,
                place.head,
                place.batch,
            );
        }
    }
}
