//! How one operation runs in its group, and what becomes of a failure.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::recorder::{Entry, Recorder};
use super::turn::Queue;
use super::{Anchor, CallSite, Core, Group, Lane, Plans};
use crate::plan::{Algorithm, Selection};
use crate::sync::{Deadline, Mutex, MutexGuard, lock};
use crate::transport::{Base, Buffers, Near, Transport};
use crate::types::{Call, Error, Fault, Site, Tag};

/// A message to be received: from which rank, and where to.
type Incoming<'a> = (usize, &'a mut [u8]);

impl Core {
    pub(super) fn group(base: Base, algorithms: Selection, deadline: Duration) -> Group {
        let Base { transport, near, session, regroup } = base;
        let lane = Lane {
            sequence: 0,
            sent: vec![0; transport.world_size()],
            received: vec![0; transport.world_size()],
            plans: Plans::default(),
            scratch: Default::default(),
        };
        let core = Arc::new(Core {
            transport,
            near,
            algorithms,
            queue: Queue::default(),
            lane: Mutex::new(lane),
            failure: OnceLock::new(),
            session,
            regroup,
            shrunk: AtomicBool::new(false),
            recorder: Recorder::new(),
            traced: Mutex::new(false),
        });
        let anchor = Arc::new(Anchor { core: core.clone(), progress: OnceLock::new(), kept: Mutex::default() });
        Group { core, deadline, shape: None, anchor, lineage: None }
    }

    pub(crate) fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    /// What ranks reach each other by besides messages.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) fn near(&self) -> &Near {
        &self.near
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Runs one collective, whose turn it is: on the engine if there is one and the table leaves it this size, else
    /// through `plans`.
    pub(crate) fn collective(
        &self,
        call: Call,
        buffers: Buffers<'_>,
        limit: Duration,
        at: CallSite,
        plans: impl FnOnce(&Core, &mut Lane, &Site, &mut Buffers<'_>, &Deadline, Option<Algorithm>) -> Result<(), Fault>,
    ) -> Result<(), Error> {
        self.collective_for(call, call, buffers, limit, at, plans)
    }

    /// Runs a collective as a part of what was called, `whole`, which errors name.
    pub(crate) fn collective_for(
        &self,
        whole: Call,
        call: Call,
        mut buffers: Buffers<'_>,
        limit: Duration,
        at: CallSite,
        plans: impl FnOnce(&Core, &mut Lane, &Site, &mut Buffers<'_>, &Deadline, Option<Algorithm>) -> Result<(), Fault>,
    ) -> Result<(), Error> {
        let mut lane = self.lane()?;
        let site = Site { call, sequence: lane.sequence };
        lane.sequence += 1;
        let deadline = Deadline::after(limit);
        let entry = self.recorder.begin(&call, site.sequence, None, at, deadline.start());
        let run = || {
            self.transport.begin(&site)?;
            let chosen = self.algorithms.plan(&call, self.transport.world_size(), self.near.is_somebody());
            match (&self.near, chosen) {
                (Near::Everybody(engine), None) if engine.serves(&call) => {
                    return engine.run(&site, &mut buffers, &deadline);
                }
                (Near::Everybody(engine), _) => engine.stand_aside(&site, &deadline)?,
                _ => {}
            }
            plans(self, &mut lane, &site, &mut buffers, &deadline, chosen)
        };
        self.end(entry, run(), |fault| {
            // Ranks that disagree have to see what was compared.
            let named = if matches!(fault, Fault::Unexpected { .. }) { call } else { whole };
            self.fail(Site { call: named, ..site }, fault, &deadline, site.sequence)
        })
    }

    /// Sends to or receives from `peer`, as `transfer` says; their messages are numbered apart from the collectives.
    pub(crate) fn message(
        &self,
        call: Call,
        peer: usize,
        sends: bool,
        limit: Duration,
        at: CallSite,
        transfer: impl FnOnce(&dyn Transport, &Tag, &Deadline) -> Result<(), Fault>,
    ) -> Result<(), Error> {
        let mut lane = self.lane()?;
        let lane = &mut *lane;
        let count = if sends { &mut lane.sent[peer] } else { &mut lane.received[peer] };
        let tag = Tag { group: 0, sequence: *count, call };
        *count += 1;
        self.transfer(lane, &tag, (peer, sends), (&Deadline::after(limit), at), transfer)
    }

    /// Sends to a rank, receives from one, or both at once. Such messages have no number: between two ranks they come in
    /// order.
    pub(crate) fn exchange(
        &self,
        call: Call,
        (outgoing, incoming): (Option<(usize, &[u8])>, Option<Incoming<'_>>),
        deadline: &Deadline,
        at: CallSite,
    ) -> Result<(), Error> {
        let lane = self.lane()?;
        let tag = Tag { group: 0, sequence: 0, call };
        let with = match (&outgoing, &incoming) {
            (Some((to, _)), _) => (*to, true),
            (None, Some((from, _))) => (*from, false),
            (None, None) => return Ok(()),
        };
        self.transfer(&lane, &tag, with, (deadline, at), |transport, tag, deadline| match (outgoing, incoming) {
            (Some(outgoing), Some(incoming)) => transport.exchange(tag, outgoing, incoming, deadline),
            (Some((to, bytes)), None) => transport.send(tag, to, bytes, deadline),
            (None, Some((from, bytes))) => transport.receive(tag, from, bytes, deadline),
            (None, None) => Ok(()),
        })
    }

    fn transfer(
        &self,
        lane: &Lane,
        tag: &Tag,
        message: (usize, bool),
        (deadline, at): (&Deadline, CallSite),
        transfer: impl FnOnce(&dyn Transport, &Tag, &Deadline) -> Result<(), Fault>,
    ) -> Result<(), Error> {
        let site = Site { call: tag.call, sequence: tag.sequence };
        let entry = self.recorder.begin(&tag.call, site.sequence, Some(message), at, deadline.start());
        let result = transfer(self.transport(), tag, deadline);
        self.end(entry, result, |fault| self.fail(site, fault, deadline, lane.sequence))
    }

    /// Records how an operation ended, before the group's trace may be written.
    pub(super) fn end<T>(
        &self,
        entry: Entry,
        result: Result<T, Fault>,
        fail: impl FnOnce(Fault) -> Error,
    ) -> Result<T, Error> {
        match result {
            Ok(result) => {
                self.recorder.done(entry);
                Ok(result)
            }
            Err(fault) => {
                self.recorder.failed(entry);
                Err(fail(fault))
            }
        }
    }

    /// Ends the group because this rank cannot take part in the operation whose turn it is.
    pub(crate) fn abandon(&self, error: Error) -> Error {
        let completed = lock(&self.lane).sequence;
        self.poison(error, completed)
    }

    /// The number of the collective that began last.
    pub(crate) fn latest(&self) -> u64 {
        lock(&self.lane).sequence.saturating_sub(1)
    }

    /// Ends the group because of what this rank has found out about the collective with this number, whose turn is over.
    pub fn give_up(&self, error: Error, sequence: u64) -> Error {
        self.poison(error, sequence + 1)
    }

    pub(super) fn lane(&self) -> Result<MutexGuard<'_, Lane>, Error> {
        match self.failure.get() {
            Some(error) => Err(error.clone()),
            None => Ok(lock(&self.lane)),
        }
    }

    /// Turns the fault into the group's failure and tells the peers.
    pub(super) fn fail(&self, site: Site, fault: Fault, deadline: &Deadline, completed: u64) -> Error {
        self.poison(self.error(site, fault, deadline), completed)
    }

    /// What has happened, if anything did, that an operation that all ranks have begun may not survive.
    pub fn trouble(&self, site: Site, deadline: &Deadline) -> Option<Error> {
        let apart = |error: &Error| matches!(error, Error::Mismatch { .. });
        let failure = self.failure.get().filter(|error| !apart(error)).cloned();
        failure.or_else(|| Some(self.error(site, self.transport.trouble()?, deadline)).filter(|error| !apart(error)))
    }

    fn error(&self, site: Site, fault: Fault, deadline: &Deadline) -> Error {
        let (rank, elapsed) = (self.transport.rank(), deadline.elapsed());
        match fault {
            Fault::Failed(error) => error,
            Fault::Timeout { missing } => Error::Timeout { site, rank, missing, elapsed },
            Fault::Left { peer } => Error::Left { site, rank: peer },
            Fault::Lost { peer, reason } => {
                Error::PeerLost { site, peer, address: self.transport.address(peer), reason, elapsed }
            }
            Fault::Unexpected { peer, tag } => {
                let mut calls = vec![(rank, site.call), (peer, tag.call)];
                calls.sort_by_key(|(rank, _)| *rank);
                Error::Mismatch { sequence: site.sequence, calls }
            }
        }
    }

    /// The group ends with `error`, unless it has ended already.
    fn poison(&self, error: Error, completed: u64) -> Error {
        let error = self.failure.get_or_init(|| error).clone();
        self.transport.fail(&error, completed);
        // The peers know by now, and need not wait for a disk.
        self.leave_trace();
        error
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::types::ReduceOp;

    #[test]
    fn a_rank_that_cannot_go_on_keeps_nobody_waiting() {
        let mut groups = Group::threads(2).unwrap();
        let (one, zero) = (groups.pop().unwrap(), groups.pop().unwrap());
        let cause = Error::argument("test", "on purpose");
        let waiting = thread::spawn(move || zero.all_reduce(&mut [1.0f32; 1000], ReduceOp::Sum));
        one.abandon(cause.clone());
        assert_eq!(waiting.join().unwrap(), Err(cause.clone()));
        assert_eq!(one.barrier(), Err(cause));
    }
}
