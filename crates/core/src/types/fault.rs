//! The failure of an operation, as a transport reports it.

use super::{Error, Site};

/// Why a message or an engine's operation failed. The group adds operation, rank and elapsed time to form an [`Error`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// The deadline passed.
    Timeout {
        /// The ranks that this rank was waiting for.
        missing: Vec<usize>,
    },
    /// A peer ended, or its connection broke, without a goodbye message.
    Lost {
        /// The rank that was lost.
        peer: usize,
        /// What this rank observed.
        reason: String,
    },
    /// A peer that the operation needs has left the group in order.
    Left {
        /// The rank that left.
        peer: usize,
    },
    /// A peer sent a message with another tag or another length than expected.
    Unexpected {
        /// The sender.
        peer: usize,
        /// The tag of its message; equal to the expected one if only the length differs.
        site: Site,
    },
    /// The whole group failed, on this rank or another, with this error.
    Failed(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Failed(error)
    }
}
