//! The op under autodiff.
//!
//! Where a gradient is asked for, the composed operations run on the autodiff backend, which
//! differentiates them; where none is, the inner backend's kernel runs.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, TensorMetadata};
use burn::tensor::Shape;

use crate::backend::{FlashBackend, ForwardOptions, Mask, composed_forward};
use crate::fallback::{attention_shape, no_scores};
use crate::options::has_no_scores;

impl<B: FlashBackend, C: CheckpointStrategy> FlashBackend for Autodiff<B, C> {
    fn flash_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Mask<Self>,
        options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if !(query.is_tracked() || key.is_tracked() || value.is_tracked()) {
            let mask = Mask::from_option(mask.into_option());
            let (query, key) = (query.into_primitive(), key.into_primitive());
            let (out, lse) = B::flash_forward(query, key, value.into_primitive(), mask, options);
            return (<FloatTensor<Self>>::new(out), <FloatTensor<Self>>::new(lse));
        }
        if has_no_scores(&attention_shape(&query, &key, &value)) {
            return tracked_no_scores::<B, C>(query, key, value);
        }
        composed_forward::<Self>(query, key, value, mask, options)
    }
}

/// Zeros that depend on q, k and v with gradients of exactly 0, so that a training loop meets a
/// gradient and not its absence.
fn tracked_no_scores<B: FlashBackend, C: CheckpointStrategy>(
    query: FloatTensor<Autodiff<B, C>>,
    key: FloatTensor<Autodiff<B, C>>,
    value: FloatTensor<Autodiff<B, C>>,
) -> (FloatTensor<Autodiff<B, C>>, FloatTensor<Autodiff<B, C>>) {
    let shape = attention_shape(&query, &key, &value);
    let shapes = [query.shape(), key.shape(), value.shape()];
    let (out, lse) = no_scores::<B>(&shape, query.primitive());
    let nodes = [query.node(), key.node(), value.node()];
    let step = NoScores.prepare::<C>(nodes).compute_bound().stateful();
    let out = match step {
        OpsKind::Tracked(prep) => prep.finish(shapes, out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    };
    (out, <FloatTensor<Autodiff<B, C>>>::new(lse))
}

#[derive(Debug)]
struct NoScores;

impl<B: Backend> Backward<B, 3> for NoScores {
    /// Shapes of q, k and v.
    type State = [Shape; 3];

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let (device, dtype) = (grad.device(), grad.dtype().into());
        for (parent, shape) in ops.parents.into_iter().zip(ops.state) {
            let Some(parent) = parent else { continue };
            let zeros = match shape.num_elements() {
                0 => B::float_empty(shape, &device, dtype),
                _ => B::float_zeros(shape, &device, dtype),
            };
            grads.register::<B>(parent.id, zeros);
        }
    }
}
