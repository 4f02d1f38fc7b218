//! Into how many parts the keys of a query tile are dealt, each to a cube of its own.

use super::{Pass, Plan};
use crate::{AttentionError, AttentionShape, DeviceClass};

/// Fewest keys of a part: a walk over fewer takes no longer than what merging the parts adds, a
/// launch and the way of the parts through memory.
const LEAST_KEYS: usize = 256;

/// Units that a processor runs at the same time where each has 255 registers.
const UNITS_AT_ONCE: usize = 256;

impl Plan {
    /// The plan as kernels are compiled for it: they are the same for every number of parts but one.
    pub const fn compiled(&self) -> Self {
        Self {
            splits: if self.splits > 1 { 2 } else { 1 },
            ..*self
        }
    }

    /// Does a cube leave a part of an output, to be merged with others?
    pub const fn is_split(&self) -> bool {
        self.splits > 1
    }

    /// Can the plan's kernel walk so many parts?
    pub(super) fn check_splits(&self) -> Result<(), AttentionError> {
        let allowed = match self.pass == Pass::Forward {
            true if self.splits == 0 => "at least 1".to_owned(),
            false if self.splits != 1 => {
                format!("1: {:?} has no parts", self.pass)
            }
            _ => return Ok(()),
        };
        Err(AttentionError::new("splits", self.splits, allowed))
    }

    /// Cubes that a processor of `device` runs at the same time.
    fn cubes_at_once(&self, device: &DeviceClass) -> usize {
        let by_memory = device.shared_bytes / self.shared_bytes().max(1);
        by_memory.min(UNITS_AT_ONCE / self.threads).max(1)
    }

    /// Query tiles of all heads.
    const fn query_tiles(&self, shape: &AttentionShape) -> usize {
        shape.batch * shape.num_heads * shape.seqlen_q.div_ceil(self.tile.block_m)
    }

    /// The plan with as many parts as `device` is worth: one, unless query tiles leave half of its
    /// processors idle; else as many as run at the same time, of `LEAST_KEYS` each or more.
    pub(crate) fn split_for(self, device: &DeviceClass, shape: &AttentionShape) -> Self {
        let tiles = self.query_tiles(shape).max(1);
        let can = self.pass == Pass::Forward;
        let splits = match can && 2 * tiles <= device.processors {
            true => {
                let cubes = device.processors * self.cubes_at_once(device) / tiles;
                cubes.min(shape.seqlen_k / LEAST_KEYS).max(1)
            }
            false => 1,
        };
        Self { splits, ..self }
    }
}
