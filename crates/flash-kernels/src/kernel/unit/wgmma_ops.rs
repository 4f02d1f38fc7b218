//! Warpgroup products as operations of CubeCL's intermediate representation.
//!
//! Inline assembly of CubeCL has one output and no operand that is read and written; a warpgroup
//! product has up to 128 of them, which must stay where they are from the instruction that starts
//! the product to the wait for it. Each operation here takes an accumulator by value and returns it
//! by value, so that the compiler sees one chain of registers and puts nothing between.

use cubecl::{
    ir::{
        self, CanMaterialize, HasSideEffects,
        attributes::IndexAttr,
        cube_op,
        interfaces::side_effects::{MemoryEffect, MemoryEffectsOp},
        prelude::*,
    },
    prelude::{ReadValue, Size, Vector, cube, intrinsic},
};
use cubecl_cpp::{
    shared::{CppValue, operation::OpToCPP, ty::TypeExtCPP},
    target::Cuda,
};

/// High word of a matrix descriptor: 1024 bytes from 8 rows to the next 8, 128-byte swizzle.
const DESCRIPTOR_HIGH: u32 = (1024 / 16) | (1 << 30);

/// Low words are apart by so much where the data is by 16 columns of a row, in units of 16 bytes.
const K_MAJOR_STEP: usize = 2;

/// Likewise by 16 rows.
const MN_MAJOR_STEP: usize = 128;

/// A right operand whose rows are columns of the product: contiguous along the depth.
pub const ALONG_DEPTH: usize = 0;

/// A right operand whose rows are summed over: contiguous along the columns of the product.
pub const ALONG_COLS: usize = 1;

/// `{%from, ..}`, `count` operands of the assembly.
fn operands(from: usize, count: usize) -> String {
    let names: Vec<_> = (from..from + count).map(|i| format!("%{i}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// The first `count` registers of `r`, each constrained to `constraint`.
fn outputs(constraint: &str, count: usize) -> String {
    let outputs: Vec<_> = (0..count)
        .map(|i| format!("\"{constraint}\"(r.i_{i})"))
        .collect();
    outputs.join(", ")
}

/// The name of the operands' type.
fn element(is_bf16: usize) -> &'static str {
    match is_bf16 {
        0 => "f16",
        _ => "bf16",
    }
}

/// A statement that starts from `initial` and leaves what `assembly` made of it in `result`.
fn statement(result: &str, ty: &str, initial: &str, assembly: &str, constraints: &str) -> String {
    format!(
        "{result} = [&]{{ {ty} r{initial}; asm volatile({assembly:?} : {constraints} : \"memory\"); return r; }}();\n"
    )
}

/// A product of a warpgroup, `m64 × n(cols) × k(depth)`, both operands in shared memory: `a` along `k`,
/// `b` as `right` says.
///
/// `like` only gives the type of the result; the first instruction starts from zero.
#[cube_op(name = "flash.wgmma_product")]
#[result_ty(same_as = like)]
#[op_traits(CanMaterialize, HasSideEffects)]
pub struct ProductOp {
    pub like: Value,
    pub a: Value,
    pub b: Value,
    pub cols: IndexAttr,
    pub depth: IndexAttr,
    pub a_rows: IndexAttr,
    pub right: IndexAttr,
    pub is_bf16: IndexAttr,
}

#[op_interface_impl]
impl MemoryEffectsOp for ProductOp {
    fn memory_effects(&self, _ctx: &Context) -> Vec<MemoryEffect> {
        vec![MemoryEffect::ReadAllInSpace(ir::AddressSpace::Shared)]
    }
}

#[op_interface_impl]
impl OpToCPP<Cuda> for ProductOp {
    fn to_cpp(&self, ctx: &Context) -> String {
        let (cols, depth) = (self.cols(ctx).0, self.depth(ctx).0);
        let (a_rows, e) = (self.a_rows(ctx).0, element(self.is_bf16(ctx).0));
        let right = self.right(ctx).0;
        let count = cols / 2;
        let acc = operands(0, count);
        let mut text =
            "{\n.reg .b64 da, db;\n.reg .b32 la, lb;\nwgmma.fence.sync.aligned;\n".to_owned();
        for k in 0..depth / 16 {
            // Four steps of 16 columns to a box; a row of a box is 8 units of 16 bytes.
            let within = k % 4 * K_MAJOR_STEP;
            let at_a = k / 4 * 8 * a_rows + within;
            let at_b = match right {
                ALONG_DEPTH => k / 4 * 8 * cols + within,
                _ => k * MN_MAJOR_STEP,
            };
            let add = usize::from(k > 0);
            text += &format!(
                "add.u32 la, %{count}, {at_a};\nadd.u32 lb, %{}, {at_b};\n\
                 mov.b64 da, {{la, {DESCRIPTOR_HIGH}}};\nmov.b64 db, {{lb, {DESCRIPTOR_HIGH}}};\n\
                 wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{e}.{e} {acc}, da, db, {add}, 1, 1, 0, {right};\n",
                count + 1,
            );
        }
        text += "wgmma.commit_group.sync.aligned;\n}";
        let constraints = format!(
            "{} : \"r\"({}), \"r\"({})",
            outputs("=f", count),
            self.a(ctx).name(ctx),
            self.b(ctx).name(ctx)
        );
        let ty = self.like(ctx).get_type(ctx).to_cpp(ctx);
        let result = self.get_result(ctx).fmt_left(ctx);
        statement(&result, &ty, "", &text, &constraints)
    }
}

/// `acc + p·b` of a warpgroup, `m64 × n(cols) × k(depth)`, `p` in registers, `b` in shared memory
/// along `n`.
#[cube_op(name = "flash.wgmma_accumulate")]
#[result_ty(same_as = acc)]
#[op_traits(CanMaterialize, HasSideEffects)]
pub struct AccumulateOp {
    pub acc: Value,
    pub p: Value,
    pub b: Value,
    pub cols: IndexAttr,
    pub depth: IndexAttr,
    pub is_bf16: IndexAttr,
}

#[op_interface_impl]
impl MemoryEffectsOp for AccumulateOp {
    fn memory_effects(&self, _ctx: &Context) -> Vec<MemoryEffect> {
        vec![MemoryEffect::ReadAllInSpace(ir::AddressSpace::Shared)]
    }
}

#[op_interface_impl]
impl OpToCPP<Cuda> for AccumulateOp {
    fn to_cpp(&self, ctx: &Context) -> String {
        let (cols, depth) = (self.cols(ctx).0, self.depth(ctx).0);
        let e = element(self.is_bf16(ctx).0);
        let (count, held) = (cols / 2, depth / 4);
        let acc = operands(0, count);
        let mut text = "{\n.reg .b64 db;\n.reg .b32 lb;\nwgmma.fence.sync.aligned;\n".to_owned();
        for k in 0..depth / 16 {
            text += &format!(
                "add.u32 lb, %{}, {};\nmov.b64 db, {{lb, {DESCRIPTOR_HIGH}}};\n\
                 wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{e}.{e} {acc}, {}, db, 1, 1, 1, 1;\n",
                count + held,
                k * MN_MAJOR_STEP,
                operands(count + 4 * k, 4)
            );
        }
        text += "wgmma.commit_group.sync.aligned;\n}";
        let p = self.p(ctx).name(ctx);
        let inputs: Vec<_> = (0..held).map(|i| format!("\"r\"({p}.i_{i})")).collect();
        let constraints = format!(
            "{} : {}, \"r\"({})",
            outputs("+f", count),
            inputs.join(", "),
            self.b(ctx).name(ctx)
        );
        let acc = self.acc(ctx);
        let ty = acc.get_type(ctx).to_cpp(ctx);
        let initial = format!(" = {}", acc.name(ctx));
        let result = self.get_result(ctx).fmt_left(ctx);
        statement(&result, &ty, &initial, &text, &constraints)
    }
}

/// Waits until all but the latest `pending` products are done, of which `acc` was one.
#[cube_op(name = "flash.wgmma_wait")]
#[result_ty(same_as = acc)]
#[op_traits(CanMaterialize, HasSideEffects)]
pub struct WaitOp {
    pub acc: Value,
    pub pending: IndexAttr,
    pub cols: IndexAttr,
}

#[op_interface_impl]
impl MemoryEffectsOp for WaitOp {
    fn memory_effects(&self, _ctx: &Context) -> Vec<MemoryEffect> {
        Vec::new()
    }
}

#[op_interface_impl]
impl OpToCPP<Cuda> for WaitOp {
    fn to_cpp(&self, ctx: &Context) -> String {
        let acc = self.acc(ctx);
        let ty = acc.get_type(ctx).to_cpp(ctx);
        let text = format!("wgmma.wait_group.sync.aligned {};", self.pending(ctx).0);
        let constraints = format!("{} :", outputs("+f", self.cols(ctx).0 / 2));
        let initial = format!(" = {}", acc.name(ctx));
        let result = self.get_result(ctx).fmt_left(ctx);
        statement(&result, &ty, &initial, &text, &constraints)
    }
}

/// Text before the kernel that makes its launch bounds say "one cube to a processor": without it
/// the assembler ignores the hand-over of registers between warpgroups.
#[cube_op(name = "flash.one_cube")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
pub struct OneCubeOp {}

#[op_interface_impl]
impl OpToCPP<Cuda> for OneCubeOp {
    fn to_cpp(&self, _ctx: &Context) -> String {
        "#undef __launch_bounds__\n\
         #define __launch_bounds__(n) __attribute__((launch_bounds(n, 1)))\n"
            .to_owned()
    }
}

/// See [`OneCubeOp`].
#[cube]
pub fn one_cube() {
    intrinsic!(|scope| {
        let op = OneCubeOp::new(scope.ctx_mut());
        let entry = scope.state().entry_func.get_operation();
        op.get_operation().insert_before(scope.ctx(), entry);
    })
}

/// Starts a product: `a` `[64, depth]` of a tile with `a_rows` rows, `b` `[cols, depth]`
/// ([`ALONG_DEPTH`]) or `[depth, cols]` ([`ALONG_COLS`]), both by the low words of their descriptors.
/// The first `cols / 2` registers of the result are its.
#[cube]
pub fn product<N: Size>(
    like: Vector<f32, N>,
    a: u32,
    b: u32,
    #[comptime] cols: usize,
    #[comptime] depth: usize,
    #[comptime] a_rows: usize,
    #[comptime] right: usize,
    #[comptime] is_bf16: usize,
) -> Vector<f32, N> {
    intrinsic!(|scope| {
        let (like, a, b) = (
            like.read_value(scope),
            a.read_value(scope),
            b.read_value(scope),
        );
        let op = ProductOp::new(
            scope.ctx_mut(),
            like,
            a,
            b,
            cols,
            depth,
            a_rows,
            right,
            is_bf16,
        );
        scope.register_with_result(&op).into()
    })
}

/// Starts `acc + p·b`: `p` `[64, depth]`, `b` `[depth, cols]` by the low word of its descriptor.
#[cube]
pub fn accumulate<N: Size, P: Size>(
    acc: Vector<f32, N>,
    p: Vector<u32, P>,
    b: u32,
    #[comptime] cols: usize,
    #[comptime] depth: usize,
    #[comptime] is_bf16: usize,
) -> Vector<f32, N> {
    intrinsic!(|scope| {
        let (acc, p, b) = (
            acc.read_value(scope),
            p.read_value(scope),
            b.read_value(scope),
        );
        let op = AccumulateOp::new(scope.ctx_mut(), acc, p, b, cols, depth, is_bf16);
        scope.register_with_result(&op).into()
    })
}

/// `acc` once all but the latest `pending` products are done.
#[cube]
pub fn wait<N: Size>(
    acc: Vector<f32, N>,
    #[comptime] pending: usize,
    #[comptime] cols: usize,
) -> Vector<f32, N> {
    intrinsic!(|scope| {
        let acc = acc.read_value(scope);
        let op = WaitOp::new(scope.ctx_mut(), acc, pending, cols);
        scope.register_with_result(&op).into()
    })
}
