//! What a rank tells the launcher that started it, `bonfire run`: that its group failed, which other ranks the error
//! names, that an operation waits, and that its program stops in order. The launcher can then name the rank that failed
//! first, whatever the programs print and in whatever order they end, and does not kill one that saves.
//!
//! The ranks of a node inherit one end of a pair of datagram sockets; `BONFIRE_LAUNCHER` holds its descriptor, its
//! inode and the local rank. A datagram is in the launcher's queue when the call that sends it returns, so before this
//! rank ends. A rank reports a failure before it tells its peers, so the first report is that of the rank where the
//! failure began.

use std::env;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::{FileType, fstat};
use serde::{Deserialize, Serialize};

use crate::types::{Error, ShrinkError};

/// The environment variable by which a rank finds the socket: `DESCRIPTOR:INODE:LOCAL_RANK`.
pub const VARIABLE: &str = "BONFIRE_LAUNCHER";

/// Most characters of an error, and most ranks that a report names. Some systems limit datagrams to 2 KiB.
const LONGEST: usize = 1000;
const MOST_RANKS: usize = 64;

/// A message from a rank to its launcher.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The local rank of the process that sends it.
    pub local: u32,
    /// What happened.
    pub event: Event,
}

/// What a rank reports.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// An operation has waited for a tenth of its deadline.
    Waits {
        /// How long.
        elapsed: Duration,
        /// In which operation, for which ranks.
        what: String,
        /// Where ranks are in their programs, after a colon, if that is known. Texts of two ranks differ: each has
        /// measured times of its own.
        places: String,
    },
    /// A group of this rank failed, or could not be made.
    Failed {
        /// Whether the error says, or may mean, that another rank is the cause.
        names_another: bool,
        /// The ranks that it names, as the launcher numbers them, as far as their numbers are known.
        named: Vec<usize>,
        /// The error as text.
        error: String,
    },
    /// This rank is in a new group: it has overcome earlier failures.
    Connected,
    /// All ranks have agreed to stop after so many steps, and the program of this one has heard of it: it saves, and
    /// ends by itself.
    Stops {
        /// The steps of this rank.
        steps: u64,
    },
}

/// Returns whether there is a launcher.
pub fn waits(elapsed: Duration, what: String, places: String) -> bool {
    send(|| Event::Waits { elapsed, what, places: cut(places) })
}

/// `number` returns the launcher's number of a rank of the group that failed, if it is known.
pub fn failed(error: &Error, number: impl Fn(usize) -> Option<usize>) {
    send(|| failure(error, number));
}

pub fn connected() {
    send(|| Event::Connected);
}

pub fn stops(steps: u64) {
    send(|| Event::Stops { steps });
}

fn failure(error: &Error, number: impl Fn(usize) -> Option<usize>) -> Event {
    let named = named(error);
    let names_another = named.is_some();
    let named = named.unwrap_or_default().iter().filter_map(|rank| number(*rank)).take(MOST_RANKS).collect();
    Event::Failed { names_another, named, error: cut(error.to_string()) }
}

fn cut(text: String) -> String {
    text.chars().take(LONGEST).collect()
}

/// Returns the ranks that are the cause, as the error says; none if it means another rank and does not say which one,
/// as those of other libraries. `None` if it means no other rank.
fn named(error: &Error) -> Option<Vec<usize>> {
    match error {
        Error::PeerLost { peer, .. }
        | Error::Disconnected { peer, .. }
        | Error::Stalled { peer, .. }
        | Error::Left { rank: peer, .. } => Some(vec![*peer]),
        Error::Timeout { missing, .. } => Some(missing.clone()),
        Error::Shrink { why: ShrinkError::Missing { ranks, .. } | ShrinkError::Minority { silent: ranks }, .. } => {
            Some(ranks.clone())
        }
        Error::Shrink { .. } | Error::MemberMismatch { .. } | Error::Rendezvous { .. } => Some(Vec::new()),
        Error::Nccl { .. } | Error::Mpi { .. } => Some(Vec::new()),
        Error::InvalidArgument { .. } | Error::Config(_) | Error::Mismatch { .. } => None,
        Error::Io { .. } | Error::Broken { .. } | Error::Library { .. } => None,
        Error::Gpu { .. } | Error::OutOfMemory { .. } => None,
    }
}

/// Sends a report, if a launcher listens. If the launcher is stopped, waits for at most a second, which the launcher
/// has set on the socket. A report that cannot be sent is dropped: it explains a failure and must not cause one.
/// Returns whether there is a launcher.
fn send(event: impl FnOnce() -> Event) -> bool {
    static LAUNCHER: OnceLock<Option<(UnixDatagram, u32)>> = OnceLock::new();
    let launcher = LAUNCHER.get_or_init(|| inherited(&env::var(VARIABLE).ok()?));
    if let Some((socket, local)) = launcher
        && let Ok(bytes) = serde_json::to_vec(&Report { local: *local, event: event() })
    {
        let _ = socket.send(&bytes);
    }
    launcher.is_some()
}

/// Returns a duplicate of the inherited socket, and the local rank. A program between the launcher and this rank may
/// have closed the socket and opened something else under its number, so the inode is compared.
fn inherited(text: &str) -> Option<(UnixDatagram, u32)> {
    let mut numbers = text.split(':');
    let descriptor: RawFd = numbers.next()?.parse().ok().filter(|number| *number >= 0)?;
    let inode: u64 = numbers.next()?.parse().ok()?;
    let local = numbers.next()?.parse().ok()?;
    // SAFETY: the number is not -1. It is only duplicated, which is an error if it is not open and has no effect on its
    // owner if it is.
    let duplicate = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned().ok()?;
    let stat = fstat(&duplicate).ok()?;
    let is_it = FileType::from_raw_mode(stat.st_mode).is_socket() && stat.st_ino as u64 == inode;
    is_it.then(|| (UnixDatagram::from(duplicate), local))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;
    use crate::types::{Call, DType, Operation, Site};

    fn variable(descriptor: impl AsFd, inode: u64) -> String {
        format!("{}:{inode}:7", descriptor.as_fd().as_raw_fd())
    }

    #[test]
    fn only_the_launchers_own_socket_is_written_to() {
        let (launcher, ranks) = UnixDatagram::pair().unwrap();
        let inode = fstat(&ranks).unwrap().st_ino as u64;
        let (socket, local) = inherited(&variable(&ranks, inode)).unwrap();
        socket.send(b"x").unwrap();
        assert_eq!((local, launcher.recv(&mut [0; 2]).unwrap()), (7, 1));
        assert!(inherited(&variable(&launcher, inode)).is_none());
        let file = tempfile::tempfile().unwrap();
        let inode = fstat(&file).unwrap().st_ino as u64;
        assert!(inherited(&variable(&file, inode)).is_none());
        for text in ["", "x", "-1:1:1", "1", "1:2", "999999:1:1", "::"] {
            assert!(inherited(text).is_none(), "{text}");
        }
    }

    #[test]
    fn an_error_names_ranks_by_the_launchers_numbers() {
        let named = |error: &Error| match failure(error, |rank| Some(10 + rank).filter(|number| *number < 13)) {
            Event::Failed { names_another, named, .. } => (names_another, named),
            event => panic!("{event:?}"),
        };
        let call = Call::new(Operation::Barrier, DType::U8, 0);
        let (site, elapsed) = (Site { call, sequence: 0 }, Duration::ZERO);
        let (missing, whereabouts) = (vec![1, 2, 3], Box::default());
        let timeout = &Error::Timeout { site, rank: 0, missing, elapsed, whereabouts };
        assert_eq!(named(&Error::Left { site, rank: 2, note: String::new() }), (true, vec![12]));
        assert_eq!(named(timeout), (true, vec![11, 12]));
        let excluded = Error::Shrink { rank: 0, why: ShrinkError::Excluded { by: 1 }, elapsed };
        assert_eq!(named(&excluded), (true, vec![]));
        assert_eq!(named(&Error::argument("test", "on purpose")), (false, vec![]));
    }

    #[test]
    fn long_errors_are_cut_to_the_size_of_a_datagram() {
        let error = Error::Config("x".repeat(10_000));
        let Event::Failed { names_another: false, named, error } = failure(&error, Some) else { panic!() };
        assert!(named.is_empty());
        let missing = (100_000..200_000).collect();
        let why = ShrinkError::Missing { ranks: missing, problem: String::new() };
        let shrink = Error::Shrink { rank: 0, why, elapsed: Duration::ZERO };
        let Event::Failed { names_another: true, named, .. } = failure(&shrink, Some) else { panic!() };
        let report = Report { local: u32::MAX, event: Event::Failed { names_another: true, named, error } };
        let bytes = serde_json::to_vec(&report).unwrap();
        assert_eq!(serde_json::from_slice::<Report>(&bytes).unwrap(), report);
        assert!(bytes.len() <= 2048, "{}", bytes.len());
    }
}
