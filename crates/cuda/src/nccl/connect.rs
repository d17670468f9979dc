//! How the ranks of a group create a communicator.
//!
//! Three small operations of the group surround NCCL's own. First the ranks tell each other version, GPU, whether NCCL
//! may share GPUs, and what keeps a rank from continuing; so all return the same error, of the same rank. Then rank 0
//! sends the id by which NCCL finds the others. Last they compare whether it has worked: no rank has a communicator
//! that another one lacks.

use std::collections::HashMap;
use std::ffi::c_char;
use std::fmt;

use cudarc::nccl::sys::ncclUniqueId;
use serde::{Deserialize, Serialize};

use super::communicator::{Communicator, GRACE};
use super::library::{Config, Library, SUCCESS, Version, library};
use crate::driver;
use bonfire_core::internal::{AgreedOperations, RankList};
use bonfire_core::{Deadline, Error, Group};

/// The first version that lets ranks share a GPU, and the variable that permits it.
const SHARING: (i32, &str) = (2_30_00, "NCCL_MULTI_RANK_GPU_ENABLE");

/// A rank's GPU, by a number unique among all GPUs, and parts of GPUs, of all hosts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Gpu([u8; 16]);

impl Gpu {
    /// Returns the GPU with this ordinal in CUDA, in this process.
    ///
    /// # Errors
    /// [`Error::Library`] if the driver is missing, does not start, or is too old; [`Error::Io`] if there is no such
    /// GPU.
    pub fn of(ordinal: usize) -> Result<Gpu, Error> {
        let failed = |error| Error::io(format!("asking CUDA for GPU {ordinal}"), error);
        driver::start()?;
        driver::uuid(ordinal).map(Gpu).map_err(failed)
    }

    /// Returns the GPU with this UUID, as `nvidia-smi -L` prints it and cuDeviceGetUuid returns it.
    pub const fn with_uuid(uuid: [u8; 16]) -> Gpu {
        Gpu(uuid)
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU")?;
        for (i, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if matches!(i, 0 | 4 | 6 | 8 | 10) { "-" } else { "" })?;
        }
        Ok(())
    }
}

/// What each rank tells the others first.
#[derive(Serialize, Deserialize)]
struct RankInfo {
    version: i32,
    gpu: Gpu,
    /// Whether this rank's NCCL may share its GPU.
    shares: bool,
}

impl Communicator {
    /// Creates a communicator of all ranks of `group`, each with its GPU, whose context must be current on the thread.
    /// All ranks call it; it blocks until they have.
    ///
    /// # Errors
    /// The same on all ranks, and the group stays usable: [`Error::Library`] if NCCL is missing or too old on any rank,
    /// or if versions differ; [`Error::InvalidArgument`] if ranks share a GPU, which NCCL allows only from 2.30 on and
    /// with `NCCL_MULTI_RANK_GPU_ENABLE=1`; [`Error::Nccl`] with what NCCL returned, also if it did not finish before
    /// the deadline. Errors of the group, if a rank does not call this.
    pub fn connect(group: &Group, gpu: Gpu, deadline: &Deadline) -> Result<Communicator, Error> {
        let (rank, world_size) = (group.rank(), group.world_size());
        let on_rank = |error| match error {
            Error::Library { library, reason } => Error::Library { library, reason: format!("rank {rank}: {reason}") },
            error => error,
        };
        let library = library().map_err(on_rank);
        let info =
            |library: &'static Library| RankInfo { version: library.version, gpu, shares: shares(library.version) };
        check(&group.with_deadline(deadline.remaining()).all_gather_results(library.clone().map(info))?)?;

        let library = library?;
        let mut communicator = Communicator::unconnected(library, rank, world_size);
        let id = if rank == 0 { communicator.unique_id(deadline).map(Some) } else { Ok(None) };
        let ids = group.with_deadline(deadline.remaining()).all_gather_results(id)?;
        let id = ids.into_iter().flatten().next().unwrap_or_default();
        let made = communicator.make(&id, deadline);
        // Either all ranks get a communicator or none does. A rank that timed out alone must still be able to say so.
        match group.with_deadline(deadline.remaining() + GRACE).all_gather_results(made) {
            Ok(_) => Ok(communicator),
            Err(error) => {
                communicator.end(error.clone());
                Err(error)
            }
        }
    }

    /// The id by which ranks find each other: 128 bytes that only NCCL interprets.
    fn unique_id(&mut self, deadline: &Deadline) -> Result<Vec<u8>, Error> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: `id` receives the result.
        match unsafe { (self.library.functions.get_unique_id)(&mut id) } {
            SUCCESS => Ok(id.internal.iter().map(|byte| *byte as u8).collect()),
            code => Err(self.fail("ncclGetUniqueId", code, deadline.elapsed())),
        }
    }

    fn make(&mut self, id: &[u8], deadline: &Deadline) -> Result<(), Error> {
        let (mut place, number) =
            (ncclUniqueId { internal: [0; 128] }, |n: usize| i32::try_from(n).unwrap_or(i32::MAX));
        for (place, byte) in place.internal.iter_mut().zip(id) {
            *place = *byte as c_char;
        }
        let init = self.library.functions.init_rank_config;
        let (ranks, rank, mut config) = (number(self.world_size), number(self.rank), Config::polled());
        // SAFETY: all pointers are valid, and NCCL does not use them after it returns: its work in the background has
        // copies.
        let code = unsafe { init(&mut self.comm, ranks, place, rank, &mut config) };
        self.settle("ncclCommInitRankConfig", code, deadline, None)
    }
}

fn shares(version: i32) -> bool {
    version >= SHARING.0 && std::env::var(SHARING.1).is_ok_and(|value| value.trim() == "1")
}

/// Detects errors that NCCL would report less clearly, or hang on.
fn check(infos: &[RankInfo]) -> Result<(), Error> {
    if let Some(other) = infos.iter().position(|info| info.version != infos[0].version) {
        let versions = [0, other].map(|rank| format!("{} on rank {rank}", Version(infos[rank].version)));
        let reason = format!("ranks have different versions, {}: install the same on all", versions.join(" and "));
        return Err(Error::Library { library: "NCCL".into(), reason });
    }
    let mut ranks = HashMap::<Gpu, Vec<usize>>::new();
    for (rank, info) in infos.iter().enumerate().filter(|(_, info)| !info.shares) {
        ranks.entry(info.gpu).or_default().push(rank);
    }
    match ranks.iter().filter(|(_, ranks)| ranks.len() > 1).min_by_key(|(_, ranks)| ranks[0]) {
        None => Ok(()),
        Some((gpu, ranks)) => {
            let reason = format!(
                "{} share {gpu:?}: give each rank its own GPU, or with NCCL {} and newer set {}=1 for all (this is {})",
                RankList(ranks),
                Version(SHARING.0),
                SHARING.1,
                Version(infos[0].version)
            );
            Err(Error::argument("a communicator of NCCL", reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(version: i32, gpu: u8, shares: bool) -> RankInfo {
        RankInfo { version, gpu: Gpu::with_uuid([gpu; 16]), shares }
    }

    #[test]
    fn ranks_need_the_same_version_and_a_gpu_each() {
        let sound = [info(2_21_05, 1, false), info(2_21_05, 2, false)];
        assert_eq!(check(&sound), Ok(()));
        let error = check(&[info(2_21_05, 1, false), info(2_21_05, 2, false), info(2_30_07, 3, false)]).unwrap_err();
        assert!(error.to_string().contains("2.21.5 on rank 0 and 2.30.7 on rank 2"), "{error}");
        let error = check(&[info(2_21_05, 9, false), info(2_21_05, 7, false), info(2_21_05, 9, false)]).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }));
        assert!(error.to_string().contains("ranks 0, 2 share GPU-09090909-0909-0909-0909-090909090909"), "{error}");
        assert_eq!(check(&[info(2_30_07, 9, true), info(2_30_07, 9, true)]), Ok(()));
    }

    #[test]
    fn a_machine_without_a_driver_is_a_typed_error() {
        // SAFETY: the call looks for the driver's library, whose initialisers have no requirements.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            let error = Gpu::of(0).unwrap_err();
            assert!(matches!(error, Error::Library { .. }), "{error:?}");
        }
    }
}
