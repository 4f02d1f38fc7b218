//! The op under autodiff: one node of the graph, whose gradient is the backward kernels.
//!
//! The node keeps q, k, v, the mask, the output and its log-sum-exp, nothing of the size of the
//! scores. q, k and v go through Burn's checkpointing, so a strategy that recomputes them may.

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;

use crate::backend::{FlashBackend, ForwardOptions, Mask};

const SECOND_ORDER: &str = "attention: a gradient of its gradient is not supported; allowed: first \
                            derivatives, or Burn's own attention for higher ones";

impl<B: FlashBackend, C: CheckpointStrategy> FlashBackend for Autodiff<B, C> {
    fn flash_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Mask<Self>,
        options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let mask = Mask::<B>::from_option(mask.into_option());
        let nodes = [query.node(), key.node(), value.node()];
        match Attention.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let saved = [&query, &key, &value].map(|input| prep.checkpoint(input));
                let (out, lse) = B::flash_forward(
                    query.into_primitive(),
                    key.into_primitive(),
                    value.into_primitive(),
                    mask.clone(),
                    options,
                );
                let state = Saved {
                    inputs: saved,
                    mask,
                    out: out.clone(),
                    lse: lse.clone(),
                    options,
                };
                (prep.finish(state, out), <FloatTensor<Self>>::new(lse))
            }
            OpsKind::UnTracked(prep) => {
                let (out, lse) = B::flash_forward(
                    query.into_primitive(),
                    key.into_primitive(),
                    value.into_primitive(),
                    mask,
                    options,
                );
                (prep.finish(out), <FloatTensor<Self>>::new(lse))
            }
        }
    }

    fn flash_backward_query(
        _query: FloatTensor<Self>,
        _key: FloatTensor<Self>,
        _value: FloatTensor<Self>,
        _mask: Mask<Self>,
        _out: FloatTensor<Self>,
        _lse: FloatTensor<Self>,
        _d_out: FloatTensor<Self>,
        _options: ForwardOptions,
    ) -> FloatTensor<Self> {
        panic!("{SECOND_ORDER}")
    }

    fn flash_backward_key_value(
        _query: FloatTensor<Self>,
        _key: FloatTensor<Self>,
        _value: FloatTensor<Self>,
        _mask: Mask<Self>,
        _out: FloatTensor<Self>,
        _lse: FloatTensor<Self>,
        _d_out: FloatTensor<Self>,
        _options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        panic!("{SECOND_ORDER}")
    }

    fn flash_backward(
        _query: FloatTensor<Self>,
        _key: FloatTensor<Self>,
        _value: FloatTensor<Self>,
        _mask: Mask<Self>,
        _out: FloatTensor<Self>,
        _lse: FloatTensor<Self>,
        _d_out: FloatTensor<Self>,
        _options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        panic!("{SECOND_ORDER}")
    }
}

/// The node.
#[derive(Debug)]
struct Attention;

/// What the node keeps.
#[derive(Clone, Debug)]
struct Saved<B: FlashBackend> {
    /// q, k and v, kept or recomputed as the strategy says.
    inputs: [NodeId; 3],
    mask: Mask<B>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    options: ForwardOptions,
}

impl<B: FlashBackend> Backward<B, 3> for Attention {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let d_out = grads.consume::<B>(&ops.node);
        let [query, key, value] = ops
            .state
            .inputs
            .map(|input| checkpointer.retrieve_node_output::<FloatTensor<B>>(input));
        let Saved {
            mask,
            out,
            lse,
            options,
            ..
        } = ops.state;
        let [of_query, of_key, of_value] = ops.parents;
        let (d_query, d_key, d_value) = match (&of_query, &of_key, &of_value) {
            (None, ..) => {
                let (d_key, d_value) =
                    B::flash_backward_key_value(query, key, value, mask, out, lse, d_out, options);
                (None, Some(d_key), Some(d_value))
            }
            (Some(_), None, None) => {
                let d_query =
                    B::flash_backward_query(query, key, value, mask, out, lse, d_out, options);
                (Some(d_query), None, None)
            }
            (Some(_), ..) => {
                let (d_query, d_key, d_value) =
                    B::flash_backward(query, key, value, mask, out, lse, d_out, options);
                (Some(d_query), Some(d_key), Some(d_value))
            }
        };
        let parents = [of_query, of_key, of_value];
        for (parent, gradient) in parents.into_iter().zip([d_query, d_key, d_value]) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}
