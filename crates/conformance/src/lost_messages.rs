//! Lost messages: each message of each operation fails once when it is sent, and once when it is received.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use bonfire_core::{Algorithm, Builder, Error, Group, ReduceOp, Transport};
use half::f16;

use crate::faults::{Faults, Seen, run};

type Act = fn(&Group) -> Result<(), Error>;

/// Operations that can run on 2 to 5 ranks.
const ACTS: [(&str, Act); 17] = [
    ("all_reduce", |g| g.all_reduce(&mut [1f32; 50], ReduceOp::Sum)),
    ("large all_reduce", |g| g.all_reduce(&mut vec![1f32; 100_000], ReduceOp::Sum)),
    ("wide all_reduce", |g| g.all_reduce(&mut [f16::ONE; 50], ReduceOp::Mean)),
    ("started all_reduce", |g| {
        g.start_all_reduce(vec![1f32; 50], ReduceOp::Sum)?.wait().map(drop).map_err(|(error, _)| error)
    }),
    ("all_reduce_into", |g| with_input(60, |input| g.all_reduce_into(input, &mut [0; 60], ReduceOp::Sum))),
    ("reduce", |g| g.reduce(&mut [1i32; 50], ReduceOp::Max, 1)),
    ("reduce_into", |g| with_input(60, |input| g.reduce_into(input, &mut [0; 60], ReduceOp::Sum, 1))),
    ("broadcast", |g| g.broadcast(&mut [1u8; 50], 1)),
    ("broadcast_into", |g| with_input(60, |input| g.broadcast_into((g.rank() == 1).then_some(input), &mut [0; 60], 1))),
    ("all_gather", |g| g.all_gather(&mut [1f64; 50])),
    ("all_gather_into", |g| with_input(12, |input| g.all_gather_into(input, &mut vec![0; 12 * g.world_size()]))),
    ("reduce_scatter", |g| g.reduce_scatter(&mut [1f32; 50], ReduceOp::Sum)),
    ("reduce_scatter_into", |g| {
        with_input(12 * g.world_size(), |input| g.reduce_scatter_into(input, &mut [0; 12], ReduceOp::Sum))
    }),
    ("all_to_all", |g| g.all_to_all(&mut [1f32; 60])),
    ("all_to_all_into", |g| with_input(60, |input| g.all_to_all_into(input, &mut [0; 60]))),
    ("barrier", |g| g.barrier()),
    ("messages around a ring", |g| {
        let (rank, n) = (g.rank(), g.world_size());
        with_input(20, |input| g.send(input, (rank + 1) % n))?;
        g.recv(&mut [0i64; 20], (rank + n - 1) % n)
    }),
];

/// Runs an operation on an input, and checks that the input is unchanged, also when the operation fails.
fn with_input(len: usize, operation: impl FnOnce(&[i64]) -> Result<(), Error>) -> Result<(), Error> {
    let given: Vec<i64> = (0..len as i64).collect();
    let input = given.clone();
    let result = operation(&input);
    assert_eq!(input, given, "an operation wrote to its input");
    result
}

/// The side of a message on which it fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    Sends,
    Receives,
}

/// Which messages are lost, and what the ranks learn of it.
#[derive(Clone, Copy, Debug)]
pub struct Losses {
    /// The transport tells peers that a rank has failed ([`Transport::fail`]), so that all ranks return its error.
    /// If this is false it tells nothing, and they return that a rank has left. True by default.
    pub told: bool,
    /// Also tries every algorithm. False by default.
    pub every_algorithm: bool,
    /// Seed of a generator that delays some messages by some microseconds. None by default.
    pub delays: Option<u64>,
}

impl Default for Losses {
    fn default() -> Self {
        Losses { told: true, every_algorithm: false, delays: None }
    }
}

/// One operation in one setting.
struct Case<'a, C> {
    connect: &'a C,
    n: usize,
    algorithm: Option<Algorithm>,
    losses: Losses,
    name: &'static str,
    act: Act,
}

/// How often the operation is called, so that messages fail in the first call and in a later one.
const CALLS: usize = 2;

impl<E: Transport + 'static, C: Fn(usize) -> Vec<E>> Case<'_, C> {
    fn run<T: Send + 'static>(
        &self,
        faults: impl Fn(usize) -> Faults,
        f: impl Fn(&Group, Result<(), Error>) -> T + Clone + Send + 'static,
    ) -> Vec<T> {
        let settings = |builder: Builder| {
            let builder = builder.deadline(Duration::from_secs(20));
            self.algorithm.into_iter().fold(builder, Builder::algorithms)
        };
        let act = self.act;
        let faults = |rank| Faults { delays: self.losses.delays, told: self.losses.told, ..faults(rank) };
        let calls = move |group: Group| f(&group, (0..CALLS).try_for_each(|_| act(&group)));
        run((self.connect)(self.n), settings, faults, calls)
    }

    /// Returns what each rank sends and receives if nothing fails.
    fn messages(&self) -> Vec<[(Side, usize); 2]> {
        let seen: Vec<Arc<Seen>> = (0..self.n).map(|_| Arc::default()).collect();
        let results = self.run(|rank| Faults { seen: seen[rank].clone(), ..Faults::default() }, |_, calls| calls);
        assert!(results.iter().all(Result::is_ok), "{}: {results:?}", self.name);
        let count = |number: &AtomicUsize| number.load(Ordering::Relaxed);
        seen.iter().map(|seen| [(Side::Sends, count(&seen.sent)), (Side::Receives, count(&seen.received))]).collect()
    }

    /// Fails the culprit's message `k` on this side and all after it, and checks the errors of all ranks.
    fn fails_at(&self, culprit: usize, side: Side, k: usize) {
        let faults = |rank| {
            let fail = |on| (rank == culprit && side == on).then_some(k);
            Faults { fail_at: fail(Side::Sends), fail_to_receive_at: fail(Side::Receives), ..Faults::default() }
        };
        // A failure at the end of an operation may affect one rank only. A barrier involves all ranks.
        let results = self.run(faults, |group, calls| (calls, group.barrier()));
        let Case { n, algorithm, losses: Losses { told, .. }, name, .. } = self;
        let label = format!("{name} of {n} by {algorithm:?}, told: {told}, rank {culprit} {side:?} message {k}");
        let cause = results[culprit].0.clone().expect_err(&label);
        let lost = matches!(
            &cause,
            Error::PeerLost { peer, reason, .. } if *peer != culprit && reason.ends_with("on purpose")
        );
        assert!(lost, "{label}: it got {cause:?}");
        for (rank, (calls, barrier)) in results.into_iter().enumerate() {
            let error = calls.clone().and_then(|()| barrier.clone()).expect_err(&label);
            if *told || rank == culprit {
                assert_eq!(error, cause, "{label}: rank {rank} has a different cause");
            } else {
                // It learns only that a failed rank has left.
                let left = matches!(&error, Error::Left { rank: left, .. } if *left != rank);
                assert!(left, "{label}: rank {rank} got {error:?}");
            }
            assert!(calls.is_ok() || barrier == Err(error), "{label}: later calls return the first cause");
        }
    }

    /// The culprit sends nothing, also in a barrier after the calls: no rank succeeds.
    fn sends_nothing(&self, culprit: usize) {
        let faults = |rank| Faults { fail_at: (rank == culprit).then_some(0), ..Faults::default() };
        let results = self.run(faults, |group, calls| calls.and_then(|()| group.barrier()));
        assert!(results.iter().all(Result::is_err), "{}, rank {culprit} sends nothing: {results:?}", self.name);
    }

    fn every_message_fails(&self) {
        for (culprit, sides) in self.messages().into_iter().enumerate() {
            self.sends_nothing(culprit);
            for (side, messages) in sides {
                assert_eq!(messages % CALLS, 0, "{}: {messages} messages in {CALLS} equal calls", self.name);
                (0..messages).for_each(|k| self.fails_at(culprit, side, k));
            }
        }
    }
}

/// Operations that are the same in every algorithm.
const ALIKE: [&str; 5] = ["wide all_reduce", "all_to_all", "all_to_all_into", "barrier", "messages around a ring"];

/// Every message of every rank fails once, when it is sent and when it is received: in each operation, on 2 to 5 ranks.
/// All ranks must return an error, and later calls the same one. `connect` returns the ends of so many ranks, by rank.
///
/// # Panics
/// If a rank succeeds, or returns another error.
pub fn every_lost_message<T: Transport + 'static>(connect: impl Fn(usize) -> Vec<T> + Sync, losses: Losses) {
    let every = Algorithm::ALL.iter().copied().map(Some).filter(|_| losses.every_algorithm);
    let algorithms: Vec<Option<Algorithm>> = [None].into_iter().chain(every).collect();
    let of_so_many = |n: usize| {
        for algorithm in algorithms.iter().copied() {
            for (name, act) in ACTS.into_iter().filter(|(name, _)| algorithm.is_none() || !ALIKE.contains(name)) {
                Case { connect: &connect, n, algorithm, losses, name, act }.every_message_fails();
            }
        }
    };
    let of_so_many = &of_so_many;
    thread::scope(|scope| (2..=5).for_each(|n| drop(scope.spawn(move || of_so_many(n)))));
}
