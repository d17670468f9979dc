//! Plots of bandwidth and time over size, with the floor.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::report::{Figures, Row};
use crate::text::binary;

/// A curve of a panel: its name, colour and points.
struct Curve(&'static str, RGBColor, Vec<(f64, f64)>);

const OUT_OF_PLACE: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const IN_PLACE: RGBColor = RGBColor(0xe0, 0x6c, 0x00);
const FLOOR: RGBColor = RGBColor(0x70, 0x70, 0x70);

/// Draws rows into an SVG file.
pub fn draw(rows: &[Row], title: &str, file: &Path) -> Result<(), Box<dyn Error>> {
    let svg = render(rows, title)?;
    Ok(std::fs::write(file, svg)?)
}

fn render(rows: &[Row], title: &str) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (1200, 480)).into_drawing_area();
        area.fill(&WHITE)?;
        let (left, right) = area.split_horizontally(600);
        let bandwidth = curves(rows, |figures| figures.algbw_gbps, |bytes, floor_us| bytes / floor_us / 1e3);
        let time = curves(rows, |figures| figures.times.time_us, |_, floor_us| floor_us);
        // Both figures grow with the size: the legends are in the corners without curves.
        panel(&left, &format!("{title}: bandwidth"), "algbw, GB/s", SeriesLabelPosition::LowerRight, bandwidth)?;
        panel(&right, &format!("{title}: time"), "us", SeriesLabelPosition::UpperLeft, time)?;
        area.present()?;
    }
    Ok(svg)
}

fn curves(rows: &[Row], figure: fn(&Figures) -> f64, floor: fn(f64, f64) -> f64) -> Vec<Curve> {
    let curve = |point: &dyn Fn(f64, &Row) -> Option<f64>| {
        let point = |row: &Row| Some((row.bytes as f64, point(row.bytes as f64, row)?));
        rows.iter().filter_map(point).collect()
    };
    vec![
        Curve("out of place", OUT_OF_PLACE, curve(&|_, row| Some(figure(&row.out_of_place)))),
        Curve("in place", IN_PLACE, curve(&|_, row| row.in_place.as_ref().map(figure))),
        Curve("floor (out of place)", FLOOR, curve(&|bytes, row| Some(floor(bytes, row.out_of_place.floor_us?)))),
    ]
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    unit: &str,
    corner: SeriesLabelPosition,
    curves: Vec<Curve>,
) -> Result<(), Box<dyn Error>> {
    let (x, y) =
        (span(curves.iter().flat_map(|l| &l.2).map(|p| p.0)), span(curves.iter().flat_map(|l| &l.2).map(|p| p.1)));
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
    for Curve(name, colour, points) in curves.into_iter().filter(|curve| !curve.2.is_empty()) {
        chart
            .draw_series(LineSeries::new(points, colour.filled().stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart.configure_series_labels().position(corner).background_style(WHITE.mix(0.8)).border_style(FLOOR).draw()?;
    Ok(())
}

/// Returns a range from below the smallest value to above the largest: a logarithmic axis needs one even for one point.
fn span(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), x| (low.min(x), high.max(x)));
    low.min(high) / 1.5..high * 1.5
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::timing::Times;

    fn row(bytes: usize, time_us: f64) -> Row {
        let gbps = bytes as f64 / time_us / 1e3;
        let figures = || Figures {
            times: Times { time_us, median_us: time_us, p99_us: time_us, min_us: time_us },
            algbw_gbps: gbps,
            busbw_gbps: gbps,
            wrong: Some(0),
            floor_us: Some(time_us / 2.0),
            floor_percent: Some(50.0),
        };
        Row { bytes, count: bytes / 4, out_of_place: figures(), in_place: Some(figures()) }
    }

    #[test]
    fn draws_every_curve_with_its_name_and_units() {
        let svg = render(&[row(8, 1.0), row(1 << 20, 100.0), row(32 << 20, 3000.0)], "all_reduce").unwrap();
        for text in ["out of place", "in place", "floor (out of place)", "algbw, GB/s", "size, bytes"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.matches("<polyline").count() >= 6);
    }

    #[test]
    fn one_size_and_one_side_are_enough() {
        let mut one = row(64, 1.0);
        (one.in_place, one.out_of_place.floor_us) = (None, None);
        assert!(render(&[one], "send_recv").unwrap().contains("out of place"));
    }
}
