//! What the backward benchmark times: our kernels, our op and Burn's own under autodiff.

use burn::tensor::{Device, Tensor};
use burn_flash_attention::{FlashOptions, try_flash_attention};
use cubecl::client::Client;
use flash_kernels::{
    AttentionError, AttentionProblem, BackwardInputs, BackwardPlans, ForwardOutput, GradientOrder,
    Gradients, Pass, TensorView, Wanted, backward, launch::backward_with,
};

use super::choice::Units;
use super::device::Target;
use super::grid::{Case, Series};
use super::inputs::{Inputs, Sign};
use super::subject::{
    attend, flash_options, plan_of_mma, problem, report, upload_tensor, upload_view,
};
use super::timing::Timed;

/// The bytes of dq, dk and dv, where they were asked for.
pub type Bytes = [Option<Vec<u8>>; 3];

/// One series on one case.
pub enum Subject {
    /// Our kernels on raw buffers.
    Kernels(Box<Kernels>),
    /// An op of Burn's tensor API, forward and backward.
    Op(Box<Op>),
}

impl Subject {
    /// Uploads `inputs` in the case's shape, and computes the output for our kernels.
    ///
    /// # Errors
    ///
    /// Why our kernels or op decline the case.
    ///
    /// # Panics
    ///
    /// Where Burn does, for example on a dtype that the device lacks.
    pub fn new(
        series: Series,
        case: &Case,
        inputs: &Inputs,
        target: &Target,
        units: Units,
        order: GradientOrder,
    ) -> Result<Self, String> {
        match series {
            Series::Op | Series::Burn => {
                Op::new(series, case, inputs, target, order).map(|it| Self::Op(Box::new(it)))
            }
            _ => Kernels::new(series, case, inputs, target, units, order)
                .map(|it| Self::Kernels(Box::new(it))),
        }
    }

    /// What our kernels or op will run; `None` for Burn's own op.
    pub fn path(&self) -> Option<String> {
        match self {
            Self::Kernels(kernels) => Some(kernels.path()),
            Self::Op(op) => op.report.clone(),
        }
    }

    /// Replaces the gradient of the output.
    pub fn set_d_out(&mut self, case: &Case, values: &[f32], sign: Sign) {
        match self {
            Self::Kernels(it) => {
                it.d_out = upload_view(&it.client, case, case.shape(), values, sign)
            }
            Self::Op(it) => it.d_out = upload_tensor(&it.device, case, case.shape(), values, sign),
        }
    }

    /// Drops what the last launch computed.
    pub fn forget_output(&mut self) {
        match self {
            Self::Kernels(kernels) => kernels.last = None,
            Self::Op(op) => op.last = None,
        }
    }

    /// A launch that leaves something to check: `delta` alone leaves nothing that can be read, so
    /// `dq` runs after it.
    ///
    /// # Errors
    ///
    /// As [`Timed::launch`].
    pub fn launch_for_check(&mut self) -> Result<(), String> {
        self.forget_output();
        match self {
            Self::Kernels(kernels) if kernels.series == Series::Delta => kernels.launch(Series::Dq),
            _ => self.launch(),
        }
    }

    /// What the last launch computed. Reading also reports a launch that failed: a wait does not.
    ///
    /// # Errors
    ///
    /// The launch's or the device's fault, or that nothing was launched.
    pub fn output(&mut self) -> Result<Bytes, String> {
        const NOTHING: &str = "nothing was launched";
        let mut all = [None, None, None];
        match self {
            Self::Kernels(kernels) => {
                let Gradients { dq, dk, dv } = kernels.last.take().ok_or(NOTHING)?;
                for (bytes, view) in all.iter_mut().zip([dq, dk, dv]) {
                    let read = view.map(|view| kernels.client.read_one(view.handle));
                    let read = read.transpose().map_err(|error| error.to_string())?;
                    *bytes = read.map(|it| it.to_vec());
                }
            }
            Self::Op(op) => {
                let last = op.last.take().ok_or(NOTHING)?;
                for (bytes, tensor) in all.iter_mut().zip(last) {
                    let read = tensor.try_into_data();
                    let read = read.map_err(|error| error.to_string())?;
                    *bytes = Some(read.as_bytes().to_vec());
                }
            }
        }
        Ok(all)
    }
}

impl Timed for Subject {
    fn launch(&mut self) -> Result<(), String> {
        // The previous output goes first, so that its memory serves again.
        self.forget_output();
        match self {
            Self::Kernels(kernels) => kernels.launch(kernels.series),
            Self::Op(op) => op.launch(),
        }
    }

    fn wait(&mut self) -> Result<(), String> {
        match self {
            Self::Kernels(kernels) => {
                let wait = kernels.client.sync();
                cubecl::future::block_on(wait).map_err(|error| error.to_string())
            }
            Self::Op(op) => op.device.sync().map_err(|error| error.to_string()),
        }
    }
}

/// The plans of the gradient for devices before sm_90.
fn plans_of_mma(
    client: &Client,
    problem: &AttentionProblem,
) -> Result<BackwardPlans, AttentionError> {
    Ok(BackwardPlans {
        dq: plan_of_mma(client, problem, Pass::Dq)?,
        dkv: plan_of_mma(client, problem, Pass::Dkv)?,
        fused: None,
    })
}

/// `flash_kernels::backward`, or a part of it, on packed buffers.
pub struct Kernels {
    series: Series,
    client: Client,
    problem: AttentionProblem,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    forward: ForwardOutput,
    d_out: TensorView,
    plans: BackwardPlans,
    last: Option<Gradients>,
}

impl Kernels {
    fn new(
        series: Series,
        case: &Case,
        inputs: &Inputs,
        target: &Target,
        units: Units,
        order: GradientOrder,
    ) -> Result<Self, String> {
        let client = target.client.clone();
        let problem = problem(case)?;
        let plans = match units {
            Units::All => flash_kernels::plan_backward(&client, &problem, order),
            Units::Mma => plans_of_mma(&client, &problem),
        };
        let plans = plans.map_err(|error| error.to_string())?;
        let upload = |values| upload_view(&client, case, case.shape(), values, Sign::Plus);
        let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|values| upload(values));
        let forward = flash_kernels::forward(&client, &problem, &q, &k, &v, None);
        Ok(Self {
            series,
            forward: forward.map_err(|error| error.to_string())?,
            d_out: upload(&inputs.d_out),
            q,
            k,
            v,
            client,
            problem,
            plans,
            last: None,
        })
    }

    /// What runs.
    fn path(&self) -> String {
        let plans = &self.plans;
        match self.series {
            Series::Dq => format!("{:?}", plans.dq),
            Series::Dkv => format!("{:?}", plans.dkv),
            Series::Delta => "the one there is".to_owned(),
            // It does the work of the others.
            _ if plans.fused.is_some() => format!("{:?}", plans.fused),
            _ => format!("{plans:?}"),
        }
    }

    fn launch(&mut self, series: Series) -> Result<(), String> {
        let mut problem = self.problem;
        let (mut k, mut v) = (self.k.clone(), self.v.clone());
        let wanted = match series {
            Series::Dq => Wanted::Queries,
            Series::Dkv => Wanted::KeysAndValues,
            // Nothing to own, so no kernel runs after `delta`.
            Series::Delta => {
                problem.shape.seqlen_k = 0;
                k.shape[2] = 0;
                v.shape[2] = 0;
                Wanted::KeysAndValues
            }
            _ => Wanted::All,
        };
        let inputs = BackwardInputs {
            q: &self.q,
            k: &k,
            v: &v,
            mask: None,
            forward: &self.forward,
            d_out: &self.d_out,
        };
        let gradients = if series == Series::Delta {
            // The plans are for a problem with keys.
            backward(&self.client, &problem, inputs, wanted, self.plans.order())
        } else {
            backward_with(&self.client, &problem, &self.plans, inputs, wanted)
        };
        self.last = Some(gradients.map_err(|error| error.to_string())?);
        Ok(())
    }
}

/// `burn_flash_attention::attention` or `burn::tensor::module::attention`, and the gradient of
/// `Σ d_out ∘ out`.
pub struct Op {
    series: Series,
    device: Device,
    leaves: [Tensor<4>; 3],
    d_out: Tensor<4>,
    case: Case,
    /// What `options` has no word for: our op by its own verb.
    fused: Option<FlashOptions>,
    report: Option<String>,
    last: Option<[Tensor<4>; 3]>,
}

impl Op {
    fn new(
        series: Series,
        case: &Case,
        inputs: &Inputs,
        target: &Target,
        order: GradientOrder,
    ) -> Result<Self, String> {
        let device = target.device.clone().autodiff();
        let upload = |values| upload_tensor(&device, case, case.shape(), values, Sign::Plus);
        let leaves = [&inputs.q, &inputs.k, &inputs.v].map(|values| upload(values).require_grad());
        let [q, k, v] = &leaves;
        let own = flash_options(case).with_gradient_order(order);
        let report = match series {
            Series::Burn => None,
            _ => Some(report(&own, q, k, v)?),
        };
        let asked = series == Series::Op && order == GradientOrder::Fused;
        Ok(Self {
            series,
            d_out: upload(&inputs.d_out),
            leaves,
            case: *case,
            fused: asked.then_some(own),
            device,
            report,
            last: None,
        })
    }

    fn launch(&mut self) -> Result<(), String> {
        let out = match &self.fused {
            Some(options) => {
                let [q, k, v] = self.leaves.clone();
                let output = try_flash_attention(q, k, v, options.clone());
                output.map_err(|error| error.to_string())?.out
            }
            None => attend(self.series, self.leaves.clone(), &self.case)?,
        };
        // Backward starts from ones of the root's shape, so the product's gradient is `d_out`.
        let gradients = (out * self.d_out.clone()).backward();
        let [dq, dk, dv] = self.leaves.each_ref().map(|leaf| leaf.grad(&gradients));
        match (dq, dk, dv) {
            (Some(dq), Some(dk), Some(dv)) => self.last = Some([dq, dk, dv]),
            _ => return Err("a leaf has no gradient".into()),
        }
        Ok(())
    }
}
