//! One operation, as it is recorded.

use std::fmt;
use std::panic::Location;

use serde::{Deserialize, Serialize};

use crate::types::Call;

/// Where a user called an operation.
pub(crate) type CallSite = &'static Location<'static>;

/// One operation in a [`Trace`](crate::trace::Trace).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Record {
    /// Its number among this rank's operations, counted from 0.
    pub number: u64,
    /// Its number in the group's sequence; of a message, in the order of the pair.
    pub sequence: u64,
    /// What was called.
    pub call: Call,
    /// With whom, for a message.
    pub message: Option<Message>,
    /// How far it has come.
    pub state: State,
    /// When its turn came.
    pub begun_ns: u64,
    /// When it ended.
    pub ended_ns: Option<u64>,
    /// Where it was called, `file:line`.
    pub at: String,
}

/// A message between two ranks, seen from one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The other rank.
    pub peer: usize,
    /// Whether this one sends.
    pub sends: bool,
}

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum State {
    Begun,
    Done,
    Failed,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Begun => "begun",
            State::Done => "done",
            State::Failed => "failed",
        })
    }
}

/// What was called, with the peer of a message.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.message {
            None => write!(f, "{}", self.call),
            Some(Message { peer, sends: true }) => write!(f, "{} to rank {peer}", self.call),
            Some(Message { peer, sends: false }) => {
                let Call { dtype, count, .. } = self.call;
                write!(f, "recv({dtype} x {count}) from rank {peer}")
            }
        }
    }
}
