//! What the parent tells its ranks, and what they say of it afterwards.

use std::path::PathBuf;
use std::time::Duration;

use bonfire_core::Error;
use serde::{Deserialize, Serialize};

/// The variable by which a child is told its [`Orders`].
pub const ORDERS: &str = "CHAOS_ORDERS";

/// What carries a group's operations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Carrier {
    /// All ranks are threads of one child.
    Threads,
    Tcp,
    Shm,
    /// Two hosts, on which the ranks sit in turn.
    Mixed,
}

/// What a rank does to itself at one place of its stream.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Act {
    /// This signal comes so many microseconds later, whatever the rank does then.
    Signal { number: i32, micros: u64 },
    /// It ends without a farewell.
    Exit,
    /// It drops its group in good order.
    Leave,
    /// It panics between two operations.
    Panic,
    /// It panics in the middle of an operation, by the buffer that it gave.
    PanicInside,
    /// It is slow.
    Sleep(Duration),
    /// It leaves one operation out.
    Skip,
    /// It calls something else.
    Other,
    /// From here on it may have only so many more descriptors than it has.
    Files(u64),
    /// Its wall clock is wrong by so many seconds.
    Clock(i64),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Deed {
    pub rank: usize,
    /// Before which step.
    pub at: u64,
    pub act: Act,
}

/// What one child does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orders {
    pub carrier: Carrier,
    pub rank: usize,
    pub world_size: usize,
    pub address: String,
    pub host: Option<String>,
    /// Whether the ranks share a secret.
    pub secret: bool,
    pub deadline: Duration,
    pub silence: Duration,
    /// For the rendezvous.
    pub patience: Duration,
    /// The same numbers on all ranks.
    pub seed: u64,
    /// The steps of the stream, unless it fails before.
    pub steps: u64,
    /// The most bytes of an operation, as a power of two.
    pub largest: usize,
    /// Once this file is there the stream ends early.
    pub until: Option<PathBuf>,
    pub deeds: Vec<Deed>,
    /// Whether those who are left go on without the others after a failure.
    pub goes_on: bool,
    /// How many more descriptors, and bytes of addresses, than it has before it connects.
    pub files: Option<u64>,
    pub memory: Option<u64>,
}

impl Orders {
    /// The signal that this rank is to have, if any.
    pub fn signal(&self) -> Option<&Act> {
        let own = self.deeds.iter().find(|deed| deed.rank == self.rank)?;
        matches!(own.act, Act::Signal { .. }).then_some(&own.act)
    }
}

/// What became of a rank.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub rank: usize,
    pub error: Option<Error>,
    /// From the beginning of the call that failed.
    pub took: Duration,
    /// Steps that were completed.
    pub steps: u64,
    /// Who went on together where that was ordered, as a mask of the group's ranks.
    pub went_on: Option<Result<u32, Error>>,
    /// What should not be.
    pub wrong: Vec<String>,
}

/// A child's last words.
#[derive(Debug, Serialize, Deserialize)]
pub struct Words {
    pub reports: Vec<Report>,
    /// What it still has of its group.
    pub leaks: Vec<String>,
}
