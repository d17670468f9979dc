//! Forming groups of all processes of an MPI job, and subgroups.

use std::mem::MaybeUninit;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use bonfire_core::internal::{
    GroupEndpoint, HangTimeout, PackageSettings, PolledControl, Regroup, hash, hosts_of, oversubscribed, random,
};
use bonfire_core::{Deadline, Error, Fault, TransportKind};
use mpi_sys as mpi;

use super::agreement::CallAgreement;
use super::comm::{Comm, count};
use super::control::ControlPlane;
use super::leave::{self, free_finished};
use super::library::{self, Held, Library, check, hold};
use super::watchdog::{Watchdog, WatchedCall};
use super::{Mpi, POLL_INTERVAL, types};

/// Forms a group of all processes of the job, whose ranks are MPI's. All of them call this.
pub(crate) fn connect(settings: &PackageSettings<'_>) -> Result<GroupEndpoint, Error> {
    let blocking = settings.kind == TransportKind::MpiBlocking;
    let held = hold();
    let library = library::start(&held, blocking, leave::finalize)?;
    free_finished(&held);
    let world = Comm::world(&held)?;
    drop(held);
    types::prepare()?;
    let comm = duplicate(&world, settings.timeout)?;
    // All ranks have called this, so what follows takes a moment, unless one has just timed out.
    let (watchdog, deadline) = (Watchdog::start(comm.rank)?, Deadline::after(settings.timeout));
    let (session, hosts) =
        watchdog.watch(WatchedCall::Connect, &deadline, || agree(&comm, blocking, settings.algorithms, &hold()))?;
    log::info!("rank {} of {}, assigned by MPI", comm.rank, comm.size);
    Mpi::base(library, comm, session, hosts, blocking)
}

/// Returns the group's session number and its hosts. An error if the ranks have different settings.
fn agree(comm: &Comm, blocking: bool, algorithms: &str, held: &Held) -> Result<(u64, Vec<usize>), Error> {
    let own = [random()?, u64::from(blocking), hash(algorithms.bytes())];
    let all = all_gather(comm, &own, held)?;
    if let Some(rank) = (0..comm.size).find(|rank| all[3 * rank + 1..3 * rank + 3] != own[1..]) {
        let reason = format!(
            "rank {rank} and rank {} have different algorithms, or only one of them blocks in MPI: give all ranks the \
             same BONFIRE_ALGORITHMS and BONFIRE_TRANSPORT",
            comm.rank
        );
        return Err(Error::Config(reason));
    }
    Ok((all[0], hosts(comm, held)?))
}

/// Makes a communicator for one group, so that its messages are separate from those of others.
fn duplicate(world: &Comm, limit: Duration) -> Result<Comm, Error> {
    let mut made = Box::new(MaybeUninit::uninit());
    let mut request = world.duplicate(&mut made, &hold())?;
    let start = Instant::now();
    loop {
        let held = hold();
        if request.done(&held)?.is_some() {
            // SAFETY: the request is done.
            return unsafe { Comm::duplicated(&made, &held) };
        }
        drop(held);
        if start.elapsed() > limit {
            request.abandon(made);
            let reason = "ranks are missing: every process that the launcher started must make the group, and as many \
                          groups as the others";
            return Err(Error::Rendezvous {
                rank: world.rank,
                address: "MPI".into(),
                reason: reason.into(),
                elapsed: start.elapsed(),
            });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Gathers the words of all ranks, by rank. All ranks call this with the same number of words.
fn all_gather(comm: &Comm, own: &[u64], _held: &Held) -> Result<Vec<u64>, Error> {
    let mut all = vec![0; own.len() * comm.size];
    let count = count(own.len())?;
    // SAFETY: `own` has `count` words on each rank, and `all` has space for those of all ranks.
    let code = unsafe {
        let words = mpi::RSMPI_UINT64_T;
        let (own, all) = (own.as_ptr().cast(), all.as_mut_ptr().cast());
        mpi::MPI_Allgather(own, count, words, all, count, words, comm.raw())
    };
    check("MPI_Allgather", code)?;
    Ok(all)
}

/// By rank, the lowest rank of its host.
fn hosts(comm: &Comm, held: &Held) -> Result<Vec<usize>, Error> {
    let host = comm.host(held)?;
    let lowest = all_gather(&host, &[comm.rank as u64], held)?.into_iter().min();
    host.free(held);
    let all = all_gather(comm, &[lowest.unwrap_or(comm.rank as u64)], held)?;
    Ok(all.into_iter().map(|rank| rank as usize).collect())
}

impl Mpi {
    fn base(
        library: Library,
        comm: Comm,
        session: u64,
        hosts: Vec<usize>,
        blocking: bool,
    ) -> Result<GroupEndpoint, Error> {
        let local_ranks = hosts.iter().filter(|host| **host == hosts[comm.rank]).count();
        let (control, messages) = PolledControl::new(comm.rank, comm.size)?;
        let watchdog = blocking.then(|| Watchdog::start(comm.rank)).transpose()?;
        let mpi = Arc::new_cyclic(|own: &Weak<Mpi>| Mpi {
            comm,
            library,
            control,
            plane: Mutex::new(ControlPlane::new(comm, messages)),
            own: own.clone(),
            agreement: Mutex::new(CallAgreement::new(comm)),
            memory: Mutex::default(),
            heads: Mutex::default(),
            watchdog,
            oversubscribed: oversubscribed(local_ranks),
            hosts,
            left: AtomicBool::new(false),
        });
        leave::register(&mpi);
        Ok(GroupEndpoint::from_engine(mpi, session))
    }
}

impl Regroup for Mpi {
    fn shrink(&self, _hang: &HangTimeout, _deadline: &Deadline) -> Result<GroupEndpoint, Error> {
        let reason = "MPI's launcher ends the job when it loses a rank: restart it from its last checkpoint, or give \
                      the ranks another transport (BONFIRE_TRANSPORT)";
        Err(Error::argument("shrink", reason))
    }

    fn subgroup(&self, members: &[usize], deadline: &Deadline) -> Result<GroupEndpoint, Fault> {
        let own = self.control.invite(members)?;
        // Waits for all members here first, so that no rank waits in MPI for a missing one.
        let session = loop {
            self.pump(&hold());
            if let Some(session) = self.control.accepted(&own, deadline)? {
                break session;
            }
            std::thread::sleep(POLL_INTERVAL);
        };
        let hosts = hosts_of(members, &self.hosts);
        // MPI waits for all members. They are about to call it too, unless one has just timed out.
        let watchdog = Watchdog::start(self.comm.rank)?;
        let comm = watchdog.watch(WatchedCall::Subgroup, &Deadline::after(deadline.limit()), || {
            let held = hold();
            free_finished(&held);
            self.comm.of_members(members, session, &held)
        });
        let comm = comm?;
        Mpi::base(self.library, comm, session, hosts, self.watchdog.is_some()).map_err(Fault::Failed)
    }

    fn hosts(&self) -> Vec<usize> {
        self.hosts.clone()
    }
}
