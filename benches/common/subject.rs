//! What is timed, each on inputs of its own: our kernel, our op in Burn, Burn's own op.

use burn::tensor::module::attention as burn_attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_flash_attention::{FlashOptions, attention_report, try_flash_attention};
use cubecl::client::Client;
use flash_kernels::{
    AttentionError, AttentionProblem, AttentionShape, DeviceClass, FloatKind, Masking, Pass, Plan,
    Precision, TensorView, UnitKind,
    launch::forward_with,
    select::{Alignment, select, widest},
};

use super::choice::{Choice, Units};
use super::device::Target;
use super::grid::{Case, Causality, Dtype, Series};
use super::inputs::{Inputs, Sign, encode};
use super::timing::Timed;

/// One series on one case.
pub enum Subject {
    /// Our kernel on raw buffers.
    Kernel(Box<Kernel>),
    /// An op of Burn's tensor API.
    Op(Box<Op>),
}

impl Subject {
    /// Uploads `inputs` in the case's shape.
    ///
    /// # Errors
    ///
    /// Why our kernel or op declines the case.
    ///
    /// # Panics
    ///
    /// Where Burn does, for example on a dtype that the device lacks.
    pub fn new(
        series: Series,
        case: &Case,
        inputs: &Inputs,
        target: &Target,
        choice: Choice,
    ) -> Result<Self, String> {
        match series {
            Series::Op | Series::Burn => {
                Op::new(series, case, inputs, target).map(|it| Self::Op(Box::new(it)))
            }
            _ => {
                let kernel = Kernel::new(case, inputs, target, choice);
                kernel.map(|it| Self::Kernel(Box::new(it)))
            }
        }
    }

    /// What our kernel or op will run; `None` for Burn's own op.
    pub fn path(&self) -> Option<String> {
        match self {
            Self::Kernel(kernel) => Some(format!("{:?}", kernel.plan)),
            Self::Op(op) => op.report.clone(),
        }
    }

    /// Replaces V by itself with another sign.
    pub fn set_sign(&mut self, case: &Case, inputs: &Inputs, sign: Sign) {
        match self {
            Self::Kernel(kernel) => {
                kernel.v = upload_view(&kernel.client, case, case.key_shape(), &inputs.v, sign);
            }
            Self::Op(op) => {
                op.v = upload_tensor(&op.device, case, case.key_shape(), &inputs.v, sign);
            }
        }
    }

    /// Drops the output of the last launch.
    pub fn forget_output(&mut self) {
        match self {
            Self::Kernel(kernel) => kernel.last = None,
            Self::Op(op) => op.last = None,
        }
    }

    /// The bytes of the last launch's output. Reading also reports a launch that failed: a wait
    /// does not.
    ///
    /// # Errors
    ///
    /// The launch's or the device's fault, or that nothing was launched.
    pub fn output(&mut self) -> Result<Vec<u8>, String> {
        const NOTHING: &str = "nothing was launched";
        match self {
            Self::Kernel(kernel) => {
                let view = kernel.last.take().ok_or(NOTHING)?;
                let read = kernel.client.read_one(view.handle);
                Ok(read.map_err(|error| error.to_string())?.to_vec())
            }
            Self::Op(op) => {
                let tensor = op.last.take().ok_or(NOTHING)?;
                let read = tensor.try_into_data();
                Ok(read.map_err(|error| error.to_string())?.as_bytes().to_vec())
            }
        }
    }
}

impl Timed for Subject {
    fn launch(&mut self) -> Result<(), String> {
        // The previous output goes first, so that its memory serves again.
        self.forget_output();
        match self {
            Self::Kernel(kernel) => kernel.launch(),
            Self::Op(op) => op.launch(),
        }
    }

    fn wait(&mut self) -> Result<(), String> {
        match self {
            Self::Kernel(kernel) => {
                let wait = kernel.client.sync();
                cubecl::future::block_on(wait).map_err(|error| error.to_string())
            }
            Self::Op(op) => op.device.sync().map_err(|error| error.to_string()),
        }
    }
}

/// `flash_kernels::forward` on packed buffers, or `forward_with` where a tile is asked for.
pub struct Kernel {
    client: Client,
    problem: AttentionProblem,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    plan: Plan,
    is_chosen: bool,
    last: Option<TensorView>,
}

impl Kernel {
    fn new(case: &Case, inputs: &Inputs, target: &Target, choice: Choice) -> Result<Self, String> {
        let client = target.client.clone();
        let problem = problem(case)?;
        let plan = match choice.units {
            Units::All => flash_kernels::plan_forward(&client, &problem),
            Units::Mma => plan_of_mma(&client, &problem, Pass::Forward),
        };
        let mut plan = plan.map_err(|error| error.to_string())?;
        if let Some([queries, keys]) = choice.tile {
            (plan.tile.block_m, plan.tile.block_n) = (queries, keys);
            plan.threads = match plan.unit {
                UnitKind::Wgmma => 128 * (plan.consumers() + 1),
                UnitKind::Mma => 32 * queries / plan.rows,
                unit => return Err(format!("--tile is for Wgmma and Mma, not {unit:?}")),
            };
        }
        if let Some(splits) = choice.splits {
            plan.splits = splits;
            let fits = plan.check(&DeviceClass::of(&client));
            fits.map_err(|error| error.to_string())?;
        }
        let upload = |shape, values| upload_view(&client, case, shape, values, Sign::Plus);
        Ok(Self {
            q: upload(case.shape(), &inputs.q),
            k: upload(case.key_shape(), &inputs.k),
            v: upload(case.key_shape(), &inputs.v),
            client,
            problem,
            plan,
            is_chosen: choice != Choice::NONE,
            last: None,
        })
    }

    fn launch(&mut self) -> Result<(), String> {
        let (q, k, v) = (&self.q, &self.k, &self.v);
        let (client, problem) = (&self.client, &self.problem);
        let output = if self.is_chosen {
            forward_with(client, problem, &self.plan, q, k, v, None)
        } else {
            flash_kernels::forward(client, problem, q, k, v, None)
        };
        self.last = Some(output.map_err(|error| error.to_string())?.out);
        Ok(())
    }
}

/// The table's plan for packed tensors on this device, had it no warpgroup products.
///
/// # Errors
///
/// As `flash_kernels::select::select`.
pub fn plan_of_mma(
    client: &Client,
    problem: &AttentionProblem,
    pass: Pass,
) -> Result<Plan, AttentionError> {
    let device = DeviceClass {
        wgmma: false,
        ..DeviceClass::of(client)
    };
    let shape = &problem.shape;
    let alignment = Alignment(widest(shape.head_dim, 8).min(widest(shape.val_dim, 8)));
    select(&device, problem, pass, alignment)
}

/// What `case` asks of our kernels.
///
/// # Errors
///
/// When its sizes make no attention.
pub fn problem(case: &Case) -> Result<AttentionProblem, String> {
    let (queries, keys) = (case.shape(), case.key_shape());
    Ok(AttentionProblem {
        shape: AttentionShape::new(queries, keys, keys).map_err(|error| error.to_string())?,
        dtype: match case.dtype {
            Dtype::F16 => FloatKind::F16,
            Dtype::Bf16 => FloatKind::Bf16,
            Dtype::F32 | Dtype::Tf32 => FloatKind::F32,
        },
        causality: match case.causality {
            Causality::Full => flash_kernels::Causality::Full,
            Causality::Causal => flash_kernels::Causality::Causal,
        },
        masking: Masking::None,
        scale: 1.0 / (case.head_dim as f32).sqrt(),
        precision: precision(case),
    })
}

/// What `case` lets become of products of f32.
fn precision(case: &Case) -> Precision {
    match case.dtype {
        Dtype::Tf32 => Precision::Tf32,
        Dtype::F16 | Dtype::Bf16 | Dtype::F32 => Precision::Full,
    }
}

/// The options of `case` for our op.
pub fn flash_options(case: &Case) -> FlashOptions {
    let options = FlashOptions::new().with_precision(precision(case));
    match case.causality {
        Causality::Full => options,
        Causality::Causal => options.causal(),
    }
}

/// What our op will run.
///
/// # Errors
///
/// Why it declines.
pub fn report(
    options: &FlashOptions,
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
) -> Result<String, String> {
    let report = attention_report(q, k, v, options);
    Ok(format!("{:?}", report.map_err(|error| error.to_string())?))
}

/// `case` by our op or by Burn's own.
///
/// # Errors
///
/// Why our op declines.
pub fn attend(series: Series, [q, k, v]: [Tensor<4>; 3], case: &Case) -> Result<Tensor<4>, String> {
    if series == Series::Burn {
        let options = AttentionModuleOptions {
            is_causal: case.causality == Causality::Causal,
            ..Default::default()
        };
        return Ok(burn_attention(q, k, v, None, None, options));
    }
    let output = try_flash_attention(q, k, v, flash_options(case));
    Ok(output.map_err(|error| error.to_string())?.out)
}

/// A packed buffer of the first of `values`.
pub fn upload_view(
    client: &Client,
    case: &Case,
    shape: [usize; 4],
    values: &[f32],
    sign: Sign,
) -> TensorView {
    let values = &values[..shape.iter().product()];
    let bytes = encode(case.dtype, values, sign);
    TensorView::packed(client.create_from_slice(&bytes), shape)
}

/// `burn_flash_attention::flash_attention` or `burn::tensor::module::attention`.
pub struct Op {
    series: Series,
    device: Device,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    case: Case,
    report: Option<String>,
    last: Option<Tensor<4>>,
}

impl Op {
    fn new(series: Series, case: &Case, inputs: &Inputs, target: &Target) -> Result<Self, String> {
        let device = target.device.clone();
        let upload = |shape, values| upload_tensor(&device, case, shape, values, Sign::Plus);
        let q = upload(case.shape(), &inputs.q);
        let [k, v] = [&inputs.k, &inputs.v].map(|values| upload(case.key_shape(), values));
        let report = match series {
            Series::Burn => None,
            _ => Some(report(&flash_options(case), &q, &k, &v)?),
        };
        Ok(Self {
            series,
            q,
            k,
            v,
            case: *case,
            device,
            report,
            last: None,
        })
    }

    fn launch(&mut self) -> Result<(), String> {
        let inputs = [&self.q, &self.k, &self.v].map(Tensor::clone);
        self.last = Some(attend(self.series, inputs, &self.case)?);
        Ok(())
    }
}

/// A tensor of the first of `values`.
pub fn upload_tensor(
    device: &Device,
    case: &Case,
    shape: [usize; 4],
    values: &[f32],
    sign: Sign,
) -> Tensor<4> {
    let dtype = match case.dtype {
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
        Dtype::F32 | Dtype::Tf32 => DType::F32,
    };
    let values = &values[..shape.iter().product()];
    let bytes = encode(case.dtype, values, sign);
    let data = TensorData::from_bytes_vec(bytes, shape, dtype);
    Tensor::from_data(data, (device, dtype))
}
