//! Tasks of Slurm.

use super::found::{Address, Found, Named, master, port_of};
use super::hostlist;
use super::variables::{Place, Variables};
use crate::rendezvous::source::is_loopback;
use crate::types::Error;

/// Steps from here on are no tasks of srun's: a batch script, an interactive shell.
const NO_TASKS: usize = 0xffff_fff0;

/// How far the ports of two steps are apart: a prime number, so that they do not meet those of the next jobs soon.
const STRIDE: u64 = 509;

/// This process as one that srun started.
pub(super) fn task(variables: &Variables) -> Result<Option<Found>, Error> {
    let Some(step) = step(variables)? else { return Ok(None) };
    let size = if variables.text("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let place = Place::read(variables, "SLURM_PROCID", size)?;
    if place.rank.1.is_none() {
        return Ok(None);
    }
    place.check()?;
    let job = number(variables, ["SLURM_JOB_ID", "SLURM_JOBID"])?;
    let nodes = number(variables, ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])?;
    let (host, port) = master(variables)?;
    let (first, alone) = first_host(variables)?.unzip();
    let several = nodes.map(|nodes| nodes > 1).or(alone.map(|alone| !alone));
    let job_port = |job| port_of((job as u64).wrapping_add((step as u64).wrapping_mul(STRIDE)));
    let port = port.or(job.map(|job| (job_port(job), "SLURM_JOB_ID and SLURM_STEP_ID")));
    let by = format!("Slurm (job {}, step {step})", job.map_or("?".into(), |job| job.to_string()));
    // In many a profile there is one for programs that run alone.
    let host = host.filter(|(host, _)| several != Some(true) || !is_loopback(host));
    let address = Address::of((&by, several), (host.or(first), port), "");
    Ok(Some(Found { by, place, several, address }))
}

/// What to say where a job of Slurm's is around a process that is no task of it.
pub(super) fn hint(variables: &Variables) -> String {
    match variables.text("SLURM_JOB_ID") {
        Some(job) => format!(" (this is in Slurm's job {job}, but no task of it: start the ranks with srun)"),
        None => String::new(),
    }
}

fn step(variables: &Variables) -> Result<Option<usize>, Error> {
    Ok(number(variables, ["SLURM_STEP_ID", "SLURM_STEPID"])?.filter(|step| *step < NO_TASKS))
}

/// The first of these that is set.
fn number(variables: &Variables, names: [&str; 2]) -> Result<Option<usize>, Error> {
    let name = names.into_iter().find(|name| variables.text(name).is_some());
    name.map_or(Ok(None), |name| variables.number(name))
}

/// The first host, which has task 0, and whether it is the only one.
fn first_host(variables: &Variables) -> Result<Option<(Named<String>, bool)>, Error> {
    for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
        let Some(text) = variables.text(name) else { continue };
        let first = hostlist::first(&text);
        let (host, alone) = first.map_err(|reason| Error::Config(format!("{name} is '{text}': {reason}")))?;
        return Ok(Some(((host, name), alone)));
    }
    Ok(None)
}
