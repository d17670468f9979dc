//! Bandwidth and time over size, with the floor.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::report::{Figures, Report, Row};

/// One line of a panel: its name, colour, and points.
struct Line(&'static str, RGBColor, Vec<(f64, f64)>);

const OUT_OF_PLACE: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const IN_PLACE: RGBColor = RGBColor(0xe0, 0x6c, 0x00);
const FLOOR: RGBColor = RGBColor(0x70, 0x70, 0x70);

/// Draws the report's rows into an SVG file.
pub fn draw(report: &Report, title: &str, file: &Path) -> Result<(), Box<dyn Error>> {
    let svg = render(&report.rows, title)?;
    Ok(std::fs::write(file, svg)?)
}

fn render(rows: &[Row], title: &str) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (1200, 480)).into_drawing_area();
        area.fill(&WHITE)?;
        let (left, right) = area.split_horizontally(600);
        let bandwidth = |row: &Row, figures: &Figures| (row.bytes as f64, figures.algbw / 1e9);
        let bandwidth = lines(rows, bandwidth, |bytes, floor| bytes / floor / 1e9);
        let time = |row: &Row, figures: &Figures| (row.bytes as f64, figures.measured.times.typical * 1e6);
        let time = lines(rows, time, |_, floor| floor * 1e6);
        // Both lines rise: the names stand where none is.
        panel(&left, &format!("{title}: bandwidth"), "algbw, GB/s", SeriesLabelPosition::LowerRight, bandwidth)?;
        panel(&right, &format!("{title}: time"), "us", SeriesLabelPosition::UpperLeft, time)?;
        area.present()?;
    }
    Ok(svg)
}

fn lines(rows: &[Row], figure: impl Fn(&Row, &Figures) -> (f64, f64), floor: impl Fn(f64, f64) -> f64) -> Vec<Line> {
    let floor_of = |row: &Row| {
        let bytes = row.bytes as f64;
        row.out_of_place.floor.map(|seconds| (bytes, floor(bytes, seconds)))
    };
    vec![
        Line("out of place", OUT_OF_PLACE, rows.iter().map(|row| figure(row, &row.out_of_place)).collect()),
        Line("in place", IN_PLACE, rows.iter().filter_map(|r| r.in_place.as_ref().map(|f| figure(r, f))).collect()),
        Line("floor (out of place)", FLOOR, rows.iter().filter_map(floor_of).collect()),
    ]
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    unit: &str,
    corner: SeriesLabelPosition,
    lines: Vec<Line>,
) -> Result<(), Box<dyn Error>> {
    let (x, y) =
        (span(lines.iter().flat_map(|l| &l.2).map(|p| p.0)), span(lines.iter().flat_map(|l| &l.2).map(|p| p.1)));
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(x.log_scale().base(2.0), y.log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("size, bytes")
        .y_desc(unit)
        .x_label_formatter(&|bytes| binary(*bytes))
        .y_label_formatter(&|value| format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_owned())
        .draw()?;
    for Line(name, colour, points) in lines.into_iter().filter(|line| !line.2.is_empty()) {
        chart
            .draw_series(LineSeries::new(points, colour.filled().stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart.configure_series_labels().position(corner).background_style(WHITE.mix(0.8)).border_style(FLOOR).draw()?;
    Ok(())
}

/// From below the smallest to above the largest: a logarithmic axis needs room even for one point.
fn span(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), x| (low.min(x), high.max(x)));
    low.min(high) / 1.5..high * 1.5
}

/// Bytes with a binary unit: 1K is 1024.
pub fn binary(bytes: f64) -> String {
    let units = ["", "K", "M", "G", "T"];
    let unit = (bytes.max(1.0).log2() / 10.0).floor().min(4.0);
    let number = format!("{:.1}", bytes / 1024f64.powf(unit));
    format!("{}{}", number.strip_suffix(".0").unwrap_or(&number), units[unit as usize])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::timing::{Measured, Times};

    fn row(bytes: usize, seconds: f64) -> Row {
        let figures = || Figures {
            measured: Measured {
                times: Times { typical: seconds, median: seconds, p99: seconds, min: seconds },
                wrong: Some(0),
            },
            algbw: bytes as f64 / seconds,
            busbw: bytes as f64 / seconds,
            floor: Some(seconds / 2.0),
        };
        Row { bytes, count: bytes / 4, out_of_place: figures(), in_place: Some(figures()) }
    }

    #[test]
    fn draws_every_line_with_its_name_and_units() {
        let svg = render(&[row(8, 1e-6), row(1 << 20, 1e-4), row(32 << 20, 3e-3)], "all_reduce").unwrap();
        for text in ["out of place", "in place", "floor (out of place)", "algbw, GB/s", "size, bytes"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.matches("<polyline").count() >= 6);
    }

    #[test]
    fn one_size_and_one_side_are_enough() {
        let mut one = row(64, 1e-6);
        (one.in_place, one.out_of_place.floor) = (None, None);
        assert!(render(&[one], "send_recv").unwrap().contains("out of place"));
    }

    #[test]
    fn sizes_are_written_with_binary_units() {
        assert_eq!([1.0, 8.0, 1024.0, 1536.0, 33554432.0].map(binary), ["1", "8", "1K", "1.5K", "32M"]);
    }
}
