//! Whether a training that was interrupted goes on as if it had not been.

use burn::tensor::Device;
use serde_json::{Value, json};

use crate::args::Args;
use crate::run::{Pace, Record, run};
use crate::text::Text;
use crate::trainer::Trainer;
use crate::{Outcome, checkpoint};

/// How many times a resumed training may differ from the whole one as two resumed ones differ.
const NOISE_FACTOR: f64 = 4.0;

/// Trains again from the newest checkpoint before the end and compares each loss with `record`'s.
///
/// They must be the same to the last bit, unless the device does not repeat itself: Burn's sum of a
/// whole tensor may use atomics, whose order is open. So if they differ, the checkpoint is trained
/// from once more, and what the two resumed trainings differ by is the measure.
///
/// # Errors
///
/// If there is no such checkpoint, or the losses are others.
pub fn check(args: &Args, text: &Text, device: &Device, record: &Record) -> Outcome<Value> {
    let steps = args.settings.steps;
    let mut saved = checkpoint::list(&args.out)?.into_iter();
    let middle = saved.rfind(|&step| step < steps);
    let middle = middle.ok_or("there is no checkpoint before the end")?;
    let train = |name: &str| -> Outcome<Record> {
        let mut trainer = Trainer::new(&args.settings, text, device)?;
        let before = checkpoint::load(&mut trainer, &args.out, middle)?;
        let out = args.out.join(name);
        checkpoint::clear(&out)?;
        run(&mut trainer, before, &Pace::from(args), &out, name)
    };
    let resumed = train("resumed")?;
    let difference = largest_difference(record, &resumed);
    let count = steps - middle;
    println!("resumed:   {count} steps from the checkpoint of step {middle}");
    println!("           largest difference of a loss {difference:e}");
    let mut noise = 0.0;
    if difference > 0.0 {
        noise = largest_difference(&resumed, &train("resumed-again")?);
        println!("           two resumed trainings differ by {noise:e}");
    }
    if difference > NOISE_FACTOR * noise {
        let text = format!(
            "a resumed training has other losses, by up to {difference:e}: \
             more than {NOISE_FACTOR} times {noise:e}"
        );
        return Err(text.into());
    }
    Ok(json!({ "steps": count, "largest-difference": difference, "noise": noise }))
}

fn largest_difference(one: &Record, other: &Record) -> f64 {
    let pairs = one.losses.iter().zip(&other.losses);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}
