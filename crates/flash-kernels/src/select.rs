//! One table: device class × element size × head size → plan.

use cubecl::{
    client::Client,
    features::{MmaConfig, Plane, TypeUsage},
    ir::{AddressType, DeviceProperties, ElemType, FloatKind as CubeFloat},
};

use crate::{
    AttentionError, AttentionProblem, FloatKind,
    plan::{
        CopyKind, Exponent, Isa, Pass, Plan, QueryOperand, Reduction, ScaleKind, TileShape,
        UnitKind, ValueBuffer,
    },
};

/// What a device can do, as far as the table asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceClass {
    /// Instructions beyond CubeCL's own.
    pub isa: Isa,
    /// Units of a plane, if it is fixed and has plane operations.
    pub plane_size: Option<usize>,
    /// Shared memory of a cube in bytes.
    pub shared_bytes: usize,
    /// Units of a cube.
    pub max_threads: usize,
    /// Cubes along x and y.
    pub max_cubes: (u32, u32),
    /// Widest vector in global memory.
    pub max_vector: usize,
    /// f16 can be stored and converted.
    pub f16: bool,
    /// bf16 can be stored and converted.
    pub bf16: bool,
    /// 16×16×16 cooperative matrices of f16.
    pub cmma_f16: bool,
    /// 16×16×16 cooperative matrices of bf16.
    pub cmma_bf16: bool,
    /// Buffers of more than 2^32 elements can be addressed.
    pub wide_addresses: bool,
}

impl DeviceClass {
    /// The class of the device behind `client`.
    pub fn of(client: &Client) -> Self {
        Self::from_properties(client.properties())
    }

    /// The class of a device with these properties.
    pub fn from_properties(device: &DeviceProperties) -> Self {
        let hardware = &device.hardware;
        let plane = &device.features.plane;
        let fixed = hardware.plane_size_min == hardware.plane_size_max;
        let (f16, bf16) = (
            ElemType::Float(CubeFloat::F16),
            ElemType::Float(CubeFloat::BF16),
        );
        let isa = isa(device);
        Self {
            isa,
            // CubeCL reports `Plane::Sync` where a plane can synchronise by itself; CUDA always
            // can.
            plane_size: (fixed && plane.contains(Plane::Ops))
                .then_some(hardware.plane_size_max as usize),
            shared_bytes: hardware.max_shared_memory_size,
            max_threads: hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize,
            max_cubes: (hardware.max_cube_count.0, hardware.max_cube_count.1),
            max_vector: hardware.max_vector_size.min(8),
            f16: storable(device, f16),
            bf16: storable(device, bf16),
            cmma_f16: plane.contains(Plane::Sync) && has_cmma(device, f16),
            cmma_bf16: plane.contains(Plane::Sync) && has_cmma(device, bf16),
            wide_addresses: device.supports_address(AddressType::U64),
        }
    }

    fn cmma(&self, dtype: FloatKind) -> bool {
        match dtype {
            FloatKind::F32 => false,
            FloatKind::F16 => self.cmma_f16,
            FloatKind::Bf16 => self.cmma_bf16,
        }
    }

    fn stores(&self, dtype: FloatKind) -> bool {
        match dtype {
            FloatKind::F32 => true,
            FloatKind::F16 => self.f16,
            FloatKind::Bf16 => self.bf16,
        }
    }
}

/// PTX of sm_80 or later. The LLVM compiler reports the same fingerprint but has no inline
/// assembly; it also clears `copy_async`, which tells the two apart.
fn isa(device: &DeviceProperties) -> Isa {
    let sm = device
        .identity
        .fingerprint
        .strip_prefix("ptx_sm")
        .and_then(|sm| {
            sm.trim_end_matches(|c: char| !c.is_ascii_digit())
                .parse::<u32>()
                .ok()
        });
    match sm {
        Some(sm) if sm >= 80 && device.features.copy_async => Isa::Ptx,
        _ => Isa::Portable,
    }
}

fn storable(device: &DeviceProperties, element: ElemType) -> bool {
    let usage = device.type_usage(element);
    usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
}

fn has_cmma(device: &DeviceProperties, element: ElemType) -> bool {
    device.features.matmul.cmma.contains(&MmaConfig {
        a_type: element,
        b_type: element,
        cd_type: ElemType::Float(CubeFloat::F32),
        m: 16,
        n: 16,
        k: 16,
    })
}

/// A row of the table. Rows of a unit are tried from the top; the first whose plan the device can
/// run is taken.
struct Row {
    pass: Pass,
    unit: UnitKind,
    isa: Isa,
    copy: CopyKind,
    /// Largest padded head and value size the row is meant for.
    max_dim: usize,
    block_m: usize,
    block_n: usize,
    threads: usize,
    /// Rows of a unit (Scalar) or of a plane.
    rows: usize,
    values: ValueBuffer,
    queries: QueryOperand,
}

#[allow(clippy::too_many_arguments)]
const fn row(
    pass: Pass,
    unit: UnitKind,
    isa: Isa,
    max_dim: usize,
    [block_m, block_n]: [usize; 2],
    [threads, rows]: [usize; 2],
    values: ValueBuffer,
    queries: QueryOperand,
) -> Row {
    let copy = match isa {
        Isa::Portable => CopyKind::Vector,
        Isa::Ptx => CopyKind::Async,
    };
    Row {
        pass,
        unit,
        isa,
        copy,
        max_dim,
        block_m,
        block_n,
        threads,
        rows,
        values,
        queries,
    }
}

use Isa::{Portable, Ptx};
use Pass::{Dkv, Dq, Forward};
use QueryOperand::{Reread, Resident};
use UnitKind::{Cmma, Mma, Scalar};
use ValueBuffer::{OfKeys, Own};

/// The table. Within a unit: wide devices first, then what fits 48, 32 and 16 KB.
const TABLE: &[Row] = &[
    row(Forward, Mma, Ptx, 64, [128, 64], [128, 32], Own, Resident),
    row(Forward, Mma, Ptx, 128, [128, 64], [128, 32], Own, Reread),
    row(Forward, Mma, Ptx, 256, [128, 64], [256, 16], Own, Reread),
    row(Forward, Mma, Ptx, 256, [64, 32], [128, 16], Own, Reread),
    row(
        Forward,
        Cmma,
        Portable,
        64,
        [64, 32],
        [128, 16],
        Own,
        Resident,
    ),
    row(
        Forward,
        Cmma,
        Portable,
        128,
        [64, 32],
        [128, 16],
        Own,
        Resident,
    ),
    row(
        Forward,
        Cmma,
        Portable,
        256,
        [32, 16],
        [64, 16],
        OfKeys,
        Resident,
    ),
    row(
        Forward,
        Cmma,
        Portable,
        256,
        [16, 16],
        [32, 16],
        OfKeys,
        Resident,
    ),
    row(Forward, Scalar, Ptx, 64, [64, 64], [256, 4], Own, Reread),
    row(Forward, Scalar, Ptx, 128, [64, 32], [256, 4], Own, Reread),
    row(
        Forward,
        Scalar,
        Portable,
        256,
        [64, 64],
        [256, 4],
        Own,
        Reread,
    ),
    row(
        Forward,
        Scalar,
        Portable,
        256,
        [64, 32],
        [128, 4],
        OfKeys,
        Reread,
    ),
    row(
        Forward,
        Scalar,
        Portable,
        256,
        [32, 32],
        [64, 4],
        Own,
        Reread,
    ),
    row(
        Forward,
        Scalar,
        Portable,
        256,
        [32, 32],
        [64, 4],
        OfKeys,
        Reread,
    ),
    row(
        Forward,
        Scalar,
        Portable,
        256,
        [32, 16],
        [64, 4],
        OfKeys,
        Reread,
    ),
    row(
        Forward,
        Scalar,
        Portable,
        256,
        [16, 8],
        [32, 4],
        OfKeys,
        Reread,
    ),
    row(
        Forward,
        Scalar,
        Portable,
        256,
        [4, 8],
        [8, 4],
        OfKeys,
        Reread,
    ),
    row(Dq, Mma, Ptx, 64, [128, 64], [128, 32], Own, Reread),
    row(Dq, Mma, Ptx, 128, [64, 64], [128, 16], Own, Reread),
    row(Dq, Mma, Ptx, 256, [64, 32], [128, 16], Own, Reread),
    row(Dkv, Mma, Ptx, 64, [64, 64], [128, 16], Own, Reread),
    row(Dkv, Mma, Ptx, 128, [64, 32], [128, 16], Own, Reread),
    row(Dkv, Mma, Ptx, 256, [64, 16], [128, 16], Own, Reread),
    row(Dq, Cmma, Portable, 64, [32, 32], [64, 16], OfKeys, Resident),
    row(
        Dq,
        Cmma,
        Portable,
        128,
        [32, 16],
        [64, 16],
        OfKeys,
        Resident,
    ),
    row(
        Dq,
        Cmma,
        Portable,
        256,
        [16, 16],
        [32, 16],
        OfKeys,
        Resident,
    ),
    row(
        Dkv,
        Cmma,
        Portable,
        64,
        [32, 32],
        [64, 16],
        OfKeys,
        Resident,
    ),
    row(
        Dkv,
        Cmma,
        Portable,
        128,
        [32, 16],
        [64, 16],
        OfKeys,
        Resident,
    ),
    row(
        Dkv,
        Cmma,
        Portable,
        256,
        [16, 16],
        [32, 16],
        OfKeys,
        Resident,
    ),
    row(Dq, Scalar, Ptx, 128, [64, 32], [256, 4], Own, Reread),
    row(
        Dq,
        Scalar,
        Portable,
        256,
        [64, 32],
        [128, 4],
        OfKeys,
        Reread,
    ),
    row(Dq, Scalar, Portable, 256, [32, 32], [64, 4], OfKeys, Reread),
    row(Dq, Scalar, Portable, 256, [16, 16], [32, 4], OfKeys, Reread),
    row(Dq, Scalar, Portable, 256, [8, 8], [16, 4], OfKeys, Reread),
    row(Dq, Scalar, Portable, 256, [4, 8], [8, 4], OfKeys, Reread),
    row(Dkv, Scalar, Ptx, 128, [64, 32], [256, 4], Own, Reread),
    row(
        Dkv,
        Scalar,
        Portable,
        256,
        [64, 32],
        [128, 4],
        OfKeys,
        Reread,
    ),
    row(
        Dkv,
        Scalar,
        Portable,
        256,
        [32, 32],
        [64, 4],
        OfKeys,
        Reread,
    ),
    row(
        Dkv,
        Scalar,
        Portable,
        256,
        [16, 16],
        [32, 4],
        OfKeys,
        Reread,
    ),
    row(Dkv, Scalar, Portable, 256, [8, 8], [16, 4], OfKeys, Reread),
    row(Dkv, Scalar, Portable, 256, [4, 8], [8, 4], OfKeys, Reread),
];

/// Largest head and value size of any plan.
pub const MAX_HEAD_DIM: usize = 256;

/// How the tensors of a call may be read: the widest vector that all of their rows begin at a
/// multiple of, in elements; 1 where the last dimension is strided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Alignment(pub usize);

/// The first plan of the table that suits `problem` and that `device` can run.
///
/// # Errors
///
/// [`AttentionError::Argument`] for a head size beyond the table, [`AttentionError::Device`] if
/// the device can run none of the rows, naming what the smallest one lacks.
pub fn select(
    device: &DeviceClass,
    problem: &AttentionProblem,
    pass: Pass,
    alignment: Alignment,
) -> Result<Plan, AttentionError> {
    for (argument, value) in [
        ("head_dim", problem.shape.head_dim),
        ("val_dim", problem.shape.val_dim),
    ] {
        if value == 0 || value > MAX_HEAD_DIM {
            let allowed = format!("1 to {MAX_HEAD_DIM} for a kernel");
            return Err(AttentionError::new(argument, value, allowed));
        }
    }
    if !device.stores(problem.dtype) {
        return Err(AttentionError::device(
            "element type",
            format!("without {:?}", problem.dtype),
            "storage and conversion of the tensors' type",
        ));
    }
    let mut refusal = None;
    for row in TABLE {
        if row.pass != pass || !suits(row, device, problem) {
            continue;
        }
        let plan = plan(row, device, problem, alignment);
        match plan.check(device) {
            Ok(()) => return Ok(plan),
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.unwrap_or_else(|| {
        AttentionError::device("class", format!("{device:?}"), "one of the plan table")
    }))
}

/// Is the row for this kind of device, element and head at all?
fn suits(row: &Row, device: &DeviceClass, problem: &AttentionProblem) -> bool {
    let shape = &problem.shape;
    let unit = match row.unit {
        UnitKind::Scalar => true,
        UnitKind::Cmma => device.isa == Isa::Portable && device.cmma(problem.dtype),
        UnitKind::Mma => problem.dtype != FloatKind::F32,
    };
    let isa = row.isa == Isa::Portable || device.isa == Isa::Ptx;
    unit && isa && shape.head_dim.max(shape.val_dim) <= row.max_dim
}

fn plan(row: &Row, device: &DeviceClass, problem: &AttentionProblem, align: Alignment) -> Plan {
    let shape = &problem.shape;
    let stage_bytes = match row.unit {
        UnitKind::Scalar => 4,
        UnitKind::Cmma | UnitKind::Mma => problem.dtype.bytes(),
    };
    let across = row.threads * row.rows / row.block_m;
    let (head_step, val_step, width) = match row.unit {
        // dq and dk are accumulators of head_dim columns.
        UnitKind::Scalar if row.pass != Forward => (4 * across, 4 * across, 4),
        UnitKind::Scalar => (4, 4 * across, 4),
        UnitKind::Cmma => (16, 16, 4),
        UnitKind::Mma => (16, 16, 8),
    };
    let run = match row.unit {
        UnitKind::Mma => 2,
        UnitKind::Scalar | UnitKind::Cmma => 4,
    };
    // A 16-byte copy needs 16-byte rows of the very type that is staged.
    let whole = 16 / stage_bytes;
    let copy = match row.copy {
        CopyKind::Async if problem.dtype.bytes() == stage_bytes && align.0 >= whole => {
            CopyKind::Async
        }
        _ => CopyKind::Vector,
    };
    let load_width = match copy {
        CopyKind::Async => whole,
        CopyKind::Vector => align.0.min(width).min(device.max_vector),
    };
    let planes = device
        .plane_size
        .filter(|size| size.is_power_of_two() && *size >= across);
    Plan {
        pass: row.pass,
        unit: row.unit,
        isa: device.isa,
        tile: TileShape {
            block_m: row.block_m,
            block_n: row.block_n,
            head_pad: shape.head_dim.next_multiple_of(head_step),
            val_pad: shape.val_dim.next_multiple_of(val_step),
        },
        threads: row.threads,
        plane_size: device.plane_size.unwrap_or(1),
        rows: row.rows,
        copy,
        load_width,
        store_width: store_width(row.pass, problem, run.min(device.max_vector)),
        queries: row.queries,
        reduction: match planes {
            Some(_) => Reduction::Plane,
            None => Reduction::Shared,
        },
        values: row.values,
        exponent: match row.unit {
            UnitKind::Mma => Exponent::Fused,
            UnitKind::Scalar | UnitKind::Cmma => Exponent::Exact,
        },
        scale: if problem.scale > 0.0 {
            ScaleKind::Folded
        } else {
            ScaleKind::Before
        },
        causality: problem.causality,
        masking: problem.masking,
        stage_bytes,
    }
}

/// What divides the columns of every tensor that the pass writes.
fn store_width(pass: Pass, problem: &AttentionProblem, run: usize) -> usize {
    let (head, val) = (
        widest(problem.shape.head_dim, run),
        widest(problem.shape.val_dim, run),
    );
    match pass {
        Forward => val,
        Dq => head,
        Dkv => head.min(val),
    }
}

/// The largest power of two up to `limit` that divides `length`.
pub fn widest(length: usize, limit: usize) -> usize {
    let mut width = limit;
    while !length.is_multiple_of(width) {
        width /= 2;
    }
    width
}
