//! New groups from the ranks of a group: shrink and subgroups.

use std::sync::Arc;

use super::threads::ThreadEndpoint;
use super::{Collectives, Engines, Neighbours, Transport};
use crate::control::hang::HangTimeout;
use crate::control::invitation::{Endpoint, Invitation, random, session};
use crate::sync::Deadline;
use crate::types::{Error, Fault};

/// One rank's endpoint of a group: its transport, its engine, and how to form other groups.
pub struct GroupEndpoint {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) engines: Engines,
    /// A number that is the same on all ranks of the group and different in other groups, if there is one.
    pub(crate) session: Option<u64>,
    pub(crate) regroup: Option<Arc<dyn Regroup>>,
    pub(crate) neighbours: Option<Arc<dyn Neighbours>>,
}

/// Forms new groups from the ranks of a group.
pub trait Regroup: Send + Sync {
    /// Returns this rank's endpoint of a group of the surviving ranks, in their order. All of them call this. Live
    /// ranks that do not are left out after the hang timeout, if the others are the majority. May be called again after
    /// an error, and not after a success.
    fn shrink(&self, hang: &HangTimeout, deadline: &Deadline) -> Result<GroupEndpoint, Error>;

    /// Returns this rank's endpoint of a group of `members`, in their order. All of them call this, and only they.
    fn subgroup(&self, members: &[usize], deadline: &Deadline) -> Result<GroupEndpoint, Fault>;

    /// By rank, the number of its host: ranks with the same number are on one host. The same on all ranks.
    fn hosts(&self) -> Vec<usize>;

    /// Returns the number by which the launcher of this process knows a rank, if it started it.
    #[cfg(unix)]
    fn number(&self, _rank: usize) -> Option<usize> {
        None
    }
}

/// The hosts of a subgroup: for each of `members`, the lowest rank of the subgroup on the same host. `hosts` has the
/// hosts of all ranks of the parent.
#[cfg(unix)]
pub fn hosts_of(members: &[usize], hosts: &[usize]) -> Vec<usize> {
    let first = |member: &usize| members.iter().position(|other| hosts[*other] == hosts[*member]).unwrap_or(0);
    members.iter().map(first).collect()
}

impl GroupEndpoint {
    /// A thread's endpoint of its group.
    pub(crate) fn threads(local: ThreadEndpoint, session: u64) -> GroupEndpoint {
        GroupEndpoint::from_engine(Arc::new(local), session)
    }

    /// An endpoint with one value as its transport, its engine for all ranks, its [`Regroup`] and its [`Neighbours`].
    pub fn from_engine<T>(engine: Arc<T>, session: u64) -> GroupEndpoint
    where
        T: Transport + Collectives + Regroup + Neighbours + 'static,
    {
        GroupEndpoint {
            transport: engine.clone(),
            engines: Engines::AllRanks(engine.clone()),
            session: Some(session),
            regroup: Some(engine.clone()),
            neighbours: Some(engine),
        }
    }
}

impl Regroup for ThreadEndpoint {
    fn shrink(&self, hang: &HangTimeout, deadline: &Deadline) -> Result<GroupEndpoint, Error> {
        let joined = self.join_survivors(random()?, hang, deadline);
        let (local, session) =
            joined.map_err(|why| Error::Shrink { rank: self.rank(), why, elapsed: deadline.elapsed() })?;
        Ok(GroupEndpoint::threads(local, session))
    }

    fn subgroup(&self, members: &[usize], deadline: &Deadline) -> Result<GroupEndpoint, Fault> {
        let own = Invitation { members: members.to_vec(), endpoint: Endpoint { port: 0, key: random()? } };
        let session = session(self.invite(&own, deadline)?);
        let index = members.iter().position(|member| *member == self.rank());
        let local = index.and_then(|index| self.take_endpoint(session, members.len(), index));
        let local = local.ok_or_else(|| Error::broken("subgroup", "this rank has taken its endpoint already"));
        Ok(GroupEndpoint::threads(local?, session))
    }

    fn hosts(&self) -> Vec<usize> {
        vec![0; self.world_size()]
    }
}
