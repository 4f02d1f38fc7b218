//! Which keys a query sees, from the definition and one element at a time.

use crate::{Causality, Head, Spec};

/// Whether query `i` of `head` sees key `j`.
pub(crate) fn sees(spec: &Spec, head: &Head, i: usize, j: usize) -> bool {
    let at = i * spec.seqlen_k + j;
    let masked = head.mask.is_some_and(|mask| mask[at]);
    let removed = head.bias.is_some_and(|bias| bias[at] == f64::NEG_INFINITY);
    !masked && !removed && in_reach(spec, i, j)
}

/// The causal rule `j − (seqlen_k − seqlen_q) ≤ i`, its terms moved to where none is negative.
fn in_reach(spec: &Spec, i: usize, j: usize) -> bool {
    match spec.causality {
        Causality::Full => true,
        Causality::Causal => j + spec.seqlen_q <= i + spec.seqlen_k,
    }
}
