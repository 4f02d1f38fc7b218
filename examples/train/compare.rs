//! The same training with flash and with Burn's attention, and how much of the difference between
//! their losses is rounding.

use std::fmt;

use burn::tensor::Device;
use serde_json::{Value, json};

use crate::args::Args;
use crate::curve::{self, Curve};
use crate::run::{Pace, Record, run};
use crate::settings::{AttentionKind, Settings};
use crate::text::Text;
use crate::trainer::Trainer;
use crate::{Outcome, Trained, checkpoint};

/// How many times the difference that rounding makes flash may differ from Burn's attention.
const ROUNDING_FACTOR: f64 = 4.0;

/// The part of the difference that another seed makes below which any difference is accepted.
const SEED_PART: f64 = 1e-3;

/// Distance of two loss curves over all steps.
#[derive(Clone, Copy, Debug)]
struct Distance {
    mean: f64,
    max: f64,
}

impl Distance {
    fn between(one: &Record, other: &Record) -> Self {
        let pairs = one.losses.iter().zip(&other.losses);
        let differences = pairs.map(|(a, b)| (a - b).abs());
        let (sum, max) = differences.fold((0.0, 0.0_f64), |(sum, max), difference| {
            (sum + difference, max.max(difference))
        });
        Self {
            mean: sum / one.losses.len() as f64,
            max,
        }
    }

    fn to_json(self) -> Value {
        json!({ "mean": self.mean, "max": self.max })
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mean {:.2e}, max {:.2e}", self.mean, self.max)
    }
}

/// Trains four times, draws the curves, and prints and returns the comparison.
///
/// # Errors
///
/// If a training fails, or flash and Burn's attention do not agree.
pub fn compare(args: &Args, text: &Text, device: &Device) -> Outcome<Trained> {
    let with = |attention, seed| Settings {
        attention,
        seed,
        ..args.settings.clone()
    };
    let seed = args.settings.seed;
    let variants = [
        ("flash", with(AttentionKind::Flash, seed)),
        ("burn", with(AttentionKind::Burn, seed)),
        ("burn-rescaled", with(AttentionKind::BurnRescaled, seed)),
        ("burn-seed", with(AttentionKind::Burn, seed.wrapping_add(1))),
    ];
    let (mut records, mut held_out) = (Vec::new(), Vec::new());
    for (name, settings) in &variants {
        let out = args.out.join(name);
        checkpoint::clear(&out)?;
        let mut trainer = Trainer::new(settings, text, device)?;
        let record = run(&mut trainer, Vec::new(), &Pace::from(args), &out, name)?;
        held_out.push(trainer.held_out_loss());
        println!("{name}: {}", record.describe(held_out[held_out.len() - 1]));
        records.push(record);
    }
    let curves: Vec<Curve> = variants
        .iter()
        .zip(&records)
        .map(|((name, _), record)| Curve {
            label: (*name).to_owned(),
            losses: &record.losses,
        })
        .collect();
    let path = args.out.join("compare.svg");
    curve::write(
        &path,
        "Training with flash attention and with Burn's own",
        &curves,
    )?;
    println!("curves:    {}", path.display());

    let distance = |index: usize| Distance::between(&records[1], &records[index]);
    let [flash, rounding, seeds] = [distance(0), distance(2), distance(3)];
    println!(
        "|difference of the losses| over {} steps, in nats:",
        records[0].losses.len()
    );
    println!("  flash and burn              {flash}");
    println!("  burn with another rounding  {rounding}");
    println!("  burn with another seed      {seeds}");
    let allowed = (ROUNDING_FACTOR * rounding.mean).max(SEED_PART * seeds.mean);
    println!("  allowed between flash and burn: mean {allowed:.2e}");
    if flash.mean > allowed {
        return Err(format!(
            "flash and burn differ by {:.2e}, over {allowed:.2e}",
            flash.mean
        )
        .into());
    }
    println!("flash and burn agree");
    let json = json!({
        "flash-burn": flash.to_json(),
        "rounding": rounding.to_json(),
        "seeds": seeds.to_json(),
        "allowed-mean": allowed,
        "burn-tokens-per-second": records[1].tokens_per_second,
        "burn-final-loss": records[1].final_loss(),
        "burn-held-out-loss": held_out[1],
    });
    Ok(Trained {
        record: records.swap_remove(0),
        held_out: held_out[0],
        more: json,
    })
}
