//! Which path an attention takes, decided before it runs and from nothing but shapes, types and
//! the device's properties.

use core::fmt;

#[cfg(feature = "cubecl")]
use burn::backend::DispatchDevice;
#[cfg(feature = "cubecl")]
use burn::tensor::DType;
use burn::tensor::{Device, Tensor};
#[cfg(feature = "cubecl")]
use flash_kernels::{AttentionProblem, BackwardPlans, FloatKind, Masking};
use flash_kernels::{GradientOrder, Plan, Precision, UnitKind};

use crate::options::{FlashOptions, Request, has_no_scores};

/// What computes an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionPath {
    /// One fused kernel that never stores the scores.
    Kernel(UnitKind),
    /// Burn's own operations, one after the other; the scores are stored.
    Composed,
}

/// What [`flash_attention`](crate::flash_attention) runs for a call, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionReport {
    /// The path taken.
    pub path: AttentionPath,
    /// The kernel's plan, when there is a kernel; for views that do not begin at a multiple of a
    /// vector it runs with narrower loads. The types of its fields are in the crate `flash_kernels`.
    pub plan: Option<Plan>,
    /// In which order kernels sum the gradient of all of q, k and v, when one may flow into any of
    /// them. That of some of them is always deterministic.
    pub gradient: Option<GradientOrder>,
    /// How exactly kernels multiply, when there are some, those of a gradient included:
    /// [`Precision::Tf32`] if one of them rounds to it, which is so only where it was asked for and the
    /// device has it. Composed operations multiply as Burn does.
    pub precision: Option<Precision>,
    /// Why there is no kernel, when there is none.
    pub reason: Option<String>,
}

impl AttentionReport {
    #[cfg(feature = "cubecl")]
    fn kernel(plan: Plan, gradient: Option<BackwardPlans>) -> Self {
        let of_gradient = gradient.map(|plans| plans.precision());
        Self {
            path: AttentionPath::Kernel(plan.unit),
            plan: Some(plan),
            gradient: gradient.map(|plans| plans.order()),
            precision: match (plan.precision, of_gradient) {
                (Precision::Full, Some(precision)) => Some(precision),
                (precision, _) => Some(precision),
            },
            reason: None,
        }
    }

    fn composed(reason: impl Into<String>) -> Self {
        Self {
            path: AttentionPath::Composed,
            plan: None,
            gradient: None,
            precision: None,
            reason: Some(reason.into()),
        }
    }
}

impl fmt::Display for AttentionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path {
            AttentionPath::Kernel(unit) => write!(f, "attention: {unit:?} kernel")?,
            AttentionPath::Composed => write!(f, "attention: composed operations")?,
        }
        if self.precision == Some(Precision::Tf32) {
            write!(f, " in tf32")?;
        }
        if self.gradient == Some(GradientOrder::Fused) {
            write!(f, ", fused gradient")?;
        }
        match &self.reason {
            Some(reason) => write!(f, " ({reason})"),
            None => Ok(()),
        }
    }
}

/// Chooses the path of a checked call; `query` lends its device and element type.
pub(crate) fn route(
    query: &Tensor<4>,
    request: &Request,
    options: &FlashOptions,
    tracked: bool,
) -> AttentionReport {
    if has_no_scores(&request.shape) {
        return AttentionReport::composed("there are no scores to compute");
    }
    if options.bias.is_some() {
        return AttentionReport::composed("the kernels take no bias yet");
    }
    if options.softcap.is_some() {
        return AttentionReport::composed("the kernels take no softcap yet");
    }
    kernel_route(query, request, options, tracked)
}

/// Whether a gradient may flow into q, k or v.
#[cfg(feature = "autodiff")]
pub(crate) fn is_tracked(query: &Tensor<4>, key: &Tensor<4>, value: &Tensor<4>) -> bool {
    query.is_tracked() || key.is_tracked() || value.is_tracked()
}

/// Nothing is tracked without autodiff.
#[cfg(not(feature = "autodiff"))]
pub(crate) fn is_tracked(_query: &Tensor<4>, _key: &Tensor<4>, _value: &Tensor<4>) -> bool {
    false
}

#[cfg(feature = "cubecl")]
fn kernel_route(
    query: &Tensor<4>,
    request: &Request,
    options: &FlashOptions,
    tracked: bool,
) -> AttentionReport {
    let device = query.device();
    let Some(client) = client(device.as_dispatch()) else {
        return AttentionReport::composed(no_kernels_for(&device));
    };
    let Some(dtype) = float_kind(query.dtype()) else {
        let dtype = query.dtype().name();
        return AttentionReport::composed(format!("there are no kernels for {dtype}"));
    };
    let problem = AttentionProblem {
        shape: request.shape,
        dtype,
        causality: options.causality,
        masking: match options.mask {
            Some(_) => Masking::Dense,
            None => Masking::None,
        },
        scale: request.scale as f32,
        precision: options.precision,
    };
    let plans = flash_kernels::plan_forward(&client, &problem).and_then(|plan| {
        if !tracked {
            return Ok((plan, None));
        }
        let plans = flash_kernels::plan_backward(&client, &problem, options.gradient)?;
        Ok((plan, Some(plans)))
    });
    match plans {
        Ok((plan, gradient)) => AttentionReport::kernel(plan, gradient),
        Err(error) => AttentionReport::composed(error.to_string()),
    }
}

#[cfg(not(feature = "cubecl"))]
fn kernel_route(
    query: &Tensor<4>,
    _request: &Request,
    _options: &FlashOptions,
    _tracked: bool,
) -> AttentionReport {
    AttentionReport::composed(no_kernels_for(&query.device()))
}

fn no_kernels_for(device: &Device) -> String {
    format!("there are no kernels for {device:?}")
}

/// The kernels' name of an element type, if they have it.
#[cfg(feature = "cubecl")]
pub(crate) fn float_kind(dtype: DType) -> Option<FloatKind> {
    match dtype {
        DType::F32 => Some(FloatKind::F32),
        DType::F16 => Some(FloatKind::F16),
        DType::BF16 => Some(FloatKind::Bf16),
        _ => None,
    }
}

/// The compute client of a CubeCL device, the one its tensors carry.
#[cfg(feature = "cubecl")]
fn client(device: &DispatchDevice) -> Option<burn_cubecl::cubecl::client::Client> {
    match device {
        DispatchDevice::Cube(device) => Some(device.client()),
        #[cfg(feature = "autodiff")]
        DispatchDevice::Autodiff(device) => client(device),
        // Which devices exist depends on Burn's features, which another crate may have enabled.
        #[allow(unreachable_patterns)]
        _ => None,
    }
}
