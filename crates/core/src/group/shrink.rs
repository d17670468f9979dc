//! Shrinking a group to the ranks that survive a failure.

use std::sync::atomic::Ordering;

use super::core::Core;
use super::handle::Group;
#[cfg(unix)]
use super::interrupt;
use super::journal::{Waiting, call_site};
use crate::control::hang::HangTimeout;
#[cfg(unix)]
use crate::report;
use crate::sync::Deadline;
use crate::types::{Error, ShrinkError};

impl Group {
    /// Creates a group of the surviving ranks, in their old order, numbered from 0, with this group's settings. Every
    /// surviving rank must call it. Call it when an operation fails: after a failure every survivor gets an error from
    /// its next operation. Without a failure the new group has the same ranks.
    ///
    /// It blocks, at most until the [deadline](Self::deadline), for ranks that are alive and do not call it, or are
    /// stopped. Stopped ranks are left out when they are declared lost. Ranks that are alive are left out after the
    /// [hang timeout](crate::Builder::hang_timeout), if the others are the majority as below: after [`Error::Timeout`]
    /// and [`Error::Stalled`] that is soon for the ranks that the error names. A rank that was left out gets
    /// [`ShrinkError::Excluded`](crate::error::ShrinkError) when it calls. After an error this may be called again: it
    /// continues where it was, and counts the time since the first call. A success is final.
    ///
    /// All ranks that go on are in the same group, whichever ranks were lost (rank 0 included) and whichever are lost
    /// during the call. A rank that is lost after the survivors have agreed is lost to the new group, as at any other
    /// time: shrink that group. Compare the survivors' data: a failed operation may have completed on some of them.
    ///
    /// If all other ranks have certainly ended (they left the group, or their connections closed and their machines
    /// refuse new ones), any number of ranks goes on, even one. If some ranks are only silent, as in a network
    /// partition, the side that goes on has more than half of the old group's ranks, or half of them and rank 0. So of
    /// two processes the survivor goes on if the other was killed, and only rank 0 goes on if the other is silent.
    ///
    /// The old group stays as it was. Keep its handle until all its ranks have returned from this call, which is
    /// certain once any operation of the new group has completed, or just drop it. The new group has no
    /// [parent](Self::parent), even if this one has.
    ///
    /// ```
    /// # use bonfire_core::{Error, Group, ReduceOp};
    /// fn step(group: &mut Group, gradients: &[f32], sum: &mut [f32]) -> Result<(), Error> {
    ///     loop {
    ///         match group.all_reduce_into(gradients, sum, ReduceOp::Sum) {
    ///             Err(Error::PeerLost { .. } | Error::Timeout { .. }) => *group = group.shrink()?,
    ///             result => return result,
    ///         }
    ///     }
    /// }
    /// # step(&mut Group::threads(1)?.remove(0), &[1.0], &mut [0.0])?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shrink`] if this rank must not go on: it is in the minority, the others have excluded it, or ranks that
    /// are alive did not call this by the deadline. [`Error::InvalidArgument`] on a group on MPI or on a [custom
    /// transport](Self::on), or that was shrunk before. [`Error::Io`] if the system refuses a socket or a thread.
    /// [`Error::Broken`] if this rank cannot connect to the other survivors.
    #[track_caller]
    pub fn shrink(&self) -> Result<Group, Error> {
        let _call = self.core.journal.enter("Group::shrink", call_site());
        let _waits = Waiting::begin(&self.core.operations);
        let deadline = Deadline::after(self.deadline());
        let regroup = self.regroup("shrink")?;
        let busy = || Error::Shrink { rank: self.rank(), why: ShrinkError::Busy, elapsed: deadline.elapsed() };
        let _turn = self.core.queue.turn(&deadline).ok_or_else(busy)?;
        if self.core.shrunk.load(Ordering::Relaxed) {
            let reason = "this group was shrunk before: shrink the group that it was shrunk to";
            return Err(Error::argument("shrink", reason));
        }
        let hang = HangTimeout::new(self.hang_timeout, self.deadline(), self.core.failure());
        let base = regroup.shrink(&hang, &deadline);
        #[cfg(unix)]
        base.as_ref().map_or_else(|error| report::failed(error, |rank| regroup.number(rank)), |_| report::connected());
        let base = base?;
        // Relaxed: read and written in this rank's turn only.
        self.core.shrunk.store(true, Ordering::Relaxed);
        let core = Core::new(base, self.core.executor.algorithms.clone(), Some(&self.core.journal));
        let group = Group::of(core, self.limits(), None);
        #[cfg(unix)]
        interrupt::inherit(&self.core, &group.core);
        Ok(group)
    }
}
