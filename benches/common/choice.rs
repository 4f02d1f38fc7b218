//! What replaces the plan table's choice for ours.

use clap::ValueEnum;

use super::args::positive;

/// Among which kernels the plan of ours is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Units {
    /// All that the device can run.
    All,
    /// Those of devices before sm_90, without the warpgroup kernels; on CUDA, not f32.
    Mma,
}

/// What replaces the table's choice for ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct Choice {
    /// Among which kernels the plan of ours is chosen.
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = Units::All)]
    pub units: Units,
    /// Tiles of ours instead of the table's, Q queries by K keys; forward only, on CUDA, not f32.
    ///
    /// Q is 64 (but for sm_90's own kernels), 128, 192 or 256; K is a multiple of 16 up to 256.
    #[arg(long, value_name = "QxK", value_parser = tile)]
    pub tile: Option<[usize; 2]>,
    /// Parts of the keys in ours instead of the table's; forward only.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub splits: Option<usize>,
}

impl Choice {
    /// The table's own choice.
    pub const NONE: Self = Self {
        units: Units::All,
        tile: None,
        splits: None,
    };
}

/// `128x64`, as far as a kernel for tensor cores can be made of it.
fn tile(text: &str) -> Result<[usize; 2], &'static str> {
    let sides = text.split_once('x');
    let sides = sides.and_then(|(q, k)| Some([positive(q).ok()?, positive(k).ok()?]));
    let can_be = |&[q, k]: &[usize; 2]| [64, 128, 192, 256].contains(&q) && k % 16 == 0 && k <= 256;
    let expected = "expected QxK, Q of 64, 128, 192 or 256, K a multiple of 16 up to 256";
    sides.filter(can_be).ok_or(expected)
}
