//! Processes that a launcher of MPI's started.

use super::found::{Address, Found, master, number_of, port_of};
use super::variables::{Place, Variables};
use crate::types::Error;

/// The variables of a launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world_size: &'static str,
    local_size: &'static str,
    /// What names the job, the same on all ranks and another one in every job.
    job: &'static [&'static str],
}

/// Open MPI 4 and 5, and what is in MVAPICH2's own and in the launcher of MPICH, which Intel MPI and others have too.
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

/// This process as a rank of MPI's. `task` is what Slurm says of it.
pub(super) fn process(variables: &Variables, task: Option<&Found>) -> Result<Option<Found>, Error> {
    let mut found: Option<Found> = None;
    for launcher in &LAUNCHERS {
        let place = Place::read(variables, launcher.rank, launcher.world_size)?;
        // Where Slurm says the same of another launcher's variables, it set them for the task in which this one ran.
        let around = found.is_some() && task.is_some_and(|task| task.place.both() == place.both());
        if place.is_empty() || around {
            continue;
        }
        place.check()?;
        match &found {
            Some(found) => found.place.agrees(&place)?,
            None => found = Some(launcher.found(variables, place)?),
        }
    }
    Ok(found)
}

impl Launcher {
    fn found(&self, variables: &Variables, place: Place) -> Result<Found, Error> {
        let several = place.several(variables, self.local_size)?;
        let (host, port) = master(variables)?;
        let port = port.or_else(|| self.port(variables, several));
        let address = Address::of((self.name, several), (host, port), OR_MPI);
        Ok(Found { by: self.name.into(), place, several, address })
    }

    /// A port from the job's name; on one host also from the process that started its ranks there.
    fn port(&self, variables: &Variables, several: Option<bool>) -> Option<(u16, &'static str)> {
        let named = self.job.iter().find_map(|name| Some((port_of(number_of(&variables.text(name)?)), *name)));
        let here =
            || Some((port_of(u64::from(parent(self.rank)?)), "the number of the process that started the ranks"));
        named.or_else(|| if several == Some(false) { here() } else { None })
    }
}

/// The process that started this host's ranks: the nearest above this one that is in no rank itself, since a rank may be a
/// script that starts the program. None where that cannot be seen, as in a container for each rank.
fn parent(rank: &str) -> Option<u32> {
    let mut pid = std::os::unix::process::parent_id();
    let within = |pid: u32| {
        let variables = match std::fs::read(format!("/proc/{pid}/environ")) {
            // One that runs with other rights between the launcher and its rank, most likely.
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => return true,
            variables => variables.unwrap_or_default(),
        };
        variables
            .split(|byte| *byte == 0)
            .any(|entry| entry.strip_prefix(rank.as_bytes()).is_some_and(|rest| rest.starts_with(b"=")))
    };
    let above = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // After the name, which is in brackets and may hold anything, comes the state, then the parent.
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    while let Some(up) = Some(pid).filter(|pid| within(*pid)).and_then(above) {
        pid = up;
    }
    (pid > 1).then_some(pid)
}
