//! Number formats of GPUs, and rounding to them.

/// A floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 binary32: 24 significant bits, largest finite value about 3.4e38.
    F32,
    /// IEEE 754 binary16: 11 significant bits, largest finite value 65504.
    F16,
    /// The products of tensor cores on `f32`: operands of 11 significant bits with its range, everything
    /// else in [`Dtype::F32`], tensors too.
    Tf32,
    /// bfloat16, the upper half of an `F32`: 8 significant bits, largest finite value about 3.4e38.
    Bf16,
}

impl Dtype {
    /// The format of tensors whose products are computed in this one.
    pub fn stored(self) -> Self {
        match self {
            Self::Tf32 => Self::F32,
            Self::F32 | Self::F16 | Self::Bf16 => self,
        }
    }

    /// Bits stored after the leading one.
    fn fraction_bits(self) -> i32 {
        match self {
            Self::F32 => 23,
            Self::F16 | Self::Tf32 => 10,
            Self::Bf16 => 7,
        }
    }

    /// Exponents of the smallest and of the largest normal number.
    fn exponents(self) -> (i32, i32) {
        match self {
            Self::F32 | Self::Tf32 | Self::Bf16 => (-126, 127),
            Self::F16 => (-14, 15),
        }
    }
}

const F64_FRACTION_BITS: i32 = 52;

/// The exponent of `x`: `floor(log2(|x|))` of a normal number, below every dtype's exponents for
/// zero and subnormals, 1024 for infinity and NaN.
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> F64_FRACTION_BITS) & 0x7ff) as i32 - 1023
}

/// `2^exponent`, for exponents of normal numbers.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << F64_FRACTION_BITS)
}

/// The value of `dtype` nearest to `x`, the even one of two equally near.
///
/// Rounds once, straight from `f64`. Subnormals are kept, the sign of zero too, what rounds past
/// the largest finite value becomes infinite, and NaN stays NaN.
pub fn round(dtype: Dtype, x: f64) -> f64 {
    if !x.is_finite() {
        return x;
    }
    let (min_exponent, max_exponent) = dtype.exponents();
    let unit = exponent(x).max(min_exponent) - dtype.fraction_bits();
    // How many low bits of the significand lie below one unit of the result.
    let dropped = unit - (exponent(x) - F64_FRACTION_BITS);
    if dropped > F64_FRACTION_BITS + 1 {
        // |x| is under half the smallest subnormal.
        return 0.0_f64.copysign(x);
    }
    let implicit_one = 1_u64 << F64_FRACTION_BITS;
    let significand = (x.to_bits() & (implicit_one - 1)) | implicit_one;
    let is_odd = (significand >> dropped) & 1;
    let below_half = (1_u64 << (dropped - 1)) - 1;
    let units = (significand + below_half + is_odd) >> dropped;
    let magnitude = units as f64 * power_of_two(unit);
    let limit = power_of_two(max_exponent) * 2.0;
    let magnitude = if magnitude < limit {
        magnitude
    } else {
        f64::INFINITY
    };
    magnitude.copysign(x)
}

/// [`round`] of every element.
pub fn round_all(dtype: Dtype, x: &[f64]) -> Vec<f64> {
    x.iter().map(|&x| round(dtype, x)).collect()
}

/// The distance between neighboring values of `dtype` at `|x|`; at a power of two, the distance to
/// the next larger value.
///
/// Below the normal numbers it is the smallest subnormal, beyond the finite ones the distance
/// between the two largest. NaN gives NaN.
pub fn ulp(dtype: Dtype, x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    let (min_exponent, max_exponent) = dtype.exponents();
    power_of_two(exponent(x).clamp(min_exponent, max_exponent) - dtype.fraction_bits())
}
