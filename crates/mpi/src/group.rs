//! One rank's endpoint of a group: the seams of the core, on MPI.

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

use bonfire_core::error::{Site, Whereabouts};
use bonfire_core::internal::{Buffers, Collectives, Locate, Neighbours, PolledControl, lock, spin};
use bonfire_core::{Call, Deadline, Error, Fault, Operation, Transport};
use mpi_sys as mpi;

use self::agreement::CallAgreement;
use self::comm::{Comm, Request};
use self::control::ControlPlane;
use self::engine::{EngineMemory, Run};
pub(crate) use self::job::connect;
use self::lent::LentMemory;
use self::library::{Held, Library, check, hold, try_hold};
use self::message::{Exchange, HeadBuffers};
use self::watchdog::{Watchdog, WatchedCall};

/// How long a leaving rank waits until its last control messages are sent.
const LINGER: Duration = Duration::from_secs(1);

/// After this time a waiting rank checks for the first time whether its peers are gone.
const FIRST_CHECK: Duration = Duration::from_millis(1);

/// How long a waiting rank polls continuously.
const POLL_TIME: Duration = Duration::from_millis(5);

/// Time between polls after that. No event wakes the rank: MPI makes progress only in calls.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// One rank's endpoint of a group.
struct Mpi {
    comm: Comm,
    library: Library,
    /// By rank, the number of its host: ranks with the same number are on one host.
    hosts: Vec<usize>,
    control: PolledControl,
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
        // Recorded, not returned: a rank in an operation may not be able to return. It checks for it where it can.
        if let Err(error) = plane.pump(&self.control, held) {
            self.control.record_failure(error);
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

    /// Handles control messages, and answers the peers that asked for this rank's call.
    fn announce(&self, site: &Site) -> Result<(), Fault> {
        self.pump(&hold());
        self.control.begin(site)
    }

    /// Waits until all ranks have begun this operation. Fails if a rank has called another one, is gone or is missing.
    fn agree(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        let mut watch = self.control.watch(site, deadline);
        let mut first_check = true;
        let mut idle = |_: &CallAgreement| {
            self.control.failure_in(site).map_or(Ok(()), Err)?;
            if !std::mem::take(&mut first_check) {
                watch.tick(self.comm.rank)?;
            }
            Ok(watch.pause())
        };
        let agreement = &mut *lock(&self.agreement);
        agreement.begin(site, &hold())?;
        if self.poll(agreement, |agreement, held| agreement.agreed(held).map_err(Fault::Failed), &mut idle)? {
            // A peer may have given up before this rank began: MPI completes its agreement in any later call of that
            // peer. The peer takes no part in the operation, from which this rank could not return. The message of the
            // peer's failure came before.
            self.pump(&hold());
            return self.control.failure_in(site).map_or(Ok(()), Err);
        }
        agreement.gather_calls(&hold())?;
        let tags = self.poll(agreement, |agreement, held| agreement.calls(held).map_err(Fault::Failed), &mut idle)?;
        let calls: Vec<Option<Call>> = tags.into_iter().map(|tag| tag.map(|tag| tag.call)).collect();
        Err(Fault::Failed(PolledControl::mismatch(site.sequence, &calls)))
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
        let mut watch = self.control.watch(tag, deadline);
        let heads = &mut *lock(&self.heads);
        let exchange = Exchange::begin((self, tag, deadline), outgoing, incoming, heads, &hold());
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
                    self.control.absence_in(peer, tag).map_or(Ok(()), Err)?;
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
        self.control.absence_in(to, tag).map_or(Ok(()), Err)?;
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
            return self.control.failure().map_or(Ok(()), Err);
        }
        self.announce(site)
    }

    fn known_failure(&self) -> Option<Fault> {
        self.control.known_failure()
    }

    fn leave(&self) {
        self.send_goodbye();
    }

    fn fail(&self, error: &Error, completed: u64) {
        self.control.fail(error, completed);
        if let Some(held) = try_hold(LINGER).filter(library::is_up) {
            self.pump(&held);
        }
    }
}

impl Neighbours for Mpi {
    fn locate_by(&self, own: Arc<dyn Locate>) {
        self.control.locate_by(own);
    }

    fn whereabouts(&self, ranks: &[usize]) -> Vec<(usize, Whereabouts)> {
        self.control.whereabouts(ranks)
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
