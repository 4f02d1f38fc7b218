//! The module against Burn's own.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::tensor::{Bool, Device, Distribution, Tensor, Tolerance};

use super::{FlashMhaInput, FlashMultiHeadAttentionConfig};
use crate::{AttentionError, GradientOrder};

const BATCH: usize = 2;
const SEQLEN_Q: usize = 5;
const SEQLEN_K: usize = 6;

fn inputs(device: &Device) -> [Tensor<3>; 3] {
    let random = |seqlen| Tensor::random([BATCH, seqlen, 12], Distribution::Default, device);
    [random(SEQLEN_Q), random(SEQLEN_K), random(SEQLEN_K)]
}

#[test]
fn a_record_of_burns_module_loads_and_gives_its_output() {
    let device = Device::flex();
    let burn = MultiHeadAttentionConfig::new(12, 3).init(&device);
    let ours = FlashMultiHeadAttentionConfig::new(12, 3)
        .init(&device)
        .load_record(burn.clone().into_record());
    let [query, key, value] = inputs(&device);
    let positions = Tensor::<1, burn::tensor::Int>::arange(0..SEQLEN_K as i64, &device);
    let pad: Tensor<2, Bool> = positions
        .clone()
        .equal_elem(5)
        .unsqueeze::<2>()
        .repeat_dim(0, BATCH);
    let attn: Tensor<3, Bool> = positions
        .equal_elem(2)
        .reshape([1, 1, SEQLEN_K])
        .expand([BATCH, SEQLEN_Q, SEQLEN_K]);

    let theirs = burn.forward(
        MhaInput::new(query.clone(), key.clone(), value.clone())
            .mask_pad(pad.clone())
            .mask_attn(attn.clone()),
    );
    let context = ours.forward(
        FlashMhaInput::new(query, key, value)
            .mask_pad(pad)
            .mask_attn(attn),
    );
    context
        .into_data()
        .assert_approx_eq::<f32>(&theirs.context.into_data(), Tolerance::default());
}

#[test]
fn where_nothing_can_fuse_it_the_gradient_is_the_one_of_the_other_order() {
    let device = Device::flex().autodiff();
    let module = FlashMultiHeadAttentionConfig::new(12, 3).init(&device);
    let x = inputs(&device)[0].clone().require_grad();
    let gradient = |order| {
        let input = FlashMhaInput::self_attn(x.clone()).gradient_order(order);
        let grads = module.forward(input).sum().backward();
        x.grad(&grads).expect("a leaf").into_data()
    };
    let [one, other] = [GradientOrder::Deterministic, GradientOrder::Fused].map(gradient);
    one.assert_eq(&other, true);
}

#[test]
fn grouped_heads_have_smaller_key_and_value_layers() {
    let device = Device::flex();
    let module = FlashMultiHeadAttentionConfig::new(12, 6)
        .with_num_kv_heads(Some(2))
        .init(&device);
    assert_eq!(module.key.weight.dims(), [12, 4]);
    assert_eq!(module.value.weight.dims(), [12, 4]);
    let [query, key, value] = inputs(&device);
    let context = module.forward(FlashMhaInput::new(query, key, value).causal());
    assert_eq!(context.dims(), [BATCH, SEQLEN_Q, 12]);
}

#[test]
fn dropout_is_refused_in_training_only() {
    let config = FlashMultiHeadAttentionConfig::new(12, 3).with_dropout(0.1);
    let inference = Device::flex();
    let module = config.init(&inference);
    let [query, key, value] = inputs(&inference);
    assert!(
        module
            .try_forward(FlashMhaInput::new(query, key, value))
            .is_ok()
    );

    let training = Device::flex().autodiff();
    let module = config.init(&training);
    let [query, key, value] = inputs(&training);
    let error = module
        .try_forward(FlashMhaInput::new(query, key, value))
        .unwrap_err();
    assert!(
        matches!(
            error,
            AttentionError::Argument {
                argument: "dropout",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn sizes_that_do_not_divide_are_refused() {
    let device = Device::flex();
    let argument = |config: FlashMultiHeadAttentionConfig| match config.try_init(&device) {
        Err(AttentionError::Argument { argument, .. }) => argument,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        argument(FlashMultiHeadAttentionConfig::new(10, 3)),
        "n_heads"
    );
    let config = FlashMultiHeadAttentionConfig::new(12, 6);
    assert_eq!(
        argument(config.clone().with_num_kv_heads(Some(4))),
        "num_kv_heads"
    );
    assert_eq!(argument(config.with_dropout(1.0)), "dropout");
}
