//! How many instructions of a kind a plan's kernel must have.

use flash_kernels::{Causality, Masking, Pass, Plan, Precision, UnitKind, plan::QueryOperand};

/// Steps of the walk over the keys that the code holds: one that needs no mask and one that does,
/// or the latter alone. Where keys are split planes do not know that a part begins with the latter;
/// warpgroups, which are told where walks begin, do.
fn steps(plan: &Plan) -> usize {
    match (plan.masking, plan.unit) {
        (Masking::Dense, UnitKind::Wgmma) => 1,
        (Masking::Dense, _) if !plan.is_split() => 1,
        (Masking::None | Masking::Dense, _) => 2,
    }
}

/// `wgmma` of a warpgroup. Forward: the scores of the first query tile, then scores and outputs of each
/// copy of a step and of the step from one query tile to the next, then the last outputs. Dq: likewise
/// for the one query tile. Dkv: the first scores, then those of the next queries in each step; of a
/// divided one, the products of values likewise. Fused: as dkv, and the last keys' part of dq.
pub fn warpgroup_products(plan: &Plan) -> usize {
    let walked = warpgroup_steps(plan) * warpgroup_step(plan);
    match plan.pass {
        Pass::Forward => walked + 2 * warpgroup_step(plan),
        Pass::Dq => walked + warpgroup_step(plan),
        Pass::Dkv if plan.is_divided() => walked + (plan.tile.head_pad + plan.tile.val_pad) / 16,
        Pass::Dkv => walked + plan.tile.head_pad / 16,
        Pass::Fused => walked + plan.tile.head_pad / 16 + plan.tile.block_m / 16,
    }
}

/// Copies of a step of warpgroups. Where every query sees every key, dkv masks no step: its rows past
/// the last key are not stored. In the fused kernel they would reach dq.
pub fn warpgroup_steps(plan: &Plan) -> usize {
    match (plan.pass, plan.causality) {
        (Pass::Dkv, Causality::Full) => 1,
        _ => steps(plan),
    }
}

/// `wgmma` of a step: scores of one tile, what is summed over another, and the product of values and
/// the gradient of the output. Fused: a piece of dq, summed over all keys of the cube, too.
pub fn warpgroup_step(plan: &Plan) -> usize {
    let tile = plan.tile;
    let (head, val, sum) = (tile.head_pad / 16, tile.val_pad / 16, tile.block_n / 16);
    match plan.pass {
        Pass::Forward => head + sum,
        Pass::Dq => head + val + sum,
        Pass::Dkv => head + val + 2 * sum,
        Pass::Fused => head + val + 2 * sum + tile.block_m / 16,
    }
}

/// `R2UR` of a step for additions to global memory: the copy engine takes both addresses, three
/// registers, from uniform ones.
pub fn addition_moves(plan: &Plan) -> usize {
    match plan.pass {
        Pass::Forward | Pass::Dq | Pass::Dkv => 0,
        Pass::Fused => 3 * warpgroup_steps(plan),
    }
}

/// Elements of the depth of an `mma.sync`: 32 bytes.
fn block(plan: &Plan) -> usize {
    32 / plan.stage_bytes
}

/// `mma.sync` of a plane: the products of a step, in each of its copies.
pub fn products(plan: &Plan) -> usize {
    let (tile, rows, block) = (plan.tile, plan.rows / 16, block(plan));
    let of_depth = |depth: usize| rows * (tile.block_n / 8) * (depth / block);
    let into = |cols: usize| rows * (cols / 8) * (tile.block_n / block);
    let (head, val) = (tile.head_pad, tile.val_pad);
    let step = match plan.pass {
        Pass::Forward => of_depth(head) + into(val),
        Pass::Dq => of_depth(head) + of_depth(val) + into(head),
        Pass::Dkv | Pass::Fused => of_depth(head) + of_depth(val) + into(val) + into(head),
    };
    steps(plan) * step
}

/// `ldmatrix` of a plane: owned operands once or in each step, walked ones in each. It does not turn
/// f32, so those whose depth is a tile's rows come otherwise.
pub fn loads(plan: &Plan) -> usize {
    let (tile, block) = (plan.tile, block(plan));
    let owned = |depth: usize| plan.rows / 16 * (depth / block);
    let along = |cols: usize| (tile.block_n / 16) * (cols / block);
    let down = |cols: usize| match plan.precision {
        Precision::Full => along(cols),
        Precision::Tf32 => 0,
    };
    let (head, val) = (tile.head_pad, tile.val_pad);
    let both = along(head) + along(val);
    let (owned, walked) = match plan.pass {
        Pass::Forward => (owned(head), along(head) + down(val)),
        Pass::Dq => (owned(head) + owned(val), both + down(head)),
        Pass::Dkv | Pass::Fused => (owned(head) + owned(val), both + down(head) + down(val)),
    };
    match plan.queries {
        QueryOperand::Resident | QueryOperand::Lent => owned + steps(plan) * walked,
        QueryOperand::Reread => steps(plan) * (owned + walked),
    }
}

/// Functions applied to 16×16 matrices of a plane: of each cell of scores the scale, the exponential and,
/// in steps with a mask, what drops it and its gradient.
pub fn functions(plan: &Plan) -> usize {
    let cells = plan.rows / 16 * (plan.tile.block_n / 16);
    if plan.is_mapped() { cells * (2 + 4) } else { 0 }
}
