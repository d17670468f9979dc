//! Ranks as processes of an MPI job, on MPI's own operations.
//!
//! MPI's calls wait forever for a missing rank, and may keep the memory that they are given for as long. So an
//! operation has two steps:
//! 1. All ranks agree on the call (`agreement`). Any rank may give up this step at its deadline, and in it all ranks
//!    learn whether they called the same operation. A barrier is this step and nothing more.
//! 2. MPI gets the callers' memory, and a rank stays in this step until MPI is done (`lent`). If a peer is stopped in
//!    the middle, the rank cannot wait longer than its deadline, and cannot return while MPI has the memory. So it ends
//!    the job with `MPI_Abort`.
//!
//! *Blocking* groups leave out the first step and are as fast as MPI itself. They rely on MPI to detect ranks that
//! disagree, and a watchdog ends the job when a rank waits longer than its deadline.
//!
//! # Threads
//!
//! Every call into MPI is made under one lock of the process. Non-blocking groups hold it for one poll at a time, so
//! several threads may use the groups of a rank, in any order. A blocking call holds it until it is done: operations of
//! several blocking groups must be called by one thread, in the same order on all ranks. The same holds for making
//! groups of either kind, since MPI 3.1 has no non-blocking `MPI_Comm_create_group` or `MPI_Comm_split_type`. A
//! watchdog monitors these calls too.
//!
//! # Bindings
//!
//! The bindings are `mpi-sys`, the lower half of rsmpi. rsmpi's own functions drop what MPI returns, and some do not
//! compare the lengths of the buffers that they pass on.

mod agreement;
mod comm;
mod control;
mod engine;
mod job;
mod leave;
mod lent;
mod library;
mod message;
mod types;
mod watchdog;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use mpi_sys as mpi;
use tokio::sync::mpsc::UnboundedSender;

use self::agreement::CallAgreement;
use self::comm::{Comm, Request};
use self::control::ControlPlane;
use self::engine::{EngineMemory, Run};
pub(crate) use self::job::{MpiSettings, connect};
use self::lent::LentMemory;
use self::library::{Held, Library, check, hold, try_hold};
use self::message::{Exchange, HeadBuffers};
use self::watchdog::{Watchdog, WatchedCall};
use super::{Buffers, Collectives, Neighbours, Transport};
use crate::control::{ControlRequest, GroupStatus, Watch, apply_message, find_mismatch};
use crate::sync::{Deadline, lock, spin};
use crate::types::{Call, Error, Fault, Locate, Operation, Site, Whereabouts};

/// How long a leaving rank waits until its last control messages are sent.
const LINGER: Duration = Duration::from_secs(1);

/// After this time a waiting rank checks for the first time whether its peers are gone.
const FIRST_CHECK: Duration = Duration::from_millis(1);

/// How long a waiting rank polls continuously.
const POLL_TIME: Duration = Duration::from_millis(5);

/// Time between polls after that. No event wakes the rank: MPI makes progress only in calls.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// One rank's endpoint of a group.
pub(crate) struct Mpi {
    comm: Comm,
    library: Library,
    /// By rank, the number of its host: ranks with the same number are on one host.
    hosts: Vec<usize>,
    status: GroupStatus,
    control: UnboundedSender<ControlRequest>,
    plane: Mutex<ControlPlane>,
    /// Upgraded when this rank leaves, to keep the group until all peers have left it too.
    own: Weak<Mpi>,
    /// Used in non-blocking groups only.
    agreement: Mutex<CallAgreement>,
    memory: Mutex<EngineMemory>,
    heads: Mutex<HeadBuffers>,
    /// In blocking groups only.
    watchdog: Option<Arc<Watchdog>>,
    /// Ranks have to share processors.
    oversubscribed: bool,
    left: AtomicBool,
}

impl Mpi {
    /// Sends pending control messages and handles those that have arrived.
    fn pump(&self, held: &Held) {
        let plane = &mut *lock(&self.plane);
        // Recorded, not returned: a rank in an operation may not be able to return. It checks the status where it can.
        if let Err(error) = plane.pump(held, |peer, message| apply_message(&self.status, peer, message)) {
            self.status.fail(Fault::Failed(error), 0);
        }
    }

    /// Polls `step`, in which MPI makes progress, until it returns a value. In between handles control messages and
    /// calls `idle`, which returns an error to give up, or else the time until its next call.
    fn poll<S, T>(
        &self,
        state: &mut S,
        step: impl Fn(&mut S, &Held) -> Result<Option<T>, Fault>,
        mut idle: impl FnMut(&S) -> Result<Duration, Fault>,
    ) -> Result<T, Fault> {
        let mut outcome = Ok(None);
        spin(self.oversubscribed, || {
            outcome = step(state, &hold());
            !matches!(outcome, Ok(None))
        });
        let start = Instant::now();
        let mut next_check = start + FIRST_CHECK;
        loop {
            if let Some(value) = outcome? {
                return Ok(value);
            }
            let now = Instant::now();
            if now >= next_check {
                next_check = now + idle(state)?;
            }
            // Yields first: MPI moves large data in fragments, in the calls of a waiting rank.
            if now < start + POLL_TIME {
                std::thread::yield_now();
            } else {
                std::thread::sleep(POLL_INTERVAL);
            }
            let held = hold();
            self.pump(&held);
            outcome = step(state, &held);
        }
    }

    fn watch<'a>(&'a self, tag: &'a Site, deadline: &'a Deadline) -> Watch<'a> {
        Watch::new(self.comm.rank, &self.status, &self.control, tag, deadline)
    }

    /// Handles control messages, and answers the peers that asked for this rank's call.
    fn announce(&self, site: &Site) -> Result<(), Fault> {
        self.pump(&hold());
        for peer in self.status.begin(site)? {
            let _ = self.control.send(ControlRequest::Called(peer, *site));
        }
        Ok(())
    }

    /// Waits until all ranks have begun this operation. Fails if a rank has called another one, is gone or is missing.
    fn agree(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        let tag = *site;
        let mut watch = self.watch(&tag, deadline);
        let mut first_check = true;
        let mut idle = |_: &CallAgreement| {
            self.status.failure_in(&tag).map_or(Ok(()), Err)?;
            if !std::mem::take(&mut first_check) {
                watch.tick(self.comm.rank)?;
            }
            Ok(watch.pause())
        };
        let agreement = &mut *lock(&self.agreement);
        agreement.begin(&tag, &hold())?;
        if self.poll(agreement, |agreement, held| agreement.agreed(held).map_err(Fault::Failed), &mut idle)? {
            return Ok(());
        }
        agreement.gather_calls(&hold())?;
        let tags = self.poll(agreement, |agreement, held| agreement.calls(held).map_err(Fault::Failed), &mut idle)?;
        let calls: Vec<Option<Call>> = tags.into_iter().map(|tag| tag.map(|tag| tag.call)).collect();
        let inconsistent = || Error::broken("agreeing on an operation", "the ranks are at different sequence numbers");
        Err(Fault::Failed(find_mismatch(site.sequence, &calls).unwrap_or_else(inconsistent)))
    }

    /// Runs an MPI function on the caller's memory. `function` calls the blocking form, or, given the address of a
    /// request, the non-blocking one.
    fn call(
        &self,
        name: &str,
        site: &Site,
        deadline: &Deadline,
        function: impl FnOnce(Option<*mut mpi::MPI_Request>) -> i32,
    ) -> Result<(), Fault> {
        if let Some(watchdog) = &self.watchdog {
            let _held = hold();
            let code = watchdog.watch(WatchedCall::Operation(*site), deadline, || function(None));
            return check(name, code).map_err(Fault::Failed);
        }
        let lent = LentMemory::begin(self, site, deadline);
        let begin = |_held: Held| Request::start(name, |request| function(Some(request)));
        let mut request = begin(hold())?;
        let done = |request: &mut Request, held: &Held| request.done(held).map_err(Fault::Failed);
        let done = self.poll(&mut request, done, |_| Ok(lent.check()));
        lent.finish(done.map(drop))
    }

    fn transfer(
        &self,
        tag: &Site,
        outgoing: Option<(usize, &[u8])>,
        incoming: Option<(usize, &mut [u8])>,
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        let site = Site { call: tag.call, sequence: tag.sequence };
        let mut watch = self.watch(tag, deadline);
        let heads = &mut *lock(&self.heads);
        let exchange = Exchange::begin((self, &site, deadline), tag, outgoing, incoming, heads, &hold());
        let mut exchange = exchange?;
        let mut first_check = true;
        let moved = self.poll(
            &mut exchange,
            |exchange, held| Ok(exchange.advance(held)?.then_some(())),
            |exchange| {
                if let Some(lent) = exchange.lent() {
                    return Ok(lent.check());
                }
                // Not in the first check: a message that a peer sent before it left may still be in flight.
                if !std::mem::take(&mut first_check) {
                    let peer = exchange.peer();
                    self.status.absence_in(peer, tag).map_or(Ok(()), Err)?;
                    watch.tick(peer)?;
                }
                Ok(watch.pause())
            },
        );
        if moved.is_err() && exchange.lent().is_some() {
            // One direction has failed, and MPI still has the memory of the other.
            let settled = |exchange: &mut Exchange<'_>, held: &Held| Ok(exchange.settle(held)?.then_some(()));
            let check = |exchange: &Exchange<'_>| Ok(exchange.lent().map_or(FIRST_CHECK, LentMemory::check));
            self.poll(&mut exchange, settled, check)?;
        }
        moved
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.comm.rank
    }

    fn world_size(&self) -> usize {
        self.comm.size
    }

    fn send(&self, tag: &Site, to: usize, bytes: &[u8], deadline: &Deadline) -> Result<(), Fault> {
        self.status.absence_in(to, tag).map_or(Ok(()), Err)?;
        self.transfer(tag, Some((to, bytes)), None, deadline)
    }

    fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
        self.transfer(tag, None, Some((from, bytes)), deadline)
    }

    fn exchange(
        &self,
        tag: &Site,
        outgoing: (usize, &[u8]),
        incoming: (usize, &mut [u8]),
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        self.transfer(tag, Some(outgoing), Some(incoming), deadline)
    }

    fn begin(&self, site: &Site) -> Result<(), Fault> {
        if self.watchdog.is_some() {
            return self.status.failure().map_or(Ok(()), |(fault, _)| Err(fault));
        }
        self.announce(site)
    }

    fn known_failure(&self) -> Option<Fault> {
        self.status.known_failure()
    }

    fn leave(&self) {
        self.send_goodbye();
    }

    fn fail(&self, error: &Error, completed: u64) {
        self.status.fail(Fault::Failed(error.clone()), completed);
        let _ = self.control.send(ControlRequest::Failed(error.clone(), completed));
        if let Some(held) = try_hold(LINGER).filter(library::is_up) {
            self.pump(&held);
        }
    }
}

impl Neighbours for Mpi {
    fn locate_by(&self, own: Arc<dyn Locate>) {
        self.status.locate_by(own);
    }

    fn whereabouts(&self, ranks: &[usize]) -> Vec<(usize, Whereabouts)> {
        self.status.whereabouts(ranks)
    }
}

impl Collectives for Mpi {
    fn run(&self, site: &Site, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        engine::fits(&site.call, buffers, self.comm.rank, self.comm.size)?;
        if self.watchdog.is_none() {
            self.agree(site, deadline)?;
            if site.call.operation == Operation::Barrier {
                return Ok(());
            }
        }
        Run { mpi: self, site, deadline }.run(&mut lock(&self.memory), buffers)
    }

    fn supports(&self, call: &Call) -> bool {
        engine::supports(call)
    }

    fn agree_before_plan(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        // A plan in a blocking group waits as on other transports, and must answer peers that ask for its call.
        if self.watchdog.is_none() { self.agree(site, deadline) } else { self.announce(site) }
    }

    fn blocks_process(&self) -> bool {
        self.watchdog.is_some()
    }
}
