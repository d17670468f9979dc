//! How ranks of a group make another.

use std::sync::Arc;

use super::local::Local;
use super::{Near, Transport};
use crate::error::{Apart, Error};
use crate::random;
use crate::wait::Deadline;

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
}

impl Base {
    /// A thread's end of its group.
    pub fn threads(local: Local, session: u64) -> Base {
        let local = Arc::new(local);
        Base {
            transport: local.clone(),
            near: Near::Everybody(local.clone()),
            session: Some(session),
            regroup: Some(local),
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
        let (local, session) = self.meet(random::number(), deadline).map_err(apart)?;
        Ok(Base::threads(local, session))
    }
}
