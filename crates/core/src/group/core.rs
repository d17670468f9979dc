//! The path of every operation through its group, and what a failure does to the group.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::execute::{Executor, Task};
use super::record::CallSite;
use super::recorder::Recorder;
use super::turn::{TicketLock, Turn};
use super::workspace::Workspace;
use crate::plan::Selection;
use crate::sync::{Deadline, Mutex, lock};
use crate::transport::{GroupEndpoint, Regroup};
use crate::types::{Call, Error, Fault, Site};

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
    /// A number that all ranks of the group share, different from every other group's, if there is one.
    pub(super) session: Option<u64>,
    pub(super) regroup: Option<Arc<dyn Regroup>>,
    /// Whether [`Group::shrink`](crate::Group::shrink) was called on this group.
    pub(super) shrunk: AtomicBool,
    pub(super) recorder: Recorder,
    /// Whether this rank's trace was written to the folder `BONFIRE_TRACE`.
    pub(super) trace_saved: Mutex<bool>,
}

impl Core {
    pub(super) fn new(base: GroupEndpoint, algorithms: Selection) -> Core {
        let GroupEndpoint { transport, engines, session, regroup } = base;
        Core {
            workspace: Mutex::new(Workspace::new(transport.world_size())),
            completed: AtomicU64::new(0),
            executor: Executor { transport, engines, algorithms },
            queue: TicketLock::default(),
            failure: OnceLock::new(),
            rewinds: AtomicU64::new(0),
            session,
            regroup,
            shrunk: AtomicBool::new(false),
            recorder: Recorder::new(),
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
        self.poison(Error::Timeout { site, rank, missing: Vec::new(), elapsed })
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
        let entry = self.recorder.begin(&call, site.sequence, message, at, turn.begin(deadline));
        // From here on the peers count on this rank, so a panic must reach them too.
        let unwinding = Unwinding { core: self, site: &site };
        let result = operate(&mut workspace, &site);
        std::mem::forget(unwinding);
        match result {
            Ok(result) => {
                self.completed.store(workspace.sequence, Ordering::Relaxed);
                self.recorder.done(entry);
                Ok(result)
            }
            Err(fault) => {
                // Before the trace is written.
                self.recorder.failed(entry);
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
            Fault::Failed(error) => self.located(error),
            Fault::Timeout { missing } => Error::Timeout { site, rank, missing, elapsed },
            Fault::Left { peer } => Error::Left { site, rank: peer },
            Fault::Lost { peer, reason } => {
                Error::PeerLost { site, peer, address: self.executor.transport.address(peer), reason, elapsed }
            }
            Fault::Unexpected { peer, site: theirs } => {
                let mut calls = vec![(rank, site.call), (peer, theirs.call)];
                calls.sort_by_key(|(rank, _)| *rank);
                Error::Mismatch { sequence: site.sequence, calls }
            }
        }
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
