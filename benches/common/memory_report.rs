//! The report of the memory benchmark: table, exponent, plot.

use std::ops::RangeInclusive;

use serde_json::{Value, json};

use super::grid::Series;
use super::memory_args::MemoryArgs;
use super::note::note;
use super::outcome::{Origin, Outcome};
use super::plot::{Curve, Panel};
use super::table::align;

/// Exponents that count as linear.
pub const LINEAR: RangeInclusive<f64> = 0.9..=1.1;
/// Fewest lengths that an exponent is fitted to.
const FEWEST: usize = 3;
/// Below this the pools' own pages, of 2 and 8 MiB, weigh too much to say how memory grows.
const SMALLEST_JUDGED: f64 = 64.0;

/// A step of one series at one length.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Whose.
    pub series: Series,
    /// Length of queries and keys.
    pub seqlen: usize,
    /// How it ended; `reserved` is the peak.
    pub outcome: Outcome,
    /// Most bytes seen in use.
    pub in_use: Option<u64>,
    /// Seconds of the step.
    pub seconds: Option<f64>,
}

impl Entry {
    /// Reads what a worker answers or a line of the JSON file.
    ///
    /// # Errors
    ///
    /// When it is neither.
    pub fn from_json(series: Series, seqlen: usize, value: &Value) -> Result<Self, String> {
        Ok(Self {
            series,
            seqlen,
            outcome: Outcome::from_json(value)?,
            in_use: value["in_use_bytes"].as_u64(),
            seconds: value["step_seconds"].as_f64(),
        })
    }

    /// Peak in MiB, where the step ran and computed attention.
    pub fn mib(&self) -> Option<f64> {
        let counts = self.outcome.status.counts();
        self.outcome.reserved.filter(|_| counts).map(mib)
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A line of the JSON file.
pub fn json_line(origin: &Origin, args: &MemoryArgs, entry: &Entry) -> String {
    let mut object = json!({
        "pass": "memory",
        "series": entry.series.name(),
        "dtype": args.dtype.name(),
        "head_dim": args.head_dim,
        "causal": args.causality.name() == "yes",
        "seqlen": entry.seqlen,
        "batch": args.batch,
        "num_heads": args.heads,
        "layers": args.layers,
        "in_use_bytes": entry.in_use,
        "step_seconds": entry.seconds,
        "device": origin.device,
        "runtime": origin.runtime,
        "date": origin.date,
        "command": origin.command,
    });
    if let Value::Object(fields) = &mut object {
        fields.extend(entry.outcome.to_json());
    }
    object.to_string()
}

/// The entries in the text of a JSON file, which must be of the same steps.
///
/// # Errors
///
/// When a line is not of this benchmark, or its setting or its runtime is another.
pub fn earlier(args: &MemoryArgs, origin: &Origin, text: &str) -> Result<Vec<Entry>, String> {
    let read = |line: &str| {
        let value: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let series = value["series"].as_str().and_then(Series::parse);
        let seqlen = value["seqlen"].as_u64();
        let (Some(series), Some(seqlen)) = (series, seqlen) else {
            return Err(format!("no series or no length in {line}"));
        };
        let entry = Entry::from_json(series, seqlen as usize, &value)?;
        let again: Value = serde_json::from_str(&json_line(origin, args, &entry))
            .map_err(|error| error.to_string())?;
        for key in [
            "pass",
            "dtype",
            "head_dim",
            "causal",
            "batch",
            "num_heads",
            "layers",
            "device",
            "runtime",
        ] {
            if value[key] != again[key] {
                let (has, needs) = (&value[key], &again[key]);
                return Err(format!("{key} is {has} in the earlier run, {needs} now"));
            }
        }
        Ok(entry)
    };
    text.lines().map(read).collect()
}

/// Least squares of log(MiB) over log(length).
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The slope.
    pub exponent: f64,
    /// Its points, ascending: (length, MiB).
    pub points: Vec<(usize, f64)>,
}

impl Fit {
    /// Fits the upper half of the lengths at which `series` ran, at least [`FEWEST`]. Nothing is
    /// subtracted. `None` if there are fewer.
    pub fn new(entries: &[Entry], series: Series) -> Option<Self> {
        let points = points(entries, series);
        let take = points.len().div_ceil(2).max(FEWEST);
        let points = points.get(points.len().checked_sub(take)?..)?.to_vec();
        let logs = points.iter().map(|&(n, y)| ((n as f64).ln(), y.ln()));
        let count = points.len() as f64;
        let (x, y) = logs
            .clone()
            .fold((0.0, 0.0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
        let (x, y) = (x / count, y / count);
        let up: f64 = logs.clone().map(|it| (it.0 - x) * (it.1 - y)).sum();
        let across: f64 = logs.map(|it| (it.0 - x) * (it.0 - x)).sum();
        Some(Self {
            exponent: up / across,
            points,
        })
    }

    fn text(&self) -> String {
        let (first, last) = (self.points[0].0, self.points[self.points.len() - 1].0);
        format!(
            "N^{:.3} (least squares over N = {first} to {last})",
            self.exponent
        )
    }

    /// Whether the memory is large enough to say how it grows.
    fn is_judged(&self) -> bool {
        self.points[0].1 >= SMALLEST_JUDGED
    }
}

fn points(entries: &[Entry], series: Series) -> Vec<(usize, f64)> {
    let of = entries.iter().filter(|it| it.series == series);
    let mut points: Vec<_> = of.filter_map(|it| Some((it.seqlen, it.mib()?))).collect();
    points.sort_by_key(|point| point.0);
    points
}

/// Table, notes, exponents, and whether ours is linear.
pub fn render(entries: &[Entry]) -> String {
    let mut lengths: Vec<usize> = entries.iter().map(|it| it.seqlen).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let header = [
        "N",
        "ours MiB",
        "burn MiB",
        "burn/ours",
        "ours in use",
        "burn in use",
        "ours s",
        "burn s",
    ];
    let mut lines = vec![header.map(str::to_owned).to_vec()];
    for &seqlen in &lengths {
        let find = |series| {
            let mut all = entries.iter();
            all.find(|it| it.series == series && it.seqlen == seqlen)
        };
        lines.push(cells(seqlen, find(Series::Op), find(Series::Burn)));
    }
    let mut text = align(&lines);
    for entry in entries {
        if let Some(note) = note(&entry.outcome) {
            text += &format!("- N={} {}: {note}\n", entry.seqlen, name(entry.series));
        }
    }
    for series in [Series::Op, Series::Burn] {
        if let Some(fit) = Fit::new(entries, series) {
            text += &format!("{}: {}\n", name(series), fit.text());
        }
    }
    text + &format!("{}\n", verdict(entries).1)
}

/// Whether ours grows linearly, and a line that says so; `None` where that cannot be said.
pub fn verdict(entries: &[Entry]) -> (Option<bool>, String) {
    let (low, high) = (LINEAR.start(), LINEAR.end());
    match Fit::new(entries, Series::Op) {
        None => (
            None,
            format!("not judged: ours ran at fewer than {FEWEST} lengths"),
        ),
        Some(fit) if !fit.is_judged() => (
            None,
            format!("not judged: less than {SMALLEST_JUDGED} MiB, where the pools' pages weigh"),
        ),
        Some(fit) => {
            let linear = LINEAR.contains(&fit.exponent);
            let word = if linear { "PASS" } else { "FAIL" };
            (
                Some(linear),
                format!(
                    "{word}: exponent of ours {:.3}, allowed {low} to {high}",
                    fit.exponent
                ),
            )
        }
    }
}

fn name(series: Series) -> &'static str {
    match series {
        Series::Burn => "burn",
        _ => "ours",
    }
}

fn cells(seqlen: usize, ours: Option<&Entry>, burn: Option<&Entry>) -> Vec<String> {
    let peak = |entry: Option<&Entry>| match entry {
        None => "–".to_owned(),
        Some(entry) => entry.mib().map_or_else(
            || entry.outcome.status.name().to_owned(),
            |it| format!("{it:.0}"),
        ),
    };
    let ratio = match (ours.and_then(Entry::mib), burn.and_then(Entry::mib)) {
        (Some(ours), Some(burn)) => format!("{:.2}", burn / ours),
        _ => "–".into(),
    };
    let ran = |entry: Option<&Entry>| entry.filter(|it| it.mib().is_some()).cloned();
    let in_use = |entry| {
        let bytes = ran(entry).and_then(|it| it.in_use);
        bytes.map_or("–".into(), |it| format!("{:.0}", mib(it)))
    };
    let seconds = |entry| {
        let seconds = ran(entry).and_then(|it| it.seconds);
        seconds.map_or("–".into(), |it| format!("{it:.3}"))
    };
    vec![
        seqlen.to_string(),
        peak(ours),
        peak(burn),
        ratio,
        in_use(ours),
        in_use(burn),
        seconds(ours),
        seconds(burn),
    ]
}

/// One panel with a curve for each series.
pub fn panel(entries: &[Entry], title: &str) -> Panel {
    let curve = |series| Curve {
        label: name(series).into(),
        points: points(entries, series),
    };
    Panel {
        title: title.into(),
        curves: [Series::Op, Series::Burn].map(curve).into(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::outcome::Status;
    use super::*;

    fn entry(series: Series, seqlen: usize, mib: f64) -> Entry {
        let mut outcome = Outcome::without_time(Status::Ok, "");
        outcome.detail = None;
        outcome.reserved = Some((mib * f64::from(1 << 20)) as u64);
        Entry {
            series,
            seqlen,
            outcome,
            in_use: Some(1 << 20),
            seconds: Some(0.5),
        }
    }

    fn grown(power: f64) -> Vec<Entry> {
        let lengths = (9..=16).map(|power| 1 << power);
        let mib = |n: usize| 100.0 * (n as f64 / 512.0).powf(power);
        lengths.map(|n| entry(Series::Op, n, mib(n))).collect()
    }

    #[test]
    fn the_exponent_is_that_of_the_upper_half() {
        let mut entries = grown(1.0);
        // A constant matters only to the short ones, and the order does not matter.
        entries[0].outcome.reserved = Some(1 << 40);
        entries.reverse();
        let fit = Fit::new(&entries, Series::Op).unwrap();
        assert!((fit.exponent - 1.0).abs() < 1e-3, "{fit:?}");
        let lengths: Vec<usize> = fit.points.iter().map(|it| it.0).collect();
        assert_eq!(lengths, [8192, 16_384, 32_768, 65_536]);
        assert_eq!(verdict(&entries).0, Some(true));
        assert!(Fit::new(&entries, Series::Burn).is_none());
    }

    #[test]
    fn what_grows_faster_fails_and_what_is_tiny_is_not_judged() {
        assert_eq!(verdict(&grown(2.0)).0, Some(false));
        assert!(render(&grown(2.0)).contains("FAIL: exponent of ours 2.000"));
        let tiny: Vec<Entry> = [256, 512, 1024].map(|n| entry(Series::Op, n, 1.0)).into();
        assert_eq!(verdict(&tiny).0, None);
        assert_eq!(verdict(&tiny[..2]).0, None);
    }

    #[test]
    fn what_did_not_fit_is_in_the_table_with_its_words() {
        let mut entries = grown(1.0);
        entries.push(entry(Series::Burn, 32_768, 12_800.0));
        let mut burn = entry(Series::Burn, 65_536, 1.0);
        let words = "out of device memory allocating 68719476736 bytes";
        let fault = format!("Several failures\nskipped a kernel\n{words}\nNo backtrace");
        burn.outcome = Outcome::without_time(Status::of_fault(&fault), fault);
        entries.push(burn);
        let text = render(&entries);
        let line = |n: &str| {
            let mut lines = text.lines();
            lines
                .find(|line| line.contains(&format!("| {n} |")))
                .unwrap()
        };
        assert!(line("32768").contains(" 2.00 |"), "{text}");
        assert!(line("65536").contains("| out of memory |"), "{text}");
        assert!(
            text.contains(&format!("N=65536 burn: out of memory: {words}")),
            "{text}"
        );
    }

    #[test]
    fn an_earlier_run_is_taken_only_if_it_was_of_the_same_steps() {
        let args = MemoryArgs::parse_from(["memory"]);
        let origin = Origin {
            device: "D".into(),
            runtime: "cuda".into(),
            date: "then".into(),
            command: "memory".into(),
        };
        let entries = grown(1.0);
        let lines = entries.iter().map(|it| json_line(&origin, &args, it));
        let text = lines.collect::<Vec<_>>().join("\n");
        assert_eq!(earlier(&args, &origin, &text), Ok(entries));
        let mut other = args.clone();
        other.layers += 1;
        assert!(
            earlier(&other, &origin, &text)
                .unwrap_err()
                .contains("layers")
        );
        assert!(earlier(&args, &origin, "{}").is_err());
    }
}
