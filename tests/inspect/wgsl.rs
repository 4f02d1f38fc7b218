//! WGSL: parsed and validated by naga, as wgpu does before a driver sees it. The test binary uses
//! it too.

use flash_kernels::{DeviceClass, Plan, Reduction};
use naga::{
    AddressSpace, Block, Module, Statement,
    valid::{Capabilities, ValidationFlags, Validator},
};

/// Storage buffers that every WebGPU device can bind to a shader.
pub const MOST_BUFFERS: usize = 8;

/// A valid compute shader, as far as a plan says something about it.
#[derive(Clone, Copy, Debug)]
pub struct Shader {
    /// Workgroup memory in bytes.
    pub shared_bytes: usize,
    /// Invocations of a workgroup.
    pub threads: usize,
    /// Storage buffers.
    pub buffers: usize,
    /// Workgroup barriers in the text.
    pub barriers: usize,
}

/// Validates `text` with no capability but those that `device` and `plan` give it.
///
/// # Errors
///
/// naga's message, with the lines it points at.
pub fn validate(text: &str, device: &DeviceClass, plan: &Plan) -> Result<Shader, String> {
    let module = naga::front::wgsl::parse_str(text).map_err(|e| e.emit_to_string(text))?;
    let mut allowed = Capabilities::empty();
    allowed.set(Capabilities::SHADER_FLOAT16, device.f16);
    let planes = plan.reduction == Reduction::Plane;
    allowed.set(
        Capabilities::SUBGROUP,
        planes && device.plane_size.is_some(),
    );
    Validator::new(ValidationFlags::all(), allowed)
        .validate(&module)
        .map_err(|e| e.emit_to_string(text))?;
    let [entry] = module.entry_points.as_slice() else {
        let count = module.entry_points.len();
        return Err(format!("{count} entry points instead of one"));
    };
    let [x, y, z] = entry.workgroup_size;
    let mut barriers = 0;
    count_barriers(&entry.function.body, &mut barriers);
    Ok(Shader {
        shared_bytes: shared_bytes(&module),
        threads: (x * y * z) as usize,
        buffers: globals(&module, |space| {
            matches!(space, AddressSpace::Storage { .. })
        })
        .count(),
        barriers,
    })
}

fn globals(
    module: &Module,
    wanted: fn(AddressSpace) -> bool,
) -> impl Iterator<Item = &naga::GlobalVariable> {
    let all = module.global_variables.iter().map(|(_, variable)| variable);
    all.filter(move |variable| wanted(variable.space))
}

fn shared_bytes(module: &Module) -> usize {
    let sizes = globals(module, |space| space == AddressSpace::WorkGroup)
        .map(|variable| module.types[variable.ty].inner.size(module.to_ctx()) as usize);
    sizes.sum()
}

fn count_barriers(block: &Block, count: &mut usize) {
    for statement in block {
        match statement {
            Statement::ControlBarrier(_) => *count += 1,
            Statement::Block(inner) => count_barriers(inner, count),
            Statement::If { accept, reject, .. } => {
                count_barriers(accept, count);
                count_barriers(reject, count);
            }
            Statement::Loop {
                body, continuing, ..
            } => {
                count_barriers(body, count);
                count_barriers(continuing, count);
            }
            Statement::Switch { cases, .. } => {
                for case in cases {
                    count_barriers(&case.body, count);
                }
            }
            _ => {}
        }
    }
}
