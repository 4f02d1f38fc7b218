//! `cargo run --example quickstart`: causal attention with grouped heads and a padding mask on the
//! device that `FLASH_RUNTIME` names, checked against the specification in f64.

#[path = "common/device.rs"]
mod device;

use burn::tensor::{Bool, Distribution, Tensor, TensorData};
use burn_flash_attention::{FlashOptions, flash_attention};
use flash_reference::{Causality, Inputs, Spec, forward, rounding};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device::Chosen { runtime, device } = device::from_env()?;
    let (batch, num_heads, num_kv_heads, len, dim) = (2, 8, 2, 200, 64);
    device.seed(7);
    let normal = Distribution::Normal(0.0, 1.0);
    let random = |h| Tensor::<4>::random([batch, h, len, dim], normal, &device);
    let [q, k, v] = [num_heads, num_kv_heads, num_kv_heads].map(random);
    // True drops a key: the second sequence ends after 150 tokens.
    let padding: Vec<bool> = (0..batch * len).map(|i| i >= len + 150).collect();
    let mask = TensorData::new(padding.clone(), [batch, 1, 1, len]);
    let mask = Tensor::<4, Bool>::from_data(mask, &device);
    let options = FlashOptions::new().causal().with_mask(mask);
    let result = flash_attention(q.clone(), k.clone(), v.clone(), options);
    println!("{runtime}, {device:?}: {:?}", result.report);

    let [q, k, v, ours] = [q, k, v, result.out].map(|t| t.into_data().iter().collect::<Vec<f64>>());
    let per_batch = num_heads * len * len;
    let mask: Vec<bool> = (0..batch * per_batch)
        .map(|i| padding[i / per_batch * len + i % len])
        .collect();
    let inputs = Inputs {
        q: &q,
        k: &k,
        v: &v,
        mask: Some(&mask),
        bias: None,
    };
    let spec = Spec {
        batch,
        num_heads,
        num_kv_heads,
        seqlen_q: len,
        seqlen_k: len,
        head_dim: dim,
        val_dim: dim,
        scale: (dim as f64).sqrt().recip(),
        softcap: None,
        causality: Causality::Causal,
    };
    let exact = forward(&spec, &inputs).out;
    let plain = rounding::forward_plain(rounding::Dtype::F32, &spec, &inputs).out;
    let distance = |x: &[f64]| {
        let each = exact.iter().zip(x).map(|(e, x)| (e - x).abs());
        each.max_by(f64::total_cmp).unwrap_or(f64::NAN)
    };
    // Twice what the plain computation in f32 is off by, and a few units in the last place of 1.
    let allowed = 2.0 * distance(&plain) + 4.0 * rounding::ulp(rounding::Dtype::F32, 1.0);
    let largest = distance(&ours);
    println!("largest difference to f64: {largest:.2e}, allowed: {allowed:.2e}");
    if largest <= allowed {
        return Ok(());
    }
    Err("flash_attention differs from the specification".into())
}
