//! The command line.

use std::path::PathBuf;

use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use flash_kernels::codegen::Target;

use super::cases::{Case, target_name};

/// Generates the kernels without a GPU, compiles or validates them, and tells what came out.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(name = "inspect", args_override_self = true)]
pub struct Options {
    /// CUDA tree with bin/ptxas, bin/nvdisasm, lib/libnvrtc.so.13 and include/; DIR/lib must be in
    /// LD_LIBRARY_PATH (cargo xtask inspect sees to both).
    #[arg(long, value_name = "DIR")]
    pub cuda_tools: Option<PathBuf>,
    /// Only kernels in this language; may be repeated.
    #[arg(long = "target", value_name = "NAME", value_parser = target())]
    targets: Vec<Target>,
    /// Only kernels whose label has these words, such as "f16 d64"; may be repeated.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Leaves text, PTX, machine code and modules here.
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

impl Options {
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

fn target() -> impl TypedValueParser<Value = Target> {
    const ALL: [Target; 3] = [Target::Cuda, Target::Wgsl, Target::Spirv];
    let find = |name: String| ALL.into_iter().find(|target| target_name(*target) == name);
    PossibleValuesParser::new(ALL.map(target_name))
        .map(move |name| find(name).expect("the parser has checked it"))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, error::ErrorKind};

    use super::*;
    use crate::cases;

    fn parse(line: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(["inspect"].into_iter().chain(line.split_whitespace()))
    }

    #[test]
    fn filters_combine() {
        Options::command().debug_assert();
        let options = parse("--target wgsl --only d64 --only d128").unwrap();
        let wanted: Vec<_> = cases::all()
            .into_iter()
            .filter(|x| options.wants(x))
            .collect();
        assert!(wanted.iter().all(|x| x.machine.target == Target::Wgsl));
        let sizes = |size| wanted.iter().any(|x| x.ask.head_dim == size);
        assert!(sizes(64) && sizes(128) && !sizes(256));
        assert!(!options.wants_all() && parse("").unwrap().wants_all());
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let message = |line| parse(line).unwrap_err().to_string();
        assert!(message("--target metal").contains("metal"));
        assert!(message("--keep").contains("--keep"));
        let help = parse("--help").unwrap_err();
        assert_eq!(help.kind(), ErrorKind::DisplayHelp);
    }
}
