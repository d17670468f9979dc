//! Churn in one process: round after round, groups of every kind are made and split, lose ranks that panic, leave, hang
//! or are killed, and are shrunk and split again. After each round the process has as many descriptors, threads,
//! segments and listening ports as before the first, and its memory does not grow.
//!
//! `BONFIRE_CHURN` is the time in seconds (10 by default), and `BONFIRE_CHURN_SEED` repeats the rounds of a run.

use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, set_hook, take_hook};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use bonfire_core::error::ShrinkError;
use bonfire_core::{Builder, Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::resources::Resources;
use bonfire_testing::settings::{number, seed};
use bonfire_testing::transport::Random;
use bonfire_testing::{DEADLINE, Kind, run_ranks, run_ranks_with};
use rustix::process::Signal;

const KINDS: [Kind; 4] = [Kind::Threads, Kind::Tcp, Kind::Shm, Kind::Hosts(&[0, 1])];

/// How a rank gets lost.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Panics,
    Leaves,
    Hangs,
}

/// The payload of a panic that is part of the test.
struct OnPurpose;

/// How long ranks wait for one that hangs.
const HANG: Duration = Duration::from_millis(100);

/// Runs operations of all sizes in the group and in two subgroups of it, and compares their results.
fn exercise(group: &Group) -> Result<(), Error> {
    let n = group.world_size();
    for len in [1, 3000, 200_000] {
        let mut data = vec![1i64 << group.rank(); len];
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        assert!(data.iter().all(|sum| *sum == (1 << n) - 1), "{group:?}");
    }
    let half = group.split(Some(group.rank() as u64 % 2), 0)?.expect("it has a color");
    let mut shared = half.allocate::<u8>(100_000)?;
    shared.fill(1);
    half.all_reduce(&mut shared, ReduceOp::Sum)?;
    assert!(shared.iter().all(|sum| usize::from(*sum) == half.world_size()), "{half:?}");
    group.barrier()
}

/// Calls until the group fails, then shrinks it until a group works. Returns the size of that group.
fn survive(mut group: Group) -> Result<usize, Error> {
    while group.barrier().is_ok() {}
    loop {
        group = group.with_deadline(DEADLINE).shrink()?;
        match exercise(&group) {
            Ok(()) => return Ok(group.world_size()),
            // Another rank may have failed in the group before, and leaves this one.
            Err(error @ (Error::PeerLost { .. } | Error::Left { .. })) => println!("{group:?} fails: {error}"),
            Err(error) => return Err(error),
        }
    }
}

/// The life of a rank in a group that loses `victim`. Returns how many ranks went on with it, if it went on.
fn live(group: Group, victim: usize, end: End, done: &Barrier) -> Result<usize, Error> {
    let exercised = exercise(&group);
    if group.rank() != victim {
        // The victim may be gone before the last operation ends here.
        assert!(matches!(exercised, Ok(()) | Err(Error::PeerLost { .. } | Error::Left { .. })), "{exercised:?}");
        let limited = group.with_deadline(if end == End::Hangs { HANG } else { DEADLINE });
        let left = survive(limited);
        if end == End::Hangs {
            done.wait();
        }
        return left;
    }
    exercised?;
    match end {
        End::Leaves => {}
        End::Panics => drop(catch_unwind(AssertUnwindSafe(move || {
            let _group = group;
            panic_any(OnPurpose);
        }))),
        End::Hangs => {
            done.wait();
            // At first it may only know that the others are about to go on.
            let minority = |error: &Error| matches!(error, Error::Shrink { why: ShrinkError::Minority { .. }, .. });
            let error = std::iter::repeat_with(|| group.shrink().unwrap_err()).find(|error| !minority(error));
            assert!(matches!(error, Some(Error::Shrink { why: ShrinkError::Excluded { .. }, .. })), "{error:?}");
        }
    }
    Ok(0)
}

/// A round whose ranks are threads of this process, over any transport.
fn threads(random: &mut impl FnMut(usize) -> usize) -> String {
    let (kind, n, star) = (KINDS[random(KINDS.len())], 2 + random(4), random(2) == 0);
    let (n, victim, end) = match random(6) {
        // Each of the other ranks is needed to go on, so that none is left out because it is late.
        0 => [(2, 1), (3, random(3)), (4, 0)].map(|(n, victim)| (n, victim, End::Hangs))[random(3)],
        1..=3 => (n, random(n), End::Panics),
        _ => (n, random(n), End::Leaves),
    };
    let what = format!("{kind:?}, star: {star}, rank {victim} of {n} {end:?}");
    let done = Arc::new(Barrier::new(n));
    let settings = |builder: Builder| {
        let builder = if star { builder.full_mesh_limit(2) } else { builder };
        if end == End::Hangs { builder.hang_timeout(HANG) } else { builder }
    };
    let results = run_ranks_with(kind, n, settings, move |group| live(group, victim, end, &done));
    for (rank, result) in results.into_iter().enumerate() {
        let expected = if rank == victim { 0 } else { n - 1 };
        assert_eq!(result, Ok(expected), "{what}, rank {rank}");
    }
    what
}

const TEST: &str = "a_process_that_shrinks_and_splits_groups_for_long_leaks_nothing";

/// A round whose other ranks are processes, one of which is killed.
fn processes(random: &mut impl FnMut(usize) -> usize) -> String {
    let (n, transport) = (2 + random(2), ["tcp", "shm", "auto"][random(3)]);
    let own = random(n);
    let victim = (own + 1 + random(n - 1)) % n;
    let what = format!("{transport}, rank {victim} of {n} is killed, seen by rank {own}");
    let address = bonfire_testing::free_address();
    let variables = |rank: usize| {
        [
            ("BONFIRE_RANK", rank.to_string()),
            ("BONFIRE_WORLD_SIZE", n.to_string()),
            ("BONFIRE_ADDRESS", address.clone()),
            ("BONFIRE_TRANSPORT", transport.to_owned()),
        ]
    };
    let others: Vec<_> =
        (0..n).filter(|rank| *rank != own).map(|rank| (rank, Process::start(TEST, &variables(rank)))).collect();
    let transport = bonfire_core::TransportKind::ALL.into_iter().find(|kind| kind.to_string() == transport);
    let builder = Group::builder().rank(own).world_size(n).address(&address).deadline(DEADLINE);
    let group = builder.transport(transport.expect("its name")).connect().expect("ranks find each other");
    exercise(&group).expect("all ranks are there");
    others.iter().for_each(|(rank, process)| assert_eq!(process.read_line(), "going", "{what}, rank {rank}"));
    let killed = others.iter().filter(|(rank, _)| *rank == victim);
    killed.for_each(|(_, process)| process.signal(Signal::KILL));
    assert_eq!(survive(group), Ok(n - 1), "{what}");
    for (rank, mut process) in others {
        if rank != victim {
            assert_eq!(process.read_line(), "done", "{what}, rank {rank}");
            assert!(process.end().success());
        }
    }
    what
}

#[test]
#[cfg(target_os = "linux")]
fn a_process_that_shrinks_and_splits_groups_for_long_leaks_nothing() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other").with_deadline(DEADLINE);
        exercise(&group).expect("all ranks are there");
        send_line("going");
        // The one that is killed does not get further.
        survive(group).expect("the others go on");
        return send_line("done");
    }
    let hook = take_hook();
    set_hook(Box::new(move |panic| {
        if !panic.payload().is::<OnPurpose>() {
            hook(panic);
        }
    }));
    let (seconds, seed) = (number("BONFIRE_CHURN").unwrap_or(10), seed("BONFIRE_CHURN_SEED"));
    println!("BONFIRE_CHURN={seconds} BONFIRE_CHURN_SEED={seed}");
    let mut numbers = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut random = |below: usize| (numbers.next() >> 33) as usize % below;
    // Opens what a process opens once and keeps.
    for kind in KINDS {
        run_ranks(kind, 3, |group| exercise(&group)).into_iter().for_each(|done| done.expect("all ranks are there"));
    }
    let (start, limit) = (Instant::now(), Duration::from_secs(seconds));
    let before = Resources::now();
    println!("before: {before:?}");
    // The most of each, in the first half of the time and in the second.
    let (mut mappings, mut memory, mut rounds) = ([0; 2], [0; 2], 0);
    while start.elapsed() < limit {
        let what = if random(6) == 0 { processes(&mut random) } else { threads(&mut random) };
        let (now, more) = Resources::settle(&before);
        assert!(more.is_empty(), "after round {rounds} ({what}): {more:?}");
        let half = usize::from(start.elapsed() > limit / 2);
        (mappings[half], memory[half]) = (now.mappings.max(mappings[half]), now.memory.max(memory[half]));
        rounds += 1;
    }
    println!("after {rounds} rounds: {:?}; at most {mappings:?} mappings, {memory:?} KiB", Resources::now());
    // Allocators keep some of both. A short run proves nothing.
    let bounded = |[early, late]: [usize; 2], slack: usize| rounds < 100 || late < early + early / 4 + slack;
    assert!(bounded(mappings, 200), "{mappings:?} mappings in the two halves of the time");
    assert!(bounded(memory, 64 << 10), "{memory:?} KiB in the two halves of the time");
}
