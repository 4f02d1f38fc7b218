//! One table: device class × element size × head size → plan.

use crate::{
    AttentionError, AttentionProblem, Causality, DeviceClass, FloatKind, Masking, Precision,
    plan::{
        CopyKind, Exponent, Isa, Pass, Plan, QueryOperand, Reduction, ScaleKind, TileShape,
        UnitKind, ValueBuffer,
    },
};

/// A row of the table. Rows of a unit are tried from the top; the first whose plan the device can
/// run is taken.
struct Row {
    pass: Pass,
    unit: UnitKind,
    isa: Isa,
    /// Largest padded head and value size the row is meant for.
    max_dim: usize,
    block_m: usize,
    block_n: usize,
    /// Units of a cube; for [`UnitKind::Cmma`] at 32 to a plane.
    threads: usize,
    /// Rows of a unit (Scalar) or of a plane.
    rows: usize,
    values: ValueBuffer,
    queries: QueryOperand,
    /// Fewest queries that the row is for.
    min_queries: usize,
    /// Most queries that the row is for: more rows to a tile would be computed for nothing.
    max_queries: usize,
    /// The one kind of mask that the row is for, if it has not the registers for both.
    masking: Option<Masking>,
    /// The one causality that the row is the fastest for.
    causality: Option<Causality>,
    /// KB of shared memory that a device must have, whatever the plan needs: which generation the
    /// row was made for. (ptxas spills the same kernel for sm_80.)
    least_kb: usize,
    /// How the row multiplies f32, if it does.
    precision: Precision,
}

/// Writes `TABLE`, a row a line.
macro_rules! table {
    ($($pass:ident $unit:ident $isa:ident $max_dim:literal [$block_m:literal $block_n:literal]
        [$threads:literal $rows:literal] $values:ident $queries:ident
            $(from $min:literal)? $(to $max:literal)? $(masking $masking:ident)? $(when $causality:ident)?
            $(having $kb:literal)? $(in $precision:ident)?,)*) => {
        /// The table. Within a pass and a unit: wide devices first, then what fits 48, 32 and 16 KB.
        const TABLE: &[Row] = &[$(Row {
            pass: Pass::$pass,
            unit: UnitKind::$unit,
            isa: Isa::$isa,
            max_dim: $max_dim,
            block_m: $block_m,
            block_n: $block_n,
            threads: $threads,
            rows: $rows,
            values: ValueBuffer::$values,
            queries: QueryOperand::$queries,
            min_queries: 0 $(+ $min)?,
            max_queries: [$($max,)? usize::MAX][0],
            masking: [$(Some(Masking::$masking),)? None][0],
            causality: [$(Some(Causality::$causality),)? None][0],
            least_kb: 0 $(+ $kb)?,
            precision: [$(Precision::$precision,)? Precision::Full][0],
        }),*];
    };
}

table! {
    // pass, unit, isa, largest dim, [block_m, block_n], [threads, rows], V (or dO), query operand,
    // fewest queries, most queries, only mask, only causality, least KB of shared memory, precision
    Forward Mma    Ptx       64 [ 16 64] [ 32 16] Own    Resident to 16,
    Forward Mma    Ptx      128 [ 16 64] [ 32 16] Own    Reread to 16,
    Forward Mma    Ptx      256 [ 16 32] [ 32 16] Own    Reread to 16,
    Forward Wgmma  Ptx       64 [256  64] [640 16] Own    Reread from 256 masking None,
    Forward Wgmma  Ptx       64 [128 128] [384 16] Own    Reread,
    Forward Wgmma  Ptx      128 [192  80] [512 16] Own    Reread from 2048 masking None,
    Forward Wgmma  Ptx      128 [128 128] [384 16] Own    Reread masking None,
    Forward Wgmma  Ptx      128 [128  96] [384 16] Own    Reread,
    Forward Wgmma  Ptx      192 [128 112] [384 16] Own    Reread masking None,
    Forward Wgmma  Ptx      256 [128  64] [384 16] Own    Reread to 2047 masking None when Causal,
    Forward Wgmma  Ptx      256 [128  80] [384 16] Own    Reread masking None,
    Forward Wgmma  Ptx      256 [128  64] [384 16] Own    Reread,
    Forward Mma    Ptx      128 [ 64 64] [128 16] Own    Reread to 64,
    Forward Mma    Ptx       64 [128 64] [128 32] Own    Resident,
    Forward Mma    Ptx      128 [128 64] [128 32] Own    Reread,
    Forward Mma    Ptx      256 [128 64] [256 16] Own    Reread,
    Forward Mma    Ptx      256 [ 64 32] [128 16] Own    Reread,
    Forward Mma    Ptx       64 [ 16 64] [ 32 16] Own    Resident to 16 in Tf32,
    Forward Mma    Ptx      128 [ 16 32] [ 32 16] Own    Resident to 16 in Tf32,
    Forward Mma    Ptx      256 [ 16 16] [ 32 16] Own    Reread to 16 in Tf32,
    Forward Mma    Ptx       64 [128 32] [128 32] Own    Resident in Tf32,
    Forward Mma    Ptx      128 [ 64 32] [128 16] Own    Resident to 64 in Tf32,
    Forward Mma    Ptx      128 [256 32] [256 32] Own    Reread having 200 in Tf32,
    Forward Mma    Ptx      128 [ 64 32] [128 16] Own    Resident in Tf32,
    Forward Mma    Ptx      256 [ 64 32] [128 16] Own    Reread in Tf32,
    Forward Mma    Ptx      256 [ 64 16] [128 16] Own    Reread in Tf32,
    Forward Mma    Ptx      256 [ 32 16] [ 64 16] Own    Reread in Tf32,
    Forward Cmma   Portable 128 [ 64 32] [128 16] Own    Lent,
    Forward Cmma   Portable 128 [ 64 32] [ 64 32] Own    Lent,
    Forward Cmma   Portable 256 [ 32 16] [ 64 16] Own    Lent,
    Forward Cmma   Portable 256 [ 32 16] [ 32 32] Own    Lent,
    Forward Cmma   Portable 256 [ 16 16] [ 32 16] Own    Lent,
    Forward Scalar Ptx      128 [  8 32] [ 32  4] Own    Reread to 8,
    Forward Scalar Ptx       64 [ 64 64] [256  4] Own    Reread,
    Forward Scalar Ptx      128 [ 64 32] [256  4] Own    Reread,
    Forward Scalar Portable 256 [ 64 64] [256  4] Own    Reread,
    Forward Scalar Portable 256 [ 64 32] [128  4] OfKeys Reread,
    Forward Scalar Portable 256 [ 32 32] [ 64  4] Own    Reread,
    Forward Scalar Portable 256 [ 32 32] [ 64  4] OfKeys Reread,
    Forward Scalar Portable 256 [ 32 16] [ 64  4] OfKeys Reread,
    Forward Scalar Portable 256 [ 16  8] [ 32  4] OfKeys Reread,
    Forward Scalar Portable 256 [  4  8] [  8  4] OfKeys Reread,
    Dq      Wgmma  Ptx       64 [128 128] [384 16] Own    Reread masking None,
    Dq      Wgmma  Ptx      128 [128  96] [384 16] Own    Reread,
    Dq      Wgmma  Ptx      192 [128  64] [384 16] Own    Reread,
    Dq      Wgmma  Ptx      256 [128  48] [384 16] Own    Reread,
    Dkv     Wgmma  Ptx       64 [128  96] [384 16] Own    Reread,
    Dkv     Wgmma  Ptx      128 [128  64] [384 16] Own    Reread,
    Dkv     Wgmma  Ptx      192 [ 64  64] [384 16] Own    Reread,
    Dkv     Wgmma  Ptx      256 [ 64  48] [384 16] Own    Reread,
    Fused   Wgmma  Ptx       64 [128 128] [384 16] Own    Reread masking None,
    Fused   Wgmma  Ptx      128 [128  64] [384 16] Own    Reread,
    Dq      Mma    Ptx       64 [128 32] [128 32] Own    Reread,
    Dq      Mma    Ptx      128 [128 32] [128 32] Own    Reread having 200,
    Dq      Mma    Ptx      128 [ 64 64] [128 16] Own    Reread,
    Dq      Mma    Ptx      256 [ 64 32] [128 16] Own    Reread,
    Dkv     Mma    Ptx       64 [128 32] [128 32] Own    Reread having 200,
    Dkv     Mma    Ptx       64 [ 64 64] [128 16] Own    Reread,
    Dkv     Mma    Ptx      128 [ 64 64] [128 16] Own    Reread,
    Dkv     Mma    Ptx      128 [ 64 32] [128 16] Own    Reread,
    Dkv     Mma    Ptx      256 [ 64 16] [128 16] Own    Reread,
    Dq      Mma    Ptx       64 [128 32] [128 32] Own    Reread masking None in Tf32,
    Dq      Mma    Ptx       64 [ 64 32] [128 16] Own    Reread in Tf32,
    Dq      Mma    Ptx      128 [128 32] [256 16] Own    Reread having 200 in Tf32,
    Dq      Mma    Ptx      128 [ 64 32] [128 16] Own    Reread in Tf32,
    Dq      Mma    Ptx      128 [ 64 16] [128 16] Own    Reread in Tf32,
    Dq      Mma    Ptx      256 [ 64 16] [128 16] Own    Reread in Tf32,
    Dq      Mma    Ptx      256 [ 32 16] [ 64 16] Own    Reread in Tf32,
    Dq      Mma    Ptx      256 [ 16 16] [ 32 16] Own    Reread in Tf32,
    Dkv     Mma    Ptx       64 [128 32] [128 32] Own    Reread masking None having 200 in Tf32,
    Dkv     Mma    Ptx       64 [ 64 32] [128 16] Own    Reread in Tf32,
    Dkv     Mma    Ptx      128 [128 32] [256 16] Own    Reread masking None having 200 in Tf32,
    Dkv     Mma    Ptx      128 [ 64 32] [128 16] Own    Reread in Tf32,
    Dkv     Mma    Ptx      128 [ 32 16] [ 64 16] Own    Reread in Tf32,
    Dkv     Mma    Ptx      256 [ 64 16] [128 16] Own    Reread in Tf32,
    Dkv     Mma    Ptx      256 [ 32 16] [ 64 16] Own    Reread in Tf32,
    Dkv     Mma    Ptx      256 [ 16 16] [ 32 16] Own    Reread in Tf32,
    Dq      Cmma   Mapped    64 [ 64 32] [128 16] Own    Lent masking None,
    Dq      Cmma   Mapped   128 [128 32] [256 16] Own    Lent masking None,
    Dq      Cmma   Portable 128 [ 64 32] [128 16] Own    Lent,
    Dq      Cmma   Portable 128 [ 32 16] [ 64 16] Own    Lent,
    Dq      Cmma   Portable 256 [ 16 16] [ 32 16] Own    Lent,
    Dkv     Cmma   Mapped    64 [ 64 32] [128 16] Own    Lent masking None,
    Dkv     Cmma   Mapped   128 [ 64 32] [128 16] Own    Lent masking None,
    Dkv     Cmma   Portable  64 [ 64 32] [128 16] Own    Lent,
    Dkv     Cmma   Portable 128 [ 64 16] [128 16] Own    Lent,
    Dkv     Cmma   Portable 128 [ 32 16] [ 64 16] Own    Lent,
    Dkv     Cmma   Portable 256 [ 16 16] [ 32 16] Own    Lent,
    Dq      Scalar Ptx      128 [ 64 32] [256  4] Own    Reread,
    Dq      Scalar Portable 256 [ 64 32] [128  4] OfKeys Reread,
    Dq      Scalar Portable 256 [ 32 32] [ 64  4] OfKeys Reread,
    Dq      Scalar Portable 256 [ 16 16] [ 32  4] OfKeys Reread,
    Dq      Scalar Portable 256 [  8  8] [ 16  4] OfKeys Reread,
    Dq      Scalar Portable 256 [  4  8] [  8  4] OfKeys Reread,
    Dkv     Scalar Ptx      128 [ 64 32] [256  4] Own    Reread,
    Dkv     Scalar Portable 256 [ 64 32] [128  4] OfKeys Reread,
    Dkv     Scalar Portable 256 [ 32 32] [ 64  4] OfKeys Reread,
    Dkv     Scalar Portable 256 [ 16 16] [ 32  4] OfKeys Reread,
    Dkv     Scalar Portable 256 [  8  8] [ 16  4] OfKeys Reread,
    Dkv     Scalar Portable 256 [  4  8] [  8  4] OfKeys Reread,
}

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
        if row.pass != pass || !suits(row, device, problem, alignment) {
            continue;
        }
        let plan = plan(row, device, problem, alignment).split_for(device, &problem.shape);
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
fn suits(row: &Row, device: &DeviceClass, problem: &AttentionProblem, align: Alignment) -> bool {
    let shape = &problem.shape;
    let half = problem.dtype != FloatKind::F32;
    let unit = match row.unit {
        UnitKind::Scalar => true,
        UnitKind::Cmma => device.isa != Isa::Ptx && device.cmma(problem.dtype),
        UnitKind::Mma => match row.precision {
            Precision::Full => half,
            Precision::Tf32 => !half && problem.precision == Precision::Tf32,
        },
        // Boxes are copied in pieces of 16 bytes, and there is none without a row.
        UnitKind::Wgmma => {
            half && device.wgmma && align.0 >= 8 && shape.seqlen_q.min(shape.seqlen_k) > 0
        }
    };
    // Products are rounded where they are only to what the device has sums of: f16, as far as seen.
    let rounds = row.isa != Isa::Mapped || problem.dtype == FloatKind::F16;
    let isa = row.isa == Isa::Portable || row.isa == device.isa;
    let sizes = shape.head_dim.max(shape.val_dim) <= row.max_dim;
    let masking = row.masking.is_none_or(|only| only == problem.masking);
    let causality = row.causality.is_none_or(|only| only == problem.causality);
    let recent = device.shared_bytes >= row.least_kb * 1024;
    let queries = (row.min_queries..=row.max_queries).contains(&shape.seqlen_q);
    unit && isa && rounds && sizes && masking && causality && recent && queries
}

/// How tiles travel; `whole` if rows can be copied 16 bytes at a time as they are.
fn copy_kind(row: &Row, whole: bool) -> CopyKind {
    match row.isa {
        _ if row.unit == UnitKind::Wgmma => CopyKind::Boxes,
        Isa::Ptx if whole => CopyKind::Async,
        // The sums of dk and dv leave no registers to carry the next tiles in.
        _ if row.pass == Pass::Dkv && row.max_dim > 64 => CopyKind::Vector,
        // Nor do those of more than 128 columns.
        _ if row.unit == UnitKind::Cmma && row.max_dim <= 128 => CopyKind::Ahead,
        _ => CopyKind::Vector,
    }
}

fn plan(row: &Row, device: &DeviceClass, problem: &AttentionProblem, align: Alignment) -> Plan {
    let shape = &problem.shape;
    let stage_bytes = match row.unit {
        UnitKind::Scalar => 4,
        UnitKind::Cmma | UnitKind::Mma | UnitKind::Wgmma => problem.dtype.bytes(),
    };
    let across = row.threads * row.rows / row.block_m;
    let (head_step, val_step, width) = match row.unit {
        // dq and dk are accumulators of head_dim columns.
        UnitKind::Scalar if row.pass != Pass::Forward => (4 * across, 4 * across, 4),
        UnitKind::Scalar => (4, 4 * across, 4),
        UnitKind::Cmma => (16, 16, 4),
        UnitKind::Mma | UnitKind::Wgmma => (16, 16, 16 / stage_bytes),
    };
    let run = match row.unit {
        UnitKind::Mma => 2,
        UnitKind::Wgmma => 8,
        UnitKind::Scalar | UnitKind::Cmma => 4,
    };
    // A 16-byte copy needs 16-byte rows of the very type that is staged.
    let whole = 16 / stage_bytes;
    let copy = copy_kind(
        row,
        problem.dtype.bytes() == stage_bytes && align.0 >= whole,
    );
    let load_width = match (copy, row.unit) {
        (CopyKind::Async | CopyKind::Boxes, _) => whole,
        (_, UnitKind::Cmma) if align.0 >= whole => whole,
        _ => align.0.min(width).min(device.max_vector),
    };
    let plane_size = device.plane_size.unwrap_or(1);
    let planes = device
        .plane_size
        .filter(|size| size.is_power_of_two() && *size >= across);
    Plan {
        pass: row.pass,
        unit: row.unit,
        isa: match device.isa {
            Isa::Ptx => Isa::Ptx,
            Isa::Portable | Isa::Mapped => row.isa,
        },
        tile: TileShape {
            block_m: row.block_m,
            block_n: row.block_n,
            head_pad: shape.head_dim.next_multiple_of(head_step),
            val_pad: shape.val_dim.next_multiple_of(val_step),
        },
        threads: match row.unit {
            // A plane owns its rows, however many units it has.
            UnitKind::Cmma => row.block_m / row.rows * plane_size,
            UnitKind::Scalar | UnitKind::Mma | UnitKind::Wgmma => row.threads,
        },
        plane_size,
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
            UnitKind::Mma | UnitKind::Wgmma => Exponent::Fused,
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
        precision: row.precision,
        rounding: device.rounding,
        splits: 1,
    }
}

/// What divides the columns of every tensor that the pass writes.
fn store_width(pass: Pass, problem: &AttentionProblem, run: usize) -> usize {
    let (head, val) = (
        widest(problem.shape.head_dim, run),
        widest(problem.shape.val_dim, run),
    );
    match pass {
        Pass::Forward => val,
        Pass::Dq => head,
        Pass::Dkv | Pass::Fused => head.min(val),
    }
}

/// The largest power of two up to `limit` that divides `length`.
// Hidden: tests and benchmarks make an `Alignment` by it.
#[doc(hidden)]
pub fn widest(length: usize, limit: usize) -> usize {
    let mut width = limit;
    while !length.is_multiple_of(width) {
        width /= 2;
    }
    width
}
