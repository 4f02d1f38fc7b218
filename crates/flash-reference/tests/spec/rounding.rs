use flash_reference::rng::Rng;
use flash_reference::rounding::{Dtype, round, round_all, ulp};

/// The non-negative finite values of a 16-bit format in ascending order, decoded from all its bit
/// patterns, and what would come next if the exponent went on.
fn values(fraction_bits: i32, exponent_bits: i32) -> (Vec<f64>, f64) {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let infinity = ((1 << exponent_bits) - 1) << fraction_bits;
    let decode = |pattern: i32| {
        let fraction = f64::from(pattern & ((1 << fraction_bits) - 1));
        let exponent = pattern >> fraction_bits;
        let one = 2.0_f64.powi(fraction_bits);
        if exponent == 0 {
            fraction / one * 2.0_f64.powi(1 - bias)
        } else {
            (1.0 + fraction / one) * 2.0_f64.powi(exponent - bias)
        }
    };
    ((0..infinity).map(decode).collect(), decode(infinity))
}

fn next_up(x: f64) -> f64 {
    f64::from_bits(x.to_bits() + 1)
}

fn next_down(x: f64) -> f64 {
    f64::from_bits(x.to_bits() - 1)
}

#[test]
fn every_16_bit_value_and_every_midpoint_rounds_to_nearest_even() {
    for (dtype, fraction_bits, exponent_bits) in [(Dtype::F16, 10, 5), (Dtype::Bf16, 7, 8)] {
        let (values, beyond) = values(fraction_bits, exponent_bits);
        assert_eq!(values.len(), (1 << 15) - (1 << fraction_bits));
        for (pattern, &low) in values.iter().enumerate() {
            let is_last = pattern + 1 == values.len();
            let high = if is_last { beyond } else { values[pattern + 1] };
            let rounded_high = if is_last { f64::INFINITY } else { high };
            let middle = (low + high) / 2.0;
            let even = if pattern % 2 == 0 { low } else { rounded_high };
            for (x, expected) in [
                (low, low),
                (next_up(low), low),
                (next_down(middle), low),
                (middle, even),
                (next_up(middle), rounded_high),
                (next_down(high), rounded_high),
            ] {
                assert_eq!(round(dtype, x), expected, "{dtype:?} {x:e}");
                assert_eq!(round(dtype, -x), -expected, "{dtype:?} {x:e}");
            }
            assert_eq!(ulp(dtype, low), high - low, "{dtype:?} {low:e}");
            assert_eq!(ulp(dtype, -middle), high - low, "{dtype:?} {low:e}");
        }
    }
}

#[test]
fn f32_agrees_with_the_processor() {
    let mut rng = Rng::new(1);
    for _ in 0..1_000_000 {
        let bits = rng.next_u64();
        // Any bits at all, and bits whose exponent an f32 has, subnormals included.
        let exponent = 1023 - 152 + (bits >> 52) % (152 + 130);
        let in_range = bits & !(0x7ff << 52) | exponent << 52;
        // A tie: only the bits an f32 keeps, and the one below.
        let tie = in_range >> 28 << 28;
        for x in [bits, in_range, tie].map(f64::from_bits) {
            let expected = f64::from(x as f32);
            let found = round(Dtype::F32, x);
            assert!(found == expected || (found.is_nan() && x.is_nan()), "{x:e}");
            assert_eq!(found.is_sign_negative(), x.is_sign_negative(), "{x:e}");
        }
    }
}

#[test]
fn known_values() {
    let two = |exponent| 2.0_f64.powi(exponent);
    for (dtype, x, expected) in [
        (Dtype::F16, 65504.0, 65504.0),
        (Dtype::F16, 65519.0, 65504.0),
        (Dtype::F16, 65520.0, f64::INFINITY),
        (Dtype::F16, 2049.0, 2048.0),
        (Dtype::F16, 2051.0, 2052.0),
        (Dtype::F16, 0.1, 0.0999755859375),
        // The smallest normal number, the largest subnormal one and the tie between them.
        (Dtype::F16, 6.103515625e-5, two(-14)),
        (Dtype::F16, 1023.0 * two(-24), 1023.0 * two(-24)),
        (Dtype::F16, 1023.5 * two(-24), two(-14)),
        (Dtype::F16, 6.1e-5, 1023.0 * two(-24)),
        // Half the smallest subnormal is a tie with zero.
        (Dtype::F16, two(-25), 0.0),
        (Dtype::F16, next_up(two(-25)), two(-24)),
        (Dtype::F16, 1.5 * two(-24), two(-23)),
        (Dtype::F16, f64::MIN_POSITIVE / 2.0, 0.0),
        (Dtype::Bf16, 133_120.0, 133_120.0),
        (Dtype::Bf16, 133_120.0 + 512.0, 133_120.0),
        (Dtype::Bf16, 133_120.0 + 513.0, 134_144.0),
        (Dtype::Bf16, 134_144.0 + 512.0, 135_168.0),
        (Dtype::Bf16, 257.0, 256.0),
        (Dtype::Bf16, 1e-40, two(-133)),
        (Dtype::Bf16, 3.4e38, f64::INFINITY),
        (Dtype::F32, 16_777_217.0, 16_777_216.0),
        (Dtype::F32, f64::MAX, f64::INFINITY),
        (Dtype::F32, two(-150), 0.0),
        (Dtype::F32, 1.5 * two(-149), two(-148)),
    ] {
        assert_eq!(round(dtype, x), expected, "{dtype:?} {x:e}");
    }
    assert_eq!(round(Dtype::F16, f64::NEG_INFINITY), f64::NEG_INFINITY);
    assert_eq!(round(Dtype::Bf16, -0.0).to_bits(), (-0.0_f64).to_bits());
    assert_eq!(round(Dtype::F16, -1e-9).to_bits(), (-0.0_f64).to_bits());
    assert!(round(Dtype::F32, f64::NAN).is_nan());
    assert_eq!(round_all(Dtype::Bf16, &[257.0, 259.0]), [256.0, 260.0]);
}

#[test]
fn tf32_has_the_fraction_of_f16_and_the_range_of_f32() {
    let mut rng = Rng::new(7);
    for _ in 0..100_000 {
        // Between 2^-8 and 2^8, where f16 is normal.
        let bits = rng.next_u64();
        let x = f64::from_bits(bits & !(0x7ff << 52) | (1023 - 8 + (bits >> 52) % 16) << 52);
        assert_eq!(round(Dtype::Tf32, x), round(Dtype::F16, x), "{x:e}");
        let far = 2.0_f64.powi(100);
        assert_eq!(
            round(Dtype::Tf32, x * far),
            round(Dtype::F16, x) * far,
            "{x:e}"
        );
        assert_eq!(ulp(Dtype::Tf32, x / far), ulp(Dtype::F16, x) / far, "{x:e}");
    }
    assert_eq!(Dtype::Tf32.stored(), Dtype::F32);
    assert_eq!(Dtype::Bf16.stored(), Dtype::Bf16);
}

#[test]
fn rounding_happens_once() {
    // Just above a tie of the narrow format; by way of f32 it would become that tie and go down.
    for (dtype, half_unit) in [(Dtype::F16, -11), (Dtype::Bf16, -8)] {
        let x = 1.0 + 2.0_f64.powi(half_unit) + 2.0_f64.powi(-40);
        assert_eq!(round(dtype, f64::from(x as f32)), 1.0);
        assert_eq!(round(dtype, x), 1.0 + 2.0_f64.powi(half_unit + 1));
    }
}

#[test]
fn ulp_outside_the_normal_numbers() {
    assert_eq!(ulp(Dtype::F16, 0.0), 2.0_f64.powi(-24));
    assert_eq!(ulp(Dtype::F16, 65504.0), 32.0);
    assert_eq!(ulp(Dtype::F16, 1e9), 32.0);
    assert_eq!(ulp(Dtype::F16, f64::INFINITY), 32.0);
    assert_eq!(ulp(Dtype::F32, 1.0), f64::from(f32::EPSILON));
    assert_eq!(ulp(Dtype::F32, 1e-300), 2.0_f64.powi(-149));
    assert_eq!(ulp(Dtype::Bf16, 133_120.0), 1024.0);
    assert!(ulp(Dtype::Bf16, f64::NAN).is_nan());
}
