//! Random numbers of the host: the same on every machine and in every version.

use std::f64::consts::TAU;

/// SplitMix64 (Steele, Lea and Flood, 2014), with normal values by Box and Muller's transform.
pub struct Rng {
    state: u64,
}

impl Rng {
    /// A generator whose sequence depends on `seed` alone.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// `true` with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        self.uniform() < p
    }

    /// `count` values from the standard normal distribution.
    pub fn normals(&mut self, count: usize) -> Vec<f64> {
        let mut values = Vec::with_capacity(count + 1);
        while values.len() < count {
            // 1 - u is in (0, 1], where the logarithm is finite.
            let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
            let (sin, cos) = (TAU * self.uniform()).sin_cos();
            values.extend([radius * cos, radius * sin]);
        }
        values.truncate(count);
        values
    }

    /// `count` values uniform in `[0, 1)`.
    pub fn uniforms(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.uniform()).collect()
    }
}
