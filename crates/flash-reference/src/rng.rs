//! Random inputs: the same bits on every machine and in every version.

use std::f64::consts::TAU;

/// What SplitMix64 adds to its state: 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64 (Steele, Lea and Flood, 2014): one multiplication chain per value, any seed is good.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose sequence depends on `seed` alone.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The stream number `stream` of `seed`.
    pub fn stream(seed: u64, stream: u64) -> Self {
        // Mixed twice, so that neighboring seeds and streams share no stretch of numbers.
        Self(mix(mix(seed).wrapping_add(stream.wrapping_mul(GOLDEN))))
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A number below `count`, which is at least 1; each as likely but for 1 in 2^64 / `count`.
    pub fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.next_u64()) * count as u128) >> 64) as usize
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// `count` values uniform in `[0, 1)`.
    pub fn uniforms(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.uniform()).collect()
    }

    /// Two values from the standard normal distribution, by Box and Muller's transform.
    pub fn normal_pair(&mut self) -> [f64; 2] {
        // 1 - u is in (0, 1], where the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        let (sin, cos) = (TAU * self.uniform()).sin_cos();
        [radius * cos, radius * sin]
    }

    /// `count` values from the standard normal distribution.
    pub fn normals(&mut self, count: usize) -> Vec<f64> {
        let pairs = (0..count.div_ceil(2)).flat_map(|_| self.normal_pair());
        pairs.take(count).collect()
    }
}

fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
