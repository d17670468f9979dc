//! How ranks of a group make another.

use std::sync::Arc;

use super::threads::Local;
use super::{Collectives, Near, Transport};
use crate::control::invitation::{Door, Invitation, random, session};
use crate::sync::Deadline;
use crate::types::{Apart, Error, Fault};

/// What a group is built on.
pub(crate) struct Base {
    pub transport: Arc<dyn Transport>,
    pub near: Near,
    /// A number that all ranks of the group have, and no other group, where there is one.
    pub session: Option<u64>,
    pub regroup: Option<Arc<dyn Regroup>>,
}

/// What makes other groups of a group's ranks.
pub(crate) trait Regroup: Send + Sync {
    /// This rank's end of a group of those ranks that are left, by their order in this one; all of them call this.
    fn shrink(&self, deadline: &Deadline) -> Result<Base, Error>;

    /// This rank's end of a group of `members`, in their order; all of them call this, and this rank is one of them.
    fn subgroup(&self, members: &[usize], deadline: &Deadline) -> Result<Base, Fault>;

    /// By rank: ranks with the same number are on one host. The same on all ranks.
    fn hosts(&self) -> Vec<usize>;
}

/// By rank in a group of these members, the lowest rank there that is on the same host, from the hosts of all.
#[cfg(unix)]
pub(crate) fn hosts_of(members: &[usize], hosts: &[usize]) -> Vec<usize> {
    let first = |member: &usize| members.iter().position(|other| hosts[*other] == hosts[*member]).unwrap_or(0);
    members.iter().map(first).collect()
}

impl Base {
    /// A thread's end of its group.
    pub fn threads(local: Local, session: u64) -> Base {
        Base::whole(Arc::new(local), session)
    }

    /// What a group is built on where one thing is its transport, runs its operations and makes other groups.
    pub fn whole<T: Transport + Collectives + Regroup + 'static>(whole: Arc<T>, session: u64) -> Base {
        Base {
            transport: whole.clone(),
            near: Near::Everybody(whole.clone()),
            session: Some(session),
            regroup: Some(whole),
        }
    }
}

impl Regroup for Local {
    fn shrink(&self, deadline: &Deadline) -> Result<Base, Error> {
        let rank = self.rank();
        let apart = |ranks| {
            let why = Apart::Missing { ranks, problem: String::new() };
            Error::Shrink { rank, why, elapsed: deadline.elapsed() }
        };
        let (local, session) = self.meet(random()?, deadline).map_err(apart)?;
        Ok(Base::threads(local, session))
    }

    fn subgroup(&self, members: &[usize], deadline: &Deadline) -> Result<Base, Fault> {
        let own =
            Invitation { members: members.to_vec(), door: Door { port: 0, key: random().map_err(Fault::Failed)? } };
        let session = session(self.invite(&own, deadline)?);
        let place = members.iter().position(|member| *member == self.rank());
        let local = place.and_then(|place| self.end(session, members.len(), place));
        let local = local.ok_or_else(|| Error::broken("subgroup", "this rank has its end of the group already"));
        Ok(Base::threads(local.map_err(Fault::Failed)?, session))
    }

    fn hosts(&self) -> Vec<usize> {
        vec![0; self.world_size()]
    }
}
