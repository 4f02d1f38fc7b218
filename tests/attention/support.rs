//! Sizes, host tensors, and the way to the device and back.

use burn::tensor::{Bool, Device, Tensor, TensorData, bf16, f16};
use flash_reference::rounding::Dtype;

use crate::runtime;

/// Sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    pub batch: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub seqlen_q: usize,
    pub seqlen_k: usize,
    pub head_dim: usize,
    pub val_dim: usize,
}

/// As many key heads as query heads, and values as long as keys.
pub fn dims(
    batch: usize,
    num_heads: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    head_dim: usize,
) -> Dims {
    Dims {
        batch,
        num_heads,
        num_kv_heads: num_heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        val_dim: head_dim,
    }
}

impl Dims {
    pub fn kv_heads(mut self, num_kv_heads: usize) -> Self {
        self.num_kv_heads = num_kv_heads;
        self
    }

    pub fn val_dim(mut self, val_dim: usize) -> Self {
        self.val_dim = val_dim;
        self
    }

    pub fn q(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.seqlen_q, self.head_dim]
    }

    pub fn k(&self) -> [usize; 4] {
        [self.batch, self.num_kv_heads, self.seqlen_k, self.head_dim]
    }

    pub fn v(&self) -> [usize; 4] {
        [self.batch, self.num_kv_heads, self.seqlen_k, self.val_dim]
    }

    pub fn out(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.seqlen_q, self.val_dim]
    }

    pub fn lse(&self) -> [usize; 3] {
        [self.batch, self.num_heads, self.seqlen_q]
    }

    pub fn scores(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.seqlen_q, self.seqlen_k]
    }
}

/// A packed host tensor of four dimensions.
#[derive(Clone, Debug)]
pub struct Host<T> {
    pub shape: [usize; 4],
    pub data: Vec<T>,
}

impl<T: Copy> Host<T> {
    /// One element per index.
    pub fn from_fn(shape: [usize; 4], mut element: impl FnMut([usize; 4]) -> T) -> Self {
        let data = indices(shape).map(&mut element).collect();
        Self { shape, data }
    }

    /// The packed elements of this tensor broadcast to `shape`.
    pub fn broadcast(&self, shape: [usize; 4]) -> Vec<T> {
        let source = |index: [usize; 4]| {
            let place = |at, d| at * self.shape[d] + if self.shape[d] == 1 { 0 } else { index[d] };
            self.data[(0..4).fold(0, place)]
        };
        indices(shape).map(source).collect()
    }
}

/// Every index of `shape`, the last dimension fastest.
fn indices(shape: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    let [_, b, c, d] = shape;
    (0..shape.iter().product()).map(move |i| [i / (b * c * d), i / (c * d) % b, i / d % c, i % d])
}

/// A float tensor of `dtype` on `device`.
pub fn upload(dtype: Dtype, shape: [usize; 4], values: &[f64], device: &Device) -> Tensor<4> {
    let dtype_of = runtime::burn_dtype(dtype);
    if values.is_empty() {
        return Tensor::empty(shape, (device, dtype_of));
    }
    let values = values.iter();
    let data = match dtype {
        Dtype::F32 | Dtype::Tf32 => TensorData::new(values.map(|&x| x as f32).collect(), shape),
        Dtype::F16 => TensorData::new(values.map(|&x| f16::from_f64(x)).collect(), shape),
        Dtype::Bf16 => TensorData::new(values.map(|&x| bf16::from_f64(x)).collect(), shape),
    };
    Tensor::from_data(data, (device, dtype_of))
}

/// A bool tensor on `device`.
pub fn upload_mask(mask: &Host<bool>, device: &Device) -> Tensor<4, Bool> {
    if mask.data.is_empty() {
        return Tensor::empty(mask.shape, device);
    }
    Tensor::from_data(TensorData::new(mask.data.clone(), mask.shape), device)
}

/// The elements of a tensor that must be of `dtype`.
#[track_caller]
pub fn download<const D: usize>(dtype: Dtype, tensor: Tensor<D>) -> Vec<f64> {
    assert_eq!(
        tensor.dtype(),
        runtime::burn_dtype(dtype),
        "dtype of the result"
    );
    if tensor.dims().contains(&0) {
        return Vec::new();
    }
    let data = tensor.into_data();
    assert_eq!(
        data.dtype(),
        runtime::burn_dtype(dtype),
        "dtype of the result's data"
    );
    data.try_into_vec_as::<f64>().expect("a float tensor")
}
