//! The kernels of warpgroup products.

// As in the module above.
#![allow(clippy::unit_arg)]

use std::sync::Arc;

use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
};

use super::{Source, Target, buffer, compile, mask, properties, settings};
use crate::{
    Pass, Plan,
    kernel::{
        backward::{dkv_overlapped, dq_overlapped, fused_overlapped, fused_sums},
        forward_overlapped,
        unit::HalfFloat,
    },
};

/// Generates the kernel of `plan` whose products run by themselves.
pub(super) fn generate<E: HalfFloat>(target: Target, plan: &Plan) -> Result<Source, String> {
    match plan.pass {
        Pass::Forward => forward::<E>(target, plan),
        Pass::Dq => dq::<E>(target, plan),
        Pass::Dkv => dkv::<E>(target, plan),
        Pass::Fused => fused::<E>(target, plan),
    }
}

fn forward<E: HalfFloat>(target: Target, plan: &Plan) -> Result<Source, String> {
    let [scores, probabilities, _, outputs] = plan.held();
    let kernel = forward_overlapped::forward_overlapped::ForwardOverlapped::<E>::new(
        settings(plan.threads),
        properties(target),
        Arc::new(TargetProperties::default()),
        (),
        (),
        (),
        mask(plan),
        buffer(),
        buffer(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        scores,
        probabilities,
        outputs,
        plan.compiled(),
        ElemType::UInt(UIntKind::U32),
    );
    compile(target, kernel.define())
}

fn dq<E: HalfFloat>(target: Target, plan: &Plan) -> Result<Source, String> {
    let [scores, pairs, outputs, _] = plan.held();
    let kernel = dq_overlapped::dq_overlapped::DqOverlapped::<E>::new(
        settings(plan.threads),
        properties(target),
        Arc::new(TargetProperties::default()),
        (),
        (),
        (),
        (),
        buffer(),
        mask(plan),
        buffer(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        scores,
        pairs,
        outputs,
        *plan,
        ElemType::UInt(UIntKind::U32),
    );
    compile(target, kernel.define())
}

fn dkv<E: HalfFloat>(target: Target, plan: &Plan) -> Result<Source, String> {
    let [scores, pairs, keys, values] = plan.held();
    let kernel = dkv_overlapped::dkv_overlapped::DkvOverlapped::<E>::new(
        settings(plan.threads),
        properties(target),
        Arc::new(TargetProperties::default()),
        (),
        (),
        (),
        (),
        buffer(),
        mask(plan),
        buffer(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        scores,
        pairs,
        keys,
        values,
        *plan,
        ElemType::UInt(UIntKind::U32),
    );
    compile(target, kernel.define())
}

fn fused<E: HalfFloat>(target: Target, plan: &Plan) -> Result<Source, String> {
    let [scores, pairs, keys, values] = plan.held();
    let kernel = fused_overlapped::fused_overlapped::FusedOverlapped::<E>::new(
        settings(plan.threads),
        properties(target),
        Arc::new(TargetProperties::default()),
        (),
        (),
        (),
        (),
        buffer(),
        mask(plan),
        buffer(),
        buffer(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        scores,
        pairs,
        keys,
        values,
        *plan,
        ElemType::UInt(UIntKind::U32),
    );
    compile(target, kernel.define())
}

/// Generates the kernel that makes elements of the sums of [`Pass::Fused`].
pub(super) fn convert<E: HalfFloat>(target: Target, plan: &Plan) -> Result<Source, String> {
    let kernel = fused_sums::convert::Convert::<E>::new(
        settings(fused_sums::THREADS),
        properties(target),
        Arc::new(TargetProperties::default()),
        buffer(),
        buffer(),
        Default::default(),
        Default::default(),
        Default::default(),
        Default::default(),
        *plan,
    );
    compile(target, kernel.define())
}
