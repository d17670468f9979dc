//! `bonfire doctor`: what this machine has, how fast it is, and what stands in the way of a run.

mod devices;
#[cfg(unix)]
mod launchers;
mod network;
mod system;

use std::io::{self, Write};

use serde_json::{Map, Value, json};

use crate::machine::Machine;

/// Look at this machine: processors, memory, network, limits, launchers, GPUs
///
/// Measures for about a second, so let nothing else run meanwhile. For each problem it says what to do.
#[derive(clap::Args)]
#[command(after_help = EXIT_STATUS)]
pub struct Args {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

const EXIT_STATUS: &str = "\
Exit status:
  0  Bonfire can run here, though there may be warnings
  1  it cannot";

/// Examines the machine and returns the exit status.
pub fn run(args: &Args) -> u8 {
    let machine = Machine::this();
    let mut findings = Findings::default();
    system::processors(&machine, &mut findings);
    system::memory(&machine, &mut findings);
    system::limits(&mut findings);
    network::interfaces(&machine, &mut findings);
    network::loopback(&mut findings);
    #[cfg(unix)]
    launchers::variables(|name| std::env::var(name).ok(), &mut findings);
    #[cfg(unix)]
    launchers::recognised(bonfire::Builder::from_env(), &mut findings);
    devices::devices(&machine, &mut findings);
    let text = if args.json { findings.json() } else { findings.text() };
    if let Err(error) = io::stdout().write_all(text.as_bytes()) {
        eprintln!("error: cannot print: {error}");
        return 1;
    }
    u8::from(!findings.runs())
}

/// What was found.
#[derive(Default)]
pub struct Findings {
    facts: Vec<Fact>,
    problems: Vec<Problem>,
}

struct Fact {
    area: &'static str,
    name: String,
    text: String,
    value: Value,
}

#[derive(Debug, PartialEq)]
pub struct Problem {
    /// Whether Bonfire cannot run with it.
    fatal: bool,
    pub what: String,
    remedy: String,
}

impl Findings {
    /// Something that is so: `text` for people, `value` for programs.
    fn fact(&mut self, area: &'static str, name: &str, text: impl Into<String>, value: Value) {
        self.facts.push(Fact { area, name: name.into(), text: text.into(), value });
    }

    /// Bonfire runs, but slower or with less than it could.
    fn warn(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.problems.push(Problem { fatal: false, what: what.into(), remedy: remedy.into() });
    }

    /// Bonfire cannot run.
    fn fail(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.problems.push(Problem { fatal: true, what: what.into(), remedy: remedy.into() });
    }

    fn runs(&self) -> bool {
        self.problems.iter().all(|problem| !problem.fatal)
    }

    fn text(&self) -> String {
        let mut text = format!("bonfire {}\n", env!("CARGO_PKG_VERSION"));
        let mut area = "";
        for fact in &self.facts {
            if fact.area != area {
                area = fact.area;
                text += &format!("\n{area}\n");
            }
            text += &format!("  {:<14} {}\n", fact.name, fact.text);
        }
        text += "\nproblems\n";
        for Problem { fatal, what, remedy } in &self.problems {
            text += &format!("  {}: {what}\n    -> {remedy}\n", if *fatal { "error" } else { "warning" });
        }
        if self.problems.is_empty() {
            text += "  none\n";
        }
        text
    }

    fn json(&self) -> String {
        let mut areas: Map<String, Value> = Map::new();
        for Fact { area, name, value, .. } in &self.facts {
            if let Value::Object(facts) = areas.entry(*area).or_insert_with(|| json!({})) {
                facts.insert(name.clone(), value.clone());
            }
        }
        let problems: Vec<Value> = self
            .problems
            .iter()
            .map(|Problem { fatal, what, remedy }| json!({ "fatal": fatal, "what": what, "remedy": remedy }))
            .collect();
        let object = json!({
            "version": env!("CARGO_PKG_VERSION"), "runs": self.runs(), "facts": areas, "problems": problems,
        });
        format!("{object}\n")
    }
}

/// Bytes, for people.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => format!("{} KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_come_with_their_remedy_and_only_fatal_ones_fail() {
        let mut findings = Findings::default();
        assert!(findings.text().ends_with("problems\n  none\n"));
        findings.fact("memory", "total", "2 GiB", json!(2 << 30));
        findings.warn("little memory", "buy some");
        assert!(findings.runs());
        assert!(findings.text().contains("\nmemory\n  total          2 GiB\n"));
        assert!(findings.text().contains("  warning: little memory\n    -> buy some\n"));
        findings.fail("no memory", "buy some");
        assert!(!findings.runs());
        let object: Value = serde_json::from_str(&findings.json()).unwrap();
        assert_eq!((&object["runs"], &object["facts"]["memory"]["total"]), (&json!(false), &json!(2 << 30)));
        assert_eq!(object["problems"][1], json!({ "fatal": true, "what": "no memory", "remedy": "buy some" }));
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!([0, 4096, 64 << 20, 3 << 29].map(size), ["0 KiB", "4 KiB", "64 MiB", "1.5 GiB"]);
    }
}
