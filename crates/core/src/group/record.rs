//! One recorded operation.

use std::fmt;
use std::panic::Location;

use serde::{Deserialize, Serialize};

use crate::types::{Call, Operation};

/// Where user code called an operation.
pub type CallSite = &'static Location<'static>;

/// One operation in a [`Trace`](crate::trace::Trace).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Record {
    /// Its number among this rank's operations in the group, counted from 0.
    pub number: u64,
    /// Its number in the group's sequence; for a message see [`Site::sequence`](crate::error::Site::sequence).
    pub sequence: u64,
    /// The call.
    pub call: Call,
    /// Peer and direction, if it is a message.
    pub message: Option<Message>,
    /// Whether it has ended, and how.
    pub state: State,
    /// When its turn came, in nanoseconds on the trace's clock.
    pub begun_ns: u64,
    /// When it ended, if it has, in nanoseconds on the trace's clock.
    pub ended_ns: Option<u64>,
    /// The call site, `file:line`.
    pub at: String,
}

impl Record {
    /// Returns the name of the function that was called.
    pub(super) fn function(&self) -> String {
        match (self.call.operation, self.message) {
            (Operation::Send, Some(Message { sends: false, .. })) => "recv".into(),
            (operation, _) => format!("{operation}{}", if self.call.is_sized() { "_v" } else { "" }),
        }
    }
}

/// A message between two ranks, seen from one of them. An exchange is recorded as a message to its receiver, if it has
/// one, and the creation of a subgroup as one to another member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The peer.
    pub peer: usize,
    /// Whether this rank sends.
    pub sends: bool,
}

/// The state of an operation in a [`Trace`](crate::trace::Trace).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum State {
    /// Its turn has come, and it has not ended.
    Begun,
    /// It has completed on this rank.
    Done,
    /// It has returned an error.
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

/// The call, with the peer of a message.
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
