//! Detects tasks of Slurm.

use super::detected::{Address, Detected, Named, master, port_of};
use super::hostlist;
use super::variables::{RankAndSize, Variables};
use crate::rendezvous::source::is_loopback;
use crate::types::Error;

/// Step numbers from here on are not srun's: a batch script, an interactive shell.
const FIRST_SPECIAL_STEP: usize = 0xffff_fff0;

/// Distance between the ports of two steps: a prime, so that they do not soon collide with the ports of the next jobs.
const STRIDE: u64 = 509;

/// Reads this process's rank if srun started it.
pub(super) fn task(variables: &Variables) -> Result<Option<Detected>, Error> {
    let Some(step) = step(variables)? else { return Ok(None) };
    let size = if variables.text("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let ranks = RankAndSize::read(variables, "SLURM_PROCID", size)?;
    if ranks.rank.1.is_none() {
        return Ok(None);
    }
    ranks.check()?;
    let job = number(variables, ["SLURM_JOB_ID", "SLURM_JOBID"])?;
    let nodes = number(variables, ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])?;
    let (host, port) = master(variables)?;
    let (first, alone) = first_host(variables)?.unzip();
    let several = nodes.map(|nodes| nodes > 1).or(alone.map(|alone| !alone));
    let job_port = |job| port_of((job as u64).wrapping_add((step as u64).wrapping_mul(STRIDE)));
    let port = port.or(job.map(|job| (job_port(job), "SLURM_JOB_ID and SLURM_STEP_ID")));
    let by = format!("Slurm (job {}, step {step})", job.map_or("?".into(), |job| job.to_string()));
    // Many profiles set `MASTER_ADDR` to loopback, for programs that run on one host.
    let host = host.filter(|(host, _)| several != Some(true) || !is_loopback(host));
    let address = Address::of((&by, several), (host.or(first), port), "");
    Ok(Some(Detected { by, ranks, several, address }))
}

/// Returns a hint for a process that runs inside a Slurm job but is not one of its tasks.
pub(super) fn hint(variables: &Variables) -> String {
    match variables.text("SLURM_JOB_ID") {
        Some(job) => format!(" (this is in Slurm's job {job}, but not a task of it: start the ranks with srun)"),
        None => String::new(),
    }
}

fn step(variables: &Variables) -> Result<Option<usize>, Error> {
    Ok(number(variables, ["SLURM_STEP_ID", "SLURM_STEPID"])?.filter(|step| *step < FIRST_SPECIAL_STEP))
}

/// Returns the first of these variables that is set.
fn number(variables: &Variables, names: [&str; 2]) -> Result<Option<usize>, Error> {
    let name = names.into_iter().find(|name| variables.text(name).is_some());
    name.map_or(Ok(None), |name| variables.number(name))
}

/// Returns the first host, which runs task 0, and whether it is the only one.
fn first_host(variables: &Variables) -> Result<Option<(Named<String>, bool)>, Error> {
    for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
        let Some(text) = variables.text(name) else { continue };
        let first = hostlist::first(&text);
        let (host, alone) = first.map_err(|reason| Error::Config(format!("{name} is '{text}': {reason}")))?;
        return Ok(Some(((host, name), alone)));
    }
    Ok(None)
}
