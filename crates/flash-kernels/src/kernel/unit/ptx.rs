//! PTX instructions that CubeCL has no word for. Only plans with `Isa::Ptx` may reach them.
//!
//! `T::cast_from(x)` around an operand forces a read by value: a mutable variable would hand its
//! address to the assembler.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// `2^x`, `ex2.approx.ftz.f32`.
#[cube]
pub fn ex2(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) out, in(_) f32::cast_from(x), options(pure, nomem));
    out
}

/// `1 / x`, `rcp.approx.ftz.f32`.
#[cube]
pub fn rcp(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("rcp.approx.ftz.f32 {}, {};", out(_) out, in(_) f32::cast_from(x), options(pure, nomem));
    out
}

/// `x`, unknown to the compiler: what is derived from it is computed anew, instead of being kept in
/// registers since it was first derived.
#[cube]
pub fn opaque(x: u32) -> u32 {
    let out: u32;
    gpu_asm!("mov.b32 {o}, {x};", o = out(_) out, x = in(_) u32::cast_from(x), options(nomem));
    out
}

/// Address of `data[at]` in the shared window, for vectors of 16 bytes.
#[cube]
pub fn shared_address<S: Scalar, V: Size>(data: &Shared<[Vector<S, V>]>, at: usize) -> u32 {
    generic_to_shared::<Vector<S, V>>(unsafe { data.as_ptr_unchecked() }) + (at * 16) as u32
}

/// `to[at] = from[index]`, 16 bytes, of which the first `bytes` (0 or 16) are read and the rest
/// become zero. Complete after `copy_wait` for the group that `copy_commit` closes.
#[cube]
pub fn copy_async<S: Scalar, V: Size, E: Scalar, W: Size>(
    to: &Shared<[Vector<S, V>]>,
    at: usize,
    from: &Tensor<Vector<E, W>>,
    index: usize,
    bytes: u32,
) {
    let dst = shared_address(to, at);
    let source = from.as_slice().slice(index, index + 1);
    copy_16(dst, unsafe { source.as_ptr_unchecked() }, bytes);
}

#[cube]
fn copy_16<E: Scalar, W: Size>(dst: u32, src: *const Vector<E, W>, bytes: u32) {
    gpu_asm!(
        "cp.async.cg.shared.global [{d}], [{s}], 16, {n};",
        d = mem_out(_) u32::cast_from(dst),
        s = mem_in(_) src,
        n = in(_) u32::cast_from(bytes),
        options(explicit_mem)
    );
}

/// `to[at] = from[index]`, 8 bytes, of which the first `bytes` (0 or 8) are read and the rest become
/// zero. Complete as `copy_async`.
#[cube]
pub fn copy_async_8(
    to: &Shared<[Vector<f32, Const<2>>]>,
    at: usize,
    from: &[Vector<f32, Const<2>>],
    index: usize,
    bytes: u32,
) {
    let base = generic_to_shared::<Vector<f32, Const<2>>>(unsafe { to.as_ptr_unchecked() });
    let source = from.slice(index, index + 1);
    copy_8(
        base + (at * 8) as u32,
        unsafe { source.as_ptr_unchecked() },
        bytes,
    );
}

#[cube]
fn copy_8(dst: u32, src: *const Vector<f32, Const<2>>, bytes: u32) {
    gpu_asm!(
        "cp.async.ca.shared.global [{d}], [{s}], 8, {n};",
        d = mem_out(_) u32::cast_from(dst),
        s = mem_in(_) src,
        n = in(_) u32::cast_from(bytes),
        options(explicit_mem)
    );
}

/// Closes the group of this unit's copies issued so far.
#[cube]
pub fn copy_commit() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until all but the latest `pending` of this unit's groups are complete.
#[cube]
pub fn copy_wait(#[comptime] pending: u32) {
    gpu_asm!("cp.async.wait_group {pending};");
}

/// Four 8×8 matrices of 16-bit elements; lane `l` gives the address of row `l % 8` of matrix
/// `l / 8`, register `i` receives two neighbours of row `lane / 4` of matrix `i`.
#[cube]
pub fn ldmatrix(address: u32, #[comptime] offset: u32) -> Vector<u32, Const<4>> {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {o}, [{a} + {offset}];",
        o = out(_) out,
        a = in(_) u32::cast_from(address),
        options(nomem)
    );
    out
}

/// As `ldmatrix`, each matrix transposed.
#[cube]
pub fn ldmatrix_trans(address: u32, #[comptime] offset: u32) -> Vector<u32, Const<4>> {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {o}, [{a} + {offset}];",
        o = out(_) out,
        a = in(_) u32::cast_from(address),
        options(nomem)
    );
    out
}

/// Both halves of `x`, of type `types` (`f16` or `bf16`), clamped to `±largest` (its bits in both
/// halves); NaN becomes `largest`.
#[cube]
pub fn clamp(x: u32, #[comptime] largest: u32, #[comptime] types: &'static str) -> u32 {
    let out: u32;
    let smallest = comptime!(largest | 0x8000_8000);
    gpu_asm!(
        "{{ .reg .b32 t, u; mov.b32 u, {largest}; min.{types}x2 t, {x}, u; mov.b32 u, {smallest}; max.{types}x2 {o}, t, u; }}",
        o = out(_) out,
        x = in(_) u32::cast_from(x),
        options(pure, nomem)
    );
    out
}

/// `c + a·b` for `a` 16×16, `b` 16×8 of type `types` (`f16` or `bf16`), `c` 16×8 of f32.
#[cube]
pub fn mma_m16n8k16(
    a: Vector<u32, Const<4>>,
    b: Vector<u32, Const<2>>,
    c: Vector<f32, Const<4>>,
    #[comptime] types: &'static str,
) -> Vector<f32, Const<4>> {
    let out: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{types}.{types}.f32 {o}, {a}, {b}, {c};",
        o = out(_) out,
        a = in(_) Vector::<u32, Const<4>>::cast_from(a),
        b = in(_) Vector::<u32, Const<2>>::cast_from(b),
        c = in(_) Vector::<f32, Const<4>>::cast_from(c),
        options(pure, nomem)
    );
    out
}

/// `c + a·b` for `a` 16×8, `b` 8×8 of tf32, `c` 16×8 of f32. The 13 bits that tf32 has not are ignored.
#[cube]
pub fn mma_m16n8k8(
    a: Vector<u32, Const<4>>,
    b: Vector<u32, Const<2>>,
    c: Vector<f32, Const<4>>,
) -> Vector<f32, Const<4>> {
    let out: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {o}, {a}, {b}, {c};",
        o = out(_) out,
        a = in(_) Vector::<u32, Const<4>>::cast_from(a),
        b = in(_) Vector::<u32, Const<2>>::cast_from(b),
        c = in(_) Vector::<f32, Const<4>>::cast_from(c),
        options(pure, nomem)
    );
    out
}

/// The bits of an f32, rounded to tf32 to the nearest, by `mode` of two equally near: `rna` away from
/// zero, `rn` to the even one (sm_90 and later). What tf32 has no bits for may hold anything.
#[cube]
pub fn round_tf32(x: u32, #[comptime] mode: &'static str) -> u32 {
    let out: u32;
    gpu_asm!(
        "cvt.{mode}.tf32.f32 {o}, {x};",
        o = out(_) out,
        x = in(_) u32::cast_from(x),
        options(pure, nomem)
    );
    out
}

/// The bits of an f32, clamped to `±largest` (its bits); NaN becomes `largest`.
#[cube]
pub fn clamp_f32(x: u32, #[comptime] largest: u32) -> u32 {
    let out: u32;
    let smallest = comptime!(largest | 0x8000_0000);
    gpu_asm!(
        "{{ .reg .b32 t, u; mov.b32 u, {largest}; min.f32 t, {x}, u; mov.b32 u, {smallest}; max.f32 {o}, t, u; }}",
        o = out(_) out,
        x = in(_) u32::cast_from(x),
        options(pure, nomem)
    );
    out
}

/// 4 bytes of shared memory.
#[cube]
pub fn load_word(address: u32, #[comptime] offset: u32) -> u32 {
    let out: u32;
    gpu_asm!(
        "ld.shared.b32 {o}, [{a} + {offset}];",
        o = out(_) out,
        a = in(_) u32::cast_from(address),
        options(nomem)
    );
    out
}

/// Two f32 rounded to `types` (`f16` or `bf16`) in one register, `lo` in the low half.
#[cube]
pub fn pack(lo: f32, hi: f32, #[comptime] types: &'static str) -> u32 {
    let out: u32;
    gpu_asm!(
        "cvt.rn.{types}x2.f32 {o}, {h}, {l};",
        o = out(_) out,
        h = in(_) f32::cast_from(hi),
        l = in(_) f32::cast_from(lo),
        options(pure, nomem)
    );
    out
}

/// The value of the lane whose number differs in the bits `mask`. CubeCL's shuffle asks for the
/// active mask first, which costs a vote.
#[cube]
pub fn shuffle_xor(x: f32, #[comptime] mask: u32) -> f32 {
    let out: f32;
    gpu_asm!(
        "shfl.sync.bfly.b32 {o}, {x}, {mask}, 31, 0xffffffff;",
        o = out(_) out,
        x = in(_) f32::cast_from(x),
        options(nomem)
    );
    out
}

/// As `shuffle_xor`.
#[cube]
pub fn shuffle_xor_u32(x: u32, #[comptime] mask: u32) -> u32 {
    let out: u32;
    gpu_asm!(
        "shfl.sync.bfly.b32 {o}, {x}, {mask}, 31, 0xffffffff;",
        o = out(_) out,
        x = in(_) u32::cast_from(x),
        options(nomem)
    );
    out
}

/// Is `x` nonzero in any lane?
#[cube]
pub fn any(x: u32) -> bool {
    let out: u32;
    gpu_asm!(
        "{{ .reg .pred p, q; setp.ne.u32 p, {x}, 0; vote.sync.any.pred q, p, 0xffffffff; selp.u32 {o}, 1, 0, q; }}",
        o = out(_) out,
        x = in(_) u32::cast_from(x),
        options(nomem)
    );
    out != 0u32
}
