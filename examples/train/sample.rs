//! Text from a trained model.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use flash_reference::rng::Rng;

use crate::model::Attend;
use crate::trainer::Trainer;

/// What logits are divided by: below 1, likely characters become likelier.
const TEMPERATURE: f64 = 0.8;

/// `count` characters that follow the first `count / 8` of the held-out text, and those themselves.
/// The same weights and seed give the same text.
pub fn sample(trainer: &Trainer, device: &Device, count: usize) -> (String, String) {
    let context = trainer.settings.context;
    let model = trainer.model.valid();
    let attend = Attend::from(trainer.settings);
    let mut random = Rng::stream(trainer.settings.seed, u64::MAX);
    let prompt = (count / 8).clamp(1, context);
    let mut numbers = trainer.text.held_out[..prompt].to_vec();
    for _ in 0..count {
        // Always as long as the context: one shape, one set of kernels. What stands behind the last
        // character is invisible to it.
        let known = &numbers[numbers.len().saturating_sub(context)..];
        let last = known.len() - 1;
        let mut window = known.to_vec();
        window.resize(context, 0);
        let window = TensorData::new(window, [1, context]);
        let features = model.features(Tensor::from_data(window, device), attend);
        let last = Tensor::<1, Int>::from_ints([last as i32], device);
        let logits = model.logits(features.select(1, last));
        let logits: Vec<f32> = logits.into_data_as::<f32>().iter().collect();
        numbers.push(draw(&logits, &mut random));
    }
    let (prompt, sampled) = numbers.split_at(prompt);
    (trainer.text.decode(prompt), trainer.text.decode(sampled))
}

/// The number of a logit, as likely as the softmax says.
fn draw(logits: &[f32], random: &mut Rng) -> i32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| (f64::from(logit - largest) / TEMPERATURE).exp();
    let total: f64 = logits.iter().map(|&logit| weight(logit)).sum();
    let mut left = random.uniform() * total;
    for (number, &logit) in (0..).zip(logits) {
        left -= weight(logit);
        if left < 0.0 {
            return number;
        }
    }
    logits.len() as i32 - 1
}
