//! Rows of the f64 specification that an output must agree with.
//!
//! A kernel that does not run, or computes something else, must not win a benchmark. So each
//! output is read back; every element must be finite, and sampled rows must agree with
//! `flash_reference`: max|out - f64| <= 2 · max|plain - f64| + 4 ulp, where plain is the
//! same-dtype computation of `flash_reference::rounding`. The maxima are taken over the rows
//! that see a like number of keys (up to a factor of two), because an output shrinks with the
//! root of that number, and the first rows of a causal problem would excuse all others.
//!
//! A row of causal attention with equal lengths is one query over the keys up to its own
//! position, so each row is computed by itself, and rows of the longest sequences cost little.

use flash_reference::rng::Rng;
use flash_reference::rounding::{self, Dtype as ReferenceDtype};
use flash_reference::{Causality as ReferenceCausality, Inputs as Operands, Spec, forward};

use super::grid::{Case, Causality, Dtype};
use super::inputs::{Inputs, Sign};

/// All rows are checked while rows · keys · head_dim is at most this.
pub const FULL_CHECK: usize = 1 << 25;
/// Rows that are checked otherwise.
const SAMPLED_ROWS: usize = 32;
/// Above this relative error (L2) the output is another function, not an inaccurate one: the
/// plain computation in bf16 stays below a tenth of it.
pub const WRONG: f64 = 0.1;

/// How an output compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Every checked row is within tolerance.
    Agrees,
    /// Finite and close, but some row is outside the tolerance.
    Inaccurate,
    /// Not finite, or not attention of these inputs.
    Wrong,
}

/// The verdict on one output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// How it compares.
    pub agreement: Agreement,
    /// Largest absolute error of the row that uses most of its group's tolerance.
    pub error: f64,
    /// Tolerance of that row.
    pub tolerance: f64,
    /// Norm of the error over the norm of the reference, all checked rows together.
    pub relative: f64,
    /// Rows checked.
    pub rows: usize,
}

/// The verdict that uses most of its tolerance, a wrong one before all others.
///
/// # Panics
///
/// When there is none.
pub fn worst(verdicts: &[Verdict]) -> Verdict {
    let rank = |it: &&Verdict| (it.agreement == Agreement::Wrong, it.error / it.tolerance);
    let order = |a: &&Verdict, b: &&Verdict| {
        let ((a_wrong, a_used), (b_wrong, b_used)) = (rank(a), rank(b));
        a_wrong.cmp(&b_wrong).then(a_used.total_cmp(&b_used))
    };
    *verdicts.iter().max_by(order).expect("a verdict")
}

struct Expected {
    /// Position of the row's first element in O.
    start: usize,
    /// Logarithm to base 2, rounded down, of the number of keys that the row sees.
    group: u32,
    values: Vec<f64>,
    /// Largest error of the plain computation in this row.
    plain_error: f64,
}

/// Expected rows of one case.
pub struct Oracle {
    elements: usize,
    rows: Vec<Expected>,
    /// By [`Expected::group`].
    tolerances: Vec<f64>,
}

impl Oracle {
    /// Computes the rows to check, on all cores.
    pub fn new(case: &Case, inputs: &Inputs) -> Self {
        let picked = pick_rows(case);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = picked.len().div_ceil(threads).max(1);
        let rows: Vec<Expected> = std::thread::scope(|scope| {
            let parts: Vec<_> = picked
                .chunks(share)
                .map(|part| {
                    scope.spawn(move || {
                        let expect =
                            |&(head, row): &(usize, usize)| expected(case, inputs, head, row);
                        part.iter().map(expect).collect::<Vec<_>>()
                    })
                })
                .collect();
            parts
                .into_iter()
                .flat_map(|part| part.join().expect("the specification does not panic"))
                .collect()
        });
        Self {
            elements: case.output_elements(),
            tolerances: tolerances(case.dtype, &rows),
            rows,
        }
    }

    /// Compares `out`, all of O, which was computed from V with this sign.
    ///
    /// # Errors
    ///
    /// When `out` holds fewer elements than O.
    pub fn judge(&self, out: &[f32], sign: Sign) -> Result<Verdict, String> {
        let Some(out) = out.get(..self.elements) else {
            return Err(format!(
                "the output holds {} elements, expected {}",
                out.len(),
                self.elements
            ));
        };
        let mut worst = (0.0, 0.0, f64::NEG_INFINITY);
        let (mut difference, mut norm) = (0.0, 0.0);
        for row in &self.rows {
            let mut error = 0.0f64;
            for (&got, &want) in out[row.start..].iter().zip(&row.values) {
                let apart = (f64::from(got * sign.factor()) - want).abs();
                // f64::max drops a NaN; the sum below and the test of all of O keep it.
                error = error.max(apart);
                difference += apart * apart;
                norm += want * want;
            }
            let tolerance = self.tolerances[row.group as usize];
            let used = error / tolerance;
            if used > worst.2 {
                worst = (error, tolerance, used);
            }
        }
        let relative = (difference / norm).sqrt();
        let finite = out.iter().all(|x| x.is_finite());
        let agreement = if !finite || relative > WRONG {
            Agreement::Wrong
        } else if worst.2 <= 1.0 {
            Agreement::Agrees
        } else {
            Agreement::Inaccurate
        };
        Ok(Verdict {
            agreement,
            error: worst.0,
            tolerance: worst.1,
            relative,
            rows: self.rows.len(),
        })
    }
}

/// (head of all batches, query) of the rows to check.
fn pick_rows(case: &Case) -> Vec<(usize, usize)> {
    let heads = case.batch * case.num_heads;
    let n = case.queries;
    if heads * n * case.seqlen * case.head_dim <= FULL_CHECK {
        return (0..heads * n).map(|row| (row / n, row % n)).collect();
    }
    // The ends of the sequence and of the usual tiles, in the first and the last head.
    let mut rows = Vec::with_capacity(SAMPLED_ROWS);
    for row in [0, 1, 63, 64, 127, 128, n / 2, n - 1] {
        for head in [0, heads - 1] {
            if row < n && !rows.contains(&(head, row)) {
                rows.push((head, row));
            }
        }
    }
    let mut rng = Rng::new(n as u64);
    while rows.len() < SAMPLED_ROWS {
        let head = rng.next_u64() as usize % heads;
        rows.push((head, rng.next_u64() as usize % n));
    }
    rows
}

fn expected(case: &Case, inputs: &Inputs, head: usize, row: usize) -> Expected {
    let d = case.head_dim;
    let visible = match case.causality {
        Causality::Full => case.seqlen,
        Causality::Causal => case.seqlen - case.queries + row + 1,
    };
    let first = head * case.seqlen * d;
    let start = (head * case.queries + row) * d;
    let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let q = wide(&inputs.q[start..start + d]);
    let k = wide(&inputs.k[first..first + visible * d]);
    let v = wide(&inputs.v[first..first + visible * d]);
    let spec = one_head(1, visible, d);
    let operands = Operands {
        q: &q,
        k: &k,
        v: &v,
        mask: None,
        bias: None,
    };
    let values = forward(&spec, &operands).out;
    let plain = rounding::forward_plain(reference(case.dtype), &spec, &operands).out;
    let apart = plain.iter().zip(&values).map(|(a, b)| (a - b).abs());
    Expected {
        start,
        group: visible.ilog2(),
        plain_error: apart.fold(0.0, f64::max),
        values,
    }
}

fn tolerances(dtype: Dtype, rows: &[Expected]) -> Vec<f64> {
    let groups = rows.iter().map(|row| row.group + 1).max().unwrap_or(0);
    let tolerance = |group| {
        let members = || rows.iter().filter(|row| row.group == group);
        let error = members().map(|row| row.plain_error).fold(0.0, f64::max);
        let values = members().flat_map(|row| &row.values);
        let largest = values.map(|x| x.abs()).fold(0.0, f64::max);
        2.0 * error + 4.0 * rounding::ulp(reference(dtype), largest)
    };
    (0..groups).map(tolerance).collect()
}

/// The specification's name of a type.
pub fn reference(dtype: Dtype) -> ReferenceDtype {
    match dtype {
        Dtype::F16 => ReferenceDtype::F16,
        Dtype::Bf16 => ReferenceDtype::Bf16,
        Dtype::F32 => ReferenceDtype::F32,
        Dtype::Tf32 => ReferenceDtype::Tf32,
    }
}

/// One head that sees all keys but for a mask, at the usual scale.
pub fn one_head(seqlen_q: usize, seqlen_k: usize, head_dim: usize) -> Spec {
    Spec {
        batch: 1,
        num_heads: 1,
        num_kv_heads: 1,
        seqlen_q,
        seqlen_k,
        head_dim,
        val_dim: head_dim,
        scale: 1.0 / (head_dim as f64).sqrt(),
        softcap: None,
        causality: ReferenceCausality::Full,
    }
}

#[cfg(test)]
mod tests {
    use super::super::grid::{Pass, Size};
    use super::*;

    fn small(causality: Causality, dtype: Dtype) -> (Case, Inputs) {
        let case = Case::new(Size::Small, dtype, 64, causality, 64);
        (case, Inputs::new(Pass::Forward, dtype, case.elements()))
    }

    fn perfect(oracle: &Oracle) -> Vec<f32> {
        let mut out = vec![0.0; oracle.elements];
        for row in &oracle.rows {
            for (out, &value) in out[row.start..].iter_mut().zip(&row.values) {
                *out = value as f32;
            }
        }
        out
    }

    #[test]
    fn the_specification_agrees_with_itself() {
        for causality in [Causality::Full, Causality::Causal] {
            let (case, inputs) = small(causality, Dtype::F32);
            let oracle = Oracle::new(&case, &inputs);
            assert_eq!(oracle.rows.len(), case.elements() / case.head_dim);
            let verdict = oracle.judge(&perfect(&oracle), Sign::Plus).unwrap();
            assert_eq!(verdict.agreement, Agreement::Agrees, "{verdict:?}");
        }
    }

    #[test]
    fn rows_alone_are_the_rows_of_the_whole_causal_problem() {
        let (case, inputs) = small(Causality::Causal, Dtype::F32);
        let oracle = Oracle::new(&case, &inputs);
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (q, k, v) = (wide(&inputs.q), wide(&inputs.k), wide(&inputs.v));
        let spec = Spec {
            batch: case.batch,
            num_heads: case.num_heads,
            num_kv_heads: case.num_heads,
            seqlen_q: case.seqlen,
            seqlen_k: case.seqlen,
            head_dim: case.head_dim,
            val_dim: case.head_dim,
            scale: 1.0 / (case.head_dim as f64).sqrt(),
            softcap: None,
            causality: ReferenceCausality::Causal,
        };
        let operands = Operands {
            q: &q,
            k: &k,
            v: &v,
            mask: None,
            bias: None,
        };
        let whole = forward(&spec, &operands).out;
        for row in &oracle.rows {
            for (one, all) in row.values.iter().zip(&whole[row.start..]) {
                assert!((one - all).abs() < 1e-12, "{one} {all}");
            }
        }
    }

    #[test]
    fn an_output_that_nothing_wrote_is_wrong() {
        let (case, inputs) = small(Causality::Full, Dtype::F16);
        let oracle = Oracle::new(&case, &inputs);
        let zeros = vec![0.0; case.elements()];
        assert_eq!(
            oracle.judge(&zeros, Sign::Plus).unwrap().agreement,
            Agreement::Wrong
        );
        let stale = perfect(&oracle);
        let verdict = oracle.judge(&stale, Sign::Minus).unwrap();
        assert_eq!(verdict.agreement, Agreement::Wrong);
        let mut one_nan = perfect(&oracle);
        one_nan[5] = f32::NAN;
        assert_eq!(
            oracle.judge(&one_nan, Sign::Plus).unwrap().agreement,
            Agreement::Wrong
        );
        assert!(oracle.judge(&zeros[1..], Sign::Plus).is_err());
    }

    #[test]
    fn half_precision_in_a_single_precision_case_is_inaccurate() {
        let (case, inputs) = small(Causality::Full, Dtype::F32);
        let oracle = Oracle::new(&case, &inputs);
        let mut out = perfect(&oracle);
        for value in &mut out {
            *value = half::f16::from_f32(*value).to_f32();
        }
        let verdict = oracle.judge(&out, Sign::Plus).unwrap();
        assert_eq!(verdict.agreement, Agreement::Inaccurate, "{verdict:?}");
    }

    #[test]
    fn the_first_rows_do_not_excuse_the_last() {
        let (case, inputs) = small(Causality::Causal, Dtype::F16);
        let oracle = Oracle::new(&case, &inputs);
        assert_eq!(oracle.tolerances.len(), 7);
        assert!(oracle.tolerances[6] < oracle.tolerances[1]);
        let mut out = perfect(&oracle);
        out[case.elements() - 1] += 2.0 * oracle.tolerances[6] as f32;
        let verdict = oracle.judge(&out, Sign::Plus).unwrap();
        assert_eq!(verdict.agreement, Agreement::Inaccurate, "{verdict:?}");
    }

    #[test]
    fn a_wrong_verdict_is_worse_than_any_inaccurate_one() {
        let verdict = |agreement, error| Verdict {
            agreement,
            error,
            tolerance: 1.0,
            relative: 0.0,
            rows: 1,
        };
        let good = verdict(Agreement::Agrees, 0.5);
        let bad = verdict(Agreement::Inaccurate, 9.0);
        let wrong = verdict(Agreement::Wrong, 0.1);
        assert_eq!(worst(&[good, bad, wrong]), wrong);
        assert_eq!(worst(&[bad, good]), bad);
    }

    #[test]
    fn long_cases_are_sampled_in_both_outer_heads() {
        let case = Case::new(Size::Papers, Dtype::F16, 64, Causality::Causal, 4096);
        let rows = pick_rows(&case);
        assert_eq!(rows.len(), SAMPLED_ROWS);
        assert!(rows.contains(&(0, 0)) && rows.contains(&(4 * 32 - 1, 4095)));
        assert!(rows.iter().all(|&(head, row)| head < 4 * 32 && row < 4096));
    }
}
