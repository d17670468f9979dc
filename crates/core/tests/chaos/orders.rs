//! The parent's orders to its children, and their reports.

use std::path::PathBuf;
use std::time::Duration;

use bonfire_core::Error;
use serde::{Deserialize, Serialize};

/// The environment variable with a child's [`Orders`].
pub const ORDERS: &str = "CHAOS_ORDERS";

/// The transport of a group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum GroupTransport {
    /// All ranks are threads of one child.
    Threads,
    Tcp,
    Shm,
    /// Two hosts. Ranks alternate between them.
    Mixed,
}

/// A fault that a rank injects into itself at one step of its stream.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Act {
    /// This signal arrives after so many microseconds, whatever the rank does then.
    Signal { number: i32, micros: u64 },
    /// It exits without a graceful shutdown.
    Exit,
    /// It drops its group: a graceful shutdown.
    Leave,
    /// It panics between two operations.
    Panic,
    /// It panics during an operation, in the buffer that it passed.
    PanicInside,
    /// It is slow.
    Sleep(Duration),
    /// It skips one operation.
    Skip,
    /// It makes a different call.
    Other,
    /// From here on it may open only so many more descriptors than it has.
    Files(u64),
    /// Its wall clock is off by so many seconds.
    Clock(i64),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScheduledAct {
    pub rank: usize,
    /// The step before which it happens.
    pub at: u64,
    pub act: Act,
}

/// The orders of one child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orders {
    pub transport: GroupTransport,
    pub rank: usize,
    pub world_size: usize,
    pub address: String,
    pub host: Option<String>,
    /// Whether the ranks share a secret.
    pub secret: bool,
    pub deadline: Duration,
    pub heartbeat_timeout: Duration,
    /// How long `shrink` waits for ranks that live and do not call it.
    pub hang_timeout: Option<Duration>,
    /// The largest group that begins as a full mesh: a larger one is a star.
    pub full_mesh_limit: usize,
    /// The timeout of the rendezvous.
    pub rendezvous_timeout: Duration,
    /// The same on all ranks.
    pub seed: u64,
    /// The steps of the stream, unless it fails before.
    pub steps: u64,
    /// The base-2 logarithm of the most bytes of an operation.
    pub largest: usize,
    /// The stream ends once this file exists, in the group and in those to which it is shrunk.
    pub until: Option<PathBuf>,
    pub acts: Vec<ScheduledAct>,
    /// Whether some steps are operations of new subgroups.
    pub subgroups: bool,
    /// Whether the survivors of a failure shrink the group and continue.
    pub continues: bool,
    /// How many more descriptors, and bytes of address space, it may use than before it connects.
    pub files: Option<u64>,
    pub memory: Option<u64>,
}

impl Orders {
    /// The signal that this rank is ordered to send itself, if any.
    pub fn signal(&self) -> Option<&Act> {
        let own = self.acts.iter().find(|act| act.rank == self.rank)?;
        matches!(own.act, Act::Signal { .. }).then_some(&own.act)
    }
}

/// The outcome of a rank.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub rank: usize,
    pub error: Option<Error>,
    /// Time since the start of the call that failed.
    pub took: Duration,
    /// Steps that were completed.
    pub steps: u64,
    /// The members of the shrunk group as a mask of the original ranks, where shrinking was ordered.
    pub continued: Option<Result<u32, Error>>,
    /// Violations that the rank found.
    pub wrong: Vec<String>,
}

/// The final message of a child.
#[derive(Debug, Serialize, Deserialize)]
pub struct ChildReport {
    pub reports: Vec<Report>,
    /// Resources of its group that it still has.
    pub leaks: Vec<String>,
}
