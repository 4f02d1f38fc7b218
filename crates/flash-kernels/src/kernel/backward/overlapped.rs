//! What the two gradient kernels share where products run by themselves (sm_90).

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use crate::{
    kernel::{mask::Mask, ring::Place, score, supply::place_of, unit::HalfFloat},
    plan::Plan,
};

/// Registers of a unit that has tiles copied, and of one that multiplies: together what 64 K
/// registers give. The sums and products of a step take nearly all of the latter.
pub const REGISTERS: (u32, u32) = (24, 240);

/// Where the tiles come from.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct GradientMaps {
    /// Tensor map of the queries.
    pub q: u64,
    /// Of the keys.
    pub k: u64,
    /// Of the values.
    pub v: u64,
    /// Of the gradient of the output.
    pub d_out: u64,
    /// As in [`Maps`](crate::kernel::supply::Maps), of q, k, v and the gradient of the output.
    pub walked: u32,
}

#[cube]
impl GradientMaps {
    /// The maps of these tensors.
    pub fn new<E: HalfFloat>(
        q: &TensorMap<E, Tiled>,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        d_out: &TensorMap<E, Tiled>,
        walked: u32,
    ) -> GradientMaps {
        GradientMaps {
            q: tensor_map_address(q),
            k: tensor_map_address(k),
            v: tensor_map_address(v),
            d_out: tensor_map_address(d_out),
            walked,
        }
    }

    /// `place` in the map of `tensor`, which counts q, k, v and the gradient of the output.
    pub fn of(&self, place: Place, #[comptime] tensor: u32) -> Place {
        place_of(self.walked, place, tensor)
    }
}

/// What is asked, as far as it is not comptime.
#[derive(CubeType)]
pub struct GradientProblem<M: Int> {
    /// Bool mask.
    pub mask: ComptimeOption<OwnedTensor<M>>,
    /// Query heads of a batch entry.
    pub heads: u32,
    /// Query heads that share a key head.
    pub group: u32,
    /// Queries.
    pub seqlen_q: u32,
    /// Keys.
    pub seqlen_k: u32,
    /// Columns of q and k.
    pub head_dim: u32,
    /// Columns of v.
    pub val_dim: u32,
    /// Scale of the scores.
    pub scale: f32,
    /// `scale·log2(e)`.
    pub scale_log2: f32,
}

#[cube]
impl<M: Int> GradientProblem<M> {
    /// The mask of query head `head`.
    pub fn mask_of(&self, batch: usize, head: usize, #[comptime] plan: Plan) -> Mask<M> {
        let causality = comptime!(plan.causality);
        Mask::<M>::new(
            self.seqlen_q,
            self.seqlen_k,
            &self.mask,
            batch,
            head,
            causality,
        )
    }

    /// The first row of a query head in tensors `[batch, heads, seqlen_q, ..]`.
    pub fn line(&self, batch: usize, head: usize) -> usize {
        (batch * self.heads as usize + head) * self.seqlen_q as usize
    }
}

/// The gradient of a logit. Where no step drops a pair, `p` is not taken for an exact 0: two
/// instructions less for each score.
#[cube]
pub fn gradient_of(p: f32, dp: f32, delta: f32, #[comptime] masked: bool) -> f32 {
    if comptime!(masked) {
        score::gradient(p, dp, delta)
    } else {
        score::gradient_of_seen(p, dp, delta)
    }
}
