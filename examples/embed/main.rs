//! `cargo run --example embed -- --model DIR [SENTENCE]...`: sentence embeddings with
//! all-MiniLM-L6-v2. A batch holds sentences of different length, so every attention of the
//! encoder runs with a padding mask. `--help` lists the options.

mod args;
mod bert;
#[path = "../common/device.rs"]
mod device;
mod embedder;
mod files;
mod reference;

use std::process::ExitCode;
use std::time::Instant;

use burn_flash_attention::{AttentionPath, AttentionReport};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use args::Args;
use embedder::{Embedded, Embedder};
use reference::Reference;

/// Any error; the text is for the user.
pub type Failure = Box<dyn std::error::Error>;

/// A result whose error is for the user.
pub type Outcome<T> = Result<T, Failure>;

/// Beyond this many sentences each is printed with its nearest other one, not with all.
const MATRIX_LIMIT: usize = 12;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("embed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<()> {
    let args = Args::parse();
    let sentences = args.sentences()?;
    let device::Chosen { runtime, device } = device::from_env()?;
    println!("device:    {device:?}, runtime {runtime}, {:?}", args.dtype);
    if !device.supports_dtype(args.dtype) {
        return Err(format!("{runtime} does not compute in {:?} here", args.dtype).into());
    }

    let start = Instant::now();
    let embedder = Embedder::load(&args.model, args.dtype, &device)?;
    println!(
        "model:     {} ({:.1?})",
        embedder.describe(),
        start.elapsed()
    );

    // All in one batch, whatever --batch says: the shortest is then nearly all padding.
    let reference = Reference::load()?;
    let known = &reference.sentences;
    let embedded = embed(&embedder, known, known.len(), "built-in sentences")?;
    for report in &embedded.reports {
        println!("attention: {}", describe(report));
    }
    if sentences.is_empty() {
        print_similarities(known, &embedded);
    } else {
        let given = embed(&embedder, &sentences, args.batch, "sentences")?;
        for report in &given.reports {
            if !embedded.reports.contains(report) {
                println!("attention: {}", describe(report));
            }
        }
        print_similarities(&sentences, &given);
    }
    check(&reference, &embedded)
}

/// Embeds with a progress bar on the terminal and one closing line.
fn embed(
    embedder: &Embedder,
    sentences: &[String],
    batch: usize,
    what: &'static str,
) -> Outcome<Embedded> {
    let style = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} {per_sec} {eta}")?;
    let bar = ProgressBar::new(sentences.len() as u64).with_style(style);
    // The first batch of a shape also compiles and tunes kernels: show at once that work began.
    bar.set_message(what);
    bar.tick();
    let start = Instant::now();
    let embedded = embedder.embed(sentences, batch, &bar)?;
    bar.finish_and_clear();
    let (padding, all) = embedded.padding;
    println!(
        "embedded:  {} {what} in {:.1?}, {} tokens and {padding} of padding",
        sentences.len(),
        start.elapsed(),
        all - padding,
    );
    Ok(embedded)
}

/// One line about how attention ran.
fn describe(report: &AttentionReport) -> String {
    let mut line = match report.path {
        AttentionPath::Kernel(unit) => format!("fused kernel, {unit:?}"),
        AttentionPath::Composed => "composed of Burn's own operations".to_owned(),
    };
    if let Some(plan) = &report.plan {
        line += &format!(", {plan:?}");
    }
    if let Some(reason) = &report.reason {
        line += &format!(" ({reason})");
    }
    line
}

/// Prints the cosine similarity of each pair, or of each sentence and the one nearest to it.
fn print_similarities(sentences: &[String], embedded: &Embedded) {
    let vectors = &embedded.vectors;
    let similarity = |a: usize, b: usize| reference::cosine(&vectors[a], &vectors[b]);
    println!("\ncosine similarity");
    if sentences.len() <= MATRIX_LIMIT {
        let header: String = (1..=sentences.len()).map(|n| format!("{n:>6}")).collect();
        println!("{:>3} {:44}{header}", "", "");
        for (row, sentence) in sentences.iter().enumerate() {
            let cells: String = (0..sentences.len())
                .map(|column| format!("{:6.2}", similarity(row, column)))
                .collect();
            println!("{:>3} {:44}{cells}", row + 1, shorten(sentence, 44));
        }
    } else {
        for (row, sentence) in sentences.iter().enumerate() {
            let others = (0..sentences.len()).filter(|&other| other != row);
            let nearest = others.max_by(|&a, &b| similarity(row, a).total_cmp(&similarity(row, b)));
            let Some(nearest) = nearest else { continue };
            println!(
                "{:6.2}  {:44}  {}",
                similarity(row, nearest),
                shorten(sentence, 44),
                shorten(&sentences[nearest], 44)
            );
        }
    }
    println!();
}

/// The first `width` characters, with dots if that is not all.
fn shorten(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width - 3).chain("...".chars()).collect()
}

/// Compares with the recorded embeddings and fails if one is too far.
fn check(reference: &Reference, embedded: &Embedded) -> Outcome<()> {
    let comparison = reference.compare(embedded)?;
    let reference::Comparison { largest, worst } = comparison;
    let count = reference.sentences.len();
    let allowed = reference::ALLOWED;
    println!("check:     {count} recorded embeddings, largest cosine distance {largest:.1e}");
    if largest <= allowed {
        println!("           passed (at most {allowed:.0e})");
        return Ok(());
    }
    let sentence = shorten(&reference.sentences[worst], 44);
    Err(
        format!("cosine distance {largest:.3e} is not within {allowed:.0e} for {sentence:?}")
            .into(),
    )
}
