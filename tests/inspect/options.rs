//! The command line.

use std::path::PathBuf;

use flash_kernels::codegen::Target;

use super::cases::{Case, target_name};

/// What `--help` prints.
pub const USAGE: &str = "\
inspect: generates the kernels without a GPU, compiles or validates them, and tells what came out

  --cuda-tools DIR   CUDA tree with bin/ptxas, bin/nvdisasm, lib/libnvrtc.so.13 and include/;
                     DIR/lib must be in LD_LIBRARY_PATH (cargo xtask inspect sees to both)
  --target NAME      only cuda, wgsl or spirv; may be repeated
  --only TEXT        only kernels whose label has the words TEXT, such as \"f16 d64\"; may be
                     repeated
  --keep DIR         leave text, PTX, machine code and modules in DIR
  --help             this
";

/// What was asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// The CUDA tree.
    pub cuda_tools: Option<PathBuf>,
    /// Where generated files stay.
    pub keep: Option<PathBuf>,
    targets: Vec<Target>,
    only: Vec<String>,
}

impl Options {
    /// Reads the words of a command line; `None` where it asks for help.
    ///
    /// # Errors
    ///
    /// The word that is not understood.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Option<Self>, String> {
        let mut options = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            if word == "--help" {
                return Ok(None);
            }
            let value = words.next();
            match (word.as_str(), value) {
                ("--cuda-tools", Some(dir)) => options.cuda_tools = Some(dir.into()),
                ("--keep", Some(dir)) => options.keep = Some(dir.into()),
                ("--only", Some(text)) => options.only.push(text),
                ("--target", Some(name)) => options.targets.push(target(&name)?),
                _ => return Err(format!("{word} is unknown or lacks a value; see --help")),
            }
        }
        Ok(Some(options))
    }

    /// Is the kernel one of those asked for?
    pub fn wants(&self, case: &Case) -> bool {
        let target = self.targets.is_empty() || self.targets.contains(&case.machine.target);
        // Whole words: f16 is not bf16.
        let label = format!(" {} ", case.label());
        let named = |text: &String| label.contains(&format!(" {text} "));
        target && (self.only.is_empty() || self.only.iter().any(named))
    }

    /// Is every kernel asked for?
    pub fn wants_all(&self) -> bool {
        self.targets.is_empty() && self.only.is_empty()
    }
}

fn target(name: &str) -> Result<Target, String> {
    let all = [Target::Cuda, Target::Wgsl, Target::Spirv];
    let found = all.into_iter().find(|target| target_name(*target) == name);
    found.ok_or_else(|| format!("target {name} is not cuda, wgsl or spirv"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases;

    fn parse(line: &str) -> Result<Option<Options>, String> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn filters_combine() {
        let options = parse("--target wgsl --only d64 --only d128")
            .unwrap()
            .unwrap();
        let wanted: Vec<_> = cases::all()
            .into_iter()
            .filter(|x| options.wants(x))
            .collect();
        assert!(wanted.iter().all(|x| x.machine.target == Target::Wgsl));
        let sizes = |size| wanted.iter().any(|x| x.ask.head_dim == size);
        assert!(sizes(64) && sizes(128) && !sizes(256));
        assert!(!options.wants_all() && parse("").unwrap().unwrap().wants_all());
    }

    #[test]
    fn what_is_not_understood_is_named() {
        assert!(parse("--target metal").is_err_and(|e| e.contains("metal")));
        assert!(parse("--keep").is_err_and(|e| e.contains("--keep")));
        assert_eq!(parse("--help"), Ok(None));
    }
}
