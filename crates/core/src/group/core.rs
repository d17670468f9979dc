//! The path of every operation through its group, and what a failure does to the group.
//!
//! # Limits
//! A rank that arrives in an operation at the moment in which the others time out may complete it, and learns of the
//! failure at its next call. Only a commit round could close this gap.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::execute::{Executor, Task};
use super::journal::{Journal, Operations, Waiting};
use super::record::CallSite;
use super::turn::{TicketLock, Turn};
use super::workspace::Workspace;
use crate::plan::Selection;
use crate::sync::{Deadline, Mutex, lock};
use crate::transport::{GroupEndpoint, Neighbours, Regroup};
use crate::types::{Call, Error, Fault, Locate, Places, Site, Whereabouts, asked};

/// State shared by the handles and the started operations of a group.
pub struct Core {
    pub(super) executor: Executor,
    pub(super) queue: TicketLock,
    workspace: Mutex<Workspace>,
    /// Collectives that this rank has completed. Only the owner of the turn writes it.
    completed: AtomicU64,
    failure: OnceLock<Error>,
    /// See `AgreedOperations::rewinds`. Only the outermost group counts.
    pub(super) rewinds: AtomicU64,
    /// See `AgreedOperations::saves`.
    pub(super) saves: AtomicU64,
    /// A number that all ranks of the group share, different from every other group's, if there is one.
    pub(super) session: Option<u64>,
    pub(super) regroup: Option<Arc<dyn Regroup>>,
    /// Whether [`Group::shrink`](crate::Group::shrink) was called on this group.
    pub(super) shrunk: AtomicBool,
    pub(super) operations: Arc<Operations>,
    /// What this rank is in, over this group and those around it.
    pub(super) journal: Arc<Journal>,
    neighbours: Option<Arc<dyn Neighbours>>,
    /// Whether this rank's trace was written to the folder `BONFIRE_TRACE`.
    pub(super) trace_saved: Mutex<bool>,
}

impl Core {
    /// The state of a new group. `around` is the journal of the group that it was made of, if there is one.
    pub(super) fn new(base: GroupEndpoint, algorithms: Selection, around: Option<&Arc<Journal>>) -> Core {
        let GroupEndpoint { transport, engines, session, regroup, neighbours } = base;
        let operations = Arc::new(Operations::new());
        let journal = around.cloned().unwrap_or_else(|| Journal::new(session));
        journal.add(&operations);
        neighbours.iter().for_each(|neighbours| neighbours.locate_by(journal.clone()));
        Core {
            workspace: Mutex::new(Workspace::new(transport.world_size())),
            completed: AtomicU64::new(0),
            executor: Executor { transport, engines, algorithms },
            queue: TicketLock::default(),
            failure: OnceLock::new(),
            rewinds: AtomicU64::new(0),
            saves: AtomicU64::new(0),
            session,
            regroup,
            shrunk: AtomicBool::new(false),
            operations,
            journal,
            neighbours,
            trace_saved: Mutex::new(false),
        }
    }

    #[inline]
    pub(super) fn rank(&self) -> usize {
        self.executor.transport.rank()
    }

    #[inline]
    pub(super) fn world_size(&self) -> usize {
        self.executor.transport.world_size()
    }

    /// Returns the error that poisoned the group, if any.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Waits until it is this call's turn. If the deadline passes first, the group is poisoned: the other ranks make
    /// this call, and this rank will not.
    #[inline]
    pub(super) fn turn(&self, call: Call, deadline: &Deadline) -> Result<Turn<'_>, Error> {
        self.queue.turn(deadline).ok_or_else(|| self.miss_turn(call, deadline))
    }

    /// Poisons the group because the deadline of a call passed before its turn came. Interrupts the operation whose
    /// turn it is.
    #[cold]
    pub(super) fn miss_turn(&self, call: Call, deadline: &Deadline) -> Error {
        // The first operation that this rank has not completed.
        let site = Site { call, sequence: self.completed.load(Ordering::Relaxed) };
        let (rank, elapsed) = (self.rank(), deadline.elapsed());
        self.poison(Error::Timeout { site, rank, missing: Vec::new(), elapsed, whereabouts: Box::default() })
    }

    /// Runs an operation whose turn it is. Returns its sequence number.
    #[inline]
    pub(super) fn run(
        &self,
        turn: &Turn<'_>,
        call: Call,
        task: Task<'_>,
        deadline: &Deadline,
        at: CallSite,
    ) -> Result<u64, Error> {
        self.run_for(turn, None, call, task, deadline, at)
    }

    /// As [`run`](Self::run), for a step of the operation `outer`, which errors name instead.
    #[inline]
    pub(super) fn run_for(
        &self,
        turn: &Turn<'_>,
        outer: Option<Call>,
        call: Call,
        task: Task<'_>,
        deadline: &Deadline,
        at: CallSite,
    ) -> Result<u64, Error> {
        let message = task.message();
        let operate = |workspace: &mut Workspace, site: &Site| {
            self.executor.run(workspace, site, task, deadline).map(|()| site.sequence)
        };
        self.enter(turn, outer, call, message, deadline, at, operate)
    }

    /// Numbers and records an operation whose turn it is, runs `operate`, and poisons the group after a fault.
    /// `message` is the peer and whether this rank sends.
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "all that an operation consists of, passed on by two functions")]
    pub(super) fn enter<T>(
        &self,
        turn: &Turn<'_>,
        outer: Option<Call>,
        call: Call,
        message: Option<(usize, bool)>,
        deadline: &Deadline,
        at: CallSite,
        operate: impl FnOnce(&mut Workspace, &Site) -> Result<T, Fault>,
    ) -> Result<T, Error> {
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        let mut workspace = lock(&self.workspace);
        let site = Site { call, sequence: workspace.number(call.operation, message) };
        let entry = self.operations.recorder.begin(&call, site.sequence, message, at, turn.begin(deadline));
        // From here on the peers count on this rank, so a panic must reach them too.
        let unwinding = Unwinding { core: self, site: &site };
        let result = operate(&mut workspace, &site);
        std::mem::forget(unwinding);
        match result {
            Ok(result) => {
                self.completed.store(workspace.sequence, Ordering::Relaxed);
                self.operations.recorder.done(entry);
                Ok(result)
            }
            Err(fault) => {
                // The rank is still there, for what error and trace say of it.
                let _here = Waiting::begin(&self.operations);
                // Before the trace is written.
                self.operations.recorder.failed(entry);
                // A mismatch names the calls that were compared.
                let outer = outer.filter(|_| !matches!(fault, Fault::Unexpected { .. }));
                let named = outer.unwrap_or(call);
                Err(self.poison(self.error(Site { call: named, ..site }, fault, deadline)))
            }
        }
    }

    /// Poisons the group because this rank cannot take part in the operation whose turn it is.
    pub(crate) fn abort(&self, error: Error) -> Error {
        self.poison(self.located(error))
    }

    /// Poisons the group because this rank panicked in this operation.
    #[cold]
    pub(super) fn panicked(&self, operation: &dyn fmt::Display) {
        let reason = format!("rank {} panicked in it; that rank's output has the message", self.rank());
        self.poison(Error::broken(operation.to_string(), reason));
    }

    /// Poisons the group because of an error in the collective with this number, whose turn is over.
    pub fn abort_after(&self, error: Error, sequence: u64) -> Error {
        self.poison_after(self.located(error), sequence + 1)
    }

    /// Returns a failure or a lost rank, if there is any, that an operation which all ranks have begun may not survive.
    /// Mismatches are left out, since they concern later operations.
    pub fn known_failure(&self, site: Site, deadline: &Deadline) -> Option<Error> {
        let is_mismatch = |error: &Error| matches!(error, Error::Mismatch { .. });
        let failure = self.failure.get().filter(|error| !is_mismatch(error)).cloned();
        failure.or_else(|| {
            Some(self.error(site, self.executor.transport.known_failure()?, deadline))
                .filter(|error| !is_mismatch(error))
        })
    }

    fn error(&self, site: Site, fault: Fault, deadline: &Deadline) -> Error {
        let (rank, elapsed) = (self.rank(), deadline.elapsed());
        match fault {
            Fault::Failed(error @ Error::Mismatch { .. }) => self.explained(error, &site.call),
            Fault::Failed(error) => self.located(error),
            Fault::Timeout { missing } => {
                let whereabouts = self.whereabouts(&missing).into();
                Error::Timeout { site, rank, missing, elapsed, whereabouts }
            }
            Fault::Left { peer } => {
                let note = Places(&[(rank, self.journal.whereabouts())]).to_string();
                Error::Left { site, rank: peer, note }
            }
            Fault::Lost { peer, reason } => {
                Error::PeerLost { site, peer, address: self.executor.transport.address(peer), reason, elapsed }
            }
            Fault::Unexpected { peer, site: theirs } => {
                let mut calls = vec![(rank, site.call), (peer, theirs.call)];
                calls.sort_by_key(|(rank, _)| *rank);
                self.explained(Error::Mismatch { sequence: site.sequence, calls, note: String::new() }, &site.call)
            }
        }
    }

    /// Adds to a mismatch where the ranks are, unless another rank has done so.
    fn explained(&self, mut error: Error, own: &Call) -> Error {
        let known = self.whereabouts(&error.others(own));
        if let Error::Mismatch { note, .. } = &mut error
            && note.is_empty()
            && known.len() > 1
        {
            *note = Places(&known).to_string();
        }
        error
    }

    /// Returns where the missing ranks are, this one, and others, as far as it is known.
    fn whereabouts(&self, missing: &[usize]) -> Vec<(usize, Whereabouts)> {
        let Some(neighbours) = &self.neighbours else { return Vec::new() };
        let mut known = neighbours.whereabouts(&asked(missing, self.world_size()));
        known.retain(|(rank, _)| *rank != self.rank());
        known.push((self.rank(), self.journal.whereabouts()));
        known.sort_by_key(|(rank, _)| *rank);
        known
    }

    /// Adds this rank to an error that occurred here and that other ranks will see without its source.
    fn located(&self, error: Error) -> Error {
        match error {
            Error::Io { mut operation, reason, source: Some(source) } => {
                // Once, also if it fails several groups.
                let place = format!(" on rank {}", self.rank());
                if !operation.ends_with(&place) {
                    operation.push_str(&place);
                }
                Error::Io { operation, reason, source: Some(source) }
            }
            error => error,
        }
    }

    /// Poisons the group with `error`, unless it is poisoned already. Returns the error that did.
    fn poison(&self, error: Error) -> Error {
        self.poison_after(error, self.completed.load(Ordering::Relaxed))
    }

    /// As [`poison`](Self::poison), when this rank has completed so many collectives.
    fn poison_after(&self, error: Error, completed: u64) -> Error {
        let error = self.failure.get_or_init(|| error).clone();
        // First: so the launcher hears first from the rank where a failure begins.
        #[cfg(unix)]
        crate::report::failed(&error, |rank| self.regroup.as_ref()?.number(rank));
        self.executor.transport.fail(&error, completed);
        // Last: the peers know by now and need not wait for a disk.
        self.save_trace();
        error
    }
}

/// Poisons the group if it is dropped, which happens only while a panic unwinds the operation.
struct Unwinding<'a> {
    core: &'a Core,
    site: &'a Site,
}

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        self.core.panicked(self.site);
    }
}
