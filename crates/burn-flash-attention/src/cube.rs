//! The op on CubeCL's backends: Burn's tensors become views, and views become Burn's tensors.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{BoolStore, DType};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::tensor::CubeTensor;
use flash_kernels::{
    AttentionError, AttentionProblem, AttentionShape, BackwardInputs, ForwardOutput, MaskKind,
    MaskView, Masking, TensorView, Wanted, backward, forward,
};

use crate::backend::{BackwardTensors, FlashBackend, ForwardOptions, Mask, composed_forward};
use crate::fallback::{attention_shape, no_scores};
use crate::gradient::composed_gradient;
use crate::options::has_no_scores;
use crate::report::float_kind;

impl FlashBackend for CubeBackend {
    fn flash_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Mask<Self>,
        options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let shape = attention_shape(&query, &key, &value);
        if has_no_scores(&shape) {
            return no_scores::<Self>(&shape, &query);
        }
        let call = Call::new(shape, query, key, value, mask.into_option());
        match call.run(options) {
            Ok(output) => output,
            Err(error) => {
                log::debug!("attention: composed operations ({error})");
                let mask = Mask::from_option(call.mask);
                composed_forward::<Self>(call.query, call.key, call.value, mask, options)
            }
        }
    }

    fn flash_backward_query(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Mask<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        options: ForwardOptions,
    ) -> FloatTensor<Self> {
        let tensors = BackwardTensors {
            query,
            key,
            value,
            mask,
            out,
            lse,
            d_out,
        };
        let [d_query, ..] = gradients(tensors, options, Wanted::Queries);
        d_query.expect("it was asked for")
    }

    fn flash_backward_key_value(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Mask<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let tensors = BackwardTensors {
            query,
            key,
            value,
            mask,
            out,
            lse,
            d_out,
        };
        let [_, d_key, d_value] = gradients(tensors, options, Wanted::KeysAndValues);
        (
            d_key.expect("it was asked for"),
            d_value.expect("it was asked for"),
        )
    }

    fn flash_backward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Mask<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        options: ForwardOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let tensors = BackwardTensors {
            query,
            key,
            value,
            mask,
            out,
            lse,
            d_out,
        };
        let [d_query, d_key, d_value] = gradients(tensors, options, Wanted::All);
        (
            d_query.expect("it was asked for"),
            d_key.expect("it was asked for"),
            d_value.expect("it was asked for"),
        )
    }
}

/// The gradients that `wanted` names, by the kernels, or composed if the device refuses them.
fn gradients(
    tensors: BackwardTensors<CubeBackend>,
    options: ForwardOptions,
    wanted: Wanted,
) -> [Option<CubeTensor>; 3] {
    let BackwardTensors {
        query, key, value, ..
    } = &tensors;
    let shape = attention_shape(query, key, value);
    if has_no_scores(&shape) {
        return composed_gradient::<CubeBackend>(tensors, options).map(Some);
    }
    let mask = tensors.mask.clone().into_option();
    let call = Call::new(shape, query.clone(), key.clone(), value.clone(), mask);
    match call.gradients(&tensors, options, wanted) {
        Ok(gradients) => gradients,
        Err(error) => {
            log::debug!("attention: composed gradient ({error})");
            composed_gradient::<CubeBackend>(tensors, options).map(Some)
        }
    }
}

/// One attention on the device.
struct Call {
    shape: AttentionShape,
    query: CubeTensor,
    key: CubeTensor,
    value: CubeTensor,
    mask: Option<CubeTensor>,
}

impl Call {
    fn new(
        shape: AttentionShape,
        query: CubeTensor,
        key: CubeTensor,
        value: CubeTensor,
        mask: Option<CubeTensor>,
    ) -> Self {
        Self {
            shape,
            query: in_rows(query),
            key: in_rows(key),
            value: in_rows(value),
            mask: mask.map(untile),
        }
    }

    fn run(&self, options: ForwardOptions) -> Result<(CubeTensor, CubeTensor), AttentionError> {
        let problem = self.problem(options)?;
        let mask = match &self.mask {
            Some(mask) => Some(mask_view(mask, &self.shape)?),
            None => None,
        };
        let (query, key, value) = (view(&self.query), view(&self.key), view(&self.value));
        let client = &self.query.client;
        let ForwardOutput { out, lse } =
            forward(client, &problem, &query, &key, &value, mask.as_ref())?;
        Ok((
            self.tensor(out, self.query.dtype),
            self.tensor(lse, DType::F32),
        ))
    }

    fn gradients(
        &self,
        tensors: &BackwardTensors<CubeBackend>,
        options: ForwardOptions,
        wanted: Wanted,
    ) -> Result<[Option<CubeTensor>; 3], AttentionError> {
        let problem = self.problem(options)?;
        let mask = match &self.mask {
            Some(mask) => Some(mask_view(mask, &self.shape)?),
            None => None,
        };
        let forward = ForwardOutput {
            out: view(&into_contiguous(tensors.out.clone())),
            lse: view(&into_contiguous(tensors.lse.clone())),
        };
        let inputs = BackwardInputs {
            q: &view(&self.query),
            k: &view(&self.key),
            v: &view(&self.value),
            mask: mask.as_ref(),
            forward: &forward,
            d_out: &view(&in_rows(tensors.d_out.clone())),
        };
        let gradients = backward(
            &self.query.client,
            &problem,
            inputs,
            wanted,
            options.gradient,
        )?;
        let dtype = self.query.dtype;
        let tensor = |view: Option<TensorView>| view.map(|view| self.tensor(view, dtype));
        Ok([gradients.dq, gradients.dk, gradients.dv].map(tensor))
    }

    fn problem(&self, options: ForwardOptions) -> Result<AttentionProblem, AttentionError> {
        let dtype = self.query.dtype;
        let allowed = "f32, f16 or bf16";
        let refused = || AttentionError::new("query dtype", dtype.name(), allowed);
        Ok(AttentionProblem {
            shape: self.shape,
            dtype: float_kind(dtype).ok_or_else(refused)?,
            causality: options.causality,
            masking: match self.mask {
                Some(_) => Masking::Dense,
                None => Masking::None,
            },
            scale: options.scale as f32,
            precision: options.precision,
        })
    }

    fn tensor(&self, packed: TensorView, dtype: DType) -> CubeTensor {
        CubeTensor::new_contiguous(
            self.query.client.clone(),
            self.query.device.clone(),
            packed.shape.into(),
            packed.handle,
            dtype,
        )
    }
}

/// The tensor as the kernels should read it. Strides between rows are as good as packed ones, but
/// strided elements would be loaded one by one in every step, which one copy is cheaper than.
fn in_rows(tensor: CubeTensor) -> CubeTensor {
    // Storage tiles are read by Burn's matmul alone.
    let tensor = untile(tensor);
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    if shape[3] == 1 || strides[3] == 1 {
        return tensor;
    }
    into_contiguous(tensor)
}

/// The tensor as it lies: strides as they are, and the handle holds the offset.
fn view(tensor: &CubeTensor) -> TensorView {
    let strides = tensor.meta.strides();
    TensorView {
        handle: tensor.handle.clone(),
        shape: tensor.shape().dims(),
        strides: core::array::from_fn(|dim| strides[dim]),
    }
}

/// The mask stretched to `[batch, num_heads, seqlen_q, seqlen_k]` by strides of 0.
fn mask_view(mask: &CubeTensor, shape: &AttentionShape) -> Result<MaskView, AttentionError> {
    let kind = match mask.dtype {
        DType::Bool(BoolStore::U8) => MaskKind::U8,
        DType::Bool(BoolStore::U32) => MaskKind::U32,
        other => {
            let allowed = "a bool stored as u8 or u32";
            return Err(AttentionError::new("mask dtype", other.name(), allowed));
        }
    };
    let mut tensor = view(mask);
    for (stride, size) in tensor.strides.iter_mut().zip(tensor.shape) {
        if size == 1 {
            *stride = 0;
        }
    }
    tensor.shape = [shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k];
    Ok(MaskView { tensor, kind })
}
