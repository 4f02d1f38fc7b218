//! `cargo run --example train`: a GPT-style character model, trained in Burn with
//! burn-flash-attention or with Burn's own attention. `--help` lists the options.

mod args;
mod checkpoint;
mod compare;
mod curve;
#[path = "../common/device.rs"]
mod device;
mod model;
mod resume;
mod run;
mod sample;
mod settings;
mod text;
mod trainer;

use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::Device;
use serde_json::{Value, json};

use args::Args;
use curve::Curve;
use model::Attend;
use run::{Pace, Record};
use settings::AttentionKind;
use text::Text;
use trainer::Trainer;

/// Any error; the text is for the user.
pub type Failure = Box<dyn std::error::Error>;

/// A result whose error is for the user.
pub type Outcome<T> = Result<T, Failure>;

/// What a mode leaves for the result line.
pub struct Trained {
    /// The training's losses and speed; flash's if there were several.
    pub record: Record,
    /// Its loss of held-out text.
    pub held_out: f64,
    /// What only this mode knows.
    pub more: Value,
}

fn main() -> ExitCode {
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("train: {error}");
            ExitCode::FAILURE
        }
    }
}

fn start() -> Outcome<()> {
    let args = Args::read(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let device::Chosen { runtime, device } = device::from_env()?;
    let settings = &args.settings;
    println!("device:    {device:?}, runtime {runtime}");
    if !device.supports_dtype(settings.attention_dtype) {
        let dtype = settings.attention_dtype;
        return Err(format!("--attention-dtype: {runtime} has no {dtype:?} here").into());
    }
    let text = Text::load(args.text.as_deref(), settings.context)?;
    let [alone, after] = text.baselines();
    println!(
        "text:      {}, {} characters, {} different ones",
        text.name,
        text.train.len() + text.held_out.len(),
        text.alphabet.len()
    );
    println!("           {alone:.3} nats per character alone, {after:.3} knowing the one before");
    println!("settings:  {}", settings.to_json());

    let trained = match args.compare {
        true => compare::compare(&args, &text, &device)?,
        false => train(&args, &text, &device)?,
    };
    let path = match (args.compare, settings.attention) {
        (true, _) | (_, AttentionKind::Flash) => Attend::from(settings)
            .report(settings, &device.clone().autodiff())?
            .to_string(),
        _ => "Burn's own attention".to_owned(),
    };
    println!("{path}");
    let Trained {
        record,
        held_out,
        more,
    } = trained;
    let result = json!({
        "runtime": runtime,
        "attention-path": path,
        "settings": settings.to_json(),
        "steps-done": record.losses.len(),
        "final-loss": record.final_loss(),
        "held-out-loss": held_out,
        "tokens-per-second": record.tokens_per_second,
        "seconds": record.seconds,
        "more": more,
    });
    if record.losses.len() == settings.steps {
        check_loss(&args, held_out)?;
    }
    println!("result: {result}");
    Ok(())
}

/// One training with all it leaves behind.
fn train(args: &Args, text: &Text, device: &Device) -> Outcome<Trained> {
    let settings = &args.settings;
    let mut trainer = Trainer::new(settings, text, device)?;
    let losses = match args.resume {
        false => {
            checkpoint::clear(&args.out)?;
            Vec::new()
        }
        true => {
            let newest = checkpoint::list(&args.out)?.pop();
            let out = args.out.display();
            let step = newest.ok_or_else(|| format!("--resume: no checkpoint under {out}"))?;
            println!("resuming:  after step {step}");
            checkpoint::load(&mut trainer, &args.out, step)?
        }
    };
    if trainer.step >= args.stop_at {
        let (step, stop) = (trainer.step, args.stop_at);
        return Err(format!("step {step} is done, and --steps or --stop-at is {stop}").into());
    }
    let parameters = trainer.model.num_params();
    println!("model:     {parameters} parameters");
    let name = settings.attention.name();
    let record = run::run(&mut trainer, losses, &Pace::from(args), &args.out, name)?;
    let path = args.out.join("loss.svg");
    let label = format!("{name}, {} parameters", parameters);
    let curve = Curve {
        label,
        losses: &record.losses,
    };
    curve::write(&path, &format!("Training on {}", text.name), &[curve])?;
    println!("curve:     {}", path.display());
    let held_out = trainer.held_out_loss();
    println!("losses:    {}", record.describe(held_out));
    if args.sample > 0 {
        let (prompt, sampled) = sample::sample(&trainer, device, args.sample);
        println!("\n{prompt}|{sampled}\n");
    }
    let resumed = match args.check_resume {
        true => Some(resume::check(args, text, device, &record)?),
        false => None,
    };
    let more = json!({
        "parameters": parameters,
        "resumed": resumed,
    });
    Ok(Trained {
        record,
        held_out,
        more,
    })
}

/// Fails if the loss is too large.
fn check_loss(args: &Args, held_out: f64) -> Outcome<()> {
    let Some(max_loss) = args.max_loss else {
        return Ok(());
    };
    if held_out < max_loss {
        println!("check:     held-out loss {held_out:.4} is below {max_loss}");
        return Ok(());
    }
    Err(format!("the held-out loss {held_out:.4} is not below {max_loss}").into())
}
