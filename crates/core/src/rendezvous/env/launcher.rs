//! Detects the launcher of this process and reads what its variables say about the rank.

use super::detected::{Address, Detected, master, number_of, port_of};
use super::variables::{RankAndSize, Variables};
use super::{mpi, slurm};
use crate::types::Error;

/// Detects the launcher that started this process. The innermost launcher counts, since it starts the ranks.
pub(super) fn detect(variables: &Variables) -> Result<Option<Detected>, Error> {
    if let Some(run) = variables.text("TORCHELASTIC_RUN_ID") {
        return torchrun(variables, &run).map(Some);
    }
    let task = slurm::task(variables)?;
    let detected = match (mpi::process(variables, task.as_ref())?, task) {
        // An MPI launcher started it inside a Slurm task, or through daemons that are tasks.
        (Some(process), Some(task)) if process.ranks.both() != task.ranks.both() => Some(process),
        // Slurm started it and set up the MPI library's variables. Slurm knows the hosts.
        (process, task) => task.or(process),
    };
    let detected = detected.map_or_else(|| pod(variables), |detected| Ok(Some(detected)))?;
    match (detected, plain(variables)?) {
        (Some(detected), Some(plain)) => {
            detected.ranks.agrees(&plain.ranks)?;
            Ok(Some(detected))
        }
        (detected, plain) => Ok(detected.or(plain)),
    }
}

/// Reads torchrun's variables. Its agent usually listens at `MASTER_PORT` itself, to serve a store to its workers.
fn torchrun(variables: &Variables, run: &str) -> Result<Detected, Error> {
    let ranks = RankAndSize::read(variables, "RANK", "WORLD_SIZE")?;
    ranks.check()?;
    let nodes = variables.number("GROUP_WORLD_SIZE")?;
    let several = ranks.several(variables, "LOCAL_WORLD_SIZE")?.or(nodes.map(|nodes| nodes > 1));
    let (host, port) = master(variables)?;
    let taken = variables.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|text| text.eq_ignore_ascii_case("true"));
    let port = match port {
        Some((port, _)) if taken => {
            Some((port_of(number_of(&format!("{run} {port}"))), "TORCHELASTIC_RUN_ID and MASTER_PORT"))
        }
        port => port,
    };
    let by = format!("torchrun (run {run})");
    // torchrun counts two agents on one machine as two hosts, so loopback is not refused.
    let address = Address::of((&by, several.filter(|several| !several)), (host, port), "");
    Ok(Detected { by, ranks, several, address })
}

/// Reads Kubeflow's variables, which describe pods with a torchrun in each. Without torchrun a pod must be a single
/// rank.
fn pod(variables: &Variables) -> Result<Option<Detected>, Error> {
    const REMEDY: &str = "start the program in the pod with torchrun or `bonfire run`, which start several";
    let nodes = match variables.text("PET_NNODES") {
        None => None,
        // `MIN:MAX`.
        Some(text) => {
            let same = text.split_once(':').map_or(Some(&*text), |(least, most)| (least == most).then_some(least));
            Some(same.and_then(|number| number.trim().parse().ok()).ok_or_else(|| {
                Error::Config(format!("PET_NNODES is '{text}': give one whole number, since groups do not grow"))
            })?)
        }
    };
    let ranks = RankAndSize::of(("PET_NODE_RANK", variables.number("PET_NODE_RANK")?), ("PET_NNODES", nodes));
    if ranks.is_empty() {
        return Ok(None);
    }
    // PyTorchJob sets "auto" if the job gives no number, and itself counts one rank per pod.
    let counted = ranks.both().is_some() && RankAndSize::read(variables, "RANK", "WORLD_SIZE")?.both() == ranks.both();
    let one = |count: &str| count == "1" || counted && count.parse::<usize>().is_err();
    if let Some(count) = variables.text("PET_NPROC_PER_NODE").filter(|count| !one(count)) {
        return Err(Error::Config(format!("PET_NPROC_PER_NODE is '{count}', and this process is one: {REMEDY}")));
    }
    ranks.check()?;
    let several = nodes.map(|nodes| nodes > 1);
    let (host, port) = master(variables)?;
    let host = variables.host("PET_MASTER_ADDR")?.or(host);
    let port = variables.port("PET_MASTER_PORT")?.or(port);
    let by = "Kubeflow (PET_*)".to_owned();
    let address = Address::of((&by, several), (host, port), "");
    Ok(Some(Detected { by, ranks, several, address }))
}

/// Reads the variables that PyTorchJob sets for pods, and many scripts for processes.
fn plain(variables: &Variables) -> Result<Option<Detected>, Error> {
    let ranks = RankAndSize::read(variables, "RANK", "WORLD_SIZE")?;
    if ranks.is_empty() {
        return Ok(None);
    }
    ranks.check()?;
    let several = ranks.several(variables, "LOCAL_WORLD_SIZE")?;
    let (host, port) = master(variables)?;
    let by = "RANK and WORLD_SIZE".to_owned();
    let address = Address::of((&by, several), (host, port), " (or MASTER_ADDR and MASTER_PORT)");
    Ok(Some(Detected { by, ranks, several, address }))
}
