//! Figures: measured in rounds, and printed and written to files immediately.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::Failure;

/// The value that a figure must reach.
#[derive(Clone, Copy)]
pub enum Goal {
    None,
    AtLeast(f64),
    AtMost(f64),
}

#[derive(Serialize)]
struct Figure {
    what: String,
    unit: &'static str,
    /// One per round.
    values: Vec<f64>,
    median: Option<f64>,
    goal: Option<String>,
    met: Option<bool>,
    /// Why there are no values.
    error: Option<String>,
}

pub struct Report {
    rounds: usize,
    folder: Option<PathBuf>,
    figures: Vec<Figure>,
}

impl Report {
    /// With a folder, all figures so far are in its files after each one.
    pub fn new(rounds: usize, folder: Option<PathBuf>) -> Self {
        Report { rounds, folder, figures: Vec::new() }
    }

    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Whether all figures were measured and all goals are met.
    pub fn passed(&self) -> bool {
        self.figures.iter().all(|figure| figure.error.is_none() && figure.met != Some(false))
    }

    /// Measures a figure, after a warm-up round that does not count.
    pub fn figure(
        &mut self,
        what: impl Into<String>,
        unit: &'static str,
        goal: Goal,
        mut round: impl FnMut() -> Result<f64, Failure>,
    ) {
        let values = (0..=self.rounds).map(|_| round()).skip(1).collect::<Result<Vec<_>, _>>();
        self.add(what.into(), unit, goal, values);
    }

    /// Like [`figure`](Self::figure), for features that not every machine has. A failure is printed but does not count.
    pub fn optional_figure(
        &mut self,
        what: impl Into<String>,
        unit: &'static str,
        mut round: impl FnMut() -> Result<f64, Failure>,
    ) {
        let values = (0..=self.rounds).map(|_| round()).skip(1).collect();
        self.optional_values(what.into(), unit, values);
    }

    /// Adds a figure that was measured elsewhere, with a value for each round.
    pub fn optional_values(&mut self, what: String, unit: &'static str, values: Result<Vec<f64>, Failure>) {
        match values {
            Ok(values) => self.add(what, unit, Goal::None, Ok(values)),
            Err(error) => println!("{what:<64} not measured: {error}"),
        }
    }

    /// Adds figures that were measured together and must not be missing: each round has a value for each name.
    pub fn figures<N: Into<String>, V: AsRef<[f64]>>(
        &mut self,
        names: impl IntoIterator<Item = N>,
        unit: &'static str,
        rounds: &Result<Vec<V>, Failure>,
    ) {
        for (place, name) in names.into_iter().enumerate() {
            let values = match rounds {
                Ok(rounds) => Ok(rounds.iter().filter_map(|round| round.as_ref().get(place).copied()).collect()),
                Err(error) => Err(error.to_string().into()),
            };
            self.add(name.into(), unit, Goal::None, values);
        }
    }

    /// Adds a figure that was measured elsewhere and must not lack.
    pub fn add(&mut self, what: String, unit: &'static str, goal: Goal, values: Result<Vec<f64>, Failure>) {
        let (values, error) = match values {
            Ok(values) => (values, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let median = median(&values);
        let (description, met) = match goal {
            Goal::None => (None, None),
            Goal::AtLeast(least) => (Some(format!("at least {least}")), median.map(|median| median >= least)),
            Goal::AtMost(most) => (Some(format!("at most {most}")), median.map(|median| median <= most)),
        };
        let figure = Figure { what, unit, values, median, goal: description, met, error };
        println!("{}", figure.line());
        self.figures.push(figure);
        if let Err(error) = self.write() {
            eprintln!("error: {error}");
        }
    }

    /// Writes all figures with all rounds as JSON, and a table.
    pub fn write(&self) -> Result<(), Failure> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let write = || {
            fs::create_dir_all(folder)?;
            replace(folder, "gpu_bench.json", &serde_json::to_string_pretty(&self.figures)?)?;
            replace(folder, "gpu_bench.md", &self.table())
        };
        write().map_err(|e| format!("cannot write figures to {}: {e}", folder.display()).into())
    }

    fn table(&self) -> String {
        let mut table = "| what | median | rounds | goal |\n|---|---:|---|---|\n".to_owned();
        for figure in &self.figures {
            let rounds: Vec<_> = figure.values.iter().map(|value| digits(*value)).collect();
            let median =
                figure.median.map_or("not measured".into(), |value| format!("{} {}", digits(value), figure.unit));
            let (goal, missed) =
                (figure.goal.as_deref().unwrap_or(""), if figure.met == Some(false) { ", MISSED" } else { "" });
            // Writing to a string never fails.
            let _ = writeln!(table, "| {} | {median} | {} | {goal}{missed} |", figure.what, rounds.join(", "));
        }
        table
    }
}

impl Figure {
    fn line(&self) -> String {
        let value = match (self.median, &self.error) {
            (Some(median), _) => format!("{:>9} {}", digits(median), self.unit),
            (None, error) => format!("NOT MEASURED: {}", error.as_deref().unwrap_or("no rounds")),
        };
        let goal = match (&self.goal, self.met) {
            (Some(goal), Some(true)) => format!("  ({goal})"),
            (Some(goal), Some(false)) => format!("  MISSED: {goal}"),
            _ => String::new(),
        };
        format!("{:<64} {value}{goal}", self.what)
    }
}

/// Writes a file that is complete at any moment.
fn replace(folder: &Path, name: &str, text: &str) -> std::io::Result<()> {
    let part = folder.join(format!("{name}.part"));
    fs::write(&part, text)?;
    fs::rename(part, folder.join(name))
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get(sorted.len().saturating_sub(1) / 2)?, sorted.get(sorted.len() / 2)?);
    Some((low + high) / 2.0)
}

/// Formats a value with four digits, more than rounds have in common.
fn digits(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}
