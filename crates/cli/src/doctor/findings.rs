//! Facts and problems that `bonfire doctor` found, as text and as JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

/// Facts about the machine, and its problems.
#[derive(Default)]
pub struct Findings {
    pub facts: Vec<Fact>,
    pub problems: Vec<Problem>,
}

pub struct Fact {
    area: &'static str,
    pub name: String,
    pub text: String,
    pub value: Value,
}

#[derive(Serialize)]
pub struct Problem {
    /// Whether it prevents Bonfire from running.
    fatal: bool,
    pub what: String,
    remedy: String,
}

impl Findings {
    /// Adds a fact: `text` for people, `value` for programs.
    pub fn fact(&mut self, area: &'static str, name: &str, text: impl Into<String>, value: Value) {
        self.facts.push(Fact { area, name: name.into(), text: text.into(), value });
    }

    /// Adds a problem with which Bonfire runs, but slower or with fewer capabilities.
    pub fn warn(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.problems.push(Problem { fatal: false, what: what.into(), remedy: remedy.into() });
    }

    /// Adds a problem that prevents Bonfire from running.
    pub fn fail(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.problems.push(Problem { fatal: true, what: what.into(), remedy: remedy.into() });
    }

    pub fn runs(&self) -> bool {
        self.problems.iter().all(|problem| !problem.fatal)
    }

    pub fn text(&self) -> String {
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

    pub fn json(&self) -> String {
        let mut areas = BTreeMap::<_, BTreeMap<_, _>>::new();
        for fact in &self.facts {
            areas.entry(fact.area).or_default().insert(&fact.name, &fact.value);
        }
        let (version, runs, problems) = (env!("CARGO_PKG_VERSION"), self.runs(), &self.problems);
        let object = json!({ "version": version, "runs": runs, "facts": areas, "problems": problems });
        format!("{object}\n")
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
}
