//! The descriptors (open files, sockets among them) that this process may have, and how connections share them with the
//! program.
//!
//! One budget holds for the process. A group that cannot fit is refused before it connects: its connections, what it
//! has besides, what strangers may hold, and room for the program's own files. Connections of strangers have a bound of
//! their own, so that no stranger can use up what is left to the program.
//!
//! # Why the limit is raised
//! The soft limit of most systems is 1,024, for programs that use `select`, which cannot wait for larger numbers.
//! Nothing here uses it. The hard limit is what the administrator allows.

use std::io;
use std::sync::Once;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What a group has besides its connections: listeners, a runtime, pairs of sockets that wake threads, shared memory.
const OWN: u64 = 16;

/// What is left to the program, beyond the files that it has open: data, checkpoints, logs.
const ROOM: u64 = 16;

/// More than any group needs. Some programs walk through all numbers up to the limit when they start another one.
const MOST: u64 = 1 << 20;

/// The fewest and the most connections of strangers.
const STRANGERS: (u64, u64) = (8, 1024);

/// Returns how many descriptors this process may have. The first call raises the soft limit to the hard one.
fn limit() -> u64 {
    static RAISED: Once = Once::new();
    RAISED.call_once(raise);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

fn raise() {
    let before = getrlimit(Resource::Nofile);
    let Some(soft) = before.current else { return };
    let most = before.maximum.map_or(MOST, |hard| hard.min(MOST));
    if soft >= most {
        return log::debug!("this process may have {soft} descriptors");
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..before }) {
        Ok(()) => log::debug!("raised the limit of descriptors of this process from {soft} to {most}"),
        Err(e) => log::debug!("this process may have {soft} descriptors, and not {most}: {e}"),
    }
}

/// Returns how many descriptors are open; `None` where the system does not say.
fn open() -> Option<u64> {
    let folder = if cfg!(target_os = "linux") { "/proc/self/fd" } else { "/dev/fd" };
    // The folder itself is open while it is read.
    Some(std::fs::read_dir(folder).ok()?.count().saturating_sub(1) as u64)
}

/// Returns how many connections that have not proved to be ranks the process may hold, all listeners together.
pub fn strangers() -> usize {
    strangers_of(limit()) as usize
}

fn strangers_of(limit: u64) -> u64 {
    (limit / 8).clamp(STRANGERS.0, STRANGERS.1)
}

/// Returns why `rank` has too few descriptors for a group in which it has so many connections, if it has too few.
pub fn shortage(rank: usize, connections: usize) -> Option<String> {
    // Without the folder the process cannot be out of descriptors, or it can, and then the system says so.
    shortage_of(rank, connections as u64, limit(), open().unwrap_or(0))
}

fn shortage_of(rank: usize, connections: u64, limit: u64, open: u64) -> Option<String> {
    let strangers = strangers_of(limit);
    let needed = [open, connections, OWN, strangers, ROOM].into_iter().fold(0u64, u64::saturating_add);
    (needed > limit).then(|| {
        format!(
            "rank {rank} may have {limit} open files (ulimit -n) and needs {needed}: it has {open} open, {connections} \
             are for connections to other ranks, {OWN} for the rest of the group, {strangers} for connections that \
             have proved nothing yet, and {ROOM} are left to the program; raise the hard limit on its host \
             (ulimit -Hn {needed}, LimitNOFILE= of a service, --ulimit nofile={needed} of a container), or start fewer \
             ranks"
        )
    })
}

/// Whether the process or its machine has no descriptor left.
pub fn is_shortage(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Adds to an error for which [`is_shortage`] holds how many descriptors there are, and what to do.
pub fn explained(error: io::Error) -> io::Error {
    let remedy = if Errno::from_io_error(&error) == Some(Errno::NFILE) {
        "all open files that the machine may have are in use; end other programs on it, or raise fs.file-max".to_owned()
    } else {
        let (open, limit) = (open().map_or("all".to_owned(), |open| open.to_string()), limit());
        format!(
            "{open} of the {limit} open files that this process may have are in use (ulimit -n); close files, or raise \
             the limit"
        )
    };
    io::Error::new(error.kind(), format!("{error}: {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_does_not_fit_is_refused_with_the_limit_the_need_and_a_remedy() {
        // 3 + 19 + 16 + 8 + 16.
        assert_eq!(shortage_of(0, 19, 62, 3), None);
        let reason = shortage_of(7, 19, 61, 3).unwrap();
        for words in ["rank 7 may have 61 open files", "needs 62", "19 are for connections", "ulimit -Hn 62"] {
            assert!(reason.contains(words), "{reason}");
        }
        assert_eq!(shortage_of(0, 1_000_000, u64::MAX, 3), None);
        assert!(shortage_of(0, u64::MAX, 1024, u64::MAX).is_some());
    }

    #[test]
    fn strangers_leave_most_descriptors_to_others() {
        for (limit, strangers) in [(32, 8), (1024, 128), (20_000, 1024), (u64::MAX, 1024)] {
            assert_eq!(strangers_of(limit), strangers);
        }
    }

    #[test]
    fn the_soft_limit_is_the_hard_one_after_the_first_look() {
        let limit = limit();
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        assert_eq!(current.unwrap_or(u64::MAX), limit);
        assert!(limit >= maximum.unwrap_or(u64::MAX).min(MOST), "{limit} of {maximum:?}");
    }
}
