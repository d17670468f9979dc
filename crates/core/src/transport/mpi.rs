//! Ranks as processes of an MPI job, on MPI's own operations.
//!
//! MPI's calls wait for ever where a rank does not come, and what they are given they may keep for as long. So an operation
//! has two steps here: all ranks meet (`arrival`), which any of them may give up at its deadline and where all learn whether
//! they call the same; then MPI gets the callers' memory, and whoever is in that step stays until it is done (`lent`): a
//! rank that is stopped in the middle of it cannot be waited for any longer than the deadline, and neither can it be left
//! alone with the memory, so the job ends with `MPI_Abort`.
//!
//! *Blocking* groups leave the first step out, which is as fast as MPI itself is: ranks that disagree are MPI's to find, and
//! whoever waits longer than its deadline ends the job, by a watchdog.

mod arrival;
mod comm;
mod control;
mod engine;
mod farewell;
mod job;
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

use self::arrival::Arrival;
use self::comm::{Comm, Request};
use self::control::Plane;
use self::engine::{Memory, Run};
pub(crate) use self::job::{Terms, connect};
use self::lent::Lent;
use self::library::{Held, Library, check, hold, try_hold};
use self::message::{Exchange, Post};
use self::watchdog::{Watchdog, Work};
use super::{Buffers, Collectives, Transport};
use crate::control::{Board, Outgoing, Watch, hear, verdict};
use crate::sync::{Deadline, lock, spin};
use crate::types::{Call, Error, Fault, Operation, Site};

/// How long a rank that leaves waits until its last words are on their way.
const LINGER: Duration = Duration::from_secs(1);

/// When a rank that waits first looks whether those that it waits for are gone.
const SOON: Duration = Duration::from_millis(1);

/// How long a rank that waits looks all the time.
const AWAKE: Duration = Duration::from_millis(5);

/// How long one that has waited for longer lets others run before it looks again. Nothing wakes it: MPI moves only when it
/// is called.
const NAP: Duration = Duration::from_micros(50);

/// A group's end on one rank.
pub(crate) struct Mpi {
    comm: Comm,
    library: Library,
    /// By rank: ranks with the same number are on one host.
    hosts: Vec<usize>,
    board: Board,
    control: UnboundedSender<Outgoing>,
    plane: Mutex<Plane>,
    /// What keeps the group until the others have left it, too.
    own: Weak<Mpi>,
    /// Only in groups that do not block.
    arrival: Mutex<Arrival>,
    memory: Mutex<Memory>,
    post: Mutex<Post>,
    /// Only in groups that block.
    watchdog: Option<Arc<Watchdog>>,
    /// The collective that this rank began last.
    last: Mutex<Option<Site>>,
    /// Ranks have to share processors.
    crowded: bool,
    left: AtomicBool,
}

impl Mpi {
    /// Says what this rank has to say, and hears what the others do.
    fn pump(&self, held: &Held) {
        let plane = &mut *lock(&self.plane);
        // Who is in an operation may not be able to return, and looks at the board where it can.
        if let Err(error) = plane.pump(held, |peer, message| hear(&self.board, peer, message)) {
            self.board.fail(Fault::Failed(error), 0);
        }
    }

    /// Asks `step` until it gives something, so that MPI moves on. In between it hears the others, and asks `idle` whether to
    /// go on, and how long until it asks again.
    fn until<S, T>(
        &self,
        state: &mut S,
        step: impl Fn(&mut S, &Held) -> Result<Option<T>, Fault>,
        mut idle: impl FnMut(&S) -> Result<Duration, Fault>,
    ) -> Result<T, Fault> {
        let mut outcome = Ok(None);
        spin(self.crowded, || {
            outcome = step(state, &hold());
            !matches!(outcome, Ok(None))
        });
        let start = Instant::now();
        let mut look = start + SOON;
        loop {
            if let Some(value) = outcome? {
                return Ok(value);
            }
            let now = Instant::now();
            if now >= look {
                look = now + idle(state)?;
            }
            // MPI copies what is large piece by piece, in the calls of whoever waits.
            if now < start + AWAKE {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
            let held = hold();
            self.pump(&held);
            outcome = step(state, &held);
        }
    }

    fn watch<'a>(&'a self, tag: &'a Site, deadline: &'a Deadline) -> Watch<'a> {
        Watch::new(self.comm.rank, &self.board, &self.control, tag, deadline)
    }

    /// Hears the others, and tells those that asked that this rank has come to this operation.
    fn announce(&self, site: &Site) -> Result<(), Fault> {
        self.pump(&hold());
        for peer in self.board.begin(site)? {
            let _ = self.control.send(Outgoing::Called(peer, *site));
        }
        Ok(())
    }

    /// Waits until all ranks are in this operation, and no other.
    fn arrive(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        let tag = *site;
        let mut watch = self.watch(&tag, deadline);
        let mut early = true;
        let mut idle = |_: &Arrival| {
            // Who has gone may have come to this operation before.
            let calls = self.board.calls(self.comm.rank, tag.sequence, tag.call);
            let mut silent = (0..self.comm.size).filter(|peer| calls[*peer].is_none());
            silent.find_map(|peer| self.board.absence_in(peer, &tag)).map_or(Ok(()), Err)?;
            if !std::mem::take(&mut early) {
                watch.tick(self.comm.rank)?;
            }
            Ok(watch.pause())
        };
        let arrival = &mut *lock(&self.arrival);
        arrival.begin(&tag, &hold()).map_err(Fault::Failed)?;
        if self.until(arrival, |arrival, held| arrival.met(held).map_err(Fault::Failed), &mut idle)? {
            return Ok(());
        }
        arrival.ask(&hold()).map_err(Fault::Failed)?;
        let tags = self.until(arrival, |arrival, held| arrival.answers(held).map_err(Fault::Failed), &mut idle)?;
        let calls: Vec<Option<Call>> = tags.into_iter().map(|tag| tag.map(|tag| tag.call)).collect();
        let apart = || Error::broken("meeting at an operation", "the ranks are not at the same number of it");
        Err(Fault::Failed(verdict(site.sequence, &calls).unwrap_or_else(apart)))
    }

    /// Calls a function of MPI, which does and returns when it is done, or, given a place for a request, begins.
    fn call(
        &self,
        name: &str,
        site: &Site,
        deadline: &Deadline,
        function: impl FnOnce(Option<*mut mpi::MPI_Request>) -> i32,
    ) -> Result<(), Fault> {
        if let Some(watchdog) = &self.watchdog {
            let _held = hold();
            let code = watchdog.watch(Work::Operation(*site), deadline, || function(None));
            return check(name, code).map_err(Fault::Failed);
        }
        let lent = Lent::begin(self, site, deadline);
        let begin = |_held: Held| Request::start(name, |request| function(Some(request)));
        let mut request = begin(hold()).map_err(Fault::Failed)?;
        let done = |request: &mut Request, held: &Held| request.done(held).map_err(Fault::Failed);
        let done = self.until(&mut request, done, |_| Ok(lent.look()));
        lent.end(done.map(drop))
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
        let post = &mut *lock(&self.post);
        let exchange = Exchange::begin((self, &site, deadline), tag, outgoing, incoming, post, &hold());
        let mut exchange = exchange.map_err(Fault::Failed)?;
        let mut early = true;
        let moved = self.until(
            &mut exchange,
            |exchange, held| Ok(exchange.advance(held)?.then_some(())),
            |exchange| {
                if let Some(lent) = exchange.lent() {
                    return Ok(lent.look());
                }
                // What a peer has sent before it left is on its way.
                if !std::mem::take(&mut early) {
                    let peer = exchange.peer();
                    self.board.absence_in(peer, tag).map_or(Ok(()), Err)?;
                    watch.tick(peer)?;
                }
                Ok(watch.pause())
            },
        );
        if moved.is_err() && exchange.lent().is_some() {
            // One direction has failed, and MPI has the memory of the other.
            let settled = |exchange: &mut Exchange<'_>, held: &Held| Ok(exchange.settle(held)?.then_some(()));
            let look = |exchange: &Exchange<'_>| Ok(exchange.lent().map_or(SOON, Lent::look));
            self.until(&mut exchange, settled, look)?;
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
        self.board.absence_in(to, tag).map_or(Ok(()), Err)?;
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
            return self.board.failure().map_or(Ok(()), |(fault, _)| Err(fault));
        }
        self.announce(site)?;
        *lock(&self.last) = Some(*site);
        Ok(())
    }

    fn trouble(&self) -> Option<Fault> {
        self.board.trouble()
    }

    fn leave(&self) {
        self.say_farewell();
    }

    fn fail(&self, error: &Error, completed: u64) {
        self.board.fail(Fault::Failed(error.clone()), completed);
        let _ = self.control.send(Outgoing::Failed(error.clone(), completed));
        if let Some(held) = try_hold(LINGER).filter(library::is_up) {
            self.pump(&held);
        }
    }
}

impl Collectives for Mpi {
    fn run(&self, site: &Site, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        engine::fits(&site.call, buffers, self.comm.rank, self.comm.size).map_err(Fault::Failed)?;
        if self.watchdog.is_none() {
            self.arrive(site, deadline)?;
            if site.call.operation == Operation::Barrier {
                return Ok(());
            }
        }
        Run { mpi: self, site, deadline }.run(&mut lock(&self.memory), buffers)
    }

    fn serves(&self, call: &Call) -> bool {
        engine::serves(call)
    }

    fn stand_aside(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        // A plan waits as other transports do, and is asked what it waits for.
        if self.watchdog.is_none() { self.arrive(site, deadline) } else { self.announce(site) }
    }
}
