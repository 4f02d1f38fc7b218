//! PTX to machine code by ptxas, and what is in it by nvdisasm.

use std::{
    collections::HashMap,
    fs,
    ops::RangeInclusive,
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
    /// Warnings that products which should run by themselves are waited for one by one.
    pub serializations: usize,
    code: Vec<Instruction>,
}

/// An instruction of a listing.
#[derive(Clone, Debug, PartialEq)]
struct Instruction {
    /// Its name before the first dot.
    name: String,
    /// It is between a label and a branch back to that label.
    in_loop: bool,
    /// It is in the walk: an innermost loop among those that multiply by warpgroups.
    in_walk: bool,
    /// It waits for products of the warpgroup.
    waits: bool,
    /// It is in the walk, behind the last wait there.
    is_late: bool,
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

    /// Instructions of these names in the walk.
    pub fn count_in_walk(&self, names: &[&str]) -> usize {
        let walked = self.code.iter().filter(|x| x.in_walk);
        walked.filter(|x| names.contains(&&*x.name)).count()
    }

    /// Instructions of these names in the walk that begin when no product of the warpgroup runs any more.
    pub fn count_late(&self, names: &[&str]) -> usize {
        let late = self.code.iter().filter(|x| x.is_late);
        late.filter(|x| names.contains(&&*x.name)).count()
    }

    /// All instructions, the padding at the end left out.
    pub fn instructions(&self) -> usize {
        self.code.len() - self.count(&["NOP"])
    }
}

/// What ptxas says of a kernel whose warpgroup products it could not leave to themselves.
const SERIALIZED: &str = "wgmma.mma_async instructions are serialized";

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
        machine.serializations = said.matches(SERIALIZED).count();
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
            in_walk: false,
            waits: text.contains("WARPGROUP.DEPBAR"),
            is_late: false,
        });
    }
    let ranges = branches.iter().map(|(end, label)| {
        let start = labels.get(label).copied().unwrap_or(*end);
        start..=*end
    });
    // A branch forward leaves an empty range.
    let loops: Vec<_> = ranges.filter(|range| !range.is_empty()).collect();
    let walks = walks(&code, &loops);
    for range in loops {
        for instruction in &mut code[range] {
            instruction.in_loop = true;
        }
    }
    for range in walks {
        let walk = &mut code[range];
        let last_wait = walk.iter().rposition(|x| x.waits);
        for (at, instruction) in walk.iter_mut().enumerate() {
            instruction.in_walk = true;
            // Without a wait that is known as one, all is late.
            instruction.is_late = last_wait.is_none_or(|last| at > last);
        }
    }
    code
}

/// The innermost of the loops that multiply by warpgroups. A range with an exit in it is no loop but
/// the way back from code that lies behind the kernel's end.
fn walks(code: &[Instruction], loops: &[RangeInclusive<usize>]) -> Vec<RangeInclusive<usize>> {
    let has = |range: &RangeInclusive<usize>, name| {
        let mut names = code[range.clone()].iter().map(|x| &x.name);
        names.any(|x| x == name)
    };
    let multiplies = |range: &&RangeInclusive<usize>| has(range, "HGMMA") && !has(range, "EXIT");
    let all: Vec<_> = loops.iter().filter(multiplies).collect();
    let inside = |inner: &RangeInclusive<usize>, outer: &RangeInclusive<usize>| {
        inner != outer && outer.contains(inner.start()) && outer.contains(inner.end())
    };
    let innermost = all
        .iter()
        .filter(|outer| !all.iter().any(|inner| inside(inner, outer)));
    innermost.map(|range| (*range).clone()).collect()
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

    #[test]
    fn the_walk_is_the_innermost_loop_that_multiplies() {
        let listing = "\
            .L_x_0:\n\
            /*0000*/ R2UR UR4, R2 ;\n\
            .L_x_1:\n\
            /*0010*/ R2UR UR5, R2 ;\n\
            /*0020*/ HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;\n\
            .L_x_2:\n\
            /*0030*/ R2UR UR6, R2 ;\n\
            /*0040*/ @P0 BRA `(.L_x_2) ;\n\
            /*0050*/ @P1 BRA `(.L_x_1) ;\n\
            .L_x_3:\n\
            /*0060*/ HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;\n\
            /*0070*/ @P2 BRA `(.L_x_0) ;\n\
            /*0080*/ R2UR UR7, R2 ;\n\
            /*0090*/ EXIT ;\n\
            /*00a0*/ @P0 BRA `(.L_x_3) ;\n";
        let machine = Machine {
            code: instructions(listing),
            ..Machine::default()
        };
        assert_eq!(machine.count_late(&["R2UR", "HGMMA"]), 3);
        assert_eq!(machine.count(&["R2UR"]), 4);
        assert_eq!(machine.count_in_walk(&["R2UR"]), 2);
        assert_eq!(machine.count_in_walk(&["HGMMA"]), 1);
    }

    #[test]
    fn what_follows_the_last_wait_of_the_walk_is_late() {
        let listing = "\
            .L_x_0:\n\
            /*0000*/ HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;\n\
            /*0010*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n\
            /*0020*/ MUFU.EX2 R3, R3 ;\n\
            /*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n\
            /*0040*/ MUFU.EX2 R4, R4 ;\n\
            /*0050*/ MUFU.EX2 R5, R5 ;\n\
            /*0060*/ @P1 BRA `(.L_x_0) ;\n\
            /*0070*/ MUFU.EX2 R6, R6 ;\n\
            /*0080*/ EXIT ;\n";
        let machine = Machine {
            code: instructions(listing),
            ..Machine::default()
        };
        assert_eq!(machine.count_in_walk(&["MUFU"]), 3);
        assert_eq!(machine.count_late(&["MUFU"]), 2);
    }
}
