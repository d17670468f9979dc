//! What the tests of all packages share: ranks as threads and as processes, oracles, readers on bytes that were changed.

pub mod fuzz;
pub mod oracle;
pub mod process;
pub mod relay;
pub mod transport;
pub mod wire;

use std::net::TcpListener;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use bonfire_core::{Algorithm, Builder, Error, Group, Medium, ReduceOp};

/// How the ranks of a test reach each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Threads,
    Tcp,
    /// Ranks that share memory as processes do, here as threads with a mapping each.
    Shm,
    /// Ranks on several hosts: the host of each rank by its number, over and over. They share memory on a host and use TCP
    /// between hosts, here as threads that say that they are on different machines.
    Hosts(&'static [usize]),
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Threads, Kind::Tcp, Kind::Shm, Kind::Hosts(&[0, 1])];

    /// The algorithms that a user can choose for all sizes: they are plans on messages, and neither the hosts' nor shared
    /// memory's.
    pub fn algorithms(self) -> &'static [Algorithm] {
        if matches!(self, Kind::Shm | Kind::Hosts(_)) { &[] } else { Algorithm::ALL }
    }
}

/// A test must end: nothing in it may take longer than this.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Runs `f` on `n` ranks, each on a thread of its own, and gives the results by rank.
pub fn run_ranks<T: Send + 'static>(kind: Kind, n: usize, f: impl Fn(Group) -> T + Clone + Send + 'static) -> Vec<T> {
    run_ranks_with(kind, n, |builder| builder, f)
}

/// As [`run_ranks`], with settings.
pub fn run_ranks_with<T: Send + 'static>(
    kind: Kind,
    n: usize,
    settings: impl Fn(Builder) -> Builder,
    f: impl Fn(Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let members: Vec<usize> = (0..n).collect();
    let ranks: Vec<_> = doors(kind, &members, settings)
        .into_iter()
        .map(|door| {
            let f = f.clone();
            thread::spawn(move || f(door()))
        })
        .collect();
    // A rank that panicked is more telling than those that then lost it.
    let results: Vec<_> = ranks.into_iter().map(thread::JoinHandle::join).collect();
    results.into_iter().map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
}

/// As [`run_ranks`], between threads that may borrow: runs `rank` on a thread for each of `n` ranks and gives their
/// results, by rank.
pub fn ranks<T: Send>(n: usize, rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = Group::builder().deadline(Duration::from_secs(30)).threads(n).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Prints what ranks log, as much as `RUST_LOG` says.
pub fn log_to_stderr() {
    static LOG: Once = Once::new();
    LOG.call_once(|| {
        // A test that looks at what is logged has a logger of its own.
        if log::max_level() == log::LevelFilter::Off {
            drop(simple_logger::SimpleLogger::new().with_level(log::LevelFilter::Error).env().init());
        }
    });
}

/// What a rank calls on a thread of its own to come into its group.
pub type Door = Box<dyn FnOnce() -> Group + Send>;

/// The doors of a group, by rank. `members` says which of the test's ranks they are, which is what hosts go by.
pub fn doors(kind: Kind, members: &[usize], settings: impl Fn(Builder) -> Builder) -> Vec<Door> {
    log_to_stderr();
    let n = members.len();
    let builder = settings(Group::builder().deadline(DEADLINE));
    let medium = match kind {
        Kind::Threads => {
            let groups = builder.threads(n).expect("a group of threads");
            return groups.into_iter().map(|group| Box::new(move || group) as Door).collect();
        }
        Kind::Tcp => Medium::Tcp,
        Kind::Shm => Medium::Shm,
        Kind::Hosts(_) => Medium::Auto,
    };
    let builder = builder.transport(medium).address(free_address()).world_size(n).rendezvous_timeout(DEADLINE);
    let door = |(rank, member): (usize, &usize)| {
        let host = if let Kind::Hosts(hosts) = kind { hosts[member % hosts.len()] } else { 0 };
        let builder = builder.clone().machine(format!("host {host}")).rank(rank);
        Box::new(move || builder.connect().expect("ranks find each other")) as Door
    };
    members.iter().enumerate().map(door).collect()
}

/// An address on loopback that nobody listens at. Its port is below those that the system hands out by itself, so that
/// no other socket of these tests takes it before it is used.
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

/// Calls `f` with every case, `width` at a time: cases that mostly wait need not wait for each other.
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

/// The error of every rank; panics where one succeeded.
pub fn errors<T: std::fmt::Debug>(results: Vec<Result<T, Error>>) -> Vec<Error> {
    results.into_iter().enumerate().map(|(r, result)| result.expect_err(&format!("rank {r} succeeded"))).collect()
}

/// All ranks are there and reach each other: what they compute uses a connection between any two.
pub fn works(groups: Vec<Result<Group, Error>>) {
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

/// The reason of a rendezvous that failed.
pub fn reason(result: Result<Group, Error>) -> String {
    match result {
        Err(Error::Rendezvous { reason, .. }) => reason,
        other => panic!("{other:?} is no failed rendezvous"),
    }
}
