//! A training step through a stack of attention layers, and the memory that it needs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use cubecl::client::Client;

use super::device::{Pools, Target};
use super::gradient_oracle::Oracle;
use super::grid::{Case, Series};
use super::inputs::{Inputs, Sign, decode};
use super::oracle::Verdict;
use super::run::without_panic;
use super::subject::{attend, flash_options, report, upload_tensor};

/// Between two looks at the pools.
const INTERVAL: Duration = Duration::from_micros(200);

/// What a step needed.
#[derive(Clone, Debug, PartialEq)]
pub struct Footprint {
    /// Before it: the leaves and dO, and what the pools did not give back.
    pub before: Pools,
    /// The largest of each during it.
    pub peak: Pools,
    /// From the first launch to the last gradient.
    pub seconds: f64,
    /// The check of a step through one layer.
    pub verdict: Verdict,
    /// What our op ran; nothing for Burn's own.
    pub path: Option<String>,
}

/// The tensors that a training loop would have: the query of the first layer, key and value of each
/// layer, and the gradient of the last output.
struct Stack {
    series: Series,
    case: Case,
    leaves: Vec<Tensor<4>>,
    d_out: Tensor<4>,
}

impl Stack {
    fn new(
        series: Series,
        case: &Case,
        layers: usize,
        inputs: &Inputs,
        d_out: &[f32],
        target: &Target,
    ) -> Self {
        let device = target.device.clone().autodiff();
        let upload = |values| upload_tensor(&device, case, case.shape(), values, Sign::Plus);
        let mut leaves = vec![upload(&inputs.q).require_grad()];
        for _ in 0..layers {
            leaves.extend([&inputs.k, &inputs.v].map(|values| upload(values).require_grad()));
        }
        Self {
            series,
            case: *case,
            leaves,
            d_out: upload(d_out),
        }
    }

    /// Forward and backward: the gradients of all leaves. The output of a layer is the query of
    /// the next.
    fn step(&self) -> Result<Vec<Tensor<4>>, String> {
        let mut x = self.leaves[0].clone();
        for layer in self.leaves[1..].chunks(2) {
            let inputs = [x, layer[0].clone(), layer[1].clone()];
            x = attend(self.series, inputs, &self.case)?;
        }
        let gradients = (x * self.d_out.clone()).backward();
        let of = |leaf: &Tensor<4>| leaf.grad(&gradients).ok_or("a leaf has no gradient");
        let all = self.leaves.iter().map(of).collect::<Result<_, _>>();
        all.map_err(str::to_owned)
    }
}

/// Runs a step of `layers` layers in pools that held the leaves and dO alone.
///
/// A step through one layer comes before, which is checked by the specification, and a step
/// like the measured one, so that everything is compiled and autotuned; the pools are emptied
/// after each.
///
/// # Errors
///
/// The fault of a launch or of the device, or what is wrong with the gradients.
pub fn measure(
    target: &Target,
    series: Series,
    case: &Case,
    layers: usize,
) -> Result<Footprint, String> {
    let inputs = Inputs::new(case.pass, case.dtype, case.elements());
    let oracle = Oracle::new(case, &inputs);
    let sparse = oracle.d_out(&inputs);
    let stack = Stack::new(series, case, 1, &inputs, &sparse, target);
    let path = match series {
        Series::Burn => None,
        _ => Some(report(
            &flash_options(case),
            &stack.leaves[0],
            &stack.leaves[1],
            &stack.leaves[2],
        )?),
    };
    let mut got = [None, None, None];
    for (bytes, gradient) in got.iter_mut().zip(stack.step()?) {
        *bytes = Some(read(gradient)?);
    }
    let verdict = oracle.judge(&got, Sign::Plus)?;
    drop((stack, got, sparse));

    empty(target)?;
    let stack = Stack::new(series, case, layers, &inputs, &inputs.d_out, target);
    drop(stack.step()?);
    // Uploading and autotuning may have needed more than they left.
    empty(target)?;
    let before = Pools::of(&target.client);
    let start = Instant::now();
    let (gradients, peak) = while_watched(&target.client, || {
        let gradients = stack.step()?;
        wait(target)?;
        Ok(gradients)
    })?;
    let seconds = start.elapsed().as_secs_f64();
    for (index, gradient) in gradients.into_iter().enumerate() {
        let values = decode(case.dtype, &read(gradient)?);
        if !values.iter().all(|x| x.is_finite()) || values.iter().all(|x| *x == 0.0) {
            return Err(format!("gradient {index} is not finite, or all zero"));
        }
    }
    Ok(Footprint {
        before,
        peak: peak.max(before),
        seconds,
        verdict,
        path,
    })
}

fn read(tensor: Tensor<4>) -> Result<Vec<u8>, String> {
    let data = tensor.try_into_data().map_err(|error| error.to_string())?;
    Ok(data.as_bytes().to_vec())
}

fn wait(target: &Target) -> Result<(), String> {
    target.device.sync().map_err(|error| error.to_string())
}

/// Gives the free pages of the pools back to the driver.
fn empty(target: &Target) -> Result<(), String> {
    wait(target)?;
    let cleanup = target.client.memory_cleanup();
    cleanup.map_err(|error| error.to_string())?;
    wait(target)
}

/// Runs `work` while another thread looks at the pools, and once more at its end.
///
/// Memory is given out when a launch is queued, in the order of the program, by a thread of the
/// runtime that also answers the questions about the pools. So what is seen is what the device
/// holds, between two launches. Pages rarely go back to the driver in between, and what a look
/// misses in use stays reserved.
fn while_watched<T>(
    client: &Client,
    work: impl FnOnce() -> Result<T, String>,
) -> Result<(T, Pools), String> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut peak = Pools::default();
            while !done.load(Ordering::Relaxed) {
                // A device that is lost ends the watch; `work` says why.
                match without_panic(|| Ok(Pools::of(client))) {
                    Ok(now) => peak = peak.max(now),
                    Err(_) => break,
                }
                std::thread::sleep(INTERVAL);
            }
            peak
        });
        let result = without_panic(work);
        let last = result.is_ok().then(|| Pools::of(client));
        done.store(true, Ordering::Relaxed);
        let seen = watch.join().map_err(|_| "the watch panicked".to_owned())?;
        Ok((result?, seen.max(last.unwrap_or_default())))
    })
}
