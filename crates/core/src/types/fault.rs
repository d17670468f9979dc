//! What a transport reports of an operation that failed.

use super::{Error, Site};

/// Why a message or an engine's operation failed. The group adds operation, rank and elapsed time to make an [`Error`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// The deadline passed while these ranks were waited for.
    Timeout {
        /// The ranks that had not come.
        missing: Vec<usize>,
    },
    /// A peer is gone without a farewell.
    Lost {
        /// Which.
        peer: usize,
        /// What was seen.
        reason: String,
    },
    /// A peer has left in order, and is needed.
    Left {
        /// Which.
        peer: usize,
    },
    /// A peer sent something else than what was expected: the message carries another tag.
    Unexpected {
        /// Which.
        peer: usize,
        /// What it sent instead.
        site: Site,
    },
    /// The whole group failed, here or elsewhere, for this reason.
    Failed(Error),
}
