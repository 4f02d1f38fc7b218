//! Random inputs on the host.
//!
//! Standard normal values from a fixed seed, rounded to the element type. Real values matter:
//! a GPU runs faster on zeros, and zeros hide wrong indexing.

use flash_reference::rng::Rng;
use half::{bf16, f16};

use super::grid::{Dtype, Pass};

/// Q, K and V, and the gradient of O for the backward pass, each with the same number of elements,
/// in no particular shape: all cases of the papers' grid have as many elements, so one set serves
/// them all.
pub struct Inputs {
    /// Element type that the values are rounded to.
    pub dtype: Dtype,
    /// Queries; exactly representable in `dtype`.
    pub q: Vec<f32>,
    /// Keys, likewise.
    pub k: Vec<f32>,
    /// Values, likewise.
    pub v: Vec<f32>,
    /// The gradient of O, likewise; nothing for the forward pass.
    pub d_out: Vec<f32>,
}

impl Inputs {
    /// Draws `elements` values for each of them.
    pub fn new(pass: Pass, dtype: Dtype, elements: usize) -> Self {
        Self {
            dtype,
            q: normal(dtype, elements, 1),
            k: normal(dtype, elements, 2),
            v: normal(dtype, elements, 3),
            d_out: match pass {
                Pass::Forward => Vec::new(),
                Pass::Backward => normal(dtype, elements, 4),
            },
        }
    }

    /// True if these are the inputs that [`Inputs::new`] would draw.
    pub fn serve(&self, dtype: Dtype, elements: usize) -> bool {
        self.dtype == dtype && self.q.len() == elements
    }
}

/// Whether V is used as drawn or negated, which negates O exactly; in the backward pass the
/// gradient of O, which negates those of Q, K and V. A launch after a change of sign cannot pass by
/// finding the right result of an earlier one in the memory that it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// As drawn.
    Plus,
    /// Negated.
    Minus,
}

impl Sign {
    /// What the input and the results are multiplied by.
    pub fn factor(self) -> f32 {
        match self {
            Self::Plus => 1.0,
            Self::Minus => -1.0,
        }
    }
}

/// Elements that one generator draws; a fixed number, so that values do not depend on the
/// number of threads.
const CHUNK: usize = 1 << 16;

fn normal(dtype: Dtype, elements: usize, stream: u64) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let chunks = elements.div_ceil(CHUNK);
    let per_thread = chunks.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (thread, part) in values.chunks_mut(per_thread * CHUNK).enumerate() {
            scope.spawn(move || {
                for (index, chunk) in part.chunks_mut(CHUNK).enumerate() {
                    let number = (thread * per_thread + index) as u64;
                    fill(dtype, chunk, stream << 32 | number);
                }
            });
        }
    });
    values
}

fn fill(dtype: Dtype, chunk: &mut [f32], seed: u64) {
    let mut rng = Rng::new(seed);
    for pair in chunk.chunks_mut(2) {
        for (value, normal) in pair.iter_mut().zip(rng.normal_pair()) {
            *value = round(dtype, normal as f32);
        }
    }
}

fn round(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(value).to_f32(),
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
        Dtype::F32 | Dtype::Tf32 => value,
    }
}

/// The bytes of `values` in `dtype`, in the machine's byte order.
pub fn encode(dtype: Dtype, values: &[f32], sign: Sign) -> Vec<u8> {
    let size = dtype.bytes();
    let mut bytes = vec![0; values.len() * size];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = values.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (values, bytes) in values.chunks(share).zip(bytes.chunks_mut(share * size)) {
            scope.spawn(move || {
                for (value, bytes) in values.iter().zip(bytes.chunks_exact_mut(size)) {
                    let value = value * sign.factor();
                    match dtype {
                        Dtype::F16 => {
                            bytes.copy_from_slice(&f16::from_f32(value).to_ne_bytes());
                        }
                        Dtype::Bf16 => {
                            bytes.copy_from_slice(&bf16::from_f32(value).to_ne_bytes());
                        }
                        Dtype::F32 | Dtype::Tf32 => {
                            bytes.copy_from_slice(&value.to_ne_bytes());
                        }
                    }
                }
            });
        }
    });
    bytes
}

/// The inverse of [`encode`]. Bytes left over at the end are ignored.
pub fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let halves = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        Dtype::F16 => halves.map(|b| f16::from_ne_bytes(b).to_f32()).collect(),
        Dtype::Bf16 => halves.map(|b| bf16::from_ne_bytes(b).to_f32()).collect(),
        Dtype::F32 | Dtype::Tf32 => bytes
            .chunks_exact(4)
            .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_normal_and_differ_between_tensors() {
        let inputs = Inputs::new(Pass::Backward, Dtype::F32, 3 * CHUNK + 7);
        let count = inputs.q.len() as f64;
        let mean = inputs.q.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
        let square = inputs.q.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / count;
        // Standard errors here are 0.0023 and 0.0032.
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((square - 1.0).abs() < 0.02, "{square}");
        assert_ne!(inputs.q, inputs.k);
        assert_eq!(inputs.d_out.len(), inputs.v.len());
        assert_ne!(inputs.d_out, inputs.v);
        assert_ne!(inputs.q[..CHUNK], inputs.q[CHUNK..2 * CHUNK]);
    }

    #[test]
    fn rounded_values_survive_their_bytes() {
        for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
            let inputs = Inputs::new(Pass::Forward, dtype, 1000);
            let bytes = encode(dtype, &inputs.v, Sign::Plus);
            assert_eq!(bytes.len(), 1000 * dtype.bytes());
            assert_eq!(decode(dtype, &bytes), inputs.v);
            let negated: Vec<f32> = inputs.v.iter().map(|x| -x).collect();
            assert_eq!(
                decode(dtype, &encode(dtype, &inputs.v, Sign::Minus)),
                negated
            );
        }
    }
}
