//! Detects processes that an MPI launcher started.

use super::detected::{Address, Detected, master, number_of, port_of};
use super::variables::{RankAndSize, Variables};
use crate::types::Error;

/// The variables of a launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world_size: &'static str,
    local_size: &'static str,
    /// Variables that identify the job: the same on all its ranks, and different for every job.
    job: &'static [&'static str],
}

/// Open MPI 4 and 5, MVAPICH2's own launcher, and MPICH's, which Intel MPI and others also use.
const LAUNCHERS: [Launcher; 3] = [
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"],
    },
    Launcher {
        name: "MVAPICH2",
        rank: "MV2_COMM_WORLD_RANK",
        world_size: "MV2_COMM_WORLD_SIZE",
        local_size: "MV2_COMM_WORLD_LOCAL_SIZE",
        job: &[],
    },
    Launcher {
        name: "Hydra (PMI)",
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_size: "MPI_LOCALNRANKS",
        job: &["I_MPI_HYDRA_UUID"],
    },
];

const OR_MPI: &str = " (or MASTER_ADDR and MASTER_PORT), or BONFIRE_TRANSPORT=mpi where the program is built with the \
                      feature `mpi`";

/// Reads this process's rank from the variables of MPI launchers. `task` is what Slurm says about it.
pub(super) fn process(variables: &Variables, task: Option<&Detected>) -> Result<Option<Detected>, Error> {
    let mut detected: Option<Detected> = None;
    for launcher in &LAUNCHERS {
        let ranks = RankAndSize::read(variables, launcher.rank, launcher.world_size)?;
        // A second launcher whose numbers equal Slurm's: Slurm set them for the task in which the first one ran.
        let surrounding = detected.is_some() && task.is_some_and(|task| task.ranks.both() == ranks.both());
        if ranks.is_empty() || surrounding {
            continue;
        }
        ranks.check()?;
        match &detected {
            Some(detected) => detected.ranks.agrees(&ranks)?,
            None => detected = Some(launcher.read(variables, ranks)?),
        }
    }
    Ok(detected)
}

impl Launcher {
    fn read(&self, variables: &Variables, ranks: RankAndSize) -> Result<Detected, Error> {
        let several = ranks.several(variables, self.local_size)?;
        let (host, port) = master(variables)?;
        let port = port.or_else(|| self.port(variables, several));
        let address = Address::of((self.name, several), (host, port), OR_MPI);
        Ok(Detected { by: self.name.into(), ranks, several, address })
    }

    /// Returns a port from the job's name, or, on one host, from the process that started the ranks.
    fn port(&self, variables: &Variables, several: Option<bool>) -> Option<(u16, &'static str)> {
        let named = self.job.iter().find_map(|name| Some((port_of(number_of(&variables.text(name)?)), *name)));
        let here =
            || Some((port_of(u64::from(parent(self.rank)?)), "the number of the process that started the ranks"));
        named.or_else(|| if several == Some(false) { here() } else { None })
    }
}

/// Returns the process that started this host's ranks: the nearest ancestor that is not part of a rank itself, since a
/// rank may be a script that starts the program. `None` where it is not visible, as in a container per rank.
fn parent(rank: &str) -> Option<u32> {
    let mut pid = std::os::unix::process::parent_id();
    let is_in_rank = |pid: u32| {
        let variables = match std::fs::read(format!("/proc/{pid}/environ")) {
            // Most likely a process with other privileges, between the launcher and its rank.
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => return true,
            variables => variables.unwrap_or_default(),
        };
        variables
            .split(|byte| *byte == 0)
            .any(|entry| entry.strip_prefix(rank.as_bytes()).is_some_and(|rest| rest.starts_with(b"=")))
    };
    let parent_of = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The state and then the parent follow the name, which is in brackets and may hold any characters.
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    while let Some(up) = Some(pid).filter(|pid| is_in_rank(*pid)).and_then(parent_of) {
        pid = up;
    }
    (pid > 1).then_some(pid)
}
