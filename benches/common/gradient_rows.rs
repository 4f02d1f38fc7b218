//! Which rows [`super::gradient_oracle`] checks, and what their gradients must be.

use std::collections::BTreeMap;

use flash_reference::rng::Rng;
use flash_reference::rounding::{backward_plain, ulp};
use flash_reference::{Gradients, Inputs as Operands};

use super::grid::{Case, Causality, Dtype};
use super::inputs::Inputs;
use super::oracle::{FULL_CHECK, one_head, reference};

/// Sampled rows of each sampled head.
const ROWS: usize = 8;
/// Sampled heads.
const HEADS: usize = 4;
/// Rows that see fewer keys than 2 to this plus one share a group.
const FIRST_GROUP: u32 = 6;

/// Which gradient (0 dq, 1 dk, 2 dv) and the logarithm of the number of keys.
pub type Group = (usize, u32);

/// What the gradients of one head must be.
pub struct Head {
    /// Position among the heads of all batches.
    pub index: usize,
    /// The rows of dO that are not zero, ascending.
    pub rows: Vec<usize>,
    /// dq of these rows, dk and dv of all keys.
    pub want: [Vec<f64>; 3],
    /// The same-dtype computation of the same.
    plain: [Vec<f64>; 3],
}

impl Head {
    /// The specification's gradients of the head at `index` with dO in `rows` alone.
    pub fn new(case: &Case, inputs: &Inputs, index: usize, rows: Vec<usize>) -> Self {
        let (n, d) = (case.seqlen, case.head_dim);
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let all = index * n * d..(index + 1) * n * d;
        let pick = |values: &[f32]| {
            let head = &values[all.clone()];
            rows.iter()
                .flat_map(|row| wide(&head[row * d..(row + 1) * d]))
                .collect::<Vec<f64>>()
        };
        let (q, d_out) = (pick(&inputs.q), pick(&inputs.d_out));
        let (k, v) = (wide(&inputs.k[all.clone()]), wide(&inputs.v[all.clone()]));
        // The rows are a problem of their own, whose mask says where each stood.
        let hidden = |row: &usize| (0..n).map(|key| key > *row).collect::<Vec<bool>>();
        let mask: Option<Vec<bool>> = match case.causality {
            Causality::Full => None,
            Causality::Causal => Some(rows.iter().flat_map(hidden).collect()),
        };
        let spec = one_head(rows.len(), n, d);
        let operands = Operands {
            q: &q,
            k: &k,
            v: &v,
            mask: mask.as_deref(),
            bias: None,
        };
        let three = |Gradients { dq, dk, dv, .. }: Gradients| [dq, dk, dv];
        Self {
            index,
            want: three(flash_reference::backward(&spec, &operands, &d_out)),
            plain: three(backward_plain(
                reference(case.dtype),
                &spec,
                &operands,
                &d_out,
            )),
            rows,
        }
    }

    /// The group of a row of `want[gradient]`; `None` for a key that no sampled row sees.
    fn group(&self, case: &Case, gradient: usize, row: usize) -> Option<Group> {
        let visible = match (case.causality, gradient) {
            (Causality::Full, _) => case.seqlen,
            (Causality::Causal, 0) => self.rows[row] + 1,
            // The first of the rows that see it weighs most.
            (Causality::Causal, _) => self.rows.iter().find(|it| **it >= row)? + 1,
        };
        Some((gradient, visible.ilog2().max(FIRST_GROUP)))
    }

    /// Each row of `want[gradient]` that takes part: its group and its elements.
    pub fn rows_of(&self, case: &Case, gradient: usize) -> impl Iterator<Item = (Group, usize)> {
        let count = self.want[gradient].len() / case.head_dim;
        let rows = (0..count).map(move |row| (self.group(case, gradient, row), row));
        let rows: Vec<_> = rows
            .filter_map(|(group, row)| Some((group?, row)))
            .collect();
        rows.into_iter()
    }
}

/// The heads to check and their rows of dO that stay, both ascending.
pub fn pick(case: &Case) -> Vec<(usize, Vec<usize>)> {
    let (heads, n) = (case.batch * case.num_heads, case.seqlen);
    if heads * n * n * case.head_dim <= FULL_CHECK {
        return (0..heads).map(|head| (head, (0..n).collect())).collect();
    }
    let mut rng = Rng::new(n as u64);
    let mut below = |end: usize| rng.next_u64() as usize % end;
    let mut picked = BTreeMap::new();
    // The ends of the sequence and of the usual tiles, in the first and the last head.
    for head in [0, heads - 1] {
        let edges = [0, 1, 63, 64, 127, 128, n / 2, n - 1];
        picked.insert(head, edges.into_iter().filter(|row| *row < n).collect());
    }
    for _ in picked.len()..HEADS.min(heads) {
        let rows: Vec<usize> = (0..ROWS).map(|_| below(n)).collect();
        picked.entry(below(heads)).or_insert(rows);
    }
    let sorted = |(head, mut rows): (usize, Vec<usize>)| {
        rows.sort_unstable();
        rows.dedup();
        (head, rows)
    };
    picked.into_iter().map(sorted).collect()
}

/// How far each group may be off.
pub fn tolerances(case: &Case, heads: &[Head]) -> BTreeMap<Group, f64> {
    let dtype = reference(case.dtype);
    let ulps = match case.dtype {
        Dtype::F32 => 32.0,
        Dtype::F16 | Dtype::Bf16 | Dtype::Tf32 => 8.0,
    };
    let mut maxima: BTreeMap<Group, (f64, f64)> = BTreeMap::new();
    for head in heads {
        for gradient in 0..3 {
            for (group, row) in head.rows_of(case, gradient) {
                let span = row * case.head_dim..(row + 1) * case.head_dim;
                let want = &head.want[gradient][span.clone()];
                let (error, largest) = maxima.entry(group).or_default();
                for (want, plain) in want.iter().zip(&head.plain[gradient][span]) {
                    *error = error.max((plain - want).abs());
                    *largest = largest.max(want.abs());
                }
            }
        }
    }
    let tolerance = |(error, largest)| 2.0 * error + ulps * ulp(dtype, largest);
    maxima
        .into_iter()
        .map(|(group, it)| (group, tolerance(it)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::grid::{Pass, Size};
    use super::*;

    #[test]
    fn long_cases_are_sampled_and_short_ones_are_not() {
        let case = |n| Case::new(Size::Papers, Dtype::F16, 64, Causality::Causal, n);
        let rows = pick(&case(4096));
        assert!((3..=HEADS).contains(&rows.len()));
        assert_eq!((rows[0].0, rows[rows.len() - 1].0), (0, 4 * 32 - 1));
        for (_, rows) in &rows {
            assert!(rows.len() <= ROWS && rows.is_sorted());
            assert!(rows.iter().all(|row| *row < 4096));
        }
        let small = Case::new(Size::Small, Dtype::F32, 64, Causality::Full, 64);
        let rows = pick(&small);
        assert_eq!(rows.len(), small.batch * small.num_heads);
        assert!(rows.iter().all(|(_, rows)| rows.len() == 64));
    }

    #[test]
    fn the_first_rows_do_not_excuse_the_last() {
        let case = Case::new(Size::Small, Dtype::F16, 64, Causality::Causal, 512);
        let case = case.of(Pass::Backward);
        let inputs = Inputs::new(case.pass, case.dtype, case.elements());
        let heads: Vec<Head> = pick(&case)
            .into_iter()
            .map(|(head, rows)| Head::new(&case, &inputs, head, rows))
            .collect();
        let tolerances = tolerances(&case, &heads);
        for gradient in 0..3 {
            assert!(tolerances[&(gradient, 9)] < tolerances[&(gradient, 6)]);
        }
    }
}
