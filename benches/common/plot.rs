//! A quantity against sequence length as an SVG, one panel per setting.
//!
//! Plotters' SVG back-end writes text as `<text>` elements, so the viewer's font is used and
//! none is needed here.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

/// One line of a panel.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Its name in the legend.
    pub label: String,
    /// (sequence length, value), in the order to connect.
    pub points: Vec<(usize, f64)>,
}

/// One chart of the figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// Its caption.
    pub title: String,
    /// Its lines; the same labels in the same order in every panel.
    pub curves: Vec<Curve>,
}

/// The vertical axis; the horizontal one is logarithmic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vertical {
    /// What it shows.
    pub label: &'static str,
    /// How.
    pub scale: Scale,
}

impl Vertical {
    /// TFLOP/s from zero.
    pub const THROUGHPUT: Self = Self {
        label: "TFLOP/s",
        scale: Scale::Linear,
    };
    /// MiB by powers of two.
    pub const MEMORY: Self = Self {
        label: "MiB",
        scale: Scale::Log,
    };

    /// Where a value stands on the axis; values on a logarithmic one are positive.
    fn position(self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value,
            Scale::Log => value.log2(),
        }
    }

    /// Ends of the axis for these values.
    fn range(self, values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
        let positions: Vec<f64> = values.map(|value| self.position(value)).collect();
        let top = positions.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        match self.scale {
            Scale::Linear => 0.0..(top.max(0.0) * 1.1).max(1e-6),
            Scale::Log if positions.is_empty() => 0.0..1.0,
            Scale::Log => {
                let low = positions.iter().copied().fold(f64::INFINITY, f64::min);
                low.floor()..top.ceil().max(low.floor() + 1.0)
            }
        }
    }

    fn name(self, position: f64, range: &std::ops::Range<f64>) -> String {
        match self.scale {
            Scale::Linear if range.end < 10.0 => position.to_string(),
            Scale::Linear => format!("{position:.0}"),
            Scale::Log => power_of_two(position),
        }
    }

    fn labels(self, range: &std::ops::Range<f64>) -> usize {
        match self.scale {
            Scale::Linear => 10,
            Scale::Log => (range.end - range.start).round() as usize + 1,
        }
    }
}

/// How an axis maps values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From zero.
    Linear,
    /// By powers of two.
    Log,
}

/// 2 to `position` where that is whole, nothing between.
fn power_of_two(position: f64) -> String {
    if (position - position.round()).abs() < 1e-9 {
        2f64.powi(position.round() as i32).to_string()
    } else {
        String::new()
    }
}

/// Width and height of a panel in pixels.
const PANEL: (u32, u32) = (460, 340);

/// Heights of the two lines above the panels.
const TITLE: u32 = 34;
const LEGEND: u32 = 26;

/// Okabe and Ito's palette, which colour-blind readers can tell apart.
const COLORS: [RGBColor; 7] = [
    RGBColor(213, 94, 0),
    RGBColor(230, 159, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 0, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
];

/// Writes the figure to `path`.
///
/// # Errors
///
/// When there is no panel, when the file cannot be written, or when Plotters cannot draw.
pub fn write(
    path: &Path,
    title: &str,
    vertical: Vertical,
    panels: &[Panel],
) -> Result<(), Box<dyn Error>> {
    std::fs::write(path, render(title, vertical, panels)?)?;
    Ok(())
}

/// The SVG's text.
///
/// # Errors
///
/// When there is no panel, or when Plotters cannot draw.
pub fn render(title: &str, vertical: Vertical, panels: &[Panel]) -> Result<String, Box<dyn Error>> {
    if panels.is_empty() {
        return Err("nothing to plot".into());
    }
    let columns = panels.len().min(2);
    let rows = panels.len().div_ceil(columns);
    let size = (
        PANEL.0 * columns as u32,
        PANEL.1 * rows as u32 + TITLE + LEGEND,
    );
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        let style = ("sans-serif", 18).into_text_style(&root);
        root.draw_text(title, &style, (10, 8))?;
        let (_, below) = root.split_vertically(TITLE);
        let (legend, body) = below.split_vertically(LEGEND);
        // The error borrows the string that is drawn into.
        draw_legend(&legend, &panels[0].curves).map_err(|error| error.to_string())?;
        for (area, panel) in body.split_evenly((rows, columns)).iter().zip(panels) {
            draw(area, vertical, panel).map_err(|error| error.to_string())?;
        }
        root.present()?;
    }
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw_legend<'a>(area: &Area<'a>, curves: &[Curve]) -> Result<(), Box<dyn Error + 'a>> {
    let style = ("sans-serif", 15).into_text_style(area);
    let mut x = 12;
    for (curve, color) in curves.iter().zip(COLORS.iter().cycle()) {
        let line = PathElement::new([(x, 12), (x + 20, 12)], color.stroke_width(2));
        area.draw(&line)?;
        area.draw_text(&curve.label, &style, (x + 25, 5))?;
        x += 45 + 8 * curve.label.chars().count() as i32;
    }
    Ok(())
}

fn draw<'a>(area: &Area<'a>, vertical: Vertical, panel: &Panel) -> Result<(), Box<dyn Error + 'a>> {
    let points = || panel.curves.iter().flat_map(|curve| &curve.points);
    let position = |seqlen: usize| (seqlen as f64).log2();
    let first = points().map(|p| p.0).min().unwrap_or(1024);
    let last = points().map(|p| p.0).max().unwrap_or(first);
    let heights = vertical.range(points().map(|p| p.1));
    let range = position(first) - 0.3..position(last) + 0.3;
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 15))
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(range, heights.clone())?;
    // A length that was measured gets its number; the axis asks for one label per power of two.
    let powers = (position(last) - position(first)).round() as usize + 1;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(powers + 1)
        .x_label_formatter(&|x: &f64| power_of_two(*x))
        .y_labels(vertical.labels(&heights))
        .y_label_formatter(&|y: &f64| vertical.name(*y, &heights))
        .x_desc("sequence length")
        .y_desc(vertical.label)
        .draw()?;
    for (index, curve) in panel.curves.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let points = curve.points.iter();
        let line = points.map(|&(n, y)| (position(n), vertical.position(y)));
        let style = color.stroke_width(2);
        chart.draw_series(LineSeries::new(line.clone(), style))?;
        chart.draw_series(line.map(|point| Circle::new(point, 3, color.filled())))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(title: &str) -> Panel {
        let curve = |label: &str, points: &[(usize, f64)]| Curve {
            label: label.into(),
            points: points.to_vec(),
        };
        Panel {
            title: title.into(),
            curves: vec![
                curve("ours", &[(1024, 250.0), (4096, 300.0), (16_384, 310.0)]),
                curve("burn", &[(1024, 34.0)]),
                curve("cudnn", &[]),
            ],
        }
    }

    #[test]
    fn text_is_text_and_every_point_is_a_circle() {
        let panels = ["f16 d=64", "f16 d=128"].map(panel);
        let svg = render("A title", Vertical::THROUGHPUT, &panels).unwrap();
        for text in [
            "A title",
            "f16 d=64",
            "f16 d=128",
            "ours",
            "cudnn",
            "16384",
            "TFLOP/s",
        ] {
            let lines = svg.lines().collect::<Vec<_>>();
            assert!(lines.contains(&text), "{text} is not in {svg}");
        }
        assert!(svg.contains("<text"));
        assert_eq!(svg.matches("<circle").count(), 2 * 4);
    }

    #[test]
    fn memory_is_drawn_by_powers_of_two() {
        let svg = render("m", Vertical::MEMORY, &[panel("p")]).unwrap();
        let lines = svg.lines().collect::<Vec<_>>();
        for power in ["32", "64", "128", "256", "512"] {
            assert!(lines.contains(&power), "{power} is not in {svg}");
        }
        assert!(!lines.contains(&"300"));
    }

    #[test]
    fn a_panel_without_points_still_draws() {
        let empty = Panel {
            title: "nothing".into(),
            curves: vec![],
        };
        for vertical in [Vertical::THROUGHPUT, Vertical::MEMORY] {
            let svg = render("t", vertical, std::slice::from_ref(&empty)).unwrap();
            assert!(svg.contains("nothing") && svg.contains(vertical.label));
            assert!(render("t", vertical, &[]).is_err());
        }
    }
}
