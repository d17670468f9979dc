//! Environment variables that launchers set.

use bonfire::launch::Launched;
use bonfire::{Builder, Error};
use bonfire_core::internal::unknown_variables;
use serde_json::{Map, Value, json};

use super::findings::Findings;

const AREA: &str = "launchers";

pub fn variables(get: impl Fn(&str) -> Option<String>, findings: &mut Findings) {
    let mut any = false;
    for (launcher, names) in Launched::VARIABLES {
        let set: Vec<(&str, String)> = names.iter().filter_map(|name| Some((*name, get(name)?))).collect();
        if set.is_empty() {
            continue;
        }
        any = true;
        let text: Vec<String> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let value: Map<String, Value> = set.into_iter().map(|(name, value)| (name.into(), json!(value))).collect();
        findings.fact(AREA, launcher, text.join(" "), Value::Object(value));
    }
    if !any {
        findings.fact(AREA, "variables", "none is set: start ranks with `bonfire run`", json!(null));
    }
}

/// Adds what a program that calls `Group::from_env` reads from the variables.
pub fn recognised(settings: Result<Builder, Error>, findings: &mut Findings) {
    match settings.map(|builder| builder.launched()) {
        Ok(Some(launched)) => findings.fact(AREA, "recognised", launched.to_string(), json!(launched.to_string())),
        Ok(None) => {}
        Err(error) => findings.warn(error.to_string(), "correct or unset it: `Group::from_env` fails until then"),
    }
}

/// Adds a problem for each of these variables that looks like one of Bonfire's and is none.
pub fn misspelled(names: impl Iterator<Item = String>, findings: &mut Findings) {
    for warning in unknown_variables(names) {
        findings.warn(warning, "correct or unset it: nothing reads it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_listed_by_launcher() {
        let found = |set: &[(&str, &str)]| {
            let mut findings = Findings::default();
            variables(|name| set.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).into()), &mut findings);
            findings.facts.into_iter().map(|fact| (fact.name, fact.text)).collect::<Vec<_>>()
        };
        let both = found(&[("RANK", "1"), ("SLURM_PROCID", "1"), ("WORLD_SIZE", "2"), ("SLURM_JWT", "secret")]);
        assert_eq!(both[0], ("torchrun".into(), "RANK=1 WORLD_SIZE=2".into()));
        assert_eq!(both[1], ("Slurm".into(), "SLURM_PROCID=1".into()));
        assert_eq!(both.len(), 2);
        assert_eq!(found(&[])[0].0, "variables");
        assert_eq!(
            found(&[("PET_NNODES", "2"), ("BONFIRE_SECRET", "secret")]),
            [("Kubeflow".into(), "PET_NNODES=2".into())]
        );
    }

    #[test]
    fn an_environment_that_contradicts_itself_is_a_problem() {
        let mut findings = Findings::default();
        recognised(Ok(Builder::default()), &mut findings);
        assert!(findings.facts.is_empty() && findings.problems.is_empty());
        recognised(Err(Error::Config("RANK is 'x'".into())), &mut findings);
        assert!(findings.problems[0].what.contains("RANK is 'x'"));
    }

    #[test]
    fn a_misspelled_variable_is_a_problem() {
        let mut findings = Findings::default();
        misspelled(["PATH", "BONFIRE_RNAK"].map(str::to_owned).into_iter(), &mut findings);
        assert_eq!(findings.problems.len(), 1);
        assert!(findings.problems[0].what.contains("BONFIRE_RNAK"));
    }
}
