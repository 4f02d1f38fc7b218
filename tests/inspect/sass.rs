//! PTX to machine code by ptxas, and what is in it by nvdisasm.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// What ptxas reports of a kernel, and its machine code.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// Registers of a unit.
    pub registers: usize,
    /// Bytes of a unit's stack.
    pub stack_bytes: usize,
    /// Bytes of spill stores and loads in the code.
    pub spill_bytes: usize,
    code: Vec<Instruction>,
}

/// An instruction of a listing.
#[derive(Clone, Debug, PartialEq)]
struct Instruction {
    /// Its name before the first dot.
    name: String,
    /// It is between a label and a branch back to that label.
    in_loop: bool,
}

impl Machine {
    /// Instructions of these names.
    pub fn count(&self, names: &[&str]) -> usize {
        let named = self.code.iter().filter(|x| names.contains(&&*x.name));
        named.count()
    }

    /// Instructions of these names that are executed again and again.
    pub fn count_in_loops(&self, names: &[&str]) -> usize {
        let looped = self.code.iter().filter(|x| x.in_loop);
        looped.filter(|x| names.contains(&&*x.name)).count()
    }

    /// All instructions, the padding at the end left out.
    pub fn instructions(&self) -> usize {
        self.code.len() - self.count(&["NOP"])
    }
}

/// The assembler and disassembler of a CUDA tree.
pub struct Assembler {
    bin: PathBuf,
}

impl Assembler {
    /// Those in `tools` (`bin`).
    pub fn of(tools: &Path) -> Self {
        Self {
            bin: tools.join("bin"),
        }
    }

    /// Assembles the file `stem.ptx` for `arch`, and leaves `stem.cubin` and `stem.sass` beside
    /// it.
    ///
    /// # Errors
    ///
    /// When a tool fails or says something unexpected.
    pub fn assemble(&self, stem: &Path, arch: &str) -> Result<Machine, String> {
        let [ptx, cubin, sass] = ["ptx", "cubin", "sass"].map(|end| stem.with_extension(end));
        let mut ptxas = Command::new(self.bin.join("ptxas"));
        ptxas.args(["-v", &format!("-arch={arch}"), "-o"]);
        let (_, said) = run(ptxas.arg(&cubin).arg(&ptx))?;
        let mut nvdisasm = Command::new(self.bin.join("nvdisasm"));
        let (listing, _) = run(nvdisasm.arg("-c").arg(&cubin))?;
        fs::write(&sass, &listing).map_err(|e| format!("{}: {e}", sass.display()))?;
        let mut machine =
            resources(&said).ok_or_else(|| format!("no registers in what ptxas says: {said}"))?;
        machine.code = instructions(&listing);
        match machine.instructions() {
            0 => Err("nvdisasm shows no instruction".to_owned()),
            _ => Ok(machine),
        }
    }
}

/// What `command` prints on its standard output and error.
fn run(command: &mut Command) -> Result<(String, String), String> {
    let shown = command.get_program().display().to_string();
    let output = command.output().map_err(|e| format!("{shown}: {e}"))?;
    let [out, err] =
        [output.stdout, output.stderr].map(|x| String::from_utf8_lossy(&x).into_owned());
    match output.status.success() {
        true => Ok((out, err)),
        false => Err(format!("{shown}: {}\n{out}{err}", output.status)),
    }
}

/// From the lines of `ptxas -v`: functions that were not inlined count like the kernel itself.
fn resources(said: &str) -> Option<Machine> {
    let mut machine = Machine::default();
    for line in said.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        for at in 1..words.len() {
            let Ok(value) = words[at - 1].parse::<usize>() else {
                continue;
            };
            let next = words.get(at + 1).copied().unwrap_or_default();
            match (words[at], next.trim_end_matches(',')) {
                ("registers,", _) | ("registers", _) => {
                    machine.registers = machine.registers.max(value);
                }
                ("bytes", "stack") => machine.stack_bytes += value,
                ("bytes", "spill") => machine.spill_bytes += value,
                _ => {}
            }
        }
    }
    (machine.registers > 0).then_some(machine)
}

/// The instructions of a listing, from lines like `/*0090*/ @!P0 BRA `(.L_x_3) ;` and labels
/// like `.L_x_3:`.
fn instructions(listing: &str) -> Vec<Instruction> {
    let mut code = Vec::new();
    let mut labels = HashMap::new();
    let mut branches = Vec::new();
    for line in listing.lines() {
        let line = line.trim();
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label, code.len());
        }
        let Some((_, text)) = line.strip_prefix("/*").and_then(|x| x.split_once("*/")) else {
            continue;
        };
        let mut words = text.split_whitespace();
        let name = words.find(|word| !word.starts_with('@'));
        let Some(name) = name.filter(|_| text.contains(';')) else {
            continue;
        };
        let name = name.split(['.', ';']).next().unwrap_or_default().to_owned();
        let target = text.split_once("`(").and_then(|(_, x)| x.split_once(')'));
        if let Some((label, _)) = target.filter(|_| name == "BRA") {
            branches.push((code.len(), label));
        }
        code.push(Instruction {
            name,
            in_loop: false,
        });
    }
    for (end, label) in branches {
        let start = labels.get(label).copied().unwrap_or(end);
        // A branch forward leaves an empty range.
        for instruction in code.get_mut(start..=end).into_iter().flatten() {
            instruction.in_loop = true;
        }
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_stack_and_spills_are_read() {
        let said = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Function properties for kernel\n\
            \x20   24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads\n\
            ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size\n";
        let machine = resources(said).unwrap();
        assert_eq!(machine.registers, 168);
        assert_eq!(machine.stack_bytes, 24);
        assert_eq!(machine.spill_bytes, 24);
        assert_eq!(resources("ptxas info    : 0 bytes gmem"), None);
    }

    #[test]
    fn instructions_are_counted_under_their_predicates() {
        let listing = "\t.text.kernel:\n\
            \x20       /*0000*/                   LDC R1, c[0x0][0x28] ;\n\
            \x20       /*0010*/              @!P0 HMMA.16816.F32 R4, R8, R12, R4 ;\n\
            \x20       /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;\n\
            .L_x_0:\n\
            \x20       /*0030*/                   EXIT ;\n\
            \x20       /*0040*/                   NOP;\n";
        let machine = Machine {
            code: instructions(listing),
            ..Machine::default()
        };
        assert_eq!(machine.count(&["HMMA"]), 2);
        assert_eq!(machine.count(&["LDL", "STL"]), 0);
        assert_eq!(machine.instructions(), 4);
    }

    #[test]
    fn loops_end_with_a_branch_back() {
        let listing = "\
            /*0000*/ STL [R1], R2 ;\n\
            /*0010*/ @P0 BRA `(.L_x_1) ;\n\
            .L_x_0:\n\
            /*0020*/ LDL R3, [R1] ;\n\
            /*0030*/ @P1 BRA `(.L_x_0) ;\n\
            .L_x_1:\n\
            /*0040*/ LDL R2, [R1] ;\n\
            /*0050*/ EXIT ;\n";
        let machine = Machine {
            code: instructions(listing),
            ..Machine::default()
        };
        assert_eq!(machine.count(&["LDL", "STL"]), 3);
        assert_eq!(machine.count_in_loops(&["LDL", "STL"]), 1);
    }
}
