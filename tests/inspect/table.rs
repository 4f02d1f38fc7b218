//! The report: one table for each language.

use flash_kernels::{Plan, codegen::Target, plan::CopyKind};

use super::{cases::target_name, measure::Measure, report::Report};

/// The kernels of one language, aligned; numbers to the right.
pub fn render(target: Target, reports: &[&Report]) -> String {
    let columns = Measure::columns(target);
    let mut head: Vec<String> = ["machine", "problem", "unit", "tile", "copy"]
        .map(Into::into)
        .into();
    let words = head.len();
    head.extend(
        columns
            .iter()
            .map(|measure| measure.name(target).to_owned()),
    );
    head.push("result".to_owned());
    let mut lines = vec![head];
    for report in reports {
        let mut line = vec![report.case.machine.name.to_owned(), report.case.ask.label()];
        line.extend(
            report
                .plan
                .as_ref()
                .map_or_else(|| [const { String::new() }; 3], of_plan),
        );
        line.extend(columns.iter().map(|measure| {
            let value = report.measures.get(measure);
            value.map_or_else(|| "-".to_owned(), usize::to_string)
        }));
        line.push(match report.failures.is_empty() {
            true => "ok".to_owned(),
            false => "FAILED".to_owned(),
        });
        lines.push(line);
    }
    let title = target_name(target).to_uppercase();
    format!("{title}\n{}", align(&lines, words))
}

/// Unit, tile and copy.
fn of_plan(plan: &Plan) -> [String; 3] {
    let tile = plan.tile;
    let copy = match plan.copy {
        CopyKind::Async => "async",
        CopyKind::Vector => "vector",
        CopyKind::Ahead => "ahead",
        CopyKind::Boxes => "boxes",
    };
    [
        format!("{:?}", plan.unit),
        format!("{}x{} by {}", tile.block_m, tile.block_n, plan.threads),
        format!("{copy} {}", plan.load_width),
    ]
}

/// Pads cells to the widest of their column; the first `words` columns are text.
fn align(lines: &[Vec<String>], words: usize) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().zip(&widths).enumerate();
        let cells = cells.map(|(column, (cell, &width))| match column < words {
            true => format!("{cell:<width$}"),
            false => format!("{cell:>width$}"),
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        text += line.trim_end();
        text.push('\n');
    }
    text
}
