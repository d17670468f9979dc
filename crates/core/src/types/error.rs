//! What can go wrong, in the terms of a caller who has to act on it.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use derive_where::derive_where;
use serde::{Deserialize, Serialize};

use super::{Call, Site};

/// Why an operation or the creation of a group failed.
///
/// Errors are cheap to clone: the first failure poisons its group, and every later call returns a clone of it.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
#[derive_where(PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// An argument that cannot work. Nothing was changed: buffers are untouched, the group is sound, and the call may be
    /// made again with a right one.
    #[error("{operation}: {reason}")]
    InvalidArgument {
        /// The call that was refused.
        operation: String,
        /// What is wrong with it and what would be right.
        reason: String,
    },

    /// Settings, from code or environment, that are missing, malformed or contradict each other.
    #[error("invalid settings: {0}")]
    Config(String),

    /// The ranks did not find each other.
    #[error("rendezvous of rank {rank} at {address} failed after {elapsed:.1?}: {reason}")]
    Rendezvous {
        /// The rank that reports.
        rank: usize,
        /// Where rank 0 listens or should listen.
        address: String,
        /// What happened and what to do.
        reason: String,
        /// Time since the rendezvous began.
        elapsed: Duration,
    },

    /// Ranks disagree about what to do at one place in the sequence of operations. Every rank gets this same error.
    #[error(
        "ranks disagree at operation #{sequence}: {}; every rank must call the same operations in the same order \
         with the same element type, count, reduction and root",
        Calls(.calls)
    )]
    Mismatch {
        /// The number of the operation, counted from 0 since the group was made.
        sequence: u64,
        /// What each rank called, by rank. A rank that is not listed had not called anything yet.
        calls: Vec<(usize, Call)>,
    },

    /// The deadline passed before every rank that is needed had arrived.
    #[error(
        "{site} timed out after {elapsed:.1?} while rank {rank} waited for {}; if they are merely slow (evaluating, \
         saving), raise the deadline (BONFIRE_DEADLINE, or `Group::with_deadline`); else set BONFIRE_TRACE to a folder, \
         and `bonfire trace` says what each rank did",
        Ranks(.missing)
    )]
    Timeout {
        /// Which operation.
        site: Site,
        /// The rank whose deadline passed.
        rank: usize,
        /// The ranks it waited for.
        missing: Vec<usize>,
        /// Time since the operation began.
        elapsed: Duration,
    },

    /// A rank died or its connection broke: it closed without saying farewell.
    #[error(
        "{site}: rank {peer}{} was lost after {elapsed:.1?} ({reason}); look at that rank's own output, then go \
         on without it (`Group::shrink`) or restart the job from its last checkpoint",
        At(.address)
    )]
    PeerLost {
        /// Which operation.
        site: Site,
        /// The rank that was lost.
        peer: usize,
        /// Its address, where it has one.
        address: Option<String>,
        /// What was seen of it.
        reason: String,
        /// Time since the operation began.
        elapsed: Duration,
    },

    /// A rank that this operation needs has left the group in order: it dropped its handles or was interrupted.
    #[error(
        "{site}: rank {rank} has left the group; all ranks must make the same number of calls before any of them \
         drops its group"
    )]
    Left {
        /// Which operation.
        site: Site,
        /// The rank that left.
        rank: usize,
    },

    /// Two ranks name different members of the subgroup that they make: see [`Group::subgroup`](crate::Group::subgroup).
    #[error(
        "subgroup: rank {rank} makes one of {}, and rank {peer} one of {}; all members must name the same",
        Ranks(.members), Ranks(.theirs)
    )]
    Members {
        /// The lower of the two.
        rank: usize,
        /// The members that it names.
        members: Vec<usize>,
        /// The higher.
        peer: usize,
        /// The members that this one names.
        theirs: Vec<usize>,
    },

    /// The ranks that are left of a group did not come together: see [`Group::shrink`](crate::Group::shrink).
    #[error("shrink failed on rank {rank} after {elapsed:.1?}: {why}")]
    Shrink {
        /// The rank that reports, in the old group.
        rank: usize,
        /// What keeps it from going on.
        why: Apart,
        /// Time since the call.
        elapsed: Duration,
    },

    /// The operating system, a device or a library refused something, such as a thread, a socket or a copy.
    #[error("{operation}: {reason}")]
    Io {
        /// What was tried.
        operation: String,
        /// The answer, in words.
        reason: String,
        /// The answer itself, on the rank that got it.
        #[serde(skip)]
        #[derive_where(skip(EqHashOrd))]
        source: Option<Cause>,
    },

    /// Something is gone or wrong that ranks, threads or devices of the group rely on, such as a thread that panicked or data
    /// that contradict themselves.
    #[error("{operation}: {reason}")]
    Broken {
        /// What was tried.
        operation: String,
        /// What was found.
        reason: String,
    },

    /// MPI refused something.
    #[error("{function} of MPI failed with code {code}: {reason}")]
    Mpi {
        /// The function that was called.
        function: String,
        /// What it returned.
        code: i32,
        /// What MPI says of it.
        reason: String,
    },

    /// A library that is looked for at run time is not there, too old, or another one than the other ranks have.
    #[error("{library}: {reason}")]
    Library {
        /// Whose library.
        library: String,
        /// What is wrong with it and how to get a right one.
        reason: String,
    },

    /// NCCL failed. The communicator was aborted; other ranks that use it fail with their own error.
    #[error(
        "{function} of NCCL failed on rank {rank} with code {code} after {elapsed:.1?}: {reason}; NCCL_DEBUG=WARN makes \
         NCCL say more"
    )]
    Nccl {
        /// The function that was called.
        function: String,
        /// The rank that reports.
        rank: usize,
        /// What NCCL returned.
        code: i32,
        /// What NCCL says of it.
        reason: String,
        /// Time since the call.
        elapsed: Duration,
    },
}

impl Error {
    /// An [`Error::InvalidArgument`].
    pub fn argument(operation: impl fmt::Display, reason: impl Into<String>) -> Self {
        Error::InvalidArgument { operation: operation.to_string(), reason: reason.into() }
    }

    /// An [`Error::Io`] of this cause.
    pub fn io(operation: impl Into<String>, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Error::Io { operation: operation.into(), reason: source.to_string(), source: Some(Cause(Arc::new(source))) }
    }

    /// An [`Error::Broken`].
    pub fn broken(operation: impl Into<String>, reason: impl fmt::Display) -> Self {
        Error::Broken { operation: operation.into(), reason: reason.to_string() }
    }
}

/// What the operating system, a device or a library answered. It stays on the rank that got it: to other ranks the words
/// travel.
#[derive(Clone, Debug)]
pub struct Cause(Arc<dyn std::error::Error + Send + Sync>);

impl Deref for Cause {
    type Target = dyn std::error::Error + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

// It is only read.
impl std::panic::UnwindSafe for Cause {}
impl std::panic::RefUnwindSafe for Cause {}

/// Why a rank does not go on. Ranks are those of the old group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Apart {
    /// Too few can be reached: the others may go on without this rank, so it must not.
    #[error(
        "{} cannot be reached and may go on without this rank, which is not in the majority; end it, look at the network \
         between, and restart the job from its last checkpoint if nobody goes on",
        Ranks(.silent)
    )]
    Minority {
        /// Who may still be there.
        silent: Vec<usize>,
    },
    /// The others go on without this rank.
    #[error(
        "the others go on without this rank, as rank {by} says: one of them lost its connection to this one, or heard \
         nothing of it for too long; end it, and look at what held it up"
    )]
    Excluded {
        /// Who said so.
        by: usize,
    },
    /// The deadline passed, and these had not called `shrink`, or could not be connected to.
    #[error("{} did not come{problem}; every rank that is left must call shrink, or end", Ranks(.ranks))]
    Missing {
        /// Who.
        ranks: Vec<usize>,
        /// What went wrong in the attempt to connect, if anything did, in brackets.
        problem: String,
    },
}

/// Ranks as text: `rank 3` or `ranks 1, 2`.
pub struct Ranks<'a>(pub &'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => write!(f, "its turn"),
            [one] => write!(f, "rank {one}"),
            many => {
                write!(f, "ranks ")?;
                for (i, rank) in many.iter().enumerate() {
                    write!(f, "{}{rank}", if i == 0 { "" } else { ", " })?;
                }
                Ok(())
            }
        }
    }
}

struct Calls<'a>(&'a [(usize, Call)]);

impl fmt::Display for Calls<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (rank, call)) in self.0.iter().enumerate() {
            write!(f, "{}rank {rank} called {call}", if i == 0 { "" } else { ", " })?;
        }
        if let [(_, first), rest @ ..] = self.0
            && !rest.is_empty()
            && rest.iter().all(|(_, call)| call == first)
        {
            write!(f, ", but what one has for the other is not as long as that one expects, or their sizes differ")?;
        }
        Ok(())
    }
}

struct At<'a>(&'a Option<String>);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |address| write!(f, " at {address}"))
    }
}
