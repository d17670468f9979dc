//! The one way of every operation in its group, and what becomes of a failure.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use super::execute::{Executor, Task};
use super::lane::Lane;
use super::record::CallSite;
use super::recorder::Recorder;
use super::turn::Queue;
use crate::plan::Selection;
use crate::sync::{Deadline, Mutex, lock};
use crate::transport::{Base, Regroup};
use crate::types::{Call, Error, Fault, Site};

/// What handles and started operations of a group share.
pub struct Core {
    pub(super) executor: Executor,
    pub(super) queue: Queue,
    lane: Mutex<Lane>,
    failure: OnceLock<Error>,
    /// A number that all ranks of the group have, and no other group, where there is one.
    pub(super) session: Option<u64>,
    pub(super) regroup: Option<Arc<dyn Regroup>>,
    /// Whether another group was made of this one's ranks, or was to be.
    pub(super) shrunk: AtomicBool,
    pub(super) recorder: Recorder,
    /// Whether this rank's trace was left where `BONFIRE_TRACE` says.
    pub(super) traced: Mutex<bool>,
}

impl Core {
    pub(super) fn new(base: Base, algorithms: Selection) -> Core {
        let Base { transport, near, session, regroup } = base;
        Core {
            lane: Mutex::new(Lane::new(transport.world_size())),
            executor: Executor { transport, near, algorithms },
            queue: Queue::default(),
            failure: OnceLock::new(),
            session,
            regroup,
            shrunk: AtomicBool::new(false),
            recorder: Recorder::new(),
            traced: Mutex::new(false),
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

    /// What poisoned the group, if anything did.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Runs an operation whose turn it is. Gives its number.
    #[inline]
    pub(super) fn run(&self, call: Call, task: Task<'_>, deadline: &Deadline, at: CallSite) -> Result<u64, Error> {
        self.run_for(None, call, task, deadline, at)
    }

    /// As [`run`](Self::run), as a part of what was called, `whole`, which errors name.
    #[inline]
    pub(super) fn run_for(
        &self,
        whole: Option<Call>,
        call: Call,
        task: Task<'_>,
        deadline: &Deadline,
        at: CallSite,
    ) -> Result<u64, Error> {
        let message = task.message();
        let operate =
            |lane: &mut Lane, site: &Site| self.executor.run(lane, site, task, deadline).map(|()| site.sequence);
        self.enter(whole, call, message, deadline, at, operate)
    }

    /// Gives an operation whose turn it is its number, records it, and turns a fault into the group's failure. `message` is
    /// the other rank, and whether this one sends.
    #[inline]
    pub(super) fn enter<T>(
        &self,
        whole: Option<Call>,
        call: Call,
        message: Option<(usize, bool)>,
        deadline: &Deadline,
        at: CallSite,
        operate: impl FnOnce(&mut Lane, &Site) -> Result<T, Fault>,
    ) -> Result<T, Error> {
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        let mut lane = lock(&self.lane);
        let completed = lane.sequence;
        let site = Site { call, sequence: lane.number(call.operation, message) };
        let entry = self.recorder.begin(&call, site.sequence, message, at, deadline.start());
        match operate(&mut lane, &site) {
            Ok(result) => {
                self.recorder.done(entry);
                Ok(result)
            }
            Err(fault) => {
                // Before the group's trace may be written.
                self.recorder.failed(entry);
                // Ranks that disagree have to see what was compared.
                let whole = whole.filter(|_| !matches!(fault, Fault::Unexpected { .. }));
                let named = whole.unwrap_or(call);
                Err(self.poison(self.error(Site { call: named, ..site }, fault, deadline), completed))
            }
        }
    }

    /// Ends the group because this rank cannot take part in the operation whose turn it is.
    pub(crate) fn abandon(&self, error: Error) -> Error {
        let completed = lock(&self.lane).sequence;
        self.poison(error, completed)
    }

    /// Ends the group because of what this rank has found out about the collective with this number, whose turn is over.
    pub fn give_up(&self, error: Error, sequence: u64) -> Error {
        self.poison(error, sequence + 1)
    }

    /// What has happened, if anything did, that an operation that all ranks have begun may not survive.
    pub fn trouble(&self, site: Site, deadline: &Deadline) -> Option<Error> {
        let apart = |error: &Error| matches!(error, Error::Mismatch { .. });
        let failure = self.failure.get().filter(|error| !apart(error)).cloned();
        failure.or_else(|| {
            Some(self.error(site, self.executor.transport.trouble()?, deadline)).filter(|error| !apart(error))
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

    /// The group ends with `error`, unless it has ended already.
    fn poison(&self, error: Error, completed: u64) -> Error {
        let error = self.failure.get_or_init(|| error).clone();
        self.executor.transport.fail(&error, completed);
        // The peers know by now, and need not wait for a disk.
        self.leave_trace();
        error
    }
}
