//! What launchers say of a rank, in variables of their own: which launcher counts, and what it says.

use super::found::{Address, Found, master, number_of, port_of};
use super::variables::{Place, Variables};
use super::{mpi, slurm};
use crate::types::Error;

/// Finds out who started this process. The innermost launcher counts, since it starts the ranks.
pub(super) fn recognise(variables: &Variables) -> Result<Option<Found>, Error> {
    if let Some(run) = variables.text("TORCHELASTIC_RUN_ID") {
        return torchrun(variables, &run).map(Some);
    }
    let task = slurm::task(variables)?;
    let found = match (mpi::process(variables, task.as_ref())?, task) {
        // It was started within a task, or by daemons that are tasks.
        (Some(process), Some(task)) if process.place.both() != task.place.both() => Some(process),
        // Slurm started it with a library of MPI's, and knows the hosts.
        (process, task) => task.or(process),
    };
    let found = found.map_or_else(|| pod(variables), |found| Ok(Some(found)))?;
    match (found, plain(variables)?) {
        (Some(found), Some(plain)) => {
            found.place.agrees(&plain.place)?;
            Ok(Some(found))
        }
        (found, plain) => Ok(found.or(plain)),
    }
}

/// torchrun's agent mostly listens at `MASTER_PORT` itself, for a store of its workers.
fn torchrun(variables: &Variables, run: &str) -> Result<Found, Error> {
    let place = Place::read(variables, "RANK", "WORLD_SIZE")?;
    place.check()?;
    let nodes = variables.number("GROUP_WORLD_SIZE")?;
    let several = place.several(variables, "LOCAL_WORLD_SIZE")?.or(nodes.map(|nodes| nodes > 1));
    let (host, port) = master(variables)?;
    let taken = variables.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|text| text.eq_ignore_ascii_case("true"));
    let port = match port {
        Some((port, _)) if taken => {
            Some((port_of(number_of(&format!("{run} {port}"))), "TORCHELASTIC_RUN_ID and MASTER_PORT"))
        }
        port => port,
    };
    let by = format!("torchrun (run {run})");
    // Two agents on one machine count as two hosts.
    let address = Address::of((&by, several.filter(|several| !several)), (host, port), "");
    Ok(Found { by, place, several, address })
}

/// Kubeflow describes pods, for a torchrun in each. Without one a pod is a rank, if it is to have one.
fn pod(variables: &Variables) -> Result<Option<Found>, Error> {
    const REMEDY: &str = "start the program in the pod with torchrun or `bonfire run`, which start several";
    let nodes = match variables.text("PET_NNODES") {
        None => None,
        // From so many to so many.
        Some(text) => {
            let same = text.split_once(':').map_or(Some(&*text), |(least, most)| (least == most).then_some(least));
            Some(same.and_then(|number| number.trim().parse().ok()).ok_or_else(|| {
                Error::Config(format!("PET_NNODES is '{text}': give one whole number, since groups do not grow"))
            })?)
        }
    };
    let place = Place::of(("PET_NODE_RANK", variables.number("PET_NODE_RANK")?), ("PET_NNODES", nodes));
    if place.is_empty() {
        return Ok(None);
    }
    // PyTorchJob says "auto" where nothing was said, and counts one rank for each pod itself.
    let counted = place.both().is_some() && Place::read(variables, "RANK", "WORLD_SIZE")?.both() == place.both();
    let one = |ranks: &str| ranks == "1" || counted && ranks.parse::<usize>().is_err();
    if let Some(ranks) = variables.text("PET_NPROC_PER_NODE").filter(|ranks| !one(ranks)) {
        return Err(Error::Config(format!("PET_NPROC_PER_NODE is '{ranks}', and this process is one: {REMEDY}")));
    }
    place.check()?;
    let several = nodes.map(|nodes| nodes > 1);
    let (host, port) = master(variables)?;
    let host = variables.host("PET_MASTER_ADDR")?.or(host);
    let port = variables.port("PET_MASTER_PORT")?.or(port);
    let by = "Kubeflow (PET_*)".to_owned();
    let address = Address::of((&by, several), (host, port), "");
    Ok(Some(Found { by, place, several, address }))
}

/// What PyTorchJob gives to pods, and many scripts to processes.
fn plain(variables: &Variables) -> Result<Option<Found>, Error> {
    let place = Place::read(variables, "RANK", "WORLD_SIZE")?;
    if place.is_empty() {
        return Ok(None);
    }
    place.check()?;
    let several = place.several(variables, "LOCAL_WORLD_SIZE")?;
    let (host, port) = master(variables)?;
    let by = "RANK and WORLD_SIZE".to_owned();
    let address = Address::of((&by, several), (host, port), " (or MASTER_ADDR and MASTER_PORT)");
    Ok(Some(Found { by, place, several, address }))
}
