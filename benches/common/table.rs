//! The report: one Markdown table, and a note for every result that is not plain.

use super::grid::{Case, Series};
use super::outcome::{Outcome, Status};
use super::peers::Peers;
use super::plot::{Curve, Panel};

/// The results on one case.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The case.
    pub case: Case,
    /// A result per series that ran.
    pub outcomes: Vec<(Series, Outcome)>,
}

impl Row {
    fn outcome(&self, series: Series) -> Option<&Outcome> {
        let mut all = self.outcomes.iter();
        all.find(|(which, _)| *which == series).map(|(_, it)| it)
    }

    fn tflops(&self, series: Series) -> Option<f64> {
        self.outcome(series)?.tflops(&self.case)
    }
}

/// The table as Markdown, padded so that it reads as plain text too, and the notes under it.
///
/// Throughputs are TFLOP/s; memory is what the device's pools hold for one call, in MiB. Ratios
/// are of `ours`, or of `op` where `ours` was not asked for, and stand only where both sides
/// have a time that counts. A peer's ratio is followed by its TFLOP/s.
pub fn render(rows: &[Row], series: &[Series], peers: Option<&Peers>) -> String {
    let own = series.iter().copied().find(|series| series.is_own());
    let names = peers.map(Peers::names).unwrap_or_default();
    let mut lines = vec![header(series, own, &names)];
    for row in rows {
        lines.push(cells(row, series, own, peers, &names));
    }
    let mut text = align(&lines);
    for row in rows {
        for (series, outcome) in &row.outcomes {
            if let Some(note) = note(outcome) {
                text += &format!("- {} {}: {note}\n", row.case.label(), series.name());
            }
        }
    }
    text
}

fn header(series: &[Series], own: Option<Series>, peers: &[&str]) -> Vec<String> {
    let mut line: Vec<String> = ["dtype", "d", "causal", "N", "B·H"].map(Into::into).into();
    line.extend(series.iter().map(|it| format!("{} TF/s", it.name())));
    line.extend(series.iter().map(|it| format!("{} MiB", it.name())));
    if let Some(own) = own {
        if series.contains(&Series::Burn) {
            line.push(format!("{}/burn", own.name()));
        }
        line.extend(peers.iter().map(|it| format!("{}/{it} (TF/s)", own.name())));
    }
    line
}

fn cells(
    row: &Row,
    series: &[Series],
    own: Option<Series>,
    peers: Option<&Peers>,
    names: &[&str],
) -> Vec<String> {
    let case = &row.case;
    let mut line = vec![
        case.dtype.name().to_owned(),
        case.head_dim.to_string(),
        case.causality.name().to_owned(),
        case.seqlen.to_string(),
        (case.batch * case.num_heads).to_string(),
    ];
    for &series in series {
        line.push(throughput(row, series));
    }
    for &series in series {
        let bytes = row.outcome(series).and_then(|it| it.reserved);
        line.push(bytes.map_or("–".into(), |it| {
            format!("{:.0}", it as f64 / f64::from(1 << 20))
        }));
    }
    let Some(own) = own else { return line };
    let ours = row.tflops(own);
    if series.contains(&Series::Burn) {
        line.push(ratio(ours, row.tflops(Series::Burn)));
    }
    for name in names {
        let peer = peers.and_then(|peers| peers.forward(name, case));
        let shown = peer.map_or(String::new(), |it| format!(" ({it:.0})"));
        line.push(ratio(ours, peer) + &shown);
    }
    line
}

fn throughput(row: &Row, series: Series) -> String {
    let Some(outcome) = row.outcome(series) else {
        return "–".into();
    };
    match outcome.tflops(&row.case) {
        None => outcome.status.name().to_owned(),
        Some(tflops) => {
            // Three figures, whether the device does 500 TFLOP/s or 0.005.
            let decimals = (2 - tflops.log10().floor() as i32).clamp(1, 6) as usize;
            let mark = if outcome.status == Status::Ok {
                ""
            } else {
                "~"
            };
            format!("{tflops:.decimals$}{mark}")
        }
    }
}

/// `tflops` with three figures, whether a device does 500 TFLOP/s or 0.005.
pub fn figures(tflops: f64) -> String {
    let decimals = (2 - tflops.log10().floor() as i32).clamp(1, 6) as usize;
    format!("{tflops:.decimals$}")
}

fn ratio(ours: Option<f64>, other: Option<f64>) -> String {
    match (ours, other) {
        (Some(ours), Some(other)) => format!("{:.2}", ours / other),
        _ => "–".into(),
    }
}

fn note(outcome: &Outcome) -> Option<String> {
    if outcome.status == Status::Ok {
        return None;
    }
    let mut note = outcome.status.name().to_owned();
    if let Some(verdict) = outcome.verdict {
        note += &format!(
            ", error {:.2e} where {:.2e} is allowed, relative {:.1e}, {} rows checked",
            verdict.error, verdict.tolerance, verdict.relative, verdict.rows
        );
    }
    if let Some(timing) = outcome.timing {
        note += &format!(", {:.4} ms", timing.median * 1e3);
    }
    if let Some(detail) = &outcome.detail {
        // A panic's message can hold a whole kernel.
        let line: String = detail.split_whitespace().collect::<Vec<_>>().join(" ");
        note += &format!(": {}", line.chars().take(300).collect::<String>());
    }
    Some(note)
}

fn align(lines: &[Vec<String>]) -> String {
    let columns = lines[0].len();
    let width = |column: usize| {
        let cells = lines.iter().map(|line| line[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let row = |line: &[String]| {
        let cells = line.iter().zip(&widths);
        let padded = cells.map(|(cell, &width)| format!(" {cell:>width$} |"));
        format!("|{}\n", padded.collect::<String>())
    };
    let mut text = row(&lines[0]);
    let rule = widths
        .iter()
        .map(|width| format!("{}:|", "-".repeat(width + 1)));
    text += &format!("|{}\n", rule.collect::<String>());
    lines[1..].iter().for_each(|line| text += &row(line));
    text
}

/// One panel per dtype, head dimension and causal setting, with a curve per series and peer.
pub fn panels(rows: &[Row], series: &[Series], peers: Option<&Peers>) -> Vec<Panel> {
    let mut panels: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in rows {
        let case = &row.case;
        let title = format!(
            "{} d={} causal={}",
            case.dtype.name(),
            case.head_dim,
            case.causality.name()
        );
        match panels.iter_mut().find(|(known, _)| *known == title) {
            Some((_, rows)) => rows.push(row),
            None => panels.push((title, vec![row])),
        }
    }
    let curve = |rows: &[&Row], label: &str, value: &dyn Fn(&Row) -> Option<f64>| Curve {
        label: label.to_owned(),
        points: rows
            .iter()
            .filter_map(|row| Some((row.case.seqlen, value(row)?)))
            .collect(),
    };
    let fill = |(title, rows): (String, Vec<&Row>)| {
        let own = series
            .iter()
            .map(|&series| curve(&rows, series.name(), &|row| row.tflops(series)));
        let others = peers.into_iter().flat_map(|peers| {
            let names = peers.names().into_iter();
            names.map(|name| curve(&rows, name, &|row| peers.forward(name, &row.case)))
        });
        Panel {
            title,
            curves: own.chain(others).collect(),
        }
    };
    panels.into_iter().map(fill).collect()
}

#[cfg(test)]
mod tests {
    use super::super::grid::{Causality, Dtype, Size};
    use super::super::oracle::{Agreement, Verdict};
    use super::super::timing::Timing;
    use super::*;

    fn row(ours: f64, burn: Outcome) -> Row {
        let case = Case::new(Size::Papers, Dtype::F16, 64, Causality::Full, 1024);
        Row {
            case,
            outcomes: vec![
                (Series::Ours, timed(&case, ours, Agreement::Agrees)),
                (Series::Burn, burn),
            ],
        }
    }

    fn timed(case: &Case, tflops: f64, agreement: Agreement) -> Outcome {
        let seconds = case.flops() / tflops / 1e12;
        let timing = Timing {
            median: seconds,
            fastest: seconds,
            slowest: seconds,
            launches: 1,
            wait: 0.0,
        };
        let verdict = Verdict {
            agreement,
            error: 0.5,
            tolerance: 0.25,
            relative: 0.01,
            rows: 8,
        };
        let mut outcome = Outcome::timed(case, timing, verdict, 1500.0);
        outcome.reserved = Some(512 << 20);
        outcome
    }

    fn cells_of(text: &str) -> Vec<String> {
        let line = text.lines().nth(2).unwrap();
        line.split('|').map(|cell| cell.trim().to_owned()).collect()
    }

    const OURS_AND_BURN: [Series; 2] = [Series::Ours, Series::Burn];

    #[test]
    fn ratios_stand_beside_the_throughputs() {
        let case = row(1.0, Outcome::without_time(Status::Skipped, "")).case;
        let row = row(300.0, timed(&case, 40.0, Agreement::Inaccurate));
        let line = "fa2 float16 d=64 causal=0 n=1024 fwd 0.5 ms 240 TF/s";
        let peers = Peers::parse(line).unwrap();
        let text = render(&[row], &OURS_AND_BURN, Some(&peers));
        let cells = cells_of(&text);
        assert_eq!(cells[6..11], ["300.0", "40.0~", "512", "512", "7.50"]);
        assert_eq!(cells[11], "1.25 (240)");
        assert!(text.contains("burn: inaccurate, error 5.00e-1"), "{text}");
    }

    #[test]
    fn a_result_that_does_not_count_has_no_ratio() {
        let case = row(1.0, Outcome::without_time(Status::Skipped, "")).case;
        for burn in [
            Outcome::without_time(Status::NotFinished, "after 240 s"),
            timed(&case, 1345.0, Agreement::Wrong),
            timed(&case, 1501.0, Agreement::Agrees),
        ] {
            let name = burn.status.name();
            let text = render(&[row(300.0, burn)], &OURS_AND_BURN, None);
            let cells = cells_of(&text);
            assert_eq!(cells[7], name);
            assert_eq!(cells[10], "–");
            assert!(text.contains(&format!("burn: {name}")), "{text}");
        }
    }

    #[test]
    fn columns_line_up() {
        let text = render(
            &[row(0.004_321, Outcome::without_time(Status::Failed, "x"))],
            &OURS_AND_BURN,
            None,
        );
        let table = text.lines().take(3);
        let widths: Vec<usize> = table.map(|line| line.chars().count()).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
        assert_eq!(cells_of(&text)[6], "0.00432");
    }

    #[test]
    fn panels_group_lengths_and_leave_out_what_does_not_count() {
        let skipped = || Outcome::without_time(Status::Skipped, "");
        let mut long = row(200.0, skipped());
        long.case.seqlen = 4096;
        let panels = panels(&[row(100.0, skipped()), long], &OURS_AND_BURN, None);
        assert_eq!(panels.len(), 1);
        assert_eq!(panels[0].title, "f16 d=64 causal=no");
        let lengths: Vec<usize> = panels[0].curves[0].points.iter().map(|p| p.0).collect();
        assert_eq!(lengths, [1024, 4096]);
        assert!(panels[0].curves[1].points.is_empty());
    }
}
