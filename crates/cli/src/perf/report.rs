//! What a measurement looks like: a table, or JSON lines.

use std::io::{self, Write};

use bonfire::DType;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use super::Args;
use super::floors::Floors;
use super::operation::Facts;
use super::timing::Measured;

/// What all rows have in common.
pub struct Subject {
    pub facts: Facts,
    pub dtype: DType,
    /// None where nothing is reduced.
    pub op: Option<String>,
    pub root: Option<usize>,
    pub level: String,
    /// Which algorithms run which sizes, where the group chooses.
    pub algorithms: Option<String>,
    /// Whether the group allocated the buffers.
    pub registered: bool,
}

/// One size. Rank 0 has the rows.
pub struct Row {
    pub bytes: usize,
    pub count: usize,
    pub out_of_place: Figures,
    pub in_place: Option<Figures>,
}

/// What follows from a measurement.
pub struct Figures {
    pub measured: Measured,
    /// Bytes per second.
    pub algbw: f64,
    pub busbw: f64,
    /// In seconds.
    pub floor: Option<f64>,
}

impl Figures {
    fn floor_percent(&self) -> Option<f64> {
        self.floor.map(|floor| 100.0 * floor / self.measured.times.typical)
    }
}

pub struct Report {
    transport: String,
    ranks: u32,
    json: bool,
    subject: Subject,
    pub floors: Option<Floors>,
    pub rows: Vec<Row>,
    bar: ProgressBar,
}

impl Report {
    /// Measures the floors and prints the head of the table.
    pub fn begin(args: &Args, subject: Subject, sizes: usize) -> io::Result<Report> {
        let (transport, ranks) = (args.common.transport, args.common.ranks);
        let floors = Floors::measure(transport, ranks).unwrap_or_else(|error| {
            log::warn!("no floor was measured: {error}; see `bonfire doctor`");
            None
        });
        // Drawn on standard error, and only where that is a terminal.
        let bar = ProgressBar::with_draw_target(Some(sizes as u64), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos} of {len} sizes, {eta} left") {
            bar.set_style(style);
        }
        let rows = Vec::new();
        let report =
            Report { transport: transport.to_string(), ranks, json: args.common.json, subject, floors, rows, bar };
        report.print(&if report.json { Vec::new() } else { report.head() })?;
        Ok(report)
    }

    pub fn figures(&self, bytes: usize, measured: Measured, in_place: bool) -> Figures {
        let facts = &self.subject.facts;
        let algbw = bytes as f64 / measured.times.typical;
        let busbw = algbw * (facts.bus)(f64::from(self.ranks));
        let floor = self.floors.as_ref().map(|floors| floors.seconds(facts, bytes, in_place));
        Figures { measured, algbw, busbw, floor }
    }

    pub fn row(&mut self, row: Row) -> io::Result<()> {
        let line = if self.json { self.object(&row).to_string() } else { self.line(&row) };
        self.rows.push(row);
        self.bar.inc(1);
        self.print(&[line])
    }

    /// The end of the table.
    pub fn end(&self) -> io::Result<()> {
        self.bar.finish_and_clear();
        self.print(&if self.json { Vec::new() } else { self.foot() })
    }

    fn head(&self) -> Vec<String> {
        let Subject { facts, level, algorithms, registered, .. } = &self.subject;
        let buffers = if *registered { ", the group's buffers" } else { ", buffers from anywhere" };
        let bus = (facts.bus)(f64::from(self.ranks));
        let mut lines = vec![
            format!(
                "bonfire {} {}, {} ranks over {}, {level} level{buffers}",
                env!("CARGO_PKG_VERSION"),
                facts.name,
                self.ranks,
                self.transport
            ),
            format!("algorithms: {}", algorithms.as_deref().unwrap_or("none to choose")),
            "time: of one call, on the slowest rank; GB: 1e9 bytes; algbw: size / time".into(),
            format!("busbw: algbw x {bus:.3}, to compare with the hardware's bandwidth whatever the number of ranks"),
        ];
        match &self.floors {
            Some(floors) => lines.extend(floors.describe()),
            None => lines.push("floor: none".into()),
        }
        lines.push("%floor: the least time this machine needs for the same bytes, in percent of the time".into());
        let side = |title: &str| format!(" {:>10} {:>8} {:>8} {:>7} {:>6}", title, "", "", "", "");
        let names = format!(" {:>10} {:>8} {:>8} {:>7} {:>6}", "time", "algbw", "busbw", "#wrong", "%floor");
        let units = format!(" {:>10} {:>8} {:>8} {:>7} {:>6}", "us", "GB/s", "GB/s", "", "");
        lines.push(format!("{:>52}{}{}", "", side("out of place"), side("in place")));
        lines.push(format!("{:>10} {:>12} {:>6} {:>8} {:>5}{names}{names}", "size", "count", "type", "redop", "root"));
        lines.push(format!("{:>10} {:>12} {:>6} {:>8} {:>5}{units}{units}", "bytes", "elements", "", "", ""));
        // The rows begin under the space behind the mark.
        lines.iter().map(|line| format!("# {line}").trim_end().to_owned()).collect()
    }

    fn line(&self, row: &Row) -> String {
        let Subject { dtype, op, root, .. } = &self.subject;
        let root = root.map_or("-1".into(), |root| root.to_string());
        let op = op.as_deref().unwrap_or("none");
        let side = |figures: Option<&Figures>| match figures {
            None => format!(" {:>10} {:>8} {:>8} {:>7} {:>6}", "N/A", "N/A", "N/A", "N/A", "N/A"),
            Some(figures) => format!(
                " {:>10.2} {:>8.3} {:>8.3} {:>7} {:>6}",
                figures.measured.times.typical * 1e6,
                figures.algbw / 1e9,
                figures.busbw / 1e9,
                figures.measured.wrong.map_or("N/A".into(), |wrong| wrong.to_string()),
                figures.floor_percent().map_or("N/A".into(), |percent| format!("{percent:.1}")),
            ),
        };
        let (bytes, count, dtype) = (row.bytes, row.count, dtype.to_string());
        let sides = side(Some(&row.out_of_place)) + &side(row.in_place.as_ref());
        format!("  {bytes:>10} {count:>12} {dtype:>6} {op:>8} {root:>5}{sides}")
    }

    fn object(&self, row: &Row) -> Value {
        let Subject { facts, dtype, op, root, level, algorithms, registered } = &self.subject;
        let side = |figures: &Figures| {
            let times = figures.measured.times;
            json!({
                "time_us": times.typical * 1e6, "median_us": times.median * 1e6, "p99_us": times.p99 * 1e6,
                "min_us": times.min * 1e6, "algbw_gbps": figures.algbw / 1e9, "busbw_gbps": figures.busbw / 1e9,
                "wrong": figures.measured.wrong, "floor_us": figures.floor.map(|floor| floor * 1e6),
                "floor_percent": figures.floor_percent(),
            })
        };
        let mut object = json!({
            "collective": facts.name, "transport": self.transport, "ranks": self.ranks, "level": level,
            "algorithms": algorithms, "registered": registered,
            "dtype": dtype.to_string(), "op": op, "root": root, "bytes": row.bytes, "count": row.count,
            "in_place": row.in_place.as_ref().map(side),
        });
        if let (Value::Object(object), Value::Object(side)) = (&mut object, side(&row.out_of_place)) {
            object.extend(side);
        }
        object
    }

    fn foot(&self) -> Vec<String> {
        let figures = || self.rows.iter().flat_map(|row| [Some(&row.out_of_place), row.in_place.as_ref()]).flatten();
        let checked: Vec<u64> = figures().filter_map(|figures| figures.measured.wrong).collect();
        let wrong = match checked.iter().sum::<u64>() {
            _ if checked.is_empty() => "not checked".into(),
            0 => "0 OK".into(),
            wrong => format!("{wrong} FAILED"),
        };
        let mean = figures().map(|figures| figures.busbw).sum::<f64>() / figures().count().max(1) as f64;
        vec![format!("# Wrong elements    : {wrong}"), format!("# Avg bus bandwidth : {:.3} GB/s", mean / 1e9)]
    }

    /// Prints lines between two states of the bar.
    fn print(&self, lines: &[String]) -> io::Result<()> {
        self.bar.suspend(|| {
            let mut stdout = io::stdout().lock();
            lines.iter().try_for_each(|line| writeln!(stdout, "{line}"))?;
            stdout.flush()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::operation::Benchmark;
    use crate::perf::timing::Times;

    fn report(wrong: [Option<u64>; 2]) -> Report {
        let subject = Subject {
            facts: Benchmark::AllReduce.facts(),
            dtype: DType::F32,
            op: Some("sum".into()),
            root: None,
            level: "slice".into(),
            algorithms: Some("all_reduce=native:0-".into()),
            registered: false,
        };
        let mut report = Report {
            transport: "local".into(),
            ranks: 4,
            json: false,
            subject,
            floors: None,
            rows: Vec::new(),
            bar: ProgressBar::hidden(),
        };
        let figures = |time: f64, wrong, in_place| {
            let times = Times { typical: time, median: time, p99: 2.0 * time, min: time / 2.0 };
            Figures { floor: Some(time / 4.0), ..report.figures(1_000_000, Measured { times, wrong }, in_place) }
        };
        let (out_of_place, in_place) = (figures(1e-3, wrong[0], false), figures(500e-6, wrong[1], true));
        report.rows.push(Row { bytes: 1_000_000, count: 250_000, out_of_place, in_place: Some(in_place) });
        report
    }

    #[test]
    fn a_row_has_both_sides() {
        let report = report([Some(0), Some(2)]);
        let line = report.line(&report.rows[0]);
        let fields: Vec<&str> = line.split_whitespace().collect();
        let sides = ["1000.00", "1.000", "1.500", "0", "25.0", "500.00", "2.000", "3.000", "2", "25.0"];
        assert_eq!(fields[..5], ["1000000", "250000", "f32", "sum", "-1"]);
        assert_eq!(fields[5..], sides);
    }

    #[test]
    fn the_columns_stand_under_their_names() {
        let report = report([Some(0), None]);
        let head = report.head();
        let ends = |line: &str| -> Vec<usize> {
            let end = |(i, c): (usize, char)| c != ' ' && line[i + 1..].chars().next().is_none_or(|next| next == ' ');
            line.char_indices().filter(|(i, c)| end((*i, *c))).map(|(i, _)| i).collect()
        };
        let names = &head[head.len() - 2];
        assert_eq!(ends(names)[1..], ends(&report.line(&report.rows[0])));
    }

    #[test]
    fn the_footer_counts_wrong_elements_and_averages_both_sides() {
        let last = |wrong| report(wrong).foot();
        assert_eq!(last([Some(0), Some(0)]), ["# Wrong elements    : 0 OK", "# Avg bus bandwidth : 2.250 GB/s"]);
        assert_eq!(last([Some(3), Some(4)])[0], "# Wrong elements    : 7 FAILED");
        assert_eq!(last([None, None])[0], "# Wrong elements    : not checked");
    }

    #[test]
    fn json_has_the_out_of_place_figures_on_top_and_the_others_inside() {
        let report = report([Some(1), Some(2)]);
        let object = report.object(&report.rows[0]);
        assert_eq!(object["bytes"], 1_000_000);
        assert_eq!((&object["wrong"], &object["in_place"]["wrong"]), (&json!(1), &json!(2)));
        assert_eq!((&object["time_us"], &object["in_place"]["time_us"]), (&json!(1000.0), &json!(500.0)));
        assert_eq!((&object["p99_us"], &object["floor_percent"]), (&json!(2000.0), &json!(25.0)));
    }
}
