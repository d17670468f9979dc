//! Prints measurements as a table or as JSON lines.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::args::Common;
use super::floors::Floors;
use super::operation::Facts;
use super::timing::{Measured, Times};

/// The parameters that all rows have in common.
#[derive(Serialize)]
pub struct Subject {
    pub collective: String,
    pub transport: String,
    pub ranks: u32,
    pub level: String,
    /// The algorithms by size, if the group selects them.
    pub algorithms: Option<String>,
    /// Whether the group allocated the buffers.
    pub registered: bool,
    pub dtype: String,
    /// None for operations that do not reduce.
    pub op: Option<String>,
    pub root: Option<u32>,
    #[serde(skip)]
    pub facts: Facts,
}

/// The figures of one size. Only rank 0 has rows.
#[derive(Serialize)]
pub struct Row {
    pub bytes: usize,
    pub count: usize,
    #[serde(flatten)]
    pub out_of_place: Figures,
    pub in_place: Option<Figures>,
}

/// The figures derived from a measurement.
#[derive(Serialize)]
pub struct Figures {
    #[serde(flatten)]
    pub times: Times,
    /// 1 GB is 1e9 bytes.
    pub algbw_gbps: f64,
    pub busbw_gbps: f64,
    /// Wrong elements over all ranks; None if results were not checked.
    pub wrong: Option<u64>,
    pub floor_us: Option<f64>,
    pub floor_percent: Option<f64>,
}

pub struct Report {
    subject: Subject,
    json: bool,
    floors: Option<Floors>,
    pub rows: Vec<Row>,
    bar: ProgressBar,
}

impl Report {
    /// Measures the floors and prints the head of the table.
    pub fn begin(common: &Common, subject: Subject, sizes: &[usize]) -> io::Result<Report> {
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let floors = Floors::measure(common.transport, common.ranks, &subject.facts, largest).unwrap_or_else(|error| {
            log::warn!("cannot measure the floor: {error}; see `bonfire doctor`");
            None
        });
        // Drawn on standard error, and only if that is a terminal.
        let bar = ProgressBar::with_draw_target(Some(sizes.len() as u64), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos} of {len} sizes, {eta} left") {
            bar.set_style(style);
        }
        let report = Report { subject, json: common.json, floors, rows: Vec::new(), bar };
        report.print(&if report.json { Vec::new() } else { report.head() })?;
        Ok(report)
    }

    /// Adds and prints a size, measured out of place and, if there is such a form, in place.
    pub fn row(&mut self, bytes: usize, count: usize, sides: &[Measured]) -> io::Result<()> {
        let mut figures = sides.iter().zip([false, true]).map(|(side, in_place)| self.figures(bytes, side, in_place));
        let Some(out_of_place) = figures.next() else { return Ok(()) };
        let row = Row { bytes, count, out_of_place, in_place: figures.next() };
        let line = if self.json { self.object(&row)? } else { self.line(&row) };
        self.rows.push(row);
        self.bar.inc(1);
        self.print(&[line])
    }

    fn figures(&self, bytes: usize, side: &Measured, in_place: bool) -> Figures {
        let (Subject { facts, ranks, .. }, Measured { times, wrong }) = (&self.subject, *side);
        let algbw_gbps = bytes as f64 / times.time_us / 1e3;
        let floor_us = self.floors.as_ref().map(|floors| 1e6 * floors.seconds(facts, bytes, in_place));
        Figures {
            times,
            algbw_gbps,
            busbw_gbps: algbw_gbps * (facts.bus_factor)(f64::from(*ranks)),
            wrong,
            floor_us,
            floor_percent: floor_us.map(|floor| 100.0 * floor / times.time_us),
        }
    }

    /// Prints the end of the table.
    pub fn end(&self) -> io::Result<()> {
        self.bar.finish_and_clear();
        self.print(&if self.json { Vec::new() } else { self.foot() })
    }

    fn head(&self) -> Vec<String> {
        let Subject { collective, transport, ranks, level, algorithms, registered, facts, .. } = &self.subject;
        let buffers = match registered {
            _ if transport == "cuda" => ", memory of the devices",
            true => ", the group's buffers",
            false => ", ordinary buffers",
        };
        let version = env!("CARGO_PKG_VERSION");
        let bus = (facts.bus_factor)(f64::from(*ranks));
        let mut lines = vec![
            format!("bonfire {version} {collective}, {ranks} ranks over {transport}, {level} level{buffers}"),
            format!("algorithms: {}", algorithms.as_deref().unwrap_or("none to choose")),
            "time: of one call, on the slowest rank; GB: 1e9 bytes; algbw: size / time".into(),
            format!("busbw: algbw x {bus:.3}, to compare with the hardware's bandwidth for any number of ranks"),
        ];
        match &self.floors {
            Some(floors) => lines.extend(floors.describe()),
            None => lines.push("floor: none".into()),
        }
        lines.push("%floor: the least time this machine needs for the same bytes, in percent of the time".into());
        let titles = side_columns(["out of place", "", "", "", ""]) + &side_columns(["in place", "", "", "", ""]);
        let names = side_columns(["time", "algbw", "busbw", "#wrong", "%floor"]).repeat(2);
        let units = side_columns(["us", "GB/s", "GB/s", "", ""]).repeat(2);
        lines.push(format!("{:>52}{titles}", ""));
        lines.push(subject_columns(["size", "count", "type", "redop", "root"]) + &names);
        lines.push(subject_columns(["bytes", "elements", "", "", ""]) + &units);
        // Rows are indented by as much as this prefix.
        lines.iter().map(|line| format!("# {line}").trim_end().to_owned()).collect()
    }

    fn line(&self, row: &Row) -> String {
        let Subject { dtype, op, root, .. } = &self.subject;
        let root = root.map_or("-1".into(), |root| root.to_string());
        let (bytes, count, op) = (row.bytes.to_string(), row.count.to_string(), op.as_deref().unwrap_or("none"));
        let known = |figure: Option<String>| figure.unwrap_or("N/A".into());
        let figures = |figures: Option<&Figures>| {
            let Some(figures) = figures else { return side_columns(["N/A"; 5]) };
            side_columns([
                &format!("{:.2}", figures.times.time_us),
                &format!("{:.3}", figures.algbw_gbps),
                &format!("{:.3}", figures.busbw_gbps),
                &known(figures.wrong.map(|wrong| wrong.to_string())),
                &known(figures.floor_percent.map(percent)),
            ])
        };
        let sides = figures(Some(&row.out_of_place)) + &figures(row.in_place.as_ref());
        format!("  {}{sides}", subject_columns([&bytes, &count, dtype, op, &root]))
    }

    fn object(&self, row: &Row) -> serde_json::Result<String> {
        #[derive(Serialize)]
        struct Line<'a> {
            #[serde(flatten)]
            subject: &'a Subject,
            #[serde(flatten)]
            row: &'a Row,
        }
        // Through a `Value`, whose keys are in alphabetical order.
        Ok(serde_json::to_value(Line { subject: &self.subject, row })?.to_string())
    }

    fn foot(&self) -> Vec<String> {
        let figures = || self.rows.iter().flat_map(|row| [Some(&row.out_of_place), row.in_place.as_ref()]).flatten();
        let checked: Vec<u64> = figures().filter_map(|figures| figures.wrong).collect();
        let wrong = match checked.iter().sum::<u64>() {
            _ if checked.is_empty() => "not checked".into(),
            0 => "0 OK".into(),
            wrong => format!("{wrong} FAILED"),
        };
        let mean = figures().map(|figures| figures.busbw_gbps).sum::<f64>() / figures().count().max(1) as f64;
        let mut lines = vec![format!("# Wrong elements    : {wrong}"), format!("# Avg bus bandwidth : {mean:.3} GB/s")];
        let beaten =
            figures().filter_map(|figures| figures.floor_percent).filter(|percent| is_beaten(*percent)).count();
        if beaten > 0 {
            let of = figures().count();
            lines.push(format!(
                "# Floor beaten      : {beaten} of {of} times: something else ran while it was measured"
            ));
        }
        lines
    }

    /// Prints lines while the progress bar is suspended.
    fn print(&self, lines: &[String]) -> io::Result<()> {
        self.bar.suspend(|| {
            let mut stdout = io::stdout().lock();
            lines.iter().try_for_each(|line| writeln!(stdout, "{line}"))?;
            stdout.flush()
        })
    }
}

/// Whether a time is below its floor, so that the floor is none.
fn is_beaten(percent: f64) -> bool {
    percent >= 100.05
}

/// Formats a floor in percent. How far it was beaten says nothing.
fn percent(percent: f64) -> String {
    if is_beaten(percent) { ">100".into() } else { format!("{percent:.1}") }
}

/// Formats the columns that a row has once.
fn subject_columns([size, count, dtype, op, root]: [&str; 5]) -> String {
    format!("{size:>10} {count:>12} {dtype:>6} {op:>8} {root:>5}")
}

/// Formats the columns that a row has twice: out of place and in place.
fn side_columns([time, algbw, busbw, wrong, floor]: [&str; 5]) -> String {
    format!(" {time:>10} {algbw:>8} {busbw:>8} {wrong:>7} {floor:>6}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::perf::operation::Benchmark;

    fn report(wrong: [Option<u64>; 2]) -> Report {
        let subject = Subject {
            collective: "all_reduce".into(),
            transport: "local".into(),
            ranks: 4,
            level: "slice".into(),
            algorithms: Some("all_reduce=native:0-".into()),
            registered: false,
            dtype: "f32".into(),
            op: Some("sum".into()),
            root: None,
            facts: Benchmark::AllReduce.facts(),
        };
        let bar = ProgressBar::hidden();
        let mut report = Report { subject, json: false, floors: None, rows: Vec::new(), bar };
        let figures = |time: f64, wrong, in_place| {
            let times = Times { time_us: time, median_us: time, p99_us: 2.0 * time, min_us: time / 2.0 };
            let figures = report.figures(1_000_000, &Measured { times, wrong }, in_place);
            Figures { floor_us: Some(time / 4.0), floor_percent: Some(25.0), ..figures }
        };
        let (out_of_place, in_place) = (figures(1000.0, wrong[0], false), figures(500.0, wrong[1], true));
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
    fn columns_are_aligned_with_their_names() {
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
    fn a_floor_that_is_beaten_is_no_floor() {
        let mut report = report([Some(0), Some(0)]);
        report.rows[0].out_of_place.floor_percent = Some(136.8);
        let last = |report: &Report| report.line(&report.rows[0]).split_whitespace().nth(9).map(str::to_owned);
        assert_eq!(last(&report), Some(">100".into()));
        assert_eq!(report.foot()[2], "# Floor beaten      : 1 of 2 times: something else ran while it was measured");
        report.rows[0].out_of_place.floor_percent = Some(100.04);
        assert_eq!((last(&report), report.foot().len()), (Some("100.0".into()), 2));
    }

    #[test]
    fn json_has_out_of_place_figures_at_the_top_and_in_place_figures_nested() {
        let report = report([Some(1), Some(2)]);
        let object: Value = serde_json::from_str(&report.object(&report.rows[0]).unwrap()).unwrap();
        assert_eq!(object["bytes"], 1_000_000);
        assert_eq!((&object["wrong"], &object["in_place"]["wrong"]), (&json!(1), &json!(2)));
        assert_eq!((&object["time_us"], &object["in_place"]["time_us"]), (&json!(1000.0), &json!(500.0)));
        assert_eq!((&object["p99_us"], &object["floor_percent"]), (&json!(2000.0), &json!(25.0)));
    }
}
