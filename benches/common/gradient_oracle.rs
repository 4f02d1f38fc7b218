//! Gradients of sampled rows by the f64 specification.
//!
//! A row of dK or dV sums over all queries, each of which needs a softmax over all keys: too much
//! for long sequences. But the gradients are linear in dO, so for the check dO is zero but in some
//! rows of some heads. Then dQ of these rows and all of dK and dV of these heads follow from these
//! rows alone, and everything else must be exactly zero; an index that is off anywhere shows. The
//! kernels do not know: they compute as much as ever.
//!
//! The rule is the tests': max|ours - f64| <= 2 · max|plain - f64| + 8 ulp (32 in f32), where
//! plain is the same-dtype computation of `flash_reference::rounding`. The maxima are taken per
//! gradient and over rows of a like number of visible keys, as in [`super::oracle`]; those that
//! see fewer than 128 form one group, since the exact gradient of a query that sees one key is 0.

use std::collections::BTreeMap;

use super::gradient::Bytes;
use super::gradient_rows::{Group, Head, pick, tolerances};
use super::grid::{Case, Causality, Dtype};
use super::inputs::{Inputs, Sign, decode};
use super::oracle::{Agreement, Verdict, WRONG};

/// How far, relatively, two launches from opposite dO may be apart: what roundings of bf16 that
/// fall otherwise may add up to, where sums have no fixed order.
const SAME: f64 = 0.01;

/// Expected gradients of one case.
pub struct Oracle {
    case: Case,
    heads: Vec<Head>,
    tolerances: BTreeMap<Group, f64>,
}

impl Oracle {
    /// Computes them, on all cores.
    pub fn new(case: &Case, inputs: &Inputs) -> Self {
        let picked = pick(case);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = picked.len().div_ceil(threads).max(1);
        let heads: Vec<Head> = std::thread::scope(|scope| {
            let start = |part: &[(usize, Vec<usize>)]| {
                let part = part.to_vec();
                scope.spawn(move || {
                    let head = |(index, rows)| Head::new(case, inputs, index, rows);
                    part.into_iter().map(head).collect::<Vec<_>>()
                })
            };
            let parts: Vec<_> = picked.chunks(share).map(start).collect();
            let join = |part: std::thread::ScopedJoinHandle<Vec<Head>>| part.join();
            let parts = parts.into_iter().map(join);
            parts
                .flat_map(|it| it.expect("the specification does not panic"))
                .collect()
        });
        Self {
            tolerances: tolerances(case, &heads),
            heads,
            case: *case,
        }
    }

    /// dO of the checked launches: that of `inputs` in the sampled rows, zero elsewhere.
    pub fn d_out(&self, inputs: &Inputs) -> Vec<f32> {
        let (n, d) = (self.case.seqlen, self.case.head_dim);
        let mut d_out = vec![0.0; inputs.d_out.len()];
        for head in &self.heads {
            for row in &head.rows {
                let start = (head.index * n + row) * d;
                d_out[start..start + d].copy_from_slice(&inputs.d_out[start..start + d]);
            }
        }
        d_out
    }

    /// Compares gradients that were computed from [`Oracle::d_out`] with this sign.
    ///
    /// # Errors
    ///
    /// When there is none, or one has too few elements.
    pub fn judge(&self, got: &Bytes, sign: Sign) -> Result<Verdict, String> {
        let mut verdict = Verdict {
            agreement: Agreement::Agrees,
            error: 0.0,
            tolerance: f64::MIN_POSITIVE,
            relative: 0.0,
            rows: 0,
        };
        check_lengths(&self.case, got)?;
        for (gradient, bytes) in got.iter().enumerate() {
            let Some(bytes) = bytes else { continue };
            self.judge_one(gradient, bytes, sign, &mut verdict);
            if !self.is_zero_elsewhere(gradient, bytes) {
                verdict.relative = f64::INFINITY;
            }
        }
        verdict.agreement = if verdict.relative.is_nan() || verdict.relative > WRONG {
            Agreement::Wrong
        } else if verdict.error <= verdict.tolerance {
            Agreement::Agrees
        } else {
            Agreement::Inaccurate
        };
        Ok(verdict)
    }

    /// Takes one gradient into `verdict`.
    fn judge_one(&self, gradient: usize, bytes: &[u8], sign: Sign, verdict: &mut Verdict) {
        let (n, d) = (self.case.seqlen, self.case.head_dim);
        let (mut difference, mut norm) = (0.0, 0.0);
        for head in &self.heads {
            let start = head.index * n * d;
            let size = self.case.dtype.bytes();
            let values = decode(
                self.case.dtype,
                &bytes[start * size..(start + n * d) * size],
            );
            for (group, row) in head.rows_of(&self.case, gradient) {
                let at = if gradient == 0 { head.rows[row] } else { row };
                let mut error = 0.0f64;
                for (got, want) in values[at * d..]
                    .iter()
                    .zip(&head.want[gradient][row * d..][..d])
                {
                    let apart = (f64::from(got * sign.factor()) - want).abs();
                    // f64::max drops a NaN; the sum keeps it.
                    error = error.max(apart);
                    difference += apart * apart;
                    norm += want * want;
                }
                verdict.rows += 1;
                let tolerance = self.tolerances[&group];
                if error / tolerance > verdict.error / verdict.tolerance {
                    (verdict.error, verdict.tolerance) = (error, tolerance);
                }
            }
        }
        let relative = (difference / norm).sqrt();
        // A NaN stays, once there.
        if !verdict.relative.is_nan() && (relative.is_nan() || relative > verdict.relative) {
            verdict.relative = relative;
        }
    }

    /// Whether a gradient is exactly zero wherever no sampled row reaches.
    fn is_zero_elsewhere(&self, gradient: usize, bytes: &[u8]) -> bool {
        let (n, d) = (self.case.seqlen, self.case.head_dim);
        let size = self.case.dtype.bytes();
        let zero = |from: usize, to: usize| {
            are_zero(self.case.dtype, &bytes[from * d * size..to * d * size])
        };
        // Rows of all heads one behind the other, and the spans that are spared.
        let mut next = 0;
        for head in &self.heads {
            let first = head.index * n;
            let spared: Vec<(usize, usize)> = match (gradient, self.case.causality) {
                (0, _) => head.rows.iter().map(|row| (first + row, 1)).collect(),
                (_, Causality::Full) => vec![(first, n)],
                (_, Causality::Causal) => vec![(first, head.rows.last().map_or(0, |it| it + 1))],
            };
            for (start, count) in spared {
                if !zero(next, start) {
                    return false;
                }
                next = start + count;
            }
        }
        zero(next, self.case.batch * self.case.num_heads * n)
    }
}

/// How far the last timed launch is from the opposite of one that was computed from dO with the
/// opposite sign: not at all, for kernels whose sums have one order.
///
/// # Errors
///
/// When there is nothing, or too little, to compare.
pub fn repeated(case: &Case, minus: &Bytes, plus: &Bytes) -> Result<Verdict, String> {
    check_lengths(case, minus)?;
    check_lengths(case, plus)?;
    let len = case.elements() * case.dtype.bytes();
    let mut relative = 0.0f64;
    let mut rows = 0;
    for (minus, plus) in minus.iter().zip(plus) {
        let (Some(minus), Some(plus)) = (minus, plus) else {
            continue;
        };
        let apart = from_opposite(case.dtype, &minus[..len], &plus[..len]);
        if !relative.is_nan() && (apart.is_nan() || apart > relative) {
            relative = apart;
        }
        rows += case.elements() / case.head_dim;
    }
    Ok(Verdict {
        // A NaN is wrong too.
        agreement: if relative <= SAME {
            Agreement::Agrees
        } else {
            Agreement::Wrong
        },
        error: relative,
        tolerance: SAME,
        relative,
        rows,
    })
}

/// Norm of `minus + plus` over that of `plus`; NaN if an element is not finite or all are zero.
fn from_opposite(dtype: Dtype, minus: &[u8], plus: &[u8]) -> f64 {
    const PART: usize = 1 << 16;
    let (mut difference, mut norm) = (0.0, 0.0);
    for (minus, plus) in minus.chunks(PART).zip(plus.chunks(PART)) {
        for (minus, plus) in decode(dtype, minus).into_iter().zip(decode(dtype, plus)) {
            let apart = f64::from(minus) + f64::from(plus);
            difference += apart * apart;
            norm += f64::from(plus) * f64::from(plus);
        }
    }
    (difference / norm).sqrt()
}

fn check_lengths(case: &Case, gradients: &Bytes) -> Result<(), String> {
    let len = case.elements() * case.dtype.bytes();
    if gradients.iter().all(Option::is_none) {
        return Err("no gradient was computed".into());
    }
    for bytes in gradients.iter().flatten() {
        if bytes.len() < len {
            return Err(format!(
                "a gradient has {} bytes, expected {len}",
                bytes.len()
            ));
        }
    }
    Ok(())
}

/// Whether all elements are zero, of either sign.
fn are_zero(dtype: Dtype, bytes: &[u8]) -> bool {
    // All bits but the sign.
    match dtype {
        Dtype::F16 | Dtype::Bf16 => {
            let bits = bytes
                .chunks_exact(2)
                .map(|it| u16::from_ne_bytes([it[0], it[1]]));
            bits.fold(0, |all, it| all | it) & 0x7fff == 0
        }
        Dtype::F32 | Dtype::Tf32 => {
            let bits = bytes.chunks_exact(4);
            let bits = bits.map(|it| u32::from_ne_bytes([it[0], it[1], it[2], it[3]]));
            bits.fold(0, |all, it| all | it) & 0x7fff_ffff == 0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::grid::{Pass, Size};
    use super::super::inputs::encode;
    use super::*;

    fn case(causality: Causality, dtype: Dtype, seqlen: usize) -> (Case, Inputs) {
        let case = Case::new(Size::Small, dtype, 64, causality, seqlen).of(Pass::Backward);
        (case, Inputs::new(case.pass, dtype, case.elements()))
    }

    /// What the specification wants, as bytes of opposite sign.
    fn perfect(case: &Case, oracle: &Oracle) -> Bytes {
        let d = case.head_dim;
        [0, 1, 2].map(|gradient| {
            let mut values = vec![0.0; case.elements()];
            for head in &oracle.heads {
                let first = head.index * case.seqlen;
                for (row, want) in head.want[gradient].chunks(d).enumerate() {
                    let at = first + if gradient == 0 { head.rows[row] } else { row };
                    for (to, want) in values[at * d..].iter_mut().zip(want) {
                        *to = *want as f32;
                    }
                }
            }
            Some(encode(case.dtype, &values, Sign::Minus))
        })
    }

    #[test]
    fn the_specification_agrees_with_itself() {
        for causality in [Causality::Full, Causality::Causal] {
            for (dtype, seqlen) in [(Dtype::F32, 64), (Dtype::F16, 512), (Dtype::Bf16, 512)] {
                let (case, inputs) = case(causality, dtype, seqlen);
                let oracle = Oracle::new(&case, &inputs);
                let got = perfect(&case, &oracle);
                let verdict = oracle.judge(&got, Sign::Minus).unwrap();
                assert_eq!(verdict.agreement, Agreement::Agrees, "{verdict:?}");
                let verdict = oracle.judge(&got, Sign::Plus).unwrap();
                assert_eq!(verdict.agreement, Agreement::Wrong, "{verdict:?}");
            }
        }
    }

    /// The gradients from sampled rows are those of the whole problem with the same dO.
    #[test]
    fn rows_alone_give_the_gradients_of_the_whole() {
        for causality in [Causality::Full, Causality::Causal] {
            let (case, inputs) = case(causality, Dtype::F32, 64);
            let head = Head::new(&case, &inputs, 1, vec![0, 5, 40]);
            let mut oracle = Oracle::new(&case, &inputs);
            oracle.heads = vec![head];
            let d_out = oracle.d_out(&inputs);
            let whole = Head::new(
                &case,
                &Inputs { d_out, ..inputs },
                1,
                (0..case.seqlen).collect(),
            );
            let few = &oracle.heads[0];
            let d = case.head_dim;
            let apart = |a: &[f64], b: &[f64]| {
                assert_eq!(a.len(), b.len());
                let pairs = a.iter().zip(b);
                pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
            };
            for (row, at) in few.rows.iter().enumerate() {
                let of_whole = &whole.want[0][at * d..(at + 1) * d];
                assert!(apart(&few.want[0][row * d..(row + 1) * d], of_whole) < 1e-12);
            }
            for gradient in [1, 2] {
                assert!(apart(&few.want[gradient], &whole.want[gradient]) < 1e-12);
            }
        }
    }

    /// Element `at` of gradient `gradient` becomes `value`.
    fn with(got: &Bytes, gradient: usize, at: usize, value: f32) -> Bytes {
        let mut got = got.clone();
        let bytes = got[gradient].as_mut().unwrap();
        bytes[at * 4..at * 4 + 4].copy_from_slice(&value.to_ne_bytes());
        got
    }

    #[test]
    fn what_is_not_the_gradient_is_found() {
        let (case, inputs) = case(Causality::Causal, Dtype::F32, 512);
        let oracle = Oracle::new(&case, &inputs);
        let got = perfect(&case, &oracle);
        let judge = |got: &Bytes| oracle.judge(got, Sign::Minus).unwrap().agreement;
        let last = case.elements() - 1;
        for gradient in 0..3 {
            assert_eq!(
                judge(&with(&got, gradient, last, f32::NAN)),
                Agreement::Wrong
            );
            assert_eq!(
                judge(&with(&got, gradient, last, 0.01)),
                Agreement::Inaccurate
            );
            let mut none = got.clone();
            none[gradient] = Some(vec![0; case.elements() * 4]);
            assert_eq!(judge(&none), Agreement::Wrong);
        }
        // No sampled row is query 2 of the last head, so its dq must be zero.
        let quiet = (case.batch * case.num_heads - 1) * 512 * 64 + 2 * 64;
        assert!(!oracle.heads.last().unwrap().rows.contains(&2));
        assert_eq!(judge(&with(&got, 0, quiet, 1e-9)), Agreement::Wrong);
        assert_eq!(judge(&[got[0].clone(), None, None]), Agreement::Agrees);
        assert!(oracle.judge(&[None, None, None], Sign::Minus).is_err());
        assert!(
            oracle
                .judge(&[Some(vec![0; 4]), None, None], Sign::Minus)
                .is_err()
        );
    }

    #[test]
    fn a_timed_launch_must_repeat_the_opposite_of_the_one_before() {
        let (case, inputs) = case(Causality::Full, Dtype::Bf16, 64);
        let of = |sign| [Some(encode(case.dtype, &inputs.q, sign)), None, None];
        let agreement = |a: &Bytes, b: &Bytes| repeated(&case, a, b).unwrap().agreement;
        assert_eq!(
            agreement(&of(Sign::Minus), &of(Sign::Plus)),
            Agreement::Agrees
        );
        assert_eq!(
            agreement(&of(Sign::Plus), &of(Sign::Plus)),
            Agreement::Wrong
        );
        let nothing = [Some(vec![0; case.elements() * 2]), None, None];
        assert_eq!(agreement(&nothing, &nothing), Agreement::Wrong);
        assert!(repeated(&case, &of(Sign::Plus), &[None, None, None]).is_err());
    }
}
