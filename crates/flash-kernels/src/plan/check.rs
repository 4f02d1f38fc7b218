//! What a plan needs of a device.

use super::{CopyKind, Isa, Pass, Plan, Reduction, Rounding, UnitKind, ValueBuffer};
use crate::{AttentionError, DeviceClass, Masking, Precision};

impl Plan {
    /// Can `device` run this plan?
    ///
    /// # Errors
    ///
    /// [`AttentionError::Device`] naming the first resource that does not suffice.
    pub fn check(&self, device: &DeviceClass) -> Result<(), AttentionError> {
        let at_least = |resource, has: usize, needs: usize| {
            if has >= needs {
                return Ok(());
            }
            Err(AttentionError::device(
                resource,
                has,
                format!("at least {needs}"),
            ))
        };
        at_least(
            "shared memory in bytes",
            device.shared_bytes,
            self.shared_bytes(),
        )?;
        at_least("units per cube", device.max_threads, self.threads)?;
        let planes = match self.unit {
            UnitKind::Scalar => self.reduction == Reduction::Plane,
            UnitKind::Cmma | UnitKind::Mma | UnitKind::Wgmma => true,
        };
        if planes && device.plane_size != Some(self.plane_size) {
            return Err(AttentionError::device(
                "plane size",
                device
                    .plane_size
                    .map_or("not fixed or without plane operations".into(), |p| {
                        p.to_string()
                    }),
                self.plane_size,
            ));
        }
        if self.unit == UnitKind::Cmma && self.row_parts() > 2 {
            return Err(AttentionError::device(
                "plane size",
                self.plane_size,
                format!("at most {}, two lanes to a row", 2 * self.rows),
            ));
        }
        self.check_instructions(device)?;
        if self.unit == UnitKind::Wgmma && !matches!(self.consumers(), 2..=4) {
            return Err(AttentionError::new(
                "block_m",
                self.tile.block_m,
                "128, 192 or 256, or 64 keys of dkv: registers are shared out for so many",
            ));
        }
        if self.must_not_lag() && self.lag() >= self.stages() {
            return Err(AttentionError::new(
                "block_n",
                self.tile.block_n,
                format!(
                    "fewer than {} tiles of keys to 64 queries fewer than block_m",
                    self.stages()
                ),
            ));
        }
        if self.pass == Pass::Fused && self.pieces() != self.consumers() {
            return Err(AttentionError::new(
                "block_n",
                self.tile.block_n,
                "a tile of dq of as many pieces of 64 × 64 as there are warpgroups",
            ));
        }
        self.check_choices(device)
    }

    /// Has `device` the plan's instructions?
    fn check_instructions(&self, device: &DeviceClass) -> Result<(), AttentionError> {
        if self.isa == Isa::Mapped && device.isa != Isa::Mapped {
            return Err(AttentionError::device(
                "instruction set",
                "without functions of matrix elements",
                "VK_NV_cooperative_matrix2 behind CubeCL's own SPIR-V (feature vulkan)",
            ));
        }
        if self.isa == Isa::Ptx && device.isa != Isa::Ptx {
            return Err(AttentionError::device(
                "instruction set",
                "not PTX",
                "PTX of sm_80 or later through CubeCL's C++ compiler (feature cuda-cpp)",
            ));
        }
        if self.unit == UnitKind::Wgmma && !device.wgmma {
            return Err(AttentionError::device(
                "matrix instructions",
                "without wgmma, or its tensors out of the copy engine's reach",
                "wgmma of sm_90, steps of 16 bytes and rows that are apart",
            ));
        }
        Ok(())
    }

    /// Can what was chosen be had together?
    fn check_choices(&self, device: &DeviceClass) -> Result<(), AttentionError> {
        self.check_lent()?;
        self.check_mapped()?;
        self.check_rounding(device)?;
        self.check_splits()
    }

    /// Has `device` the plan's instruction for it?
    fn check_rounding(&self, device: &DeviceClass) -> Result<(), AttentionError> {
        let lacking = self.rounding == Rounding::Even && device.rounding == Rounding::Away;
        if self.precision == Precision::Full || !lacking {
            return Ok(());
        }
        Err(AttentionError::device(
            "rounding to tf32",
            format!("{:?}", device.rounding),
            "Even, of sm_90 or later",
        ))
    }

    /// Only gradients are written for functions of elements, and those cannot read a mask.
    fn check_mapped(&self) -> Result<(), AttentionError> {
        let is_gradient = matches!(self.pass, Pass::Dq | Pass::Dkv);
        if !self.is_mapped() || is_gradient && self.masking == Masking::None {
            return Ok(());
        }
        Err(AttentionError::new(
            "instruction set",
            format!("Mapped for {:?}, masking {:?}", self.pass, self.masking),
            "Mapped for dq and dkv without a bool mask",
        ))
    }

    /// Memory is lent by operands that only come through it, to tiles of their own.
    fn check_lent(&self) -> Result<(), AttentionError> {
        let can_lend = self.unit == UnitKind::Cmma
            && self.values == ValueBuffer::Own
            && matches!(self.copy, CopyKind::Vector | CopyKind::Ahead);
        if !self.lends() || can_lend {
            return Ok(());
        }
        Err(AttentionError::new(
            "query operand",
            format!(
                "Lent by {:?}, values {:?}, copies {:?}",
                self.unit, self.values, self.copy
            ),
            "Lent by Cmma, whose matrices are loaded once, to two walked tiles, each its own, in one stage",
        ))
    }
}
