//! What a training run is made of: two runs with equal settings compute the same losses.

use std::str::FromStr;

use burn::tensor::DType;
use burn_flash_attention::GradientOrder;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::{Value, json};

use crate::Outcome;

/// What computes the attention of every block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AttentionKind {
    /// `burn_flash_attention::flash_attention`.
    Flash,
    /// Burn's own `burn::tensor::module::attention`.
    Burn,
    /// Burn's own with Q three times and K a third of what they are: the same function with every
    /// product rounded elsewhere. How far its curve strays from [`AttentionKind::Burn`] is what
    /// rounding alone does to a training.
    #[value(skip)]
    BurnRescaled,
}

impl AttentionKind {
    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flash => "flash",
            Self::Burn => "burn",
            Self::BurnRescaled => "burn-rescaled",
        }
    }
}

/// Whether activations are kept for the backward pass or computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Activations {
    /// Kept.
    #[value(name = "off")]
    Keep,
    /// Computed again where Burn's checkpointing can: `Device::gradient_checkpointing`.
    #[value(name = "on")]
    Recompute,
}

/// The model, the batches and the optimization.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// What computes attention.
    #[arg(long, value_name = "KIND", value_enum, default_value_t = AttentionKind::Flash)]
    pub attention: AttentionKind,
    /// The element type of Q, K and V inside the attention; everything else is f32.
    #[arg(long, value_name = "TYPE", value_parser = dtype(), default_value = "f32")]
    pub attention_dtype: DType,
    /// The order of the sums of a query's gradient; fused is faster on sm_90, with other bits each
    /// time.
    #[arg(long, value_name = "KIND", value_parser = order(), default_value = "deterministic")]
    pub gradient_order: GradientOrder,
    /// Blocks, instead of the preset's like all that follow up to --lr.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub layers: usize,
    /// Features of a token.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub dim: usize,
    /// Attention heads; divides --dim.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub heads: usize,
    /// Characters of one sequence.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub context: usize,
    /// Sequences of one step.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub batch: usize,
    /// Steps of the whole training, which the schedule is laid over.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub steps: usize,
    /// The largest learning rate.
    #[arg(long = "lr", value_name = "X", value_parser = rate)]
    pub learning_rate: f64,
    /// Steps over which the learning rate rises.
    #[arg(skip)]
    pub warmup: usize,
    /// Seed of the weights, the batches and the sample.
    #[arg(long, value_name = "N", value_parser = whole::<u64>, default_value = "1")]
    pub seed: u64,
    /// Whether the backward pass computes activations again instead of finding them in memory.
    #[arg(long = "gradient-checkpointing", value_name = "WHETHER", value_enum)]
    #[arg(default_value_t = Activations::Keep)]
    pub activations: Activations,
}

/// Named sets of sizes, which are tuned together.
pub const PRESETS: [&str; 3] = ["tiny", "small", "large"];

/// The options whose default is the preset's, and that of each of [`PRESETS`].
pub const SIZES: [(&str, [&str; PRESETS.len()]); 8] = [
    ("layers", ["2", "4", "6"]),
    ("dim", ["64", "128", "512"]),
    ("heads", ["4", "4", "8"]),
    ("context", ["64", "256", "4096"]),
    ("batch", ["16", "16", "4"]),
    ("steps", ["160", "1000", "1000"]),
    ("learning_rate", ["1e-2", "3e-3", "6e-4"]),
    // Held out, 2.429 is what the character before tells; seeds 1 to 3 reach 2.35 to 2.37.
    ("max_loss", ["2.42", "none", "none"]),
];

/// A whole number.
///
/// # Errors
///
/// What is allowed, when the text is anything else.
pub fn whole<T: FromStr>(text: &str) -> Result<T, &'static str> {
    text.parse().map_err(|_| "expected a whole number")
}

/// A number from 1 on.
///
/// # Errors
///
/// As [`whole`].
pub fn positive(text: &str) -> Result<usize, &'static str> {
    let number = text.parse().ok().filter(|&number| number > 0);
    number.ok_or("expected a whole number of at least 1")
}

fn dtype() -> impl TypedValueParser<Value = DType> {
    let names = PossibleValuesParser::new(["f32", "f16", "bf16"]);
    names.map(|name| match name.as_str() {
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        _ => DType::F32,
    })
}

fn order() -> impl TypedValueParser<Value = GradientOrder> {
    let names = PossibleValuesParser::new(["deterministic", "fused"]);
    names.map(|name| match name.as_str() {
        "fused" => GradientOrder::Fused,
        _ => GradientOrder::Deterministic,
    })
}

fn rate(text: &str) -> Result<f64, &'static str> {
    let rate = text.parse().ok();
    let rate = rate.filter(|rate| (1e-12..=1.0).contains(rate));
    rate.ok_or("expected a number of at most 1 and more than 0")
}

impl Settings {
    /// # Errors
    ///
    /// If the settings contradict each other.
    pub fn check(&self) -> Outcome<()> {
        let Self { dim, heads, .. } = *self;
        if !dim.is_multiple_of(heads) {
            return Err(format!("--heads {heads}: a divisor of --dim, {dim}").into());
        }
        if self.warmup >= self.steps {
            let (warmup, steps) = (self.warmup, self.steps);
            return Err(format!("--warmup {warmup}: fewer than --steps, {steps}").into());
        }
        Ok(())
    }

    /// Characters of one step.
    pub fn tokens_per_step(&self) -> usize {
        self.batch * self.context
    }

    /// What the loss is multiplied by before the backward pass, and the gradients divided by after.
    /// The mean's gradient of one character is about 1 / tokens, which f16 rounds to nothing.
    pub fn loss_scale(&self) -> f64 {
        match self.attention_dtype {
            DType::F16 => self.tokens_per_step() as f64,
            _ => 1.0,
        }
    }

    /// Everything, under the names of the command line.
    pub fn to_json(&self) -> Value {
        json!({
            "attention": self.attention.name(),
            "attention-dtype": format!("{:?}", self.attention_dtype).to_lowercase(),
            "gradient-order": format!("{:?}", self.gradient_order).to_lowercase(),
            "layers": self.layers,
            "dim": self.dim,
            "heads": self.heads,
            "context": self.context,
            "batch": self.batch,
            "steps": self.steps,
            "warmup": self.warmup,
            "lr": self.learning_rate,
            "seed": self.seed,
            "gradient-checkpointing": self.activations == Activations::Recompute,
        })
    }

    /// # Errors
    ///
    /// Names the first setting that `saved`, made by [`Self::to_json`], has otherwise.
    pub fn expect_same(&self, saved: &Value) -> Outcome<()> {
        let ours = self.to_json();
        let fields = ours.as_object().into_iter().flatten();
        for (name, value) in fields {
            if saved.get(name) != Some(value) {
                let was = saved.get(name).unwrap_or(&Value::Null);
                let text = format!("--{name} {value}: the checkpoint was trained with {was}");
                return Err(text.into());
            }
        }
        Ok(())
    }
}
