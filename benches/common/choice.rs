//! What replaces the plan table's choice for ours.

use super::args::positive;

/// Among which kernels the plan of ours is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Units {
    /// All that the device can run.
    All,
    /// Those of devices before sm_90: without the warpgroup kernels.
    Mma,
}

/// What replaces the table's choice for ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Among which kernels.
    pub units: Units,
    /// Queries and keys of a tile.
    pub tile: Option<[usize; 2]>,
    /// Parts of the keys.
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
pub fn tile(text: &str) -> Option<[usize; 2]> {
    let (queries, keys) = text.split_once('x')?;
    let (queries, keys) = (positive(queries)?, positive(keys)?);
    let taken = [64, 128, 192, 256].contains(&queries) && keys % 16 == 0 && keys <= 256;
    taken.then_some([queries, keys])
}

/// `all` or `mma`.
pub fn units(text: &str) -> Option<Units> {
    match text {
        "all" => Some(Units::All),
        "mma" => Some(Units::Mma),
        _ => None,
    }
}
