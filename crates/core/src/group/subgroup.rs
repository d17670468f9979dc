//! Subgroups: groups of some of a group's ranks.
//!
//! Nothing of a subgroup is multiplexed on the connections of its parent, so an operation of the parent never waits for
//! one of a subgroup. Between processes a subgroup costs a control thread and connections to its neighbours; between
//! threads only counters and exchange slots.

use super::check;
use super::core::Core;
use super::handle::{Group, Lineage};
#[cfg(unix)]
use super::interrupt;
use super::journal::call_site;
use super::record::CallSite;
use crate::sync::Deadline;
use crate::transport::{GroupEndpoint, Regroup};
use crate::types::{Call, DType, Error, Operation};

/// # Subgroups
///
/// A subgroup is an independent group with its own connections or memory, deadlines and failures. Operations of a group
/// and of its subgroups may be in flight at the same time from different threads, and a failure of one does not affect
/// the others. Ranks in a subgroup's calls and errors are its own, numbered from 0. A subgroup holds its parent: this
/// rank leaves the parent when the last handle to it and to its subgroups is dropped.
impl Group {
    /// Creates a group of `members`, which are ranks of this group. The new ranks follow the ascending order of the old
    /// ones, whatever the order of `members`; duplicates count once. Only the members call it, each at the same
    /// position in its sequence of operations. It blocks until all of them are connected, at most until the deadline.
    /// The subgroup inherits this group's settings and this handle's deadline. Use [`split`](Self::split) if ranks do
    /// not know the other members.
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
    /// [`Error::InvalidArgument`], checked in this order, if there are no members, if a member is not a rank of this
    /// group, or if this rank is not a member; also on a group on a [custom transport](Self::on).
    /// [`Error::MemberMismatch`] if two members pass different lists. [`Error::Io`] if the system refuses a socket or a
    /// thread. [`Error::Broken`] if members cannot connect to each other by the deadline. Otherwise see
    /// [`all_reduce`](Group::all_reduce). All but `InvalidArgument` poison this group.
    #[track_caller]
    pub fn subgroup(&self, members: &[usize]) -> Result<Group, Error> {
        if members.is_empty() {
            return Err(Error::argument("subgroup", "there are no members: give this rank and others"));
        }
        for member in members {
            check::rank("subgroup", "member", *member, self.world_size())?;
        }
        let mut members = members.to_vec();
        members.sort_unstable();
        members.dedup();
        if !members.contains(&self.rank()) {
            let reason = format!("rank {} is not a member, and only members call it", self.rank());
            return Err(Error::argument("subgroup", reason));
        }
        self.form(members, &Deadline::after(self.deadline()))
    }

    /// Splits the group by color. Ranks that pass the same `color` form one subgroup, ordered by their keys and, for
    /// equal keys, by their ranks in this group. A rank without a color joins no subgroup and gets `None`. All ranks
    /// call it.
    ///
    /// # Errors
    /// See [`subgroup`](Group::subgroup).
    #[track_caller]
    pub fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Group>, Error> {
        // Checked first, so that no rank waits for one that cannot form groups.
        self.regroup("split")?;
        let mine = [u64::from(color.is_some()), color.unwrap_or(0), key.cast_unsigned()];
        let mut all = vec![0u64; 3 * self.world_size()];
        let deadline = Deadline::after(self.deadline());
        self.all_gather_into(&mine, &mut all)?;
        if color.is_none() {
            return Ok(None);
        }
        let same = |rank: &usize| all[3 * rank..3 * rank + 2] == mine[..2];
        let mut members: Vec<usize> = (0..self.world_size()).filter(same).collect();
        members.sort_by_key(|rank| all[3 * rank + 2].cast_signed());
        self.form(members, &deadline).map(Some)
    }

    /// Creates a subgroup of the ranks on this rank's host, as they identified their machines at the rendezvous. Ranks
    /// that are threads are all on one host. All ranks of the host call it.
    ///
    /// # Errors
    /// See [`subgroup`](Group::subgroup).
    #[track_caller]
    pub fn by_host(&self) -> Result<Group, Error> {
        let hosts = self.regroup("by_host")?.hosts();
        let own = hosts.get(self.rank());
        let members = (0..hosts.len()).filter(|rank| hosts.get(*rank) == own).collect();
        self.form(members, &Deadline::after(self.deadline()))
    }

    /// Returns the group that this one is a subgroup of, if it is one. A group from [`shrink`](Self::shrink) is not.
    pub fn parent(&self) -> Option<&Group> {
        self.lineage.as_ref().map(|lineage| &lineage.parent)
    }

    /// Returns the members' ranks in the [parent](Self::parent), by rank in this group. Without a parent, all ranks.
    pub fn members(&self) -> Vec<usize> {
        match &self.lineage {
            Some(lineage) => lineage.members.clone(),
            None => (0..self.world_size()).collect(),
        }
    }

    /// Converts a rank of this group to its rank in the [parent](Self::parent). Without a parent, it returns the same.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `local` is not a rank of this group.
    pub fn to_global(&self, local: usize) -> Result<usize, Error> {
        check::rank("to_global", "rank", local, self.world_size())?;
        Ok(self.lineage.as_ref().map_or(local, |lineage| lineage.members[local]))
    }

    /// Converts a rank of the [parent](Self::parent) to its rank in this group, if it is a member. Without a parent, it
    /// returns the ranks of this group as they are.
    pub fn to_local(&self, global: usize) -> Option<usize> {
        match &self.lineage {
            Some(lineage) => lineage.members.iter().position(|member| *member == global),
            None => (global < self.world_size()).then_some(global),
        }
    }

    /// Creates a group of `members`, this rank among them, with ranks in that order.
    #[track_caller]
    fn form(&self, members: Vec<usize>, deadline: &Deadline) -> Result<Group, Error> {
        let at = call_site();
        let regroup = self.regroup("subgroup")?;
        let base = self.core.invite(&members, regroup, deadline, at)?;
        let core = Core::new(base, self.core.executor.algorithms.clone(), Some(&self.core.journal));
        let group = Group::of(core, self.limits(), Some(Lineage { parent: self.clone(), members }));
        #[cfg(unix)]
        interrupt::inherit(&self.core, &group.core);
        Ok(group)
    }

    /// Returns the part of the transport that creates groups of this group's ranks.
    pub(super) fn regroup(&self, operation: &str) -> Result<&dyn Regroup, Error> {
        self.core.regroup.as_deref().ok_or_else(|| {
            let reason = "a custom transport cannot form groups: make a transport of the ranks that you want";
            Error::argument(operation, reason)
        })
    }
}

impl Core {
    /// Connects to the other members. A failure poisons this group, so that members waiting for this rank are told.
    fn invite(
        &self,
        members: &[usize],
        regroup: &dyn Regroup,
        deadline: &Deadline,
        at: CallSite,
    ) -> Result<GroupEndpoint, Error> {
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
        let turn = self.turn(call, deadline)?;
        self.enter(&turn, None, call, message, deadline, at, |_, _| regroup.subgroup(members, deadline))
    }
}
