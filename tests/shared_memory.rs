//! Shared memory between processes: who gets it, what is left of it, and operations of all sizes one after the other.

mod common;

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use bonfire::{Algorithm, Builder, Error, Group, Medium, ReduceOp, partition};
use common::process::{Process, is_child, report, say};
use common::transport::{Random, delay};
use common::{Kind, free_address, run_ranks};
use rustix::process::Signal;

/// How many segments this process has mapped.
fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux has it");
    maps.lines().filter(|line| line.contains("memfd:bonfire")).count()
}

/// What this process's descriptors refer to.
fn descriptors() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("Linux has it");
    entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect()
}

/// How many of them are memory that may be shared.
fn memories(all: &[PathBuf]) -> usize {
    all.iter().filter(|path| path.to_string_lossy().contains("memfd")).count()
}

#[test]
fn nothing_is_left_of_a_group_that_is_dropped() {
    if is_child() {
        let outcome = Group::from_env().and_then(|group| {
            let while_it_lives = (mappings(), memories(&descriptors()));
            group.all_reduce(&mut vec![1f32; 1_000_000], ReduceOp::Sum)?;
            let before = descriptors().len();
            drop(group);
            Ok(format!("{while_it_lives:?}, {}, {}", mappings(), descriptors().len() < before))
        });
        return report(&outcome);
    }
    let mut ranks = Process::start_ranks("nothing_is_left_of_a_group_that_is_dropped", 2, "auto", "60");
    for rank in &mut ranks {
        // One mapping and no descriptor while it lives, no mapping and fewer descriptors afterwards.
        assert_eq!(rank.outcome(), Ok("(1, 0), 0, true".into()));
        assert!(rank.end().success());
    }
    assert!(!named_in_dev_shm());
}

/// Whether anything of Bonfire's is in the directory where shared memory has names.
fn named_in_dev_shm() -> bool {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().contains("bonfire"))
}

#[test]
fn a_rank_that_is_killed_amid_large_operations_is_lost_at_once() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        let mut data = vec![1f32; 4_000_000];
        group.all_reduce(&mut data, ReduceOp::Mean).expect("all ranks are there");
        say("going");
        let error = loop {
            if let Err(error) = group.all_reduce(&mut data, ReduceOp::Mean) {
                break error;
            }
        };
        return report(&Err(error));
    }
    for victim in 0..3 {
        let name = "a_rank_that_is_killed_amid_large_operations_is_lost_at_once";
        let ranks = Process::start_ranks(name, 3, "shm", "60");
        ranks.iter().for_each(|rank| assert_eq!(rank.hear(), "going"));
        ranks[victim].signal(Signal::KILL);
        let start = Instant::now();
        for (rank, process) in ranks.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            let error = process.outcome().unwrap_err();
            assert!(matches!(error, Error::PeerLost { peer, .. } if peer == victim), "rank {rank} got {error:?}");
        }
        // A tenth of a second on a quiet machine; far from the deadline on any.
        assert!(start.elapsed() < Duration::from_secs(10), "after {:?}", start.elapsed());
        assert!(!named_in_dev_shm());
    }
}

type Set = fn(Builder) -> Builder;

/// Connects ranks with these settings, and gives what each has after one operation.
fn meet(settings: Vec<Set>) -> Vec<Result<i32, Error>> {
    let (address, n) = (free_address(), settings.len());
    let ranks: Vec<_> = settings
        .into_iter()
        .enumerate()
        .map(|(rank, set)| {
            let builder = Group::builder().rank(rank).world_size(n).address(address.clone()).deadline(common::DEADLINE);
            thread::spawn(move || {
                let group = set(builder.rendezvous_timeout(common::DEADLINE)).connect()?;
                let mut data = [1; 3000];
                group.all_reduce(&mut data, ReduceOp::Sum).map(|()| data[2999])
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
}

#[test]
fn what_ranks_want_is_agreed() {
    let auto: Set = |b| b;
    let tcp: Set = |b| b.transport(Medium::Tcp);
    let shm: Set = |b| b.transport(Medium::Shm);
    for wishes in [[auto, auto, auto], [auto, tcp, auto], [tcp, auto, auto], [auto, auto, shm], [shm, shm, auto]] {
        assert_eq!(meet(wishes.into()), [Ok(3), Ok(3), Ok(3)]);
    }
    for wishes in [[shm, tcp, auto], [auto, tcp, shm], [tcp, shm, shm]] {
        for result in meet(wishes.into()) {
            let Err(Error::Rendezvous { reason, .. }) = &result else { panic!("{result:?} is no failed rendezvous") };
            assert!(reason.contains("insists on shared memory") && reason.contains("BONFIRE_TRANSPORT"), "{reason}");
        }
    }
}

#[test]
fn an_algorithm_of_the_users_choice_runs_over_tcp() {
    let ring: Set = |b| b.algorithm(Algorithm::Ring);
    assert_eq!(meet(vec![ring; 3]), [Ok(3), Ok(3), Ok(3)]);
    let both = Group::builder().rank(0).world_size(2).address(free_address()).algorithm(Algorithm::Ring);
    let error = both.transport(Medium::Shm).connect().unwrap_err();
    assert!(matches!(&error, Error::Config(text) if text.contains("algorithm")), "{error:?}");
}

/// What rank `rank` brings in operation `number` at `i`.
fn value(rank: usize, number: usize, i: usize) -> i64 {
    (rank * 1_000_003 + number * 7919 + i * 31) as i64 % 10_007
}

/// One operation, which the numbers choose alike on all ranks, checked against plain arithmetic.
fn random_operation(group: &Group, number: usize, random: &mut Random) {
    let (rank, n) = (group.rank(), group.world_size());
    let len = match random.next() % 8 {
        0 => 0,
        1..=3 => random.next() as usize % 1500,
        4..=6 => random.next() as usize % 40_000,
        _ => random.next() as usize % 400_000,
    } / n
        * n;
    let root = random.next() as usize % n;
    let in_place = random.next().is_multiple_of(2);
    let mine: Vec<i64> = (0..len).map(|i| value(rank, number, i)).collect();
    let sum = |i: usize| (0..n).map(|rank| value(rank, number, i)).sum::<i64>();
    let mut data = if in_place { mine.clone() } else { vec![-1; len] };
    let own = partition(len, n, rank);
    let kind = random.next() % 7;
    match (kind, in_place) {
        (0, true) => group.all_reduce(&mut data, ReduceOp::Sum),
        (0, false) => group.all_reduce_into(&mine, &mut data, ReduceOp::Sum),
        (1, true) => group.reduce(&mut data, ReduceOp::Sum, root),
        (1, false) => group.reduce_into(&mine, &mut data, ReduceOp::Sum, root),
        (2, true) => group.broadcast(&mut data, root),
        (2, false) => group.broadcast_into((rank == root).then_some(&mine[..]), &mut data, root),
        (3, true) => group.all_gather(&mut data),
        (3, false) => group.all_gather_into(&mine[own.clone()], &mut data),
        (4, true) => group.reduce_scatter(&mut data, ReduceOp::Sum),
        (4, false) => group.reduce_scatter_into(&mine, &mut data[own.clone()], ReduceOp::Sum),
        (5, true) => group.all_to_all(&mut data),
        (5, false) => group.all_to_all_into(&mine, &mut data),
        _ => group.barrier(),
    }
    .unwrap();
    let (wanted, range): (Vec<i64>, _) = match kind {
        0 => ((0..len).map(sum).collect(), 0..len),
        1 if rank == root => ((0..len).map(sum).collect(), 0..len),
        2 => ((0..len).map(|i| value(root, number, i)).collect(), 0..len),
        3 => ((0..n).flat_map(|r| partition(len, n, r).map(move |i| value(r, number, i))).collect(), 0..len),
        4 => (own.clone().map(sum).collect(), own),
        5 => ((0..len).map(|i| value(i / (len / n), number, rank * (len / n) + i % (len / n))).collect(), 0..len),
        _ => (Vec::new(), 0..0),
    };
    assert!(data[range] == wanted, "operation {number}, kind {kind} x {len}, in place {in_place}, rank {rank} of {n}");
}

#[test]
fn operations_of_all_kinds_and_sizes_follow_each_other() {
    let hosts = [(Kind::Hosts(&[0, 0, 1, 1]), 4), (Kind::Hosts(&[0, 1]), 5)];
    for (kind, n) in [2, 3, 4, 7].map(|n| (Kind::Shm, n)).into_iter().chain(hosts) {
        run_ranks(kind, n, move |group| {
            // The operations come from the same numbers on all ranks, the delays from each rank's own.
            let (mut random, mut late) = (Random(n as u64 * 77), Random(group.rank() as u64 + 1));
            for number in 0..400 {
                delay(late.next());
                random_operation(&group, number, &mut random);
            }
        });
    }
}

#[test]
fn groups_side_by_side_do_not_mix() {
    let sums = |seed: i64| {
        run_ranks(Kind::Shm, 2, move |group| {
            (0..300).all(|i| {
                let mut data = vec![seed + i + group.rank() as i64; 1 + (i as usize * 997) % 30_000];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                data.iter().all(|x| *x == 2 * (seed + i) + 1)
            })
        })
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| sums(1 << 40));
        assert_eq!(sums(5), [true, true]);
        assert_eq!(other.join().unwrap(), [true, true]);
    });
}
