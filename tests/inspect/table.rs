//! The report: one table for each language.

use comfy_table::{CellAlignment, Table, presets};
use flash_kernels::{Plan, codegen::Target, plan::CopyKind};

use super::{cases::target_name, measure::Measure, report::Report};

/// The kernels of one language, aligned; numbers to the right.
pub fn render(target: Target, reports: &[&Report]) -> String {
    let columns = Measure::columns(target);
    let words = ["machine", "problem", "unit", "tile", "copy"];
    let names = columns.iter().map(|measure| measure.name(target));
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(words.into_iter().chain(names).chain(["result"]))
        .add_rows(reports.iter().map(|report| cells(report, columns)));
    for (place, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if place >= words.len() {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let title = target_name(target).to_uppercase();
    format!("{title}\n{}\n", table.trim_fmt())
}

fn cells(report: &Report, columns: &[Measure]) -> Vec<String> {
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
    line
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
