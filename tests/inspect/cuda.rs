//! CUDA: from a plan's text to what its machine code needs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    nvrtc::Nvrtc,
    sass::{Assembler, Machine},
};

/// The compilers of a CUDA tree, and where their files go.
pub struct Toolchain {
    nvrtc: Nvrtc,
    assembler: Assembler,
    directory: PathBuf,
}

impl Toolchain {
    /// The tools of the tree `tools`; intermediate files go to `directory`.
    ///
    /// # Errors
    ///
    /// When NVRTC cannot be opened.
    pub fn open(tools: &Path, directory: &Path) -> Result<Self, String> {
        Ok(Self {
            nvrtc: Nvrtc::open(tools)?,
            assembler: Assembler::of(tools),
            directory: directory.to_owned(),
        })
    }

    /// Compiles `text` for `arch` under the file name `name`.
    ///
    /// # Errors
    ///
    /// What the tool says that refuses it.
    pub fn compile(&self, text: &str, arch: &str, name: &str) -> Result<Machine, String> {
        let ptx = self.nvrtc.ptx(text, arch)?;
        let stem = self.directory.join(name);
        let file = stem.with_extension("ptx");
        fs::write(&file, ptx).map_err(|e| format!("{}: {e}", file.display()))?;
        self.assembler.assemble(&stem, arch)
    }
}

/// Bytes of dynamic shared memory that `text` reaches: the end of the last array that is laid
/// into it, as in `array<__half_8, 1152> * const v = reinterpret_cast<...>(&v0[18432])`.
///
/// # Errors
///
/// When an array's type is not among the structures and scalars known here.
pub fn shared_bytes(text: &str) -> Result<usize, String> {
    let Some(block) = text
        .split_once("extern __shared__")
        .and_then(|(_, rest)| rest.split_once("[]"))
        .and_then(|(declaration, _)| declaration.split_whitespace().next_back())
    else {
        return Ok(0);
    };
    let (mut end, inside) = (0, format!("(&{block}["));
    for line in text.lines() {
        let Some((before, after)) = line.split_once(&inside) else {
            continue;
        };
        let parsed = || {
            let offset: usize = after.split_once(']')?.0.parse().ok()?;
            let (_, array) = before.split_once("array<")?;
            let (element, rest) = array.split_once(',')?;
            let length: usize = rest.split_once('>')?.0.trim().parse().ok()?;
            Some(offset + length * element_bytes(text, element.trim())?)
        };
        let last = parsed().ok_or_else(|| format!("no array in shared memory: {line}"))?;
        end = end.max(last);
    }
    Ok(end)
}

/// Size of a type of the text: its vectors are aligned to their size.
fn element_bytes(text: &str, name: &str) -> Option<usize> {
    match name {
        "float" | "uint32_t" | "int32_t" => return Some(4),
        "__half" | "__nv_bfloat16" => return Some(2),
        "uint64_t" => return Some(8),
        _ => {}
    }
    let declared = format!(") {name} {{");
    let (before, _) = text.split_once(&declared)?;
    let (_, bytes) = before.rsplit_once("alignas(")?;
    bytes.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_ends_with_its_last_array() {
        let text = "struct alignas(16) __half_8 { __half i_0; };\n\
            extern __shared__ __align__(16) char v9[];uint32_t const v5 = 0;\n\
            array<__half_8, 10> * const v1 = reinterpret_cast<array<__half_8, 10> *>(&v9[0]);\n\
            array<float, 3> * const v2 = reinterpret_cast<array<float, 3> *>(&v9[160]);\n";
        assert_eq!(shared_bytes(text), Ok(172));
        assert!(shared_bytes(&text.replace("float", "mystery")).is_err());
        assert_eq!(shared_bytes("__global__ void nothing() {}"), Ok(0));
    }
}
