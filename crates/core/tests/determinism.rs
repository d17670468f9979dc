//! Results are bit-identical on all ranks and in every run, whatever the timing.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::thread;

use bonfire_core::{Algorithm, Builder, Element, Group, ReduceOp, partition};
use bonfire_testing::transport::{Faults, Random, delay, run_on_channels};
use bonfire_testing::{Kind, run_ranks_with};
use bytemuck::bytes_of;
use half::f16;

const RUNS: usize = 200;
/// The seed of all delays. Any number would do.
const SEED: u64 = 0x0b0f_f12e;
/// Every rank's part has several elements, and the parts differ in size.
const LEN: usize = 61;

trait Sample: Element {
    fn of(value: f32) -> Self;
}

impl Sample for f32 {
    fn of(value: f32) -> Self {
        value
    }
}

impl Sample for f16 {
    fn of(value: f32) -> Self {
        f16::from_f32(value)
    }
}

/// Values of very different magnitudes and both signs: a different order of summation gives a different sum.
fn sample<T: Sample>(rank: usize) -> Vec<T> {
    let mut random = Random(rank as u64 * 1000 + 7);
    let mut next = || random.next() % 2001;
    (0..LEN).map(|i| T::of((next() as f32 / 1000.0 - 1.0) * [1e-3, 1.0, 1e3][(i + rank) % 3])).collect()
}

fn hash<T: Element>(data: &[T]) -> u64 {
    let mut hasher = DefaultHasher::new();
    data.iter().for_each(|x| bytes_of(x).hash(&mut hasher));
    hasher.finish()
}

/// Runs every operation once. Returns name, whether all ranks must have the same result, and hash of the result.
fn run<T: Sample>(group: &Group) -> Vec<(&'static str, bool, u64)> {
    let (rank, n) = (group.rank(), group.world_size());
    let own = partition(LEN, n, rank);
    let mine: Vec<T> = sample(rank);
    let mut results = Vec::new();
    for (name, op) in [("sum", ReduceOp::Sum), ("mean", ReduceOp::Mean), ("product", ReduceOp::Product)] {
        let mut data = mine.clone();
        group.all_reduce(&mut data, op).unwrap();
        results.push((name, true, hash(&data)));
    }
    let mut data = mine.clone();
    group.reduce(&mut data, ReduceOp::Sum, 1).unwrap();
    results.push(("reduce", false, hash(&data)));
    let mut data = mine.clone();
    group.reduce_scatter(&mut data, ReduceOp::Sum).unwrap();
    results.push(("reduce_scatter", false, hash(&data[own])));
    let mut data = mine.clone();
    group.broadcast(&mut data, n - 1).unwrap();
    results.push(("broadcast", true, hash(&data)));
    let mut data = mine.clone();
    group.all_gather(&mut data).unwrap();
    results.push(("all_gather", true, hash(&data)));
    let mut data = mine[..LEN / n * n].to_vec();
    group.all_to_all(&mut data).unwrap();
    results.push(("all_to_all", false, hash(&data)));
    let mut data = mine.clone();
    let _ = group.start_all_reduce(data.clone(), ReduceOp::Sum).unwrap().wait().map(|sum| data = sum);
    results.push(("started", true, hash(&data)));
    results
}

/// Runs all operations [`RUNS`] times with `pause` between, asserts equal hashes, and returns those that ranks share.
fn runs<T: Sample>(group: &Group, mut pause: impl FnMut()) -> Vec<u64> {
    let first = run::<T>(group);
    for i in 1..RUNS {
        pause();
        assert_eq!(run::<T>(group), first, "run {i} on rank {} of {}", group.rank(), T::DTYPE);
    }
    first.into_iter().filter(|(_, common, _)| *common).map(|(_, _, hash)| hash).collect()
}

fn same_on_all_ranks(label: &str, ranks: Vec<Vec<u64>>) {
    let distinct: HashSet<Vec<u64>> = ranks.into_iter().collect();
    assert_eq!(distinct.len(), 1, "{label}: ranks have different results");
}

fn over_channels<T: Sample>(n: usize, label: &str, settings: impl Fn(Builder) -> Builder) {
    let faults = |_| Faults { delays: Some(SEED), ..Faults::default() };
    same_on_all_ranks(label, run_on_channels(n, settings, faults, |group| runs::<T>(&group, || {})));
}

/// Delays every call instead of every message, on transports whose messages are out of reach.
fn over<T: Sample>(kind: Kind, n: usize, label: &str, settings: impl Fn(Builder) -> Builder) {
    let ranks = run_ranks_with(kind, n, settings, |group| {
        let mut random = Random(SEED + group.rank() as u64);
        runs::<T>(&group, || delay(random.next()))
    });
    same_on_all_ranks(label, ranks);
}

#[test]
fn samples_are_sensitive_to_the_order_of_summation() {
    fn sum(ranks: impl Iterator<Item = usize>) -> Vec<f32> {
        let mut total = vec![0f32; LEN];
        ranks.for_each(|rank| total.iter_mut().zip(sample::<f32>(rank)).for_each(|(sum, x)| *sum += x));
        total
    }
    for n in 3..=5 {
        assert_ne!(hash(&sum(0..n)), hash(&sum((0..n).rev())), "{n} ranks");
    }
}

#[test]
fn message_delays_do_not_change_results() {
    for n in [2, 3, 5] {
        over_channels::<f32>(n, &format!("f32, {n} ranks"), |builder| builder);
        over_channels::<f16>(n, &format!("f16, {n} ranks"), |builder| builder);
    }
}

#[test]
fn message_delays_do_not_change_results_of_any_algorithm() {
    for algorithm in Algorithm::ALL.iter().copied() {
        for n in [4, 5] {
            over_channels::<f32>(n, &format!("{algorithm:?}, f32, {n} ranks"), |builder| builder.algorithms(algorithm));
        }
        over_channels::<f16>(3, &format!("{algorithm:?}, f16"), |builder| builder.algorithms(algorithm));
    }
}

#[test]
fn thread_delays_do_not_change_results() {
    for n in [2, 3, 5] {
        over::<f32>(Kind::Threads, n, &format!("threads, f32, {n} ranks"), |builder| builder);
        over::<f16>(Kind::Threads, n, &format!("threads, f16, {n} ranks"), |builder| builder);
    }
    for algorithm in Algorithm::ALL.iter().copied() {
        over::<f32>(Kind::Threads, 3, &format!("threads, {algorithm:?}"), |builder| builder.algorithms(algorithm));
    }
}

#[test]
fn call_delays_over_tcp_do_not_change_results() {
    over::<f32>(Kind::Tcp, 3, "tcp, f32", |builder| builder);
    over::<f16>(Kind::Tcp, 3, "tcp, f16", |builder| builder);
}

#[test]
fn call_delays_in_shared_memory_do_not_change_results() {
    for n in [2, 3, 5] {
        over::<f32>(Kind::Shm, n, &format!("shm, f32, {n} ranks"), |builder| builder);
        over::<f16>(Kind::Shm, n, &format!("shm, f16, {n} ranks"), |builder| builder);
    }
}

#[test]
fn call_delays_across_hosts_do_not_change_results() {
    for (n, hosts) in [(4, &[0, 0, 1, 1][..]), (5, &[0, 1])] {
        over::<f32>(Kind::Hosts(hosts), n, &format!("hosts, f32, {n} ranks"), |builder| builder);
        over::<f16>(Kind::Hosts(hosts), n, &format!("hosts, f16, {n} ranks"), |builder| builder);
    }
}

/// The engines of threads and of shared memory both reduce in the order of ranks.
#[test]
fn threads_and_shared_memory_give_bit_identical_results() {
    for n in [2, 3, 5] {
        let bits = |kind| run_ranks_with(kind, n, |builder| builder, |group| (run::<f32>(&group), run::<f16>(&group)));
        assert_eq!(bits(Kind::Threads), bits(Kind::Shm), "{n} ranks");
    }
}

/// Within one engine a result does not depend on whether it was computed in the slot of a small operation, and a rank
/// alone on its processor gets the same bits as one that shares it.
#[test]
fn a_second_group_gives_bit_identical_results() {
    for kind in Kind::ALL {
        let once = || {
            run_ranks_with(
                kind,
                4,
                |builder| builder,
                |group| {
                    thread::yield_now();
                    run::<f32>(&group)
                },
            )
        };
        let first = once();
        for _ in 0..5 {
            assert_eq!(once(), first, "{kind:?}");
        }
    }
}
