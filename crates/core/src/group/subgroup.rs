//! Groups of some ranks of a group.

use std::panic::Location;

use super::check;
use super::core::Core;
use super::handle::{Group, Lineage};
#[cfg(unix)]
use super::interrupt;
use super::record::CallSite;
use crate::sync::Deadline;
use crate::transport::{Base, Regroup};
use crate::types::{Call, DType, Error, Operation};

/// # Subgroups
///
/// A subgroup is a group of its own, with its own connections or memory, deadlines and failures: operations of parent and
/// subgroups, or of several subgroups, may be in flight at the same time from different threads, and a failure of one is
/// none of another. Ranks in its calls and errors are its own, from 0 on. It keeps its parent: that says farewell when the
/// last handle to it and to its subgroups is dropped.
impl Group {
    /// A group of these ranks of this one, in ascending order whatever the order here; one that is named twice is in it
    /// once. The members call it, at the same place in their order of operations, and the other ranks do not. Settings are
    /// those of this group.
    ///
    /// ```
    /// # use bonfire_core::{Group, ReduceOp};
    /// let ranks: Vec<_> = Group::threads(4)?
    ///     .into_iter()
    ///     .map(|group| std::thread::spawn(move || {
    ///         let pair = if group.rank() < 2 { [0, 1] } else { [2, 3] };
    ///         let pair = group.subgroup(&pair)?;
    ///         let mut sum = [group.rank()].map(|rank| rank as i32);
    ///         pair.all_reduce(&mut sum, ReduceOp::Sum)?;
    ///         Ok::<_, bonfire_core::Error>((pair.rank(), sum[0]))
    ///     }))
    ///     .collect();
    /// let results: Result<Vec<_>, _> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    /// assert_eq!(results?, [(0, 1), (1, 1), (0, 5), (1, 5)]);
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], in this order, for no members, one that is no rank of this group, and members that this
    /// rank is not among; also on a group on a transport [from elsewhere](Self::on). [`Error::Members`] where two members
    /// name different ones. Else as [`all_reduce`](Group::all_reduce), and [`Error::Io`] where the system refuses a socket
    /// or a thread. All but the first poison this group.
    #[track_caller]
    pub fn subgroup(&self, members: &[usize]) -> Result<Group, Error> {
        if members.is_empty() {
            return Err(Error::argument("subgroup", "no members: name this rank and others"));
        }
        for member in members {
            check::rank("subgroup", "member", *member, self.world_size())?;
        }
        let mut members = members.to_vec();
        members.sort_unstable();
        members.dedup();
        if !members.contains(&self.rank()) {
            let reason = format!("rank {} is not among the members: only they call it", self.rank());
            return Err(Error::argument("subgroup", reason));
        }
        self.make(members)
    }

    /// Splits the group: ranks that give the same `color` come into one subgroup, where their ranks are in the order of
    /// their keys, and of their ranks here where keys are the same. A rank without a color comes into none. All ranks
    /// call it.
    ///
    /// # Errors
    /// As [`all_reduce`](Group::all_reduce) and [`subgroup`](Group::subgroup).
    #[track_caller]
    pub fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Group>, Error> {
        // So that no rank waits for one that cannot.
        self.regroup("split")?;
        let mine = [u64::from(color.is_some()), color.unwrap_or(0), key.cast_unsigned()];
        let mut all = vec![0u64; 3 * self.world_size()];
        self.all_gather_into(&mine, &mut all)?;
        if color.is_none() {
            return Ok(None);
        }
        let same = |rank: &usize| all[3 * rank..3 * rank + 2] == mine[..2];
        let mut members: Vec<usize> = (0..self.world_size()).filter(same).collect();
        members.sort_by_key(|rank| all[3 * rank + 2].cast_signed());
        self.make(members).map(Some)
    }

    /// The ranks of this rank's host, by what they said of their machines when they met: all of them where ranks are
    /// threads. All ranks of the host call it.
    ///
    /// # Errors
    /// As [`subgroup`](Group::subgroup).
    #[track_caller]
    pub fn by_host(&self) -> Result<Group, Error> {
        let hosts = self.regroup("by_host")?.hosts();
        let own = hosts.get(self.rank());
        self.make((0..hosts.len()).filter(|rank| hosts.get(*rank) == own).collect())
    }

    /// The group that this one is a subgroup of.
    pub fn parent(&self) -> Option<&Group> {
        self.lineage.as_ref().map(|lineage| &lineage.parent)
    }

    /// The ranks' ranks in the [parent](Self::parent), by their ranks in this group; the same where there is no parent.
    pub fn members(&self) -> Vec<usize> {
        match &self.lineage {
            Some(lineage) => lineage.members.clone(),
            None => (0..self.world_size()).collect(),
        }
    }

    /// The rank in the [parent](Self::parent) of a rank of this group.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where `local` is no rank of this group.
    pub fn to_global(&self, local: usize) -> Result<usize, Error> {
        check::rank("to_global", "rank", local, self.world_size())?;
        Ok(self.lineage.as_ref().map_or(local, |lineage| lineage.members[local]))
    }

    /// The rank in this group of a rank of the [parent](Self::parent), if it is in it.
    pub fn to_local(&self, global: usize) -> Option<usize> {
        match &self.lineage {
            Some(lineage) => lineage.members.iter().position(|member| *member == global),
            None => (global < self.world_size()).then_some(global),
        }
    }

    /// A group of these ranks, of which this is one, with ranks in their order.
    #[track_caller]
    fn make(&self, members: Vec<usize>) -> Result<Group, Error> {
        let at = Location::caller();
        let _turn = self.turn();
        let regroup = self.regroup("subgroup")?;
        let base = self.core.invite(&members, regroup, &Deadline::after(self.deadline()), at)?;
        let core = Core::new(base, self.core.executor.algorithms.clone());
        let group = Group::of(core, self.deadline(), Some(Lineage { parent: self.clone(), members }));
        #[cfg(unix)]
        interrupt::leave_as(&self.core, &group.core);
        Ok(group)
    }

    /// What makes groups of this one's ranks.
    pub(super) fn regroup(&self, operation: &str) -> Result<&dyn Regroup, Error> {
        self.core.regroup.as_deref().ok_or_else(|| {
            let reason = "the group is on a transport from elsewhere: make a transport of the ranks that you want";
            Error::argument(operation, reason)
        })
    }
}

impl Core {
    /// Comes together with the other members. A failure ends this group, so that members that wait for this rank hear of it.
    fn invite(
        &self,
        members: &[usize],
        regroup: &dyn Regroup,
        deadline: &Deadline,
        at: CallSite,
    ) -> Result<Base, Error> {
        let call = Call {
            operation: Operation::Subgroup,
            dtype: DType::U8,
            count: 0,
            reduction: None,
            root: None,
            sizes: None,
        };
        let other = members.iter().find(|member| **member != self.rank());
        let message = Some((other.map_or(0, |other| *other), true));
        self.enter(None, call, message, deadline, at, |_, _| regroup.subgroup(members, deadline))
    }
}
