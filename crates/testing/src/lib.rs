//! Test harness of all packages: ranks as threads and as processes, oracles, a fuzzer for readers.

pub mod allocation;
pub mod fuzz;
pub mod logged;
#[cfg(unix)]
pub mod process;
pub mod relay;
pub mod resources;
pub mod settings;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub mod syscalls;
pub mod transport;
pub mod wire;

pub use bonfire_conformance::{faults::DEADLINE, oracle};

use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Once, mpsc};
use std::thread;
use std::time::Duration;

#[cfg(unix)]
use bonfire_core::TransportKind;
use bonfire_core::{Algorithm, Builder, Error, Group, ReduceOp};

/// The transport between the ranks of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Threads,
    Tcp,
    /// Shared memory as between processes. Here the ranks are threads with a mapping each.
    Shm,
    /// Several hosts: rank `i` is on host `hosts[i % hosts.len()]`. Ranks share memory on a host and use TCP between
    /// hosts. Here they are threads that report different machine names.
    Hosts(&'static [usize]),
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Threads, Kind::Tcp, Kind::Shm, Kind::Hosts(&[0, 1])];

    /// Returns the algorithms that a user can choose for all sizes. These are plans on messages, not the engines of
    /// hosts or shared memory.
    pub fn algorithms(self) -> &'static [Algorithm] {
        if matches!(self, Kind::Shm | Kind::Hosts(_)) { &[] } else { Algorithm::ALL }
    }
}

/// Runs `f` on `n` ranks, each on a thread of its own, and returns the results by rank.
pub fn run_ranks<T: Send + 'static>(kind: Kind, n: usize, f: impl Fn(Group) -> T + Clone + Send + 'static) -> Vec<T> {
    run_ranks_with(kind, n, |builder| builder, f)
}

/// How long the other ranks may take to end after one has panicked. They may wait for it where no deadline ends the
/// wait, and a test that never ends shows no panic.
const AFTER_A_PANIC: Duration = Duration::from_secs(60);

/// As [`run_ranks`], with settings.
pub fn run_ranks_with<T: Send + 'static>(
    kind: Kind,
    n: usize,
    settings: impl Fn(Builder) -> Builder,
    f: impl Fn(Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let members: Vec<usize> = (0..n).collect();
    let (ended, ends) = mpsc::channel();
    let ranks: Vec<_> = joins(kind, &members, settings)
        .into_iter()
        .map(|door| {
            let (f, ended) = (f.clone(), ended.clone());
            thread::spawn(move || {
                let result = catch_unwind(AssertUnwindSafe(|| f(door())));
                // Fails only after `AFTER_A_PANIC`: then the test has ended without this rank.
                let _ = ended.send(result.is_err());
                result.unwrap_or_else(|panic| resume_unwind(panic))
            })
        })
        .collect();
    let mut panicked = false;
    for _ in 0..n {
        match ends.recv_timeout(if panicked { AFTER_A_PANIC } else { Duration::MAX }) {
            Ok(panics) => panicked |= panics,
            Err(_) => panic!("a rank has panicked, and others have not ended {AFTER_A_PANIC:?} later"),
        }
    }
    propagated(ranks.into_iter().map(thread::JoinHandle::join).collect())
}

/// Returns the results of all ranks. A rank's panic says more than the errors of the ranks that lost it, so it is
/// propagated first.
fn propagated<T>(ended: Vec<thread::Result<T>>) -> Vec<T> {
    ended.into_iter().map(|result| result.unwrap_or_else(|panic| resume_unwind(panic))).collect()
}

/// As [`run_ranks`], between threads and with a closure that may borrow: runs `rank` on a thread for each of `n` ranks
/// and returns the results by rank.
pub fn ranks<T: Send>(n: usize, rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = Group::builder().deadline(Duration::from_secs(30)).threads(n).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        propagated(threads.into_iter().map(thread::ScopedJoinHandle::join).collect())
    })
}

/// Prints the log of the ranks to stderr, at the level of `RUST_LOG`.
pub fn log_to_stderr() {
    static LOG: Once = Once::new();
    LOG.call_once(|| {
        // A test that checks the log has a logger of its own.
        if log::max_level() == log::LevelFilter::Off {
            drop(simple_logger::SimpleLogger::new().with_level(log::LevelFilter::Error).env().init());
        }
    });
}

/// Connects one rank to its group. Called on a thread of its own.
pub type Join = Box<dyn FnOnce() -> Group + Send>;

/// Returns the joins of a group, by rank. `members` are the test's ranks in the group, which determine the hosts.
pub fn joins(kind: Kind, members: &[usize], settings: impl Fn(Builder) -> Builder) -> Vec<Join> {
    log_to_stderr();
    let n = members.len();
    let builder = settings(Group::builder().deadline(DEADLINE));
    if kind == Kind::Threads {
        let groups = builder.threads(n).expect("a group of threads");
        return groups.into_iter().map(|group| Box::new(move || group) as Join).collect();
    }
    connecting(kind, members, &builder)
}

#[cfg(not(unix))]
fn connecting(kind: Kind, _members: &[usize], _builder: &Builder) -> Vec<Join> {
    panic!("on this system ranks are threads, and never {kind:?}")
}

#[cfg(unix)]
fn connecting(kind: Kind, members: &[usize], builder: &Builder) -> Vec<Join> {
    let n = members.len();
    let transport = match kind {
        Kind::Tcp => TransportKind::Tcp,
        Kind::Shm => TransportKind::Shm,
        Kind::Hosts(_) | Kind::Threads => TransportKind::Auto,
    };
    let builder =
        builder.clone().transport(transport).address(free_address()).world_size(n).rendezvous_timeout(DEADLINE);
    let door = |(rank, member): (usize, &usize)| {
        let host = if let Kind::Hosts(hosts) = kind { hosts[member % hosts.len()] } else { 0 };
        let builder = builder.clone().machine(format!("host {host}")).rank(rank);
        Box::new(move || builder.connect().expect("ranks find each other")) as Join
    };
    members.iter().enumerate().map(door).collect()
}

/// Returns a free address on loopback. Its port is below the system's ephemeral range, so that no other socket of these
/// tests takes it before it is used.
pub fn free_address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = std::process::id().wrapping_mul(101).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let address = format!("127.0.0.1:{}", 20_000 + number % 12_000);
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

/// Calls `f` with every case, `width` at a time: cases that mostly wait do not wait for each other.
pub fn in_parallel<C: Sync>(cases: &[C], width: usize, f: impl Fn(&C) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..width {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    f(case);
                }
            });
        }
    });
}

/// Returns the error of every rank. Panics if a rank succeeded.
pub fn errors<T: std::fmt::Debug>(results: Vec<Result<T, Error>>) -> Vec<Error> {
    results.into_iter().enumerate().map(|(r, result)| result.expect_err(&format!("rank {r} succeeded"))).collect()
}

/// Checks that all ranks are connected: their all-reduce uses a connection between any two ranks.
pub fn assert_connected(groups: Vec<Result<Group, Error>>) {
    let n = groups.len();
    let groups: Vec<_> = groups.into_iter().map(|group| group.expect("ranks find each other")).collect();
    let rank = |group: Group| {
        thread::spawn(move || {
            let mut data = vec![group.rank() as i64 + 1; 100_000];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, vec![(n * (n + 1) / 2) as i64; 100_000]);
            group.barrier().unwrap();
        })
    };
    let ranks: Vec<_> = groups.into_iter().map(rank).collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

/// Returns the reason of a failed rendezvous.
pub fn reason(result: Result<Group, Error>) -> String {
    match result {
        Err(Error::Rendezvous { reason, .. }) => reason,
        other => panic!("{other:?} is not a failed rendezvous"),
    }
}
