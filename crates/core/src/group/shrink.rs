//! Going on without ranks that are lost.

use std::sync::atomic::Ordering;

use super::core::Core;
use super::handle::Group;
#[cfg(unix)]
use super::interrupt;
use crate::sync::Deadline;
use crate::types::Error;

impl Group {
    /// A group of the ranks that are left, in their order, with ranks from 0 on and settings as in this one. Every rank that
    /// is left must call it, and each group can be shrunk once; a rank that is stopped, or neither calls it nor ends, is
    /// waited for until the [deadline](Self::deadline). After a failure all survivors get an error from their next
    /// operation, so that is when to call it; a group without a failure gives one of the same ranks.
    ///
    /// Whoever was lost, rank 0 too, and whoever is lost meanwhile: all that go on are in the same group. A rank that is
    /// lost after they have agreed is lost to the new group, as at any other time: shrink that. What the survivors hold is
    /// theirs to compare; an operation that failed may have completed on some of them. Where all
    /// others have certainly ended (they said farewell, or their connections closed and their machines say that nobody
    /// listens there any more) any ranks go on, even one. Where some are only silent, as in a network that fell apart, more than
    /// half of the old group's ranks do, or half of them with rank 0. So of two processes the one that is left goes on where
    /// the other was killed, and only rank 0 does where the other is silent.
    ///
    /// The old group stays what it was. Keep its handle until all of its ranks are through with this call, which they are
    /// once any operation of the new group has completed, or just drop it.
    ///
    /// ```
    /// # use bonfire_core::{Error, Group, ReduceOp};
    /// fn step(group: &mut Group, gradients: &[f32], sum: &mut [f32]) -> Result<(), Error> {
    ///     loop {
    ///         match group.all_reduce_into(gradients, sum, ReduceOp::Sum) {
    ///             Err(Error::PeerLost { .. }) => *group = group.shrink()?,
    ///             result => return result,
    ///         }
    ///     }
    /// }
    /// # step(&mut Group::threads(1)?.remove(0), &[1.0], &mut [0.0])?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shrink`] where this rank must not go on: it is in the minority, the others have given it up, or ranks that
    /// are there did not call this by the deadline. [`Error::InvalidArgument`] on a group on a transport
    /// [from elsewhere](Self::on), and on one that was shrunk before. [`Error::Io`] where the system refuses a socket.
    pub fn shrink(&self) -> Result<Group, Error> {
        let _turn = self.turn();
        let regroup = self.regroup("shrink")?;
        if self.core.shrunk.swap(true, Ordering::Relaxed) {
            let reason = "this group was shrunk before: shrink the group that came of it";
            return Err(Error::argument("shrink", reason));
        }
        let base = regroup.shrink(&Deadline::after(self.deadline()))?;
        let group = Group::of(Core::new(base, self.core.executor.algorithms.clone()), self.deadline(), None);
        #[cfg(unix)]
        interrupt::leave_as(&self.core, &group.core);
        Ok(group)
    }
}
