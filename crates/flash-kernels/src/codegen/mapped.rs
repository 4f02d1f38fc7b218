//! Gradients by functions of elements.

// As in the module above.
#![allow(clippy::unit_arg)]

use std::sync::Arc;

use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
};

use super::{Source, Target, buffer, compile, mask, properties, settings, tensor};
use crate::{
    Pass, Plan,
    kernel::{
        backward::{dkv_mapped, dq_mapped},
        unit::MappedUnit,
    },
};

/// Generates the gradient of `plan` whose products stay where they are.
pub(super) fn generate<U: MappedUnit, L: Numeric, E: Float>(
    target: Target,
    plan: &Plan,
) -> Result<Source, String> {
    let settings = settings(plan.threads);
    let device = properties(target);
    let target_properties = Arc::new(TargetProperties::default());
    let mask_type = ElemType::UInt(UIntKind::U32);
    let kernel = match plan.pass {
        Pass::Dq => dq_mapped::dq_mapped::DqMapped::<U, L, E>::new(
            settings,
            device,
            target_properties,
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            buffer(),
            mask(plan),
            tensor(),
            Default::default(),
            Default::default(),
            Default::default(),
            plan.load_components(),
            plan.store_width,
            *plan,
            mask_type,
        )
        .define(),
        Pass::Dkv => dkv_mapped::dkv_mapped::DkvMapped::<U, L, E>::new(
            settings,
            device,
            target_properties,
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            buffer(),
            mask(plan),
            buffer(),
            Default::default(),
            Default::default(),
            Default::default(),
            Default::default(),
            plan.load_components(),
            plan.store_width,
            *plan,
            mask_type,
        )
        .define(),
        Pass::Forward | Pass::Fused => return Err(format!("{:?} is not mapped", plan.pass)),
    };
    compile(target, kernel)
}
