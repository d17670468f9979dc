//! Settings from the environment: Bonfire's own variables, and for what they leave open, those of the launcher that
//! started this process.
//!
//! A missing value is not an error here, since code may still set it. A malformed or contradictory value is.

mod detected;
mod hostlist;
mod launcher;
mod mpi;
mod slurm;
#[cfg(test)]
mod tests;
mod unknown;
mod variables;

use std::time::Duration;

use self::detected::Detected;
use self::launcher::detect;
pub use self::unknown::unknown_variables;
use self::variables::{NamedNumber, RankAndSize, Variables};
use super::source::{Launched, Missing, Numbers, Source};
use super::stop::StopSettings;
use super::{Settings, TransportKind};
use crate::sync::{DEADLINE_VARIABLE, seconds_from_env};
use crate::types::Error;

/// What the environment says about a group.
#[derive(Debug)]
pub(crate) struct Environment {
    pub settings: Settings,
    pub deadline: Option<Duration>,
    pub hang_timeout: Option<Duration>,
    pub stop: StopSettings,
    /// Unparsed: this module does not know algorithms.
    pub algorithms: Option<String>,
}

impl Launched {
    /// The variables that describe a rank and its group: each launcher with the names that are read, except for
    /// secrets.
    pub const VARIABLES: [(&str, &[&str]); 8] = [
        (
            "bonfire",
            &[
                "BONFIRE_RANK",
                "BONFIRE_WORLD_SIZE",
                "BONFIRE_LOCAL_RANK",
                "BONFIRE_LOCAL_WORLD_SIZE",
                "BONFIRE_ADDRESS",
                "BONFIRE_HOST",
                "BONFIRE_IFACE",
                "BONFIRE_TRANSPORT",
                "BONFIRE_TCP_CONNECTIONS",
                "BONFIRE_ALGORITHMS",
                "BONFIRE_DEADLINE",
                "BONFIRE_HANG_TIMEOUT",
                "BONFIRE_HEARTBEAT_TIMEOUT",
                "BONFIRE_RENDEZVOUS_TIMEOUT",
                "BONFIRE_STOP_SIGNAL",
                "BONFIRE_GRACE",
                "BONFIRE_TRACE",
            ],
        ),
        (
            "torchrun",
            &[
                "RANK",
                "WORLD_SIZE",
                "LOCAL_WORLD_SIZE",
                "GROUP_WORLD_SIZE",
                "MASTER_ADDR",
                "MASTER_PORT",
                "TORCHELASTIC_RUN_ID",
                "TORCHELASTIC_USE_AGENT_STORE",
            ],
        ),
        (
            "Slurm",
            &[
                "SLURM_JOB_ID",
                "SLURM_JOBID",
                "SLURM_STEP_ID",
                "SLURM_STEPID",
                "SLURM_PROCID",
                "SLURM_STEP_NUM_TASKS",
                "SLURM_NTASKS",
                "SLURM_STEP_NUM_NODES",
                "SLURM_NNODES",
                "SLURM_STEP_NODELIST",
                "SLURM_JOB_NODELIST",
                "SLURM_NODELIST",
            ],
        ),
        (
            "Open MPI",
            &[
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
                "PMIX_NAMESPACE",
                "OMPI_MCA_ess_base_jobid",
                "OMPI_MCA_orte_ess_jobid",
            ],
        ),
        ("MVAPICH2", &["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"]),
        ("Hydra (PMI)", &["PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "I_MPI_HYDRA_UUID"]),
        ("Kubeflow", &["PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT"]),
        // Numbers that do not describe a rank alone: of launchers that are not recognised, or by other variables.
        (
            "others",
            &[
                "LOCAL_RANK",
                "PMIX_RANK",
                "MPI_LOCALRANKID",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "MV2_COMM_WORLD_LOCAL_RANK",
                "FLUX_TASK_RANK",
                "PALS_RANKID",
                "ALPS_APP_PE",
                "JSM_NAMESPACE_RANK",
                "HOROVOD_RANK",
            ],
        ),
    ];
}

/// Reads the environment through `variable`, which looks up one variable.
pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Environment, Error> {
    let variables = Variables(&variable);
    let kind = kind(&variable)?;
    let described = describe(&variables);
    // MPI assigns the ranks itself, so errors in other variables do not count.
    let settings = if kind.is_mpi() { described.unwrap_or_default() } else { described? };
    let settings = Settings {
        host: variables.text("BONFIRE_HOST"),
        interface: variables.text("BONFIRE_IFACE"),
        kind,
        connections: variables.number("BONFIRE_TCP_CONNECTIONS")?.unwrap_or(settings.connections),
        heartbeat_timeout: seconds_from_env(&variable, "BONFIRE_HEARTBEAT_TIMEOUT")?
            .unwrap_or(settings.heartbeat_timeout),
        timeout: seconds_from_env(&variable, "BONFIRE_RENDEZVOUS_TIMEOUT")?.unwrap_or(settings.timeout),
        ..settings
    };
    let algorithms = variable("BONFIRE_ALGORITHMS");
    let hang_timeout = seconds_from_env(&variable, "BONFIRE_HANG_TIMEOUT")?;
    let deadline = seconds_from_env(&variable, DEADLINE_VARIABLE)?;
    let stop = StopSettings::read(&variable)?;
    Ok(Environment { settings, deadline, hang_timeout, stop, algorithms })
}

/// Finds rank, world size and address: each from Bonfire's own variable, or else from the launcher.
fn describe(variables: &Variables) -> Result<Settings, Error> {
    let own = RankAndSize::read(variables, "BONFIRE_RANK", "BONFIRE_WORLD_SIZE")?;
    let address = variables.text("BONFIRE_ADDRESS");
    // Where these are complete, the launcher's variables are not read and may be wrong.
    let complete = own.both().is_some_and(|(_, n)| n == 1 || address.is_some());
    let detected = if complete { None } else { detect(variables)? };
    let theirs = detected.as_ref().map(|detected| detected.ranks);
    let (rank, no_rank) = resolve(variables, own.rank, theirs.map(|ranks| (ranks.rank, ranks.world_size)));
    let (world_size, no_size) = resolve(variables, own.world_size, theirs.map(|ranks| (ranks.world_size, ranks.rank)));
    let several = match own.world_size {
        (_, Some(_)) => own.several(variables, "BONFIRE_LOCAL_WORLD_SIZE")?,
        _ => None,
    };
    let several = several.or(detected.as_ref().and_then(|detected| detected.several));
    let variables_set = [
        (own.rank.0, own.rank.1.is_some()),
        (own.world_size.0, own.world_size.1.is_some()),
        ("BONFIRE_ADDRESS", address.is_some()),
    ];
    let variables_set = variables_set.into_iter().filter_map(|(name, is_set)| is_set.then_some(name));
    let lone = if detected.is_none() && own.is_empty() { lone_rank(variables) } else { None };
    let lone_by = lone.iter().map(|(name, _)| *name);
    let by = detected.iter().map(|detected| &*detected.by).chain(lone_by).chain(variables_set);
    let by = by.collect::<Vec<_>>().join(", ");
    // With a number alone a process is not complete, and yet one of several: each of them must not train by itself.
    let launched = detected.is_some() || lone.is_some() || !own.is_empty();
    let (address, chosen, no_address) = match (address, detected) {
        (Some(address), _) => (address, None, None),
        (None, Some(Detected { address: Ok(address), .. })) => (address.text, Some(address.chosen), None),
        (None, Some(Detected { address: Err(reason), .. })) => (String::new(), None, Some(reason)),
        (None, None) => (String::new(), None, Some(missing_reason(variables, "BONFIRE_ADDRESS"))),
    };
    let source = Source {
        by: launched.then_some(by),
        several,
        address: chosen,
        numbers: own.both().map_or(Numbers::Unknown, |_| Numbers::PerProcess(1)),
        missing: Missing { rank: no_rank, world_size: no_size, address: no_address },
    };
    let settings = Settings::default();
    Ok(Settings {
        rank: rank.unwrap_or(settings.rank),
        world_size: world_size.unwrap_or(settings.world_size),
        address,
        source,
        ..settings
    })
}

/// Returns the number from Bonfire's variable, or else from the launcher's, or the reason why there is none.
/// `launchers` holds the number that is wanted (rank or world size) and the other of the two.
fn resolve(
    variables: &Variables,
    own: NamedNumber,
    launchers: Option<(NamedNumber, NamedNumber)>,
) -> (Option<usize>, Option<String>) {
    match (own, launchers) {
        ((_, Some(number)), _) | (_, Some(((_, Some(number)), _))) => (Some(number), None),
        ((own, None), Some(((missing, None), (other, _)))) => {
            let reason = format!(
                "{missing} is not set, though {other} is: start the program with the launcher that sets both, or set \
                 {own}"
            );
            (None, Some(reason))
        }
        ((own, None), None) => (None, Some(missing_reason(variables, own))),
    }
}

/// Returns the reason to report for a variable that is missing where no launcher was detected.
fn missing_reason(variables: &Variables, name: &str) -> String {
    let [_, launchers @ .., _] = Launched::VARIABLES.map(|(launcher, _)| launcher);
    let lone = lone_rank(variables).map_or(String::new(), |(name, value)| {
        format!(
            "; {name} is {value}, so something has started this process as one of several, which the other variables \
             do not describe: unset {name} if it runs alone"
        )
    });
    format!(
        "{name} is not set, and no launcher was recognised, of {} and plain RANK with WORLD_SIZE{}: start the program \
         with `bonfire run -n RANKS -- PROGRAM`, use `bonfire::launch`, whose ranks are threads without a launcher, or \
         describe the group with BONFIRE_RANK, BONFIRE_WORLD_SIZE and BONFIRE_ADDRESS, or with Group::builder(){lone}",
        launchers.join(", "),
        slurm::hint(variables)
    )
}

/// Returns a variable that numbers this process among others, and its value. Alone it does not describe a rank.
fn lone_rank(variables: &Variables) -> Option<(&'static str, String)> {
    let [(_, own), .., (_, alone)] = Launched::VARIABLES;
    let own = own.iter().filter(|name| **name == "BONFIRE_LOCAL_RANK");
    let set = |name: &&'static str| Some((*name, variables.text(name)?));
    // A batch script has the number of the first task.
    let task = || set(&"SLURM_PROCID").filter(|(_, task)| task != "0");
    own.chain(alone).find_map(set).or_else(task)
}

fn kind(variable: &impl Fn(&str) -> Option<String>) -> Result<TransportKind, Error> {
    let Some(text) = variable("BONFIRE_TRANSPORT") else { return Ok(TransportKind::Auto) };
    let kind = TransportKind::ALL.into_iter().find(|kind| kind.to_string() == text.trim());
    kind.ok_or_else(|| {
        Error::Config(format!("BONFIRE_TRANSPORT is '{text}': give auto, tcp, shm, mpi or mpi-blocking"))
    })
}
