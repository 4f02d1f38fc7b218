//! One training: weights, optimizer and the step they are at.

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::Outcome;
use crate::model::{Attend, Model};
use crate::settings::{Activations, Settings};
use crate::text::{Text, batch};

/// The largest norm of one weight tensor's gradient; Burn clips each tensor by itself.
const CLIP_NORM: f32 = 1.0;

/// What is left of the learning rate at the end.
const LAST_RATE: f64 = 0.1;

/// Batches of the held-out loss.
const HELD_OUT_BATCHES: usize = 8;

/// A training that steps.
pub struct Trainer<'a> {
    /// What is trained, and how.
    pub settings: &'a Settings,
    /// On what.
    pub text: &'a Text,
    /// The weights.
    pub model: Model,
    /// The optimizer's state.
    pub optimizer: ModuleOptimizer,
    /// Steps done.
    pub step: usize,
    device: Device,
    rates: Vec<f64>,
}

impl<'a> Trainer<'a> {
    /// A training that has done no step; `device` without autodiff.
    ///
    /// # Errors
    ///
    /// If Burn refuses the schedule.
    pub fn new(settings: &'a Settings, text: &'a Text, device: &Device) -> Outcome<Self> {
        let device = device.clone().autodiff();
        let device = match settings.activations {
            Activations::Keep => device,
            Activations::Recompute => device.gradient_checkpointing(),
        };
        let optimizer = AdamWConfig::new()
            .with_beta_2(0.99)
            .with_epsilon(1e-8)
            .with_weight_decay(0.01)
            .with_grad_clipping(Some(GradientClippingConfig::Norm(CLIP_NORM)))
            .init();
        Ok(Self {
            settings,
            text,
            model: Model::new(settings, text.alphabet.len(), &device),
            optimizer,
            step: 0,
            device,
            rates: schedule(settings)?,
        })
    }

    /// The learning rate of step `step`, counted from 0.
    pub fn rate(&self, step: usize) -> f64 {
        self.rates[step]
    }

    /// Does one step and returns its loss, `[1]`, which may not have been computed yet.
    pub fn advance(&mut self) -> Tensor<1> {
        let Settings {
            batch: rows,
            context,
            seed,
            ..
        } = *self.settings;
        let numbers = batch(&self.text.train, rows, context, seed, self.step);
        let loss = self.loss(&self.model, numbers, &self.device);
        let scale = self.settings.loss_scale();
        let scaled = if scale == 1.0 {
            loss.clone()
        } else {
            loss.clone() * scale
        };
        let grads = GradientsParams::from_grads(scaled.backward(), &self.model);
        let grads = unscale(grads, &self.model, scale);
        let rate = self.rates[self.step];
        // The optimizer takes the model and gives it back.
        self.model = self.optimizer.step(rate, self.model.clone(), grads);
        self.step += 1;
        loss.inner()
    }

    /// The mean loss over batches of the held-out text, the same ones whenever it is asked.
    pub fn held_out_loss(&self) -> f64 {
        let Settings {
            batch: rows,
            context,
            ..
        } = *self.settings;
        let device = self.device.clone().inner();
        let model = self.model.valid();
        let losses = (0..HELD_OUT_BATCHES).map(|index| {
            let numbers = batch(&self.text.held_out, rows, context, 0, index);
            f64::from(self.loss(&model, numbers, &device).into_scalar::<f32>())
        });
        losses.sum::<f64>() / HELD_OUT_BATCHES as f64
    }

    /// Waits until the device has done all that was asked.
    ///
    /// # Errors
    ///
    /// If an operation failed on the device.
    pub fn sync(&self) -> Outcome<()> {
        self.device
            .sync()
            .map_err(|error| format!("{error:?}").into())
    }

    /// Mean of `-ln p(next character)` over sequences of `context + 1` characters, in one upload.
    fn loss(&self, model: &Model, numbers: Vec<i32>, device: &Device) -> Tensor<1> {
        let Settings { batch, context, .. } = *self.settings;
        let data = TensorData::new(numbers, [batch, context + 1]);
        let numbers = Tensor::<2, Int>::from_data(data, device);
        let inputs = numbers.clone().narrow(1, 0, context);
        let targets = numbers.narrow(1, 1, context).reshape([batch * context]);
        let logits = model.forward(inputs, Attend::from(self.settings));
        let logits = logits.reshape([batch * context, self.text.alphabet.len()]);
        CrossEntropyLossConfig::new()
            .init(device)
            .forward(logits, targets)
    }
}

/// The learning rate of every step: a linear rise, then half a cosine. A list, so that a resumed
/// training needs no state of the scheduler.
fn schedule(settings: &Settings) -> Outcome<Vec<f64>> {
    let Settings {
        learning_rate,
        warmup,
        steps,
        ..
    } = *settings;
    let cosine = CosineAnnealingLrSchedulerConfig::new(learning_rate, steps - warmup)
        .with_min_lr(learning_rate * LAST_RATE);
    let mut parts = vec![LrSchedulerConfig::Cosine(cosine)];
    let mut milestones = Vec::new();
    if warmup > 0 {
        let first = learning_rate / warmup as f64;
        let rise = LinearLrSchedulerConfig::new(first, learning_rate, warmup);
        parts.insert(0, LrSchedulerConfig::Linear(rise));
        milestones.push(warmup);
    }
    let mut scheduler = SequentialLrSchedulerConfig::new(parts, milestones).init()?;
    Ok((0..steps).map(|_| scheduler.step().base()).collect())
}

/// Divides every gradient by the loss scale.
fn unscale(grads: GradientsParams, model: &Model, scale: f64) -> GradientsParams {
    if scale == 1.0 {
        return grads;
    }
    let mut unscaler = Unscaler { grads, scale };
    model.visit(&mut unscaler);
    unscaler.grads
}

struct Unscaler {
    grads: GradientsParams,
    scale: f64,
}

impl ModuleVisitor for Unscaler {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad / self.scale);
        }
    }
}
