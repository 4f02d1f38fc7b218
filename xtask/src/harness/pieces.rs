//! Which tests run in one process.

use super::Binary;

/// Tests that one process runs.
#[derive(Debug, PartialEq)]
pub struct Piece {
    /// Whose tests.
    pub binary: Binary,
    /// Their names.
    pub tests: Vec<String>,
    /// Whether nothing may run beside it.
    pub alone: bool,
}

/// Pieces for each core: enough for the last ones to end at about the same time, and few enough for
/// tests to share the kernels that their process has built.
const PIECES_PER_CORE: usize = 4;

/// Tests with tensors that fill the memory are the module of this name.
const LARGE: &str = "large::";

/// Cuts `tests` of `binary` into pieces of neighbors for so many `cores`.
pub fn cut(binary: &Binary, tests: &[String], cores: usize) -> Vec<Piece> {
    let size = tests.len().div_ceil(PIECES_PER_CORE * cores).max(1);
    let (large, small): (Vec<_>, Vec<_>) = tests
        .iter()
        .cloned()
        .partition(|test| test.starts_with(LARGE));
    let pieces = |tests: &[String], alone| {
        let pieces = tests.chunks(size).map(|tests| Piece {
            binary: binary.clone(),
            tests: tests.to_vec(),
            alone,
        });
        pieces.collect::<Vec<_>>()
    };
    let mut all = pieces(&small, false);
    all.extend(pieces(&large, true));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_is_in_one_piece_and_the_large_ones_are_alone() {
        let binary = Binary {
            name: "attention".into(),
            path: "a".into(),
            directory: ".".into(),
        };
        let mut names: Vec<_> = (0..19).map(|i| format!("masks::t{i}")).collect();
        names.insert(3, "large::one".to_owned());
        let pieces = cut(&binary, &names, 1);
        let sizes: Vec<_> = pieces.iter().map(|p| (p.tests.len(), p.alone)).collect();
        let small = [(5, false), (5, false), (5, false), (4, false)];
        assert_eq!(sizes[..4], small);
        assert_eq!(sizes[4..], [(1, true)]);
        let mut dealt: Vec<_> = pieces.into_iter().flat_map(|piece| piece.tests).collect();
        dealt.sort();
        names.sort();
        assert_eq!(dealt, names);
    }
}
