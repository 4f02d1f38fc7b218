//! The gradients, by the analytic formulas.

use crate::forward::Row;
use crate::{
    Gradients, Head, Inputs, Spec, add_scaled, for_each_part, piece, piece_mut, split, transpose,
};

/// The gradients of `Σ d_out ∘ out` where `out` is [`forward`](crate::forward()) of `x`, in `f64`.
///
/// `d_out` is `[B, H, Sq, Dv]`, the other shapes are those of the fields of [`Inputs`] and
/// [`Gradients`]. With `P` the probabilities of the forward pass and per head,
///
/// ```text
/// dV = Pᵀ dO        dP = dO Vᵀ        dS = P ∘ (dP − rowsum(dO ∘ O))        dbias = dS
/// dX = scale · (1 − tanh²) ∘ dS       dQ = dX K          dK = dXᵀ Q
/// ```
///
/// where the bracket with tanh is absent without a softcap. `dK` and `dV` are summed over the
/// query heads that read the same key head. Dropped keys and rows that see nothing have zero
/// gradients, whatever their inputs and `d_out` hold.
///
/// # Panics
///
/// As [`forward`](crate::forward()) does, and if `d_out` does not have the length `spec` gives it.
pub fn backward(spec: &Spec, x: &Inputs, d_out: &[f64]) -> Gradients {
    spec.check(x);
    spec.check_d_out(d_out);
    let mut grads = zeros(x);
    for_each_part(spec, by_kv_head(spec, &mut grads), |kv_index, part| {
        let [dq, dk, dv, dbias] = part;
        let queries = spec.seqlen_q * spec.head_dim;
        let scores = dbias.len().checked_div(spec.group()).unwrap_or_default();
        let d_outs = spec.seqlen_q * spec.val_dim;
        for member in 0..spec.group() {
            // Query heads of one group are neighbors, and groups follow each other through the
            // batch.
            let index = kv_index * spec.group() + member;
            let head = Head::new(spec, x, index);
            let part = HeadGradients {
                dq: piece_mut(dq, member, queries),
                dk: &mut *dk,
                dv: &mut *dv,
                dbias: piece_mut(dbias, member, scores),
            };
            backward_head(spec, &head, piece(d_out, index, d_outs), part);
        }
    });
    grads
}

/// Zero gradients of the shapes of `x`.
pub(crate) fn zeros(x: &Inputs) -> Gradients {
    Gradients {
        dq: vec![0.0; x.q.len()],
        dk: vec![0.0; x.k.len()],
        dv: vec![0.0; x.v.len()],
        dbias: x.bias.map(|bias| vec![0.0; bias.len()]),
    }
}

/// `[dq, dk, dv, dbias]` of each key head, counted through the batch; `dq` and `dbias` are those
/// of the query heads that read it, and `dbias` is empty if there is no bias.
pub(crate) fn by_kv_head<'a>(spec: &Spec, grads: &'a mut Gradients) -> Vec<[&'a mut [f64]; 4]> {
    let parts = spec.batch * spec.num_kv_heads;
    let dbias = grads.dbias.as_deref_mut().unwrap_or_default();
    let dq = split(&mut grads.dq, parts).into_iter();
    let dk = split(&mut grads.dk, parts);
    let dv = split(&mut grads.dv, parts);
    let dbias = split(dbias, parts);
    dq.zip(dk)
        .zip(dv)
        .zip(dbias)
        .map(|(((dq, dk), dv), dbias)| [dq, dk, dv, dbias])
        .collect()
}

/// Where one query head adds its gradients; `dk` and `dv` are shared by its group.
struct HeadGradients<'a> {
    /// `[Sq, D]`
    dq: &'a mut [f64],
    /// `[Sk, D]`
    dk: &'a mut [f64],
    /// `[Sk, Dv]`
    dv: &'a mut [f64],
    /// `[Sq, Sk]`, or empty without a bias.
    dbias: &'a mut [f64],
}

/// One query head of [`backward`]: adds to `grads`; `d_out` is `[Sq, Dv]`.
fn backward_head(spec: &Spec, head: &Head, d_out: &[f64], grads: HeadGradients) {
    let (keys, dim, val_dim) = (spec.seqlen_k, spec.head_dim, spec.val_dim);
    let k_t = transpose(head.k, keys, dim);
    let v_t = transpose(head.v, keys, val_dim);
    let mut row = Row::new(spec);
    let mut out = vec![0.0; val_dim];
    let mut dp = vec![0.0; keys];
    for i in 0..spec.seqlen_q {
        let q = piece(head.q, i, dim);
        let d_out = piece(d_out, i, val_dim);
        let dq = piece_mut(grads.dq, i, dim);

        row.softmax(spec, head, &k_t, i);
        out.fill(0.0);
        row.mean_value(spec, head, &mut out);
        let delta: f64 = d_out.iter().zip(&out).map(|(d_out, out)| d_out * out).sum();
        // As in `Row`, the elements of dropped keys are never read.
        dp.fill(0.0);
        for (e, &d_out) in d_out.iter().enumerate() {
            add_scaled(&mut dp, d_out, piece(&v_t, e, keys));
        }
        for &j in &row.kept {
            let ds = row.p[j] * (dp[j] - delta);
            let dx = spec.scale * row.slope[j] * ds;
            if head.bias.is_some() {
                grads.dbias[i * keys + j] = ds;
            }
            add_scaled(dq, dx, piece(head.k, j, dim));
            add_scaled(piece_mut(grads.dk, j, dim), dx, q);
            add_scaled(piece_mut(grads.dv, j, val_dim), row.p[j], d_out);
        }
    }
}
