//! The report: one Markdown table, and a note for every result that is not plain.

use comfy_table::{CellAlignment, Table, presets};

use super::grid::{Case, Pass, Series};
use super::note::note;
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
        self.outcome(series)?.tflops(self.case.work(series))
    }

    /// TFLOP/s of a peer in what `own` does.
    fn peer(&self, peers: Option<&Peers>, name: &str, own: Series) -> Option<f64> {
        peers?.tflops(name, &self.case, own)
    }
}

/// Which series the ratios are of.
#[derive(Clone, Copy)]
struct Ratios {
    /// Stands against the peers.
    own: Option<Series>,
    /// Stands against Burn's own op, and does as much.
    rival: Option<Series>,
}

impl Ratios {
    fn of(pass: Pass, series: &[Series]) -> Self {
        let asked = |it: &Series| series.contains(it);
        let own = [Series::Ours, Series::Op].into_iter().find(asked);
        let rival = match pass {
            Pass::Forward => own,
            Pass::Backward => Some(Series::Op).filter(asked),
        };
        Self {
            own,
            rival: rival.filter(|_| series.contains(&Series::Burn)),
        }
    }
}

/// The table as Markdown, padded so that it reads as plain text too, and the notes under it.
///
/// Throughputs are TFLOP/s. Beside them the forward table has what the device's pools hold for one
/// call, in MiB, and the backward table milliseconds, since its series do unlike amounts of work.
/// Ratios are of `ours`, or of `op` where `ours` was not asked for, and stand only where both
/// sides have a time that counts; in the backward pass `burn` is compared with `op`, which does
/// forward and backward too. A peer's ratio is followed by its TFLOP/s.
pub fn render(rows: &[Row], series: &[Series], peers: Option<&Peers>) -> String {
    let pass = rows.first().map_or(Pass::Forward, |row| row.case.pass);
    let ratios = Ratios::of(pass, series);
    let names = peers.map(Peers::names).unwrap_or_default();
    let mut lines = vec![header(pass, series, ratios, &names)];
    for row in rows {
        lines.push(cells(row, series, ratios, peers, &names));
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

fn header(pass: Pass, series: &[Series], ratios: Ratios, peers: &[&str]) -> Vec<String> {
    let second = match pass {
        Pass::Forward => "MiB",
        Pass::Backward => "ms",
    };
    let mut line: Vec<String> = ["dtype", "d", "causal", "N", "B·H"].map(Into::into).into();
    line.extend(series.iter().map(|it| format!("{} TF/s", it.name())));
    line.extend(series.iter().map(|it| format!("{} {second}", it.name())));
    line.extend(ratios.rival.map(|it| format!("{}/burn", it.name())));
    if let Some(own) = ratios.own {
        line.extend(peers.iter().map(|it| format!("{}/{it} (TF/s)", own.name())));
    }
    line
}

fn cells(
    row: &Row,
    series: &[Series],
    ratios: Ratios,
    peers: Option<&Peers>,
    names: &[&str],
) -> Vec<String> {
    let case = &row.case;
    let mut line = vec![
        case.dtype.name().to_owned(),
        case.head_dim.to_string(),
        case.causality.name().to_owned(),
        case.lengths(),
        (case.batch * case.num_heads).to_string(),
    ];
    line.extend(series.iter().map(|it| throughput(row, *it)));
    line.extend(series.iter().map(|it| second(row, *it)));
    if let Some(rival) = ratios.rival {
        line.push(ratio(row.tflops(rival), row.tflops(Series::Burn)));
    }
    let Some(own) = ratios.own else { return line };
    for name in names {
        let peer = row.peer(peers, name, own);
        let shown = peer.map_or(String::new(), |it| format!(" ({it:.0})"));
        line.push(ratio(row.tflops(own), peer) + &shown);
    }
    line
}

/// Memory or time.
fn second(row: &Row, series: Series) -> String {
    let outcome = row.outcome(series);
    let cell = match row.case.pass {
        Pass::Forward => outcome
            .and_then(|it| it.reserved)
            .map(|it| format!("{:.0}", it as f64 / f64::from(1 << 20))),
        Pass::Backward => outcome
            .filter(|it| it.status.counts())
            .and_then(|it| it.timing)
            .map(|it| format!("{:.3}", it.median * 1e3)),
    };
    cell.unwrap_or_else(|| "–".into())
}

fn throughput(row: &Row, series: Series) -> String {
    let Some(outcome) = row.outcome(series) else {
        return "–".into();
    };
    let mark = if outcome.status == Status::Ok {
        ""
    } else {
        "~"
    };
    match row.tflops(series) {
        None => outcome.status.name().to_owned(),
        Some(tflops) => figures(tflops) + mark,
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

/// A Markdown table whose columns line up, right-aligned; the first line is its header.
pub fn align(lines: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_header(&lines[0])
        .add_rows(&lines[1..]);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    // A colon is Markdown's mark of a right-aligned column; cells end in a space, the rule does not.
    format!("{table}\n").replace("-|", ":|")
}

/// One panel per dtype, head dimension and causal setting, with a curve per series and peer.
pub fn panels(rows: &[Row], series: &[Series], peers: Option<&Peers>) -> Vec<Panel> {
    let mut panels: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in rows {
        let case = &row.case;
        let mut title = format!(
            "{} d={} causal={}",
            case.dtype.name(),
            case.head_dim,
            case.causality.name()
        );
        if case.queries != case.seqlen {
            title += &format!(" queries={}", case.queries);
        }
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
        let own_series = Ratios::of(rows[0].case.pass, series).own;
        let names = peers.map(Peers::names).unwrap_or_default();
        let others = names.into_iter().map(|name| {
            let value = |row: &Row| row.peer(peers, name, own_series?);
            curve(&rows, name, &value)
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
            queue: 0.0,
        };
        let verdict = Verdict {
            agreement,
            error: 0.5,
            tolerance: 0.25,
            relative: 0.01,
            rows: 8,
        };
        let mut outcome = Outcome::timed(case.flops(), timing, verdict, 1500.0);
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
    fn in_the_backward_pass_burn_is_compared_with_the_op() {
        let skipped = || Outcome::without_time(Status::Skipped, "");
        let mut row = row(100.0, skipped());
        row.case = row.case.of(Pass::Backward);
        let op = timed(&row.case, 50.0, Agreement::Agrees);
        let burn = timed(&row.case, 10.0, Agreement::Agrees);
        row.outcomes[1] = (Series::Burn, burn);
        row.outcomes.insert(1, (Series::Op, op));
        let line = "fa2 float16 d=64 causal=0 n=1024 fwd 0.5 ms 240 TF/s bwd 1 ms 200 TF/s";
        let peers = Peers::parse(line).unwrap();
        let series = [Series::Ours, Series::Op, Series::Burn];
        let text = render(&[row], &series, Some(&peers));
        // The times are those of as many forward operations.
        let ms = row_ms(100.0);
        let cells = cells_of(&text);
        assert_eq!(cells[6..9], ["250.0", "175.0", "35.0"]);
        assert_eq!(cells[9], format!("{ms:.3}"));
        assert_eq!(cells[12], "5.00");
        assert_eq!(cells[13], "1.25 (200)");
    }

    fn row_ms(tflops: f64) -> f64 {
        let case = Case::new(Size::Papers, Dtype::F16, 64, Causality::Full, 1024);
        case.flops() / tflops / 1e9
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
        (long.case.seqlen, long.case.queries) = (4096, 4096);
        let mut few = row(50.0, skipped());
        few.case.queries = 128;
        let panels = panels(&[row(100.0, skipped()), long, few], &OURS_AND_BURN, None);
        let titles: Vec<_> = panels.iter().map(|it| it.title.as_str()).collect();
        assert_eq!(
            titles,
            ["f16 d=64 causal=no", "f16 d=64 causal=no queries=128"]
        );
        let lengths: Vec<usize> = panels[0].curves[0].points.iter().map(|p| p.0).collect();
        assert_eq!(lengths, [1024, 4096]);
        assert!(panels[0].curves[1].points.is_empty());
    }
}
