//! What a team has that works for a group.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::Team;
use crate::launches::Launches;
use crate::runtime::Kept;

/// State of a team that works for a group. The group learns on the host how calls in flight end, and a failed call does
/// not poison the devices.
pub(crate) struct GroupTeam {
    /// How long calls in flight may take when the team is dropped.
    pub(super) limit: Duration,
    /// Orders the group's launches among those of other groups. `None` if it has ranks in other processes: then a call
    /// comes here in its turn.
    pub(super) launches: Option<Arc<Launches>>,
    /// Of a communicator's team: the team whose kernels serve the same group, if there is one.
    pub(super) kernels: Option<Arc<Team>>,
    /// The group has failed.
    pub(super) group_failed: AtomicBool,
    pub(super) kept: Mutex<Vec<KeptMemory>>,
    /// Set when the team fails: for each GPU, the number of the last call that was done by then.
    pub(super) completed: OnceLock<Vec<u64>>,
}

/// Memory that lives until a call is done: the index of the GPU, and the call's number.
pub(super) type KeptMemory = (usize, u64, Vec<Kept>);

impl GroupTeam {
    pub fn new(limit: Duration, launches: Option<Arc<Launches>>, kernels: Option<Arc<Team>>) -> GroupTeam {
        GroupTeam {
            limit,
            launches,
            kernels,
            group_failed: AtomicBool::new(false),
            kept: Mutex::default(),
            completed: OnceLock::new(),
        }
    }
}
