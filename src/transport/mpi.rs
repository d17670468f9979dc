//! Ranks as processes of an MPI job, on MPI's own operations.
//!
//! MPI's calls wait for ever where a rank does not come, and what they are given they may keep for as long. So an operation
//! has two steps here: all ranks meet (`arrival`), which any of them may give up at its deadline and where all learn whether
//! they call the same; then MPI gets the callers' memory, and whoever is in that step stays until it is done. A rank that
//! is stopped in the middle of it cannot be waited for any longer than the deadline, and neither can it be left alone with
//! the memory: the job ends with `MPI_Abort`.
//!
//! *Blocking* groups leave the first step out, which is as fast as MPI itself is: ranks that disagree are MPI's to find, and
//! whoever waits longer than its deadline ends the job, by a watchdog.

mod arrival;
mod comm;
mod control;
mod engine;
mod library;
mod message;
mod types;
mod watchdog;

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use mpi_sys as mpi;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use self::arrival::Arrival;
use self::comm::{Comm, Request};
use self::control::Plane;
use self::engine::{Memory, Run};
use self::library::{Held, Library, abort, check, hold, try_hold};
use self::message::{Exchange, Post};
use self::watchdog::Watchdog;
use super::invitation::{Door, Invitation, session};
use super::tcp::{Board, Outgoing, Watch, hear, verdict};
use super::{Base, Buffers, Collectives, Fault, Near, Regroup, Transport};
use crate::call::{Call, Operation, Tag};
use crate::error::{Error, Site};
use crate::random;
use crate::wait::{Deadline, crowded, lock, spin};

/// How long a rank that leaves waits until its last words are on their way.
const LINGER: Duration = Duration::from_secs(1);

/// How long a process that ends waits for the others to leave their groups, too.
const PATIENCE: Duration = Duration::from_secs(5);

/// When a rank that waits first looks whether those that it waits for are gone.
const SOON: Duration = Duration::from_millis(1);

/// How long a rank that waits looks all the time.
const AWAKE: Duration = Duration::from_millis(5);

/// How long one that has waited for longer lets others run before it looks again. Nothing wakes it: MPI moves only when it is called.
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

/// What the ranks of a job agree on when they make their group.
pub(crate) struct Terms<'a> {
    pub blocking: bool,
    /// Which algorithms the group chooses, as text: the same on all ranks.
    pub algorithms: &'a str,
    /// How long all ranks may take to come.
    pub limit: Duration,
}

/// A group of all processes of the job; all of them call this. MPI says who they are.
pub(crate) fn connect(terms: &Terms<'_>) -> Result<Base, Error> {
    let held = hold();
    let library = library::start(&held, finalize)?;
    sweep(&held);
    let world = Comm::world(&held)?;
    drop(held);
    let comm = duplicate(&world, terms.limit)?;
    let held = hold();
    let own = [random::number(), u64::from(terms.blocking), fingerprint(terms.algorithms)];
    let all = all_gather(&comm, &own, &held)?;
    if let Some(rank) = (0..comm.size).find(|rank| all[3 * rank + 1..3 * rank + 3] != own[1..]) {
        let reason = format!(
            "rank {rank} has other algorithms than rank {}, or one of them blocks in MPI and the other does not: give all \
             the same BONFIRE_ALGORITHMS and BONFIRE_TRANSPORT",
            comm.rank
        );
        return Err(Error::Config(reason));
    }
    let hosts = hosts(&comm, &held)?;
    drop(held);
    log::info!("rank {} of {} by MPI", comm.rank, comm.size);
    Mpi::base(library, comm, all[0], hosts, terms.blocking)
}

/// A communicator of a group's own, so that its messages are no other's.
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
            let reason = "not all ranks have come: every process that the launcher started makes the group, as often as \
                          the others do";
            return Err(Error::Rendezvous {
                rank: world.rank,
                address: "MPI".into(),
                reason: reason.into(),
                elapsed: start.elapsed(),
            });
        }
        std::thread::sleep(NAP);
    }
}

/// Every rank's words, in order; all of them call it with as many.
fn all_gather(comm: &Comm, own: &[u64], _held: &Held) -> Result<Vec<u64>, Error> {
    let mut all = vec![0; own.len() * comm.size];
    let count = comm::count(own.len())?;
    // SAFETY: there are so many words of each rank, and room for all of them.
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

/// FNV-1a: Fowler, Noll and Vo.
fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

impl Mpi {
    fn base(library: Library, comm: Comm, session: u64, hosts: Vec<usize>, blocking: bool) -> Result<Base, Error> {
        let (control, outgoing) = unbounded_channel();
        let here = hosts.iter().filter(|host| **host == hosts[comm.rank]).count();
        let board = Board::new(comm.size).map_err(|e| Error::io("creating a socket pair", e))?;
        let watchdog = blocking.then(|| Watchdog::start(comm.rank)).transpose()?;
        let mpi = Arc::new_cyclic(|own: &Weak<Mpi>| Mpi {
            comm,
            library,
            board,
            control,
            plane: Mutex::new(Plane::new(comm, outgoing)),
            own: own.clone(),
            arrival: Mutex::new(Arrival::new(comm)),
            memory: Mutex::default(),
            post: Mutex::default(),
            watchdog,
            last: Mutex::new(None),
            crowded: crowded(here),
            hosts,
            left: AtomicBool::new(false),
        });
        Ok(Base {
            transport: mpi.clone(),
            near: Near::Everybody(mpi.clone()),
            session: Some(session),
            regroup: Some(mpi),
        })
    }

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

    fn watch<'a>(&'a self, tag: &'a Tag, deadline: &'a Deadline) -> Watch<'a> {
        Watch::new(self.comm.rank, &self.board, &self.control, tag, deadline)
    }

    /// Waits until all ranks are in this operation, and no other.
    fn arrive(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        let tag = Tag { group: 0, sequence: site.sequence, call: site.call };
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
        let apart = || Error::io("meeting at an operation", "the ranks are not at the same number of it");
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
            return check(name, watchdog.watch(site, deadline, || function(None))).map_err(Fault::Failed);
        }
        let begin = |_held: Held| Request::start(name, |request| function(Some(request)));
        let mut request = begin(hold()).map_err(Fault::Failed)?;
        let done = |request: &mut Request, held: &Held| request.done(held).map_err(Fault::Failed);
        self.until(&mut request, done, |_| Ok(self.lent(site, deadline))).map(drop)
    }

    /// How long to wait on while MPI has the caller's memory. At the deadline there is no way out.
    fn lent(&self, site: &Site, deadline: &Deadline) -> Duration {
        if deadline.passed() {
            let elapsed = deadline.elapsed();
            abort(self.comm.rank, &format!("{site} stands still after {elapsed:.1?}, when MPI has the ranks' memory"));
        }
        deadline.remaining()
    }

    fn transfer(
        &self,
        tag: &Tag,
        outgoing: Option<(usize, &[u8])>,
        incoming: Option<(usize, &mut [u8])>,
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        let site = Site { call: tag.call, sequence: tag.sequence };
        let mut watch = self.watch(tag, deadline);
        let post = &mut *lock(&self.post);
        let exchange = Exchange::begin(self.comm, tag, outgoing, incoming, post, &hold());
        let mut exchange = exchange.map_err(Fault::Failed)?;
        let mut early = true;
        let moved = self.until(
            &mut exchange,
            |exchange, held| Ok(exchange.advance(held)?.then_some(())),
            |exchange| {
                if exchange.lends() {
                    return Ok(self.lent(&site, deadline));
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
        if moved.is_err() && exchange.lends() {
            // One direction has failed, and MPI has the memory of the other.
            let settled = |exchange: &mut Exchange<'_>, held: &Held| Ok(exchange.settle(held)?.then_some(()));
            if let Err(fault) = self.until(&mut exchange, settled, |_| Ok(self.lent(&site, deadline))) {
                abort(self.comm.rank, &format!("{site}: {fault:?}, when MPI has the ranks' memory"));
            }
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

    fn send(&self, tag: &Tag, to: usize, bytes: &[u8], deadline: &Deadline) -> Result<(), Fault> {
        self.board.absence_in(to, tag).map_or(Ok(()), Err)?;
        self.transfer(tag, Some((to, bytes)), None, deadline)
    }

    fn receive(&self, tag: &Tag, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
        self.transfer(tag, None, Some((from, bytes)), deadline)
    }

    fn exchange(
        &self,
        tag: &Tag,
        outgoing: (usize, &[u8]),
        incoming: (usize, &mut [u8]),
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        self.transfer(tag, Some(outgoing), Some(incoming), deadline)
    }

    fn begin(&self, site: &Site) -> Result<(), Fault> {
        if self.watchdog.is_some() {
            return Ok(());
        }
        self.pump(&hold());
        let asked = self.board.begin(site)?;
        *lock(&self.last) = Some(*site);
        for peer in asked {
            let _ = self.control.send(Outgoing::Called(peer, *site));
        }
        Ok(())
    }

    fn fail(&self, error: &Error, completed: u64) {
        self.board.fail(Fault::Failed(error.clone()), completed);
        let _ = self.control.send(Outgoing::Failed(error.clone(), completed));
        if let Some(held) = try_hold(LINGER) {
            self.pump(&held);
        }
    }

    fn leave(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        // As in `fail`, for a cause that came between two operations.
        if let Some((Fault::Failed(error), completed)) = self.board.failure() {
            let _ = self.control.send(Outgoing::Failed(error, completed));
        }
        // So that who is still in it does not take this rank for missing there.
        if let Some(site) = *lock(&self.last) {
            let others = (0..self.comm.size).filter(|peer| *peer != self.comm.rank);
            others.for_each(|peer| drop(self.control.send(Outgoing::Called(peer, site))));
        }
        let _ = self.control.send(Outgoing::Farewell { panicked: std::thread::panicking() });
        let until = Instant::now() + LINGER;
        loop {
            // Without a turn, another thread of this rank is in a call that does not return.
            let Some(held) = try_hold(until.saturating_duration_since(Instant::now())) else { return };
            self.pump(&held);
            if lock(&self.plane).sent(&held).unwrap_or(true) || Instant::now() >= until {
                break;
            }
            drop(held);
            std::thread::sleep(NAP);
        }
        lock(&LEFT).extend(self.own.upgrade());
    }
}

impl Collectives for Mpi {
    fn run(&self, site: &Site, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
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
        if self.watchdog.is_none() { self.arrive(site, deadline) } else { Ok(()) }
    }
}

impl Regroup for Mpi {
    fn shrink(&self, _deadline: &Deadline) -> Result<Base, Error> {
        let reason = "MPI's launcher ends the job when it loses a rank: restart it from its last checkpoint, or give the                       ranks another transport (BONFIRE_TRANSPORT)";
        Err(Error::argument("shrink", reason))
    }

    fn subgroup(&self, members: &[usize], deadline: &Deadline) -> Result<Base, Fault> {
        let own = Invitation { members: members.to_vec(), door: Door { port: 0, key: random::number() } };
        for member in members.iter().filter(|member| **member != self.comm.rank) {
            let _ = self.control.send(Outgoing::Invites(*member, own.clone()));
        }
        // So that nobody waits in MPI for a member that does not come.
        let doors = loop {
            self.pump(&hold());
            match self.board.assemble(self.comm.rank, &own, &Deadline::after(Duration::ZERO)) {
                Err(Fault::Timeout { .. }) if !deadline.passed() => std::thread::sleep(NAP),
                doors => break doors?,
            }
        };
        let session = session(doors);
        let hosts = members.iter().map(|member| {
            let here = |other: &usize| self.hosts[*other] == self.hosts[*member];
            members.iter().position(here).unwrap_or(0)
        });
        let held = hold();
        sweep(&held);
        let comm = self.comm.of_members(members, session, &held).map_err(Fault::Failed)?;
        drop(held);
        Mpi::base(self.library, comm, session, hosts.collect(), self.watchdog.is_some()).map_err(Fault::Failed)
    }

    fn hosts(&self) -> Vec<usize> {
        self.hosts.clone()
    }
}

/// Groups that this rank has left, where other ranks may not have: their communicators are kept until nothing can come there any
/// more, since the next one may get the same number.
static LEFT: Mutex<Vec<Arc<Mpi>>> = Mutex::new(Vec::new());

/// Ends the groups that all ranks have left; whether there are no others.
fn sweep(held: &Held) -> bool {
    let mut left = lock(&LEFT);
    left.retain(|group| match group.over(held) {
        Ok(over) => !over,
        Err(error) => {
            log::warn!("in a group that this rank has left: {error}");
            false
        }
    });
    left.is_empty()
}

impl Mpi {
    /// Whether all ranks have left and nothing is on its way; then the communicator is gone.
    fn over(&self, held: &Held) -> Result<bool, Error> {
        self.pump(held);
        let plane = &mut *lock(&self.plane);
        let Some(begun) = plane.over() else { return Ok(false) };
        // Who left for a signal may be in an operation still, and waits for the turn that this thread has.
        let Ok(mut arrival) = self.arrival.try_lock() else { return Ok(false) };
        arrival.join(begun, held)?;
        let over = arrival.done(held)? && plane.sent(held)?;
        if over {
            self.comm.free(held);
        }
        Ok(over)
    }
}

/// Ends MPI with the process, as it wants to be, once nothing is on its way any more; unless that cannot be done.
extern "C" fn finalize() {
    let Some(held) = try_hold(LINGER) else { return };
    let until = Instant::now() + PATIENCE;
    while !sweep(&held) && Instant::now() < until {
        std::thread::sleep(NAP);
    }
    // What is still pending is given up here.
    lock(&LEFT).clear();
    library::end(&held);
}
