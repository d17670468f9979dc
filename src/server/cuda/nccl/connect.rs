//! How the ranks of a group make a communicator.

use std::collections::HashMap;
use std::ffi::c_char;
use std::fmt;

use cudarc::driver::{result, sys};
use cudarc::nccl::sys::ncclUniqueId;
use serde::{Deserialize, Serialize};

use super::communicator::{Communicator, GRACE};
use super::library::{Config, Library, SUCCESS, Version, library};
use bonfire_core::internal::{Agreement, Ranks};
use bonfire_core::{Deadline, Error, Group};

/// From this version on NCCL may be told to let ranks share a GPU, by this variable.
const SHARING: (i32, &str) = (2_30_00, "NCCL_MULTI_RANK_GPU_ENABLE");

/// Which GPU a rank has: a number that no other GPU has, nor other part of one, on any host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Gpu([u8; 16]);

impl Gpu {
    /// The GPU that CUDA gives this number in this process.
    ///
    /// # Errors
    /// [`Error::Library`] where there is no driver, [`Error::Io`] where there is no such GPU.
    pub fn of(ordinal: usize) -> Result<Gpu, Error> {
        let failed = |error| Error::io(format!("asking CUDA for GPU {ordinal}"), error);
        // SAFETY: it looks for the driver's library, whose initialisers ask nothing of the process.
        if !unsafe { sys::is_culib_present() } {
            let reason =
                "libcuda.so is not found: install NVIDIA's driver, and in a container let it in (`--gpus all`)";
            return Err(Error::Library { library: "CUDA's driver".into(), reason: reason.into() });
        }
        result::init().map_err(failed)?;
        let device = result::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX)).map_err(failed)?;
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: it gets a place for the number of a device that is there.
        unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device).result() }.map_err(failed)?;
        Ok(Gpu(uuid.bytes.map(|byte| byte as u8)))
    }

    /// The GPU with this number, as `nvidia-smi -L` writes it and cuDeviceGetUuid gives it.
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

/// What ranks tell each other before they begin.
#[derive(Serialize, Deserialize)]
struct Card {
    version: i32,
    gpu: Gpu,
    /// Whether this rank's NCCL was told to share it.
    shares: bool,
}

impl Communicator {
    /// Makes a communicator of all ranks of `group`, each with its GPU, whose context the thread must have current.
    ///
    /// # Errors
    /// The same on all ranks, and the group stays sound: [`Error::Library`] where NCCL is missing or too old on any
    /// rank, or they have different versions; [`Error::InvalidArgument`] where ranks share a GPU, which NCCL allows
    /// from 2.30 on and with `NCCL_MULTI_RANK_GPU_ENABLE=1` only; [`Error::Nccl`] with what NCCL returned, also where
    /// it did not come to an end before the deadline. Errors of the group, where a rank does not call this.
    pub fn connect(group: &Group, gpu: Gpu, deadline: &Deadline) -> Result<Communicator, Error> {
        let (rank, world_size) = (group.rank(), group.world_size());
        let on_rank = |error| match error {
            Error::Library { library, reason } => Error::Library { library, reason: format!("rank {rank}: {reason}") },
            error => error,
        };
        let library = library().map_err(on_rank);
        let card = |library: &'static Library| Card { version: library.version, gpu, shares: shares(library.version) };
        check(&group.with_deadline(deadline.remaining()).tell_all(library.clone().map(card))?)?;

        let library = library?;
        let mut communicator = Communicator::none(library, rank, world_size);
        let id = if rank == 0 { communicator.unique_id(deadline).map(Some) } else { Ok(None) };
        let ids = group.with_deadline(deadline.remaining()).tell_all(id)?;
        let id = ids.into_iter().flatten().next().unwrap_or_default();
        let made = communicator.make(&id, deadline);
        // No rank has a communicator that another one has not. Who is late by himself must still be able to say so.
        match group.with_deadline(deadline.remaining() + GRACE).tell_all(made) {
            Ok(_) => Ok(communicator),
            Err(error) => {
                communicator.end(error.clone());
                Err(error)
            }
        }
    }

    /// The number by which ranks find each other: 128 bytes that only NCCL can read.
    fn unique_id(&mut self, deadline: &Deadline) -> Result<Vec<u8>, Error> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: it gets a place for the number.
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
        // SAFETY: the places are there, and NCCL is done with them when it returns: what it does in the background has
        // copies.
        let code = unsafe { init(&mut self.comm, ranks, place, rank, &mut config) };
        self.settle("ncclCommInitRankConfig", code, deadline, None)
    }
}

fn shares(version: i32) -> bool {
    version >= SHARING.0 && std::env::var(SHARING.1).is_ok_and(|value| value.trim() == "1")
}

/// What can be known to fail before NCCL is asked, which would say it less clearly, or hang.
fn check(cards: &[Card]) -> Result<(), Error> {
    if let Some(other) = cards.iter().position(|card| card.version != cards[0].version) {
        let versions = [0, other].map(|rank| format!("{} on rank {rank}", Version(cards[rank].version)));
        let reason = format!("ranks have different versions, {}: install the same on all", versions.join(" and "));
        return Err(Error::Library { library: "NCCL".into(), reason });
    }
    let mut ranks = HashMap::<Gpu, Vec<usize>>::new();
    for (rank, card) in cards.iter().enumerate().filter(|(_, card)| !card.shares) {
        ranks.entry(card.gpu).or_default().push(rank);
    }
    match ranks.iter().filter(|(_, ranks)| ranks.len() > 1).min_by_key(|(_, ranks)| ranks[0]) {
        None => Ok(()),
        Some((gpu, ranks)) => {
            let reason = format!(
                "{} share {gpu:?}: give each rank a GPU of its own, or with NCCL {} and newer set {}=1 for all (this is {})",
                Ranks(ranks),
                Version(SHARING.0),
                SHARING.1,
                Version(cards[0].version)
            );
            Err(Error::argument("a communicator of NCCL", reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(version: i32, gpu: u8, shares: bool) -> Card {
        Card { version, gpu: Gpu::with_uuid([gpu; 16]), shares }
    }

    #[test]
    fn ranks_have_one_version_and_a_gpu_each() {
        let sound = [card(2_21_05, 1, false), card(2_21_05, 2, false)];
        assert_eq!(check(&sound), Ok(()));
        let error = check(&[card(2_21_05, 1, false), card(2_21_05, 2, false), card(2_30_07, 3, false)]).unwrap_err();
        assert!(error.to_string().contains("2.21.5 on rank 0 and 2.30.7 on rank 2"), "{error}");
        let error = check(&[card(2_21_05, 9, false), card(2_21_05, 7, false), card(2_21_05, 9, false)]).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }));
        assert!(error.to_string().contains("ranks 0, 2 share GPU-09090909-0909-0909-0909-090909090909"), "{error}");
        assert_eq!(check(&[card(2_30_07, 9, true), card(2_30_07, 9, true)]), Ok(()));
    }

    #[test]
    fn a_machine_without_a_driver_is_a_typed_error() {
        // SAFETY: as in `Gpu::of`.
        if !unsafe { sys::is_culib_present() } {
            let error = Gpu::of(0).unwrap_err();
            assert!(matches!(error, Error::Library { .. }), "{error:?}");
        }
    }
}
