//! Errors, in terms that a caller can act on.

mod peers;
mod texts;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use derive_where::derive_where;
use serde::{Deserialize, Serialize};

use self::texts::{Advice, At, Calls, Note, OfRanks};
use super::ranks::RankList;
use super::{Call, Site, Whereabouts};

/// Why an operation or the creation of a group failed.
///
/// Errors are cheap to clone: the first failed operation poisons its group, and every later call returns a clone of its
/// error. [`Group`](crate::Group#failures) says which errors leave a group usable. `Debug` gives the message, as
/// `Display` does, because that is what Rust prints for an error that `main` returns.
#[derive(Clone, Serialize, Deserialize, thiserror::Error)]
#[derive_where(PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// An invalid argument. Buffers are untouched, the group is intact, and the call may be repeated with a valid one.
    /// Ranks that passed valid arguments wait for it until their deadline.
    #[error("{operation}: {reason}")]
    InvalidArgument {
        /// The call that was refused.
        operation: String,
        /// What is wrong with the argument and what would be valid.
        reason: String,
    },

    /// Settings, from code or environment, that are missing, malformed or contradictory. No group was created.
    #[error("invalid settings: {0}")]
    Config(String),

    /// The ranks did not find each other in time, or contradict each other. No group was created.
    #[error("rendezvous of rank {rank} at {address} failed after {elapsed:.1?}: {reason}")]
    Rendezvous {
        /// The rank that reports.
        rank: usize,
        /// The address at which rank 0 listens or should listen.
        address: String,
        /// What happened and what to do.
        reason: String,
        /// Time since the rendezvous began.
        elapsed: Duration,
    },

    /// Ranks made different calls at the same place in the sequence of operations. All ranks return this same error.
    #[error(
        "ranks disagree at operation #{sequence}: {}; every rank must call the same operations in the same order \
         with the same element type, count, reduction and root{}",
        Calls(.calls), Note(.note)
    )]
    Mismatch {
        /// The number of the operation: see [`Site::sequence`].
        sequence: u64,
        /// The calls, in rank order. In a collective a rank that is not listed has not called anything yet; for a
        /// message, and on a custom transport, only two ranks are compared.
        calls: Vec<(usize, Call)>,
        /// Where the ranks are in their programs, as text, and what else explains the difference. Empty if nothing is
        /// known. It depends on when a rank is asked, and does not count in comparisons.
        #[derive_where(skip(EqHashOrd))]
        note: String,
    },

    /// The deadline, 300 s unless set, passed before all ranks that the operation needs had arrived.
    #[error(
        "{site} timed out after {elapsed:.1?} while rank {rank} waited for {}{}",
        RankList(.missing), Advice(.rank, .missing, .whereabouts)
    )]
    Timeout {
        /// The operation.
        site: Site,
        /// The rank whose deadline passed.
        rank: usize,
        /// The ranks that it waited for.
        missing: Vec<usize>,
        /// Time since the operation began.
        elapsed: Duration,
        /// Where ranks were in their programs, as far as it is known: the missing ones, the one whose deadline passed,
        /// and some others.
        whereabouts: Box<[(usize, Whereabouts)]>,
    },

    /// A rank was lost: its connections closed without a goodbye message, which is noticed at once, nothing arrived on
    /// them for 5 s (unless set), or its thread panicked.
    #[error(
        "{site}: rank {peer}{} was lost after {elapsed:.1?} ({reason}); look at that rank's own output, then go \
         on without it (`Group::shrink`) or restart the job from its last checkpoint",
        At(.address)
    )]
    PeerLost {
        /// The operation.
        site: Site,
        /// The rank that was lost.
        peer: usize,
        /// Its address, if it has one.
        address: Option<String>,
        /// What this rank observed.
        reason: String,
        /// Time since the operation began.
        elapsed: Duration,
    },

    /// The data connection between two ranks broke, and neither of them is known to be lost.
    #[error(
        "{site}: the data connection between ranks {rank} and {peer} broke after {elapsed:.1?} ({reason}), and no rank \
         is known to be lost; find out what lies between them and may have ended it (a firewall, a NAT gateway, a \
         proxy), and go on over new connections (`Group::shrink`) or restart the job from its last checkpoint"
    )]
    Disconnected {
        /// The operation.
        site: Site,
        /// The rank that reports.
        rank: usize,
        /// The rank at the other end.
        peer: usize,
        /// What the reporting rank observed.
        reason: String,
        /// Time since the operation began.
        elapsed: Duration,
    },

    /// What two ranks send each other does not arrive, though both are there and the connections between them are open:
    /// all packets above a size are lost on the way, or all ranks have called the operation and by its deadline nothing
    /// has come for long.
    #[error("{site}: what ranks {rank} and {peer} send each other does not arrive, after {elapsed:.1?}: {reason}")]
    Stalled {
        /// The operation.
        site: Site,
        /// The rank that reports.
        rank: usize,
        /// The rank at the other end.
        peer: usize,
        /// What the reporting rank observed, with the address of the other end, and what to do.
        reason: String,
        /// Time since the operation began.
        elapsed: Duration,
    },

    /// A rank that this operation needs has left the group in order: it dropped its handles or was interrupted.
    #[error(
        "{site}: rank {rank} has left the group; all ranks must make the same number of calls before any of them \
         drops its group{}",
        Note(.note)
    )]
    Left {
        /// The operation.
        site: Site,
        /// The rank that left.
        rank: usize,
        /// Where the rank that needed it was in its program, as text. Empty if it is not known. It does not count in
        /// comparisons.
        #[derive_where(skip(EqHashOrd))]
        note: String,
    },

    /// Two ranks name different members for the same subgroup. The parent group is poisoned. See
    /// [`Group::subgroup`](crate::Group::subgroup).
    #[error(
        "subgroup: rank {rank} names {} as members, rank {peer} names {}; all members must name the same ranks",
        RankList(.members), RankList(.theirs)
    )]
    MemberMismatch {
        /// The lower of the two ranks.
        rank: usize,
        /// The members that the lower rank names.
        members: Vec<usize>,
        /// The higher of the two ranks.
        peer: usize,
        /// The members that the higher rank names.
        theirs: Vec<usize>,
    },

    /// This rank cannot continue with the surviving ranks. There is no new group, and the old one cannot be shrunk
    /// again. See [`Group::shrink`](crate::Group::shrink).
    #[error("shrink failed on rank {rank} after {elapsed:.1?}: {why}")]
    Shrink {
        /// The rank that reports, numbered as in the old group.
        rank: usize,
        /// Why it cannot continue.
        why: ShrinkError,
        /// Time since the call's turn came.
        elapsed: Duration,
    },

    /// The operating system, a device or a library refused a request, such as a thread, a socket or a copy.
    #[error("{operation}: {reason}")]
    Io {
        /// What was attempted.
        operation: String,
        /// The underlying error, as text.
        reason: String,
        /// The underlying error itself. Present only on the rank where it occurred.
        #[serde(skip)]
        #[derive_where(skip(EqHashOrd))]
        source: Option<Cause>,
    },

    /// Something that ranks, threads or devices of the group rely on failed or is inconsistent, such as a thread that
    /// panicked or data that contradict themselves.
    #[error("{operation}: {reason}")]
    Broken {
        /// What was attempted.
        operation: String,
        /// What went wrong.
        reason: String,
    },

    /// A function of MPI failed.
    #[error("{function} of MPI failed with code {code}: {reason}")]
    Mpi {
        /// The function that was called.
        function: String,
        /// The error code.
        code: i32,
        /// MPI's description of the error.
        reason: String,
    },

    /// A library that is loaded at run time is missing, too old, or differs from that of the other ranks.
    #[error("{library}: {reason}")]
    Library {
        /// The library.
        library: String,
        /// What is wrong with it and how to get a suitable one.
        reason: String,
    },

    /// A GPU reported a fault, such as a kernel that accessed an illegal address. The fault ended all work of this
    /// process on that GPU, and every later call on it fails. Other GPUs remain usable as far as the driver permits.
    #[error(
        "{operation}: GPU {gpu}{} has a fault, found after {elapsed:.1?}: {reason}; all work on that GPU has \
         ended, and only a new process can use it: look for the kernel with compute-sanitizer and for the GPU's own \
         errors in the system log (Xid), and restart the job from its last checkpoint",
        OfRanks(.ranks)
    )]
    Gpu {
        /// What was waiting for the GPU. Other work may have caused the fault.
        operation: String,
        /// The GPU, as CUDA numbers it in the process that uses it.
        gpu: usize,
        /// The ranks of the operation that use this GPU.
        ranks: Vec<usize>,
        /// The name of the driver's error, and its description.
        reason: String,
        /// Time since the operation began.
        elapsed: Duration,
    },

    /// A device has too little free memory. In a group's operation it ends the group, and the devices stay usable. In
    /// cubecl's `all_reduce` it poisons the devices.
    #[error(
        "{operation}: {device} is out of memory ({reason}); end other programs on it, put fewer ranks on it, make the \
         batch smaller, or divide the training's state among the ranks (`FullyShardedParallel`)"
    )]
    OutOfMemory {
        /// What needed the memory.
        operation: String,
        /// The device.
        device: String,
        /// The error of the device's library.
        reason: String,
    },

    /// A function of NCCL failed. The communicator was aborted; its other ranks fail with errors of their own.
    #[error(
        "{function} of NCCL failed on rank {rank} with code {code} after {elapsed:.1?}: {reason}; for details, set \
         NCCL_DEBUG=WARN"
    )]
    Nccl {
        /// The function that was called.
        function: String,
        /// The rank that reports.
        rank: usize,
        /// The error code.
        code: i32,
        /// NCCL's description of the error.
        reason: String,
        /// Time since the call.
        elapsed: Duration,
    },
}

impl Error {
    /// Creates an [`Error::InvalidArgument`].
    pub fn argument(operation: impl fmt::Display, reason: impl Into<String>) -> Self {
        Error::InvalidArgument { operation: operation.to_string(), reason: reason.into() }
    }

    /// Creates an [`Error::Io`] with this source.
    pub fn io(operation: impl Into<String>, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Error::Io { operation: operation.into(), reason: source.to_string(), source: Some(Cause(Arc::new(source))) }
    }

    /// Returns the ranks that made another call than this one, if ranks disagree.
    pub(crate) fn others(&self, own: &Call) -> Vec<usize> {
        match self {
            Error::Mismatch { calls, .. } => {
                calls.iter().filter(|(_, call)| call != own).map(|(rank, _)| *rank).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Creates an [`Error::Broken`].
    pub fn broken(operation: impl Into<String>, reason: impl fmt::Display) -> Self {
        Error::Broken { operation: operation.into(), reason: reason.to_string() }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error of the operating system, a device or a library. It stays on its rank; other ranks receive only the text.
#[derive(Clone, Debug)]
pub struct Cause(Arc<dyn std::error::Error + Send + Sync>);

impl Deref for Cause {
    type Target = dyn std::error::Error + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

// The error is only read.
impl std::panic::UnwindSafe for Cause {}
impl std::panic::RefUnwindSafe for Cause {}

/// Why a rank cannot continue after [`Group::shrink`](crate::Group::shrink). Ranks are numbered as in the old group.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum ShrinkError {
    /// This rank is not in the majority: the unreachable ranks may continue without it, so it must not.
    #[error(
        "{} cannot be reached and may continue without this rank, which is not in the majority; end this process, \
         check the network between them, and restart the job from its last checkpoint if no rank continues",
        RankList(.silent)
    )]
    Minority {
        /// The ranks that cannot be reached but may still be alive.
        silent: Vec<usize>,
    },
    /// The other ranks continue without this rank.
    #[error(
        "the other ranks continue without this rank, as rank {by} reports: one of them lost its connection to this \
         rank, received nothing from it, or waited for its call of shrink for too long (BONFIRE_HANG_TIMEOUT); end \
         this process, and find out what delayed it"
    )]
    Excluded {
        /// The rank that reported it.
        by: usize,
    },
    /// The deadline passed while another thread of this rank was in an operation of the group.
    #[error("an operation of this rank was still in flight on another thread; call shrink again once it has returned")]
    Busy,
    /// The deadline passed, and these ranks had neither ended nor called `shrink`, or could not be connected to. They
    /// were not left out, because the time was too short or the others are not the majority. `shrink` may be called
    /// again.
    #[error(
        "{} did not take part in time{problem}; every surviving rank must call shrink or exit; shrink may be called \
         again",
        RankList(.ranks)
    )]
    Missing {
        /// The missing ranks.
        ranks: Vec<usize>,
        /// The error of the attempt to connect, in parentheses; empty if there was none.
        problem: String,
    },
}

impl fmt::Debug for ShrinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_prints_the_message() {
        let apart = ShrinkError::Missing { ranks: vec![1, 2], problem: String::new() };
        let error = Error::Shrink { rank: 0, why: apart.clone(), elapsed: Duration::from_secs(4) };
        assert_eq!(format!("{apart:?}"), apart.to_string());
        assert_eq!(format!("{error:?}"), error.to_string());
        assert_eq!(format!("{error:#?}"), error.to_string());
        assert!(error.to_string().starts_with("shrink failed on rank 0 after 4.0s: ranks 1, 2 did not take part"));
    }
}
