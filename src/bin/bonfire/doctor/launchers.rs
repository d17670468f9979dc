//! Variables by which launchers tell a process its rank.

use serde_json::{Map, Value, json};

use super::Findings;

/// Variables that say who a rank is and where the others are. No others: a launcher's variables may hold secrets.
const LAUNCHERS: [(&str, &[&str]); 5] = [
    (
        "bonfire",
        &[
            "BONFIRE_RANK",
            "BONFIRE_WORLD_SIZE",
            "BONFIRE_LOCAL_RANK",
            "BONFIRE_LOCAL_WORLD_SIZE",
            "BONFIRE_ADDRESS",
            "BONFIRE_HOST",
            "BONFIRE_DEADLINE",
            "BONFIRE_SILENCE",
            "BONFIRE_TRACE",
        ],
    ),
    ("torchrun", &["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
    (
        "Slurm",
        &[
            "SLURM_JOB_ID",
            "SLURM_PROCID",
            "SLURM_NTASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_NNODES",
            "SLURM_JOB_NODELIST",
            "SLURM_STEP_NODELIST",
        ],
    ),
    (
        "Open MPI",
        &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    ),
    ("PMI", &["PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
];

pub fn variables(get: impl Fn(&str) -> Option<String>, findings: &mut Findings) {
    const AREA: &str = "launchers";
    let mut any = false;
    for (launcher, names) in LAUNCHERS {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_told_by_launcher() {
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
    }
}
