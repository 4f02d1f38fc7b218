//! Loss curves as an SVG. Plotters' SVG back-end writes text as `<text>` elements, so no font is
//! needed here.

use std::path::Path;

use plotters::prelude::*;

use crate::Outcome;

/// One line of the figure.
pub struct Curve<'a> {
    /// Its name in the legend.
    pub label: String,
    /// The loss of each step, from the first.
    pub losses: &'a [f64],
}

/// Okabe and Ito's palette, which color-blind readers can tell apart.
const COLORS: [RGBColor; 4] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
];

const SIZE: (u32, u32) = (860, 480);

/// Writes the curves to `path`, the first one in front.
///
/// # Errors
///
/// If no curve has a point, or the file cannot be written.
pub fn write(path: &Path, title: &str, curves: &[Curve]) -> Outcome<()> {
    let losses = || curves.iter().flat_map(|curve| curve.losses.iter().copied());
    let (low, high) = (
        losses().fold(f64::MAX, f64::min),
        losses().fold(0.0, f64::max),
    );
    if low > high {
        return Err("no loss to plot".into());
    }
    let steps = curves
        .iter()
        .map(|curve| curve.losses.len())
        .max()
        .unwrap_or(1);
    let mut svg = String::new();
    let drawn = draw(&mut svg, title, curves, [low, high], steps);
    drawn.map_err(|error| format!("{}: {error}", path.display()))?;
    std::fs::write(path, svg)?;
    Ok(())
}

fn draw(
    svg: &mut String,
    title: &str,
    curves: &[Curve],
    [low, high]: [f64; 2],
    steps: usize,
) -> Result<(), String> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let text = |error: DrawingAreaErrorKind<_>| error.to_string();
    root.fill(&WHITE).map_err(text)?;
    let margin = (high - low).max(1e-3) * 0.05;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(38)
        .y_label_area_size(52)
        .build_cartesian_2d(1.0..steps.max(2) as f64, low - margin..high + margin)
        .map_err(text)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|loss| format!("{loss:.2}"))
        .x_desc("step")
        .y_desc("loss, nats per character")
        .draw()
        .map_err(text)?;
    for (index, curve) in curves.iter().enumerate().rev() {
        let color = COLORS[index % COLORS.len()];
        let points = (1..)
            .zip(curve.losses)
            .map(|(step, &loss)| (f64::from(step), loss));
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(1)))
            .map_err(text)?
            .label(&curve.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 14))
        .draw()
        .map_err(text)?;
    root.present().map_err(text)
}
