//! Random numbers that are a function of a seed and a counter: SplitMix64.

/// A stream of random numbers.
pub struct Random(u64);

/// The increment of SplitMix64, 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Random {
    /// The stream number `stream` of `seed`.
    pub fn new(seed: u64, stream: u64) -> Self {
        // Mixed twice, so that neighboring seeds and streams share no stretch of numbers.
        Self(mix(mix(seed).wrapping_add(stream.wrapping_mul(GOLDEN))))
    }

    /// A number below `count`, which is at least 1; each as likely but for 1 in 2^64 / `count`.
    pub fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.next()) * count as u128) >> 64) as usize
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }
}

fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
