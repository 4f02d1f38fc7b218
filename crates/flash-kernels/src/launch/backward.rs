//! The gradient.

use cubecl::{client::Client, prelude::*};
use half::{bf16, f16};

use super::{
    ForwardOutput, MaskView, TensorView, address_type, alignment, check_plan, check_views,
    dispatch, empty, forward::class_for, grid, packed_alignment,
};
use crate::{
    AttentionError, AttentionProblem, DeviceClass, FloatKind, GradientOrder, Precision,
    kernel::backward::delta,
    plan::{Pass, Plan},
    select::{Alignment, select},
};

mod fused;
mod kernels;
mod overlapped;

use kernels::{DkvLaunch, DqLaunch};

/// Which gradients are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wanted {
    /// Those of q, k and v.
    All,
    /// That of q alone.
    Queries,
    /// Those of k and v alone.
    KeysAndValues,
}

/// What a backward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct BackwardInputs<'a> {
    /// `[batch, num_heads, seqlen_q, head_dim]`, any strides.
    pub q: &'a TensorView,
    /// `[batch, num_kv_heads, seqlen_k, head_dim]`, any strides.
    pub k: &'a TensorView,
    /// `[batch, num_kv_heads, seqlen_k, val_dim]`, any strides.
    pub v: &'a TensorView,
    /// The mask of the forward pass.
    pub mask: Option<&'a MaskView>,
    /// What the forward pass left.
    pub forward: &'a ForwardOutput,
    /// The gradient of the output, of its shape, any strides.
    pub d_out: &'a TensorView,
}

/// Packed gradients in the inputs' type; those not asked for are absent.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// Of q's shape.
    pub dq: Option<TensorView>,
    /// Of k's shape.
    pub dk: Option<TensorView>,
    /// Of v's shape.
    pub dv: Option<TensorView>,
}

/// The plans of the gradient kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardPlans {
    /// Owns queries.
    pub dq: Plan,
    /// Owns keys.
    pub dkv: Plan,
    /// Does the work of both where all gradients are wanted: only where it was asked for and can run.
    pub fused: Option<Plan>,
}

impl BackwardPlans {
    fn of(
        device: &DeviceClass,
        problem: &AttentionProblem,
        alignment: Alignment,
        order: GradientOrder,
    ) -> Result<Self, AttentionError> {
        let fused = match order {
            GradientOrder::Deterministic => None,
            GradientOrder::Fused => select(device, problem, Pass::Fused, alignment).ok(),
        };
        Ok(Self {
            dq: select(device, problem, Pass::Dq, alignment)?,
            dkv: select(device, problem, Pass::Dkv, alignment)?,
            fused: fused.filter(|plan| fused::can_address(problem, plan)),
        })
    }

    /// In which order a call with these plans, for all gradients, sums them.
    pub fn order(&self) -> GradientOrder {
        match self.fused {
            Some(_) => GradientOrder::Fused,
            None => GradientOrder::Deterministic,
        }
    }

    /// How exactly the least exact of them multiplies.
    pub fn precision(&self) -> Precision {
        match (self.dq.precision, self.dkv.precision) {
            (Precision::Full, Precision::Full) => Precision::Full,
            (Precision::Tf32, _) | (_, Precision::Tf32) => Precision::Tf32,
        }
    }
}

/// The plans that [`backward`] would run for packed tensors.
///
/// # Errors
///
/// When no kernel can run; the error says why, and a caller takes its composed path.
pub fn plan_backward(
    client: &Client,
    problem: &AttentionProblem,
    order: GradientOrder,
) -> Result<BackwardPlans, AttentionError> {
    let device = DeviceClass::of(client);
    BackwardPlans::of(&device, problem, packed_alignment(problem), order)
}

/// The gradients of `out` with respect to q, k and v, given that of a loss with respect to `out`.
///
/// [`GradientOrder::Fused`] is taken where all gradients are wanted, and the device and the tensors
/// allow it; [`plan_backward`] tells.
///
/// # Errors
///
/// When the views disagree with `problem`, or no plan of the table can run here.
pub fn backward(
    client: &Client,
    problem: &AttentionProblem,
    inputs: BackwardInputs,
    wanted: Wanted,
    order: GradientOrder,
) -> Result<Gradients, AttentionError> {
    let BackwardInputs { q, k, v, d_out, .. } = inputs;
    let device = class_for(client, problem, &[q, k, v, d_out]);
    let alignment = alignment(&[q, k, v, d_out], problem);
    let plans = BackwardPlans::of(&device, problem, alignment, order)?;
    backward_with(client, problem, &plans, inputs, wanted)
}

/// [`backward`] with plans of the caller's choice, for tests and measurements.
///
/// # Errors
///
/// As [`backward`], when the device cannot run the plans, and when they round what `problem` does not
/// let them round.
pub fn backward_with(
    client: &Client,
    problem: &AttentionProblem,
    plans: &BackwardPlans,
    inputs: BackwardInputs,
    wanted: Wanted,
) -> Result<Gradients, AttentionError> {
    let BackwardInputs {
        q,
        k,
        v,
        d_out,
        mask,
        ..
    } = inputs;
    check_views(problem, q, k, v, mask)?;
    check_plan(&plans.dq, Pass::Dq, problem)?;
    check_plan(&plans.dkv, Pass::Dkv, problem)?;
    plans
        .fused
        .map_or(Ok(()), |plan| check_plan(&plan, Pass::Fused, problem))?;
    let device = class_for(client, problem, &[q, k, v, d_out]);
    plans.dq.check(&device)?;
    plans.dkv.check(&device)?;
    plans.fused.map_or(Ok(()), |plan| plan.check(&device))?;
    check_outputs(problem, &inputs)?;
    let call = Call {
        client,
        problem,
        device,
        inputs,
        stats: client.empty(8 * problem.shape.lse().iter().product::<usize>().max(1)),
    };
    call.gradients(plans, wanted)
}

fn check_outputs(
    problem: &AttentionProblem,
    inputs: &BackwardInputs,
) -> Result<(), AttentionError> {
    let shape = &problem.shape;
    for (argument, has, needs) in [
        ("output shape", inputs.forward.out.shape, shape.out()),
        ("lse shape", inputs.forward.lse.shape, shape.lse()),
        ("output gradient shape", inputs.d_out.shape, shape.out()),
    ] {
        if has != needs {
            return Err(AttentionError::new(
                argument,
                format!("{has:?}"),
                format!("{needs:?}"),
            ));
        }
    }
    Ok(())
}

/// Everything the launches share.
struct Call<'a> {
    client: &'a Client,
    problem: &'a AttentionProblem,
    device: DeviceClass,
    inputs: BackwardInputs<'a>,
    stats: cubecl::server::Handle,
}

impl Call<'_> {
    fn gradients(
        &self,
        plans: &BackwardPlans,
        wanted: Wanted,
    ) -> Result<Gradients, AttentionError> {
        let dtype = self.problem.dtype;
        let bytes = dtype.bytes();
        let BackwardInputs { q, k, v, .. } = self.inputs;
        let mut gradients = Gradients {
            dq: None,
            dk: None,
            dv: None,
        };
        if !self.inputs.forward.lse.is_empty() {
            match dtype {
                FloatKind::F32 => self.delta::<f32>()?,
                FloatKind::F16 => self.delta::<f16>()?,
                FloatKind::Bf16 => self.delta::<bf16>()?,
            }
        }
        if let (Wanted::All, Some(plan)) = (wanted, &plans.fused) {
            let dq = empty(self.client, q.shape, bytes);
            let (dk, dv) = self.key_value_buffers(k.shape, v.shape, bytes);
            fused::launch(self, plan, [&dq, &dk, &dv])?;
            return Ok(Gradients {
                dq: Some(dq),
                dk: Some(dk),
                dv: Some(dv),
            });
        }
        if wanted != Wanted::KeysAndValues {
            let dq = empty(self.client, q.shape, bytes);
            if !dq.is_empty() {
                let (plan, dq) = (&plans.dq, &dq);
                dispatch(
                    plan,
                    dtype,
                    &DqLaunch {
                        call: self,
                        plan,
                        dq,
                    },
                )?;
            }
            gradients.dq = Some(dq);
        }
        if wanted != Wanted::Queries {
            let (dk, dv) = self.key_value_buffers(k.shape, v.shape, bytes);
            if !dk.is_empty() || !dv.is_empty() {
                let (plan, dk, dv) = (&plans.dkv, &dk, &dv);
                let call = self;
                dispatch(plan, dtype, &DkvLaunch { call, plan, dk, dv })?;
            }
            gradients.dk = Some(dk);
            gradients.dv = Some(dv);
        }
        Ok(gradients)
    }

    /// dk and dv one behind the other in one buffer, each aligned as the device wants it.
    fn key_value_buffers(
        &self,
        k: [usize; 4],
        v: [usize; 4],
        bytes: usize,
    ) -> (TensorView, TensorView) {
        let align = (self.client.properties().memory.alignment as usize).max(16);
        let len = |shape: [usize; 4]| shape.iter().product::<usize>().max(1) * bytes;
        let start = len(k).next_multiple_of(align);
        let total = start + len(v);
        let buffer = self.client.empty(total);
        let dk = buffer.clone().offset_end((total - len(k)) as u64);
        let dv = buffer.offset_start(start as u64);
        (TensorView::packed(dk, k), TensorView::packed(dv, v))
    }

    fn views<'b>(&'b self, outputs: &[&'b TensorView]) -> Vec<&'b TensorView> {
        let BackwardInputs {
            q,
            k,
            v,
            mask,
            forward,
            d_out,
        } = self.inputs;
        let mut views = vec![q, k, v, d_out, &forward.out];
        views.extend(mask.map(|mask| &mask.tensor));
        views.extend(outputs);
        views
    }

    /// Two f32 for each row.
    fn stats_len(&self) -> usize {
        2 * self.problem.shape.lse().iter().product::<usize>()
    }

    fn delta<E: Float>(&self) -> Result<(), AttentionError> {
        let BackwardInputs { forward, d_out, .. } = self.inputs;
        let rows = self.problem.shape.lse().iter().product::<usize>();
        let width = alignment(&[&forward.out, d_out], self.problem).0;
        let width = width.min(self.device.max_vector);
        let lanes = delta::lanes(self.device.plane_size, self.problem.shape.val_dim / width);
        let cubes = rows.div_ceil(delta::THREADS / lanes);
        let (count, _) = grid(cubes, self.device.max_cubes)?;
        let lse = forward.lse.handle.clone();
        // SAFETY: the kernel's rows end at `rows`, its columns at the tensors' own.
        unsafe {
            delta::delta::launch_unchecked::<E>(
                self.client,
                count,
                CubeDim::new_1d(delta::THREADS as u32),
                address_type(&self.device, &self.views(&[]))?,
                width,
                forward.out.arg(),
                d_out.arg(),
                BufferArg::from_raw_parts(lse, rows),
                BufferArg::from_raw_parts(self.stats.clone(), 2 * rows),
                rows as u32,
                self.device.isa,
                lanes,
            );
        }
        Ok(())
    }
}
