//! The path of every operation through its group, and what a failure does to the group.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use super::execute::{Executor, Task};
use super::record::CallSite;
use super::recorder::Recorder;
use super::turn::TicketLock;
use super::workspace::Workspace;
use crate::plan::Selection;
use crate::sync::{Deadline, Mutex, lock};
use crate::transport::{Base, Regroup};
use crate::types::{Call, Error, Fault, Site};

/// State shared by the handles and the started operations of a group.
pub struct Core {
    pub(super) executor: Executor,
    pub(super) queue: TicketLock,
    workspace: Mutex<Workspace>,
    failure: OnceLock<Error>,
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
    pub(super) fn new(base: Base, algorithms: Selection) -> Core {
        let Base { transport, near, session, regroup } = base;
        Core {
            workspace: Mutex::new(Workspace::new(transport.world_size())),
            executor: Executor { transport, near, algorithms },
            queue: TicketLock::default(),
            failure: OnceLock::new(),
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

    /// Runs an operation whose turn it is. Returns its sequence number.
    #[inline]
    pub(super) fn run(&self, call: Call, task: Task<'_>, deadline: &Deadline, at: CallSite) -> Result<u64, Error> {
        self.run_for(None, call, task, deadline, at)
    }

    /// As [`run`](Self::run), for a step of the operation `outer`, which errors name instead.
    #[inline]
    pub(super) fn run_for(
        &self,
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
        self.enter(outer, call, message, deadline, at, operate)
    }

    /// Numbers and records an operation whose turn it is, runs `operate`, and poisons the group after a fault.
    /// `message` is the peer and whether this rank sends.
    #[inline]
    pub(super) fn enter<T>(
        &self,
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
        let completed = workspace.sequence;
        let site = Site { call, sequence: workspace.number(call.operation, message) };
        let entry = self.recorder.begin(&call, site.sequence, message, at, deadline.start());
        match operate(&mut workspace, &site) {
            Ok(result) => {
                self.recorder.done(entry);
                Ok(result)
            }
            Err(fault) => {
                // Before the trace is written.
                self.recorder.failed(entry);
                // A mismatch names the calls that were compared.
                let outer = outer.filter(|_| !matches!(fault, Fault::Unexpected { .. }));
                let named = outer.unwrap_or(call);
                Err(self.poison(self.error(Site { call: named, ..site }, fault, deadline), completed))
            }
        }
    }

    /// Poisons the group because this rank cannot take part in the operation whose turn it is.
    pub(crate) fn abort(&self, error: Error) -> Error {
        let completed = lock(&self.workspace).sequence;
        self.poison(error, completed)
    }

    /// Poisons the group because of an error in the collective with this number, whose turn is over.
    pub fn abort_after(&self, error: Error, sequence: u64) -> Error {
        self.poison(error, sequence + 1)
    }

    /// Returns a failure or a lost rank, if there is any, that an operation which all ranks have begun may not survive.
    /// Mismatches are left out, since they concern later operations.
    pub fn trouble(&self, site: Site, deadline: &Deadline) -> Option<Error> {
        let is_mismatch = |error: &Error| matches!(error, Error::Mismatch { .. });
        let failure = self.failure.get().filter(|error| !is_mismatch(error)).cloned();
        failure.or_else(|| {
            Some(self.error(site, self.executor.transport.trouble()?, deadline)).filter(|error| !is_mismatch(error))
        })
    }

    fn error(&self, site: Site, fault: Fault, deadline: &Deadline) -> Error {
        let (rank, elapsed) = (self.rank(), deadline.elapsed());
        match fault {
            Fault::Failed(error) => error,
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

    /// Poisons the group with `error`, unless it is poisoned already. Returns the error that did.
    fn poison(&self, error: Error, completed: u64) -> Error {
        let error = self.failure.get_or_init(|| error).clone();
        self.executor.transport.fail(&error, completed);
        // Last: the peers know by now and need not wait for a disk.
        self.save_trace();
        error
    }
}
