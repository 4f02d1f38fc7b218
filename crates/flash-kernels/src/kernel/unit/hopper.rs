//! Instructions of sm_90 that CubeCL has no word for: barriers in shared memory, boxed copies, and
//! registers that change hands. Only [`CopyKind::Boxes`](crate::plan::CopyKind) reaches them.
//!
//! CubeCL's own barrier reads the global timer each time it waits; these do not.

use cubecl::prelude::*;

/// `x` of lane 0, in all lanes: the compiler then knows that they agree.
#[cube]
pub fn uniform(x: u32) -> u32 {
    let out: u32;
    gpu_asm!(
        "shfl.sync.idx.b32 {o}, {x}, 0, 31, 0xffffffff;",
        o = out(_) out,
        x = in(_) u32::cast_from(x),
        options(nomem)
    );
    out
}

/// Raises the registers of each unit of this warpgroup to `count`.
#[cube]
pub fn claim_registers(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {count};", options(nomem));
}

/// Lowers them to `count`.
#[cube]
pub fn release_registers(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {count};", options(nomem));
}

/// A barrier at `address` whose phases end with `arrivals` arrivals.
#[cube]
pub fn barrier_init(address: u32, #[comptime] arrivals: u32) {
    gpu_asm!(
        "mbarrier.init.shared::cta.b64 [{b}], {arrivals};",
        b = in(_) u32::cast_from(address)
    );
}

/// Shows the barriers that this unit made to the copy engine.
#[cube]
pub fn barrier_fence() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
}

/// Waits for the end of a phase of parity `parity`.
#[cube]
pub fn barrier_wait(address: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{b}], {ph}; @!p bra AGAIN; }}",
        b = in(_) u32::cast_from(address),
        ph = in(_) u32::cast_from(parity)
    );
}

/// Arrives, and holds the phase open until copies have brought `bytes`.
#[cube]
pub fn barrier_expect(address: u32, #[comptime] bytes: u32) {
    gpu_asm!(
        "{{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [{b}], {bytes}; }}",
        b = in(_) u32::cast_from(address)
    );
}

/// Lane 0 of each plane arrives: a predicate, not a branch.
#[cube]
pub fn barrier_arrive(address: u32) {
    gpu_asm!(
        "{{ .reg .pred p; .reg .b32 l; .reg .b64 t; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; @p mbarrier.arrive.shared::cta.b64 t, [{b}]; }}",
        b = in(_) u32::cast_from(address)
    );
}

/// `barrier_arrive`, where `is_due` is not 0.
#[cube]
pub fn barrier_arrive_if(address: u32, is_due: u32) {
    gpu_asm!(
        "{{ .reg .pred p; .reg .b32 l; .reg .b64 t; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; setp.ne.and.u32 p, {d}, 0, p; @p mbarrier.arrive.shared::cta.b64 t, [{b}]; }}",
        d = in(_) u32::cast_from(is_due),
        b = in(_) u32::cast_from(address)
    );
}

/// Copies a box of the tensor behind `map` to shared memory: `[batch, head, row.., col..]`. What
/// lies past the tensor's end becomes zero. Completes on `barrier`.
#[cube]
pub fn copy_box(to: u32, map: u64, barrier: u32, col: u32, row: u32, head: u32, batch: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{d}], [{m}, {{{x}, {y}, {z}, {w}}}], [{b}];",
        d = in(_) u32::cast_from(to),
        m = in(_) u64::cast_from(map),
        x = in(_) u32::cast_from(col),
        y = in(_) u32::cast_from(row),
        z = in(_) u32::cast_from(head),
        w = in(_) u32::cast_from(batch),
        b = in(_) u32::cast_from(barrier)
    );
}

/// Waits for the `units` units that multiply; the others do not take part.
#[cube]
pub fn consumer_barrier(#[comptime] units: u32) {
    gpu_asm!("bar.sync 1, {units};");
}

/// `consumer_barrier`; is `x` nonzero in any of those units? All of them get the same answer.
#[cube]
pub fn any_consumer(x: u32, #[comptime] units: u32) -> bool {
    let out: u32;
    gpu_asm!(
        "{{ .reg .pred p, q; setp.ne.u32 p, {x}, 0; bar.red.or.pred q, 1, {units}, p; selp.u32 {o}, 1, 0, q; }}",
        o = out(_) out,
        x = in(_) u32::cast_from(x)
    );
    out != 0u32
}

/// Shows what this unit wrote to shared memory to products and the copy engine.
#[cube]
pub fn async_fence() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Writes four 8×8 matrices of 16-bit elements transposed: lane `l` gives the address of row `l % 8`
/// of matrix `l / 8`, register `i` holds two neighbours of column `lane / 4` of matrix `i`.
#[cube]
pub fn store_transposed(address: u32, a: u32, b: u32, c: u32, d: u32, #[comptime] offset: u32) {
    gpu_asm!(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{p}+{offset}], {{{a}, {b}, {c}, {d}}};",
        p = in(_) u32::cast_from(address),
        a = in(_) u32::cast_from(a),
        b = in(_) u32::cast_from(b),
        c = in(_) u32::cast_from(c),
        d = in(_) u32::cast_from(d)
    );
}

/// Writes four f32 to `address + offset` of shared memory.
#[cube]
pub fn store_floats(address: u32, x: Vector<f32, Const<4>>, #[comptime] offset: u32) {
    gpu_asm!(
        "st.shared.v4.f32 [{p}+{offset}], {{{a}, {b}, {c}, {d}}};",
        p = in(_) u32::cast_from(address),
        a = in(_) x.extract(0usize),
        b = in(_) x.extract(1usize),
        c = in(_) x.extract(2usize),
        d = in(_) x.extract(3usize)
    );
}

/// Lane 0, where `is_due` is not 0, has the copy engine add `bytes` of f32 at `from` in shared memory
/// to what lies `16·at` bytes behind `to`. Other cubes may add there at the same time: the order of
/// the sum is not known. What is read must be visible to the engine, and stay until `await_reads`.
#[cube]
pub fn add_to_global(to: *const f32, at: u32, from: u32, is_due: u32, #[comptime] bytes: u32) {
    gpu_asm!(
        "{{ .reg .pred p; .reg .b32 l; .reg .b64 t; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; setp.ne.and.u32 p, {d}, 0, p; mad.wide.u32 t, {o}, 16, {g}; @p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [t], [{s}], {bytes}; @p cp.async.bulk.commit_group; }}",
        d = in(_) u32::cast_from(is_due),
        o = in(_) u32::cast_from(at),
        g = mem_inout(_) to,
        s = mem_in(_) u32::cast_from(from),
        options(explicit_mem)
    );
}

/// Waits until all that this unit had the copy engine add has been read from shared memory.
#[cube]
pub fn await_reads() {
    gpu_asm!("cp.async.bulk.wait_group.read 0;");
}

/// 16 bytes at `address` of shared memory.
#[cube]
pub fn load_words(address: u32) -> Vector<u32, Const<4>> {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "ld.shared.v4.b32 {o}, [{a}];",
        o = out(_) out,
        a = in(_) u32::cast_from(address)
    );
    out
}

/// Writes them.
#[cube]
pub fn store_words(address: u32, words: Vector<u32, Const<4>>) {
    gpu_asm!(
        "st.shared.v4.b32 [{a}], {{{x}, {y}, {z}, {w}}};",
        a = in(_) u32::cast_from(address),
        x = in(_) words.extract(0usize),
        y = in(_) words.extract(1usize),
        z = in(_) words.extract(2usize),
        w = in(_) words.extract(3usize)
    );
}

/// Writes 16 bytes to `to[at]` where `is_due` is not 0: a predicate, so that what comes before and
/// after may mix.
#[cube]
pub fn store_global(
    to: *const Vector<u32, Const<4>>,
    at: usize,
    words: Vector<u32, Const<4>>,
    is_due: u32,
) {
    gpu_asm!(
        "{{ .reg .pred p; .reg .b64 t; setp.ne.u32 p, {d}, 0; mad.lo.u64 t, {o}, 16, {g}; @p st.global.v4.b32 [t], {{{x}, {y}, {z}, {w}}}; }}",
        d = in(_) u32::cast_from(is_due),
        o = in(_) u64::cast_from(at),
        g = mem_out(_) to,
        x = in(_) words.extract(0usize),
        y = in(_) words.extract(1usize),
        z = in(_) words.extract(2usize),
        w = in(_) words.extract(3usize),
        options(explicit_mem)
    );
}

/// `store_global` of one f32.
#[cube]
pub fn store_global_f32(to: *const f32, at: usize, x: f32, is_due: u32) {
    gpu_asm!(
        "{{ .reg .pred p; .reg .b64 t; setp.ne.u32 p, {d}, 0; mad.lo.u64 t, {o}, 4, {g}; @p st.global.f32 [t], {x}; }}",
        d = in(_) u32::cast_from(is_due),
        o = in(_) u64::cast_from(at),
        g = mem_out(_) to,
        x = in(_) f32::cast_from(x),
        options(explicit_mem)
    );
}
