//! Groups of more ranks than are all connected to each other: their control connections form a star around rank 0.
//! Small groups with a lowered limit, and 128 processes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use bonfire_core::{Builder, Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::{Kind, errors, in_parallel, run_ranks_with};
use rustix::process::Signal;

const KINDS: [Kind; 3] = [Kind::Tcp, Kind::Shm, Kind::Hosts(&[0, 1])];

/// Runs `f` on ranks whose control connections form a star around rank 0.
fn star<T: Send + 'static>(kind: Kind, n: usize, f: impl Fn(Group) -> T + Clone + Send + 'static) -> Vec<T> {
    run_ranks_with(kind, n, |builder| builder.full_mesh_limit(2), f)
}

fn sum(group: &Group) -> Result<u64, Error> {
    let mut sum = [1u64 << group.rank()];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
}

fn die(group: Group) {
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _group = group;
        panic!("on purpose");
    }));
    panicked.unwrap_err();
}

#[test]
fn all_ranks_of_a_star_reach_each_other() {
    for kind in KINDS {
        for n in 3..=6 {
            let results = star(kind, n, move |group| {
                let mut parts = vec![group.rank() as u64; 2 * n];
                group.all_to_all(&mut parts).unwrap();
                assert!(parts.iter().enumerate().all(|(at, part)| *part == at as u64 / 2), "{parts:?}");
                sum(&group)
            });
            assert_eq!(results, vec![Ok((1 << n) - 1); n], "{kind:?}");
        }
    }
}

#[test]
fn a_rank_that_leaves_or_panics_is_named_by_all_peers() {
    for (kind, n) in KINDS.into_iter().flat_map(|kind| [(kind, 3), (kind, 5)]) {
        for (gone, panics) in (0..n).flat_map(|gone| [(gone, false), (gone, true)]) {
            let results = star(kind, n, move |group| {
                // Between hosts, the report of a panic may arrive before this operation ends.
                let before = sum(&group);
                if group.rank() != gone {
                    return before.and_then(|_| sum(&group));
                }
                if panics {
                    die(group);
                }
                Ok(0)
            });
            for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != gone) {
                let named = match &result {
                    Err(Error::Left { rank, .. }) => !panics && *rank == gone,
                    Err(Error::PeerLost { peer, .. }) => panics && *peer == gone,
                    _ => false,
                };
                assert!(named, "{kind:?}, rank {gone} of {n}, panics: {panics}: rank {rank} got {result:?}");
            }
        }
    }
}

#[test]
fn a_mismatch_of_two_ranks_is_reported_to_all_ranks() {
    for kind in KINDS {
        let results = star(kind, 5, |group| {
            let mut data = vec![1f32; if [2, 4].contains(&group.rank()) { 70_000 } else { 50_000 }];
            group.all_reduce(&mut data, ReduceOp::Sum)
        });
        for error in errors(results) {
            let Error::Mismatch { calls, .. } = &error else { panic!("{kind:?}: {error:?}") };
            let counts: Vec<_> = calls.iter().map(|(rank, call)| (*rank, call.count)).collect();
            assert_eq!(counts, [(0, 50_000), (1, 50_000), (2, 70_000), (3, 50_000), (4, 70_000)], "{kind:?}");
        }
    }
}

#[test]
fn ranks_that_never_call_are_named_by_all_peers() {
    let cases: Vec<_> = KINDS.into_iter().flat_map(|kind| [(kind, 0), (kind, 3)]).collect();
    in_parallel(&cases, cases.len(), |&(kind, absent)| {
        let end = Arc::new(Barrier::new(5));
        let results = star(kind, 5, move |group| {
            let limited = group.with_deadline(Duration::from_secs(2));
            let result = if group.rank() == absent { Ok(0) } else { sum(&limited) };
            end.wait();
            result
        });
        for (_, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != absent) {
            let Err(Error::Timeout { missing, .. }) = &result else { panic!("{kind:?}: {result:?}") };
            assert_eq!(missing, &[absent], "{kind:?}");
        }
    });
}

#[test]
fn ranks_other_than_0_create_subgroups() {
    for kind in KINDS {
        let results = star(kind, 6, |group| {
            let halves = match group.rank() {
                1 | 3 | 4 | 5 => sum(&group.subgroup(&[1, 3, 4, 5])?)?,
                _ => 0,
            };
            let split = group.split(Some(group.rank() as u64 % 2), 0)?.expect("it has a color");
            Ok::<_, Error>((halves, sum(&split)?, sum(&group)?))
        });
        let of = |halves| Ok((halves, 0b111, 0b111_111));
        assert_eq!(results, [of(0), of(0b1111), of(0), of(0b1111), of(0b1111), of(0b1111)], "{kind:?}");
    }
}

#[test]
fn rank_0_may_leave_while_peers_create_subgroups() {
    for round in 0..20 {
        let results = star(KINDS[round % 3], 5, |group| {
            if group.rank() == 0 {
                return Ok(0);
            }
            let four = group.subgroup(&[1, 2, 3, 4])?;
            if four.rank() == 0 { sum(&four) } else { sum(&four.subgroup(&[1, 2, 3])?).and(sum(&four)) }
        });
        assert_eq!(results, [Ok(0), Ok(15), Ok(15), Ok(15), Ok(15)], "round {round}");
    }
}

#[test]
fn members_that_disagree_on_the_members_are_reported_to_all_ranks() {
    let results = star(Kind::Tcp, 5, |group| {
        let members = if group.rank() == 4 { [2, 3, 4].to_vec() } else { [1, 2, 3, 4].to_vec() };
        if group.rank() == 0 { sum(&group).map(drop) } else { group.subgroup(&members).map(drop) }
    });
    for error in errors(results) {
        assert!(matches!(&error, Error::MemberMismatch { rank: 1..=3, peer: 4, .. }), "{error:?}");
    }
}

/// Shrinks the group until an operation succeeds, and returns the world size of that group.
fn shrink_until_usable(mut group: Group) -> Result<usize, Error> {
    while sum(&group).is_ok() {}
    loop {
        group = group.shrink()?;
        if sum(&group).is_ok() && group.barrier().is_ok() {
            return Ok(group.world_size());
        }
    }
}

#[test]
fn threads_shrink_without_rank_0_and_others() {
    for kind in KINDS {
        for (n, gone) in [(3, 0b001), (3, 0b100), (5, 0b00001), (5, 0b01000), (5, 0b10001), (6, 0b001_011), (4, 0b0111)]
        {
            for panics in [false, true] {
                let results = star(kind, n, move |group| {
                    let _ = group.barrier();
                    if gone >> group.rank() & 1 == 0 {
                        return shrink_until_usable(group);
                    }
                    if panics {
                        die(group);
                    }
                    Ok(0)
                });
                let left = n - (gone as u32).count_ones() as usize;
                for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| gone >> rank & 1 == 0) {
                    assert_eq!(result, Ok(left), "{kind:?}, {gone:b} of {n}, panics: {panics}: rank {rank}");
                }
            }
        }
    }
}

#[test]
fn shrinking_a_healthy_star_creates_another_and_both_stay_complete() {
    for kind in KINDS {
        let results = star(kind, 4, |group| {
            let other = group.shrink()?;
            let pair = if group.rank() < 2 { [0, 1] } else { [2, 3] };
            let pair = sum(&group.subgroup(&pair)?)?;
            Ok::<_, Error>((sum(&other)?, sum(&group)?, pair, sum(&other.shrink()?)?))
        });
        assert_eq!(results, vec![Ok((15, 15, 3, 15)); 4], "{kind:?}");
    }
}

#[test]
fn processes_shrink_after_rank_0_and_others_are_killed() {
    if is_child() {
        let group = Builder::from_env().expect("settings").full_mesh_limit(2).connect().expect("ranks find each other");
        group.barrier().expect("all ranks are there");
        send_line("going");
        return report(&shrink_until_usable(group).map(|left| left.to_string()));
    }
    let name = "processes_shrink_after_rank_0_and_others_are_killed";
    for transport in ["tcp", "shm"] {
        for (n, gone) in [(4, 0b0001), (4, 0b1000), (4, 0b0011), (5, 0b01001), (5, 0b10111)] {
            let mut ranks =
                Process::start_ranks_with(name, n, transport, "60", &[("BONFIRE_HEARTBEAT_TIMEOUT", "3".to_owned())]);
            ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
            let (dead, alive): (Vec<_>, Vec<_>) = (0..n).partition(|rank| gone >> rank & 1 == 1);
            dead.iter().for_each(|rank| ranks[*rank].signal(Signal::KILL));
            for rank in &alive {
                assert_eq!(ranks[*rank].outcome(), Ok(alive.len().to_string()), "{transport}, {gone:b} of {n} killed");
                assert!(ranks[*rank].end().success());
            }
        }
    }
}

#[test]
fn a_stopped_rank_is_excluded_and_gets_a_shrink_error() {
    if is_child() {
        let group = Builder::from_env().expect("settings").full_mesh_limit(2).connect().expect("ranks find each other");
        group.barrier().expect("all ranks are there");
        send_line("going");
        return report(&shrink_until_usable(group).map(|left| left.to_string()));
    }
    let name = "a_stopped_rank_is_excluded_and_gets_a_shrink_error";
    let start = |victim: usize| {
        let ranks = Process::start_ranks_with(name, 4, "tcp", "60", &[("BONFIRE_HEARTBEAT_TIMEOUT", "3".to_owned())]);
        ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
        ranks[victim].signal(Signal::STOP);
        ranks
    };
    let all = [0, 2].map(|victim| (victim, start(victim)));
    for (victim, ranks) in &all {
        for rank in (0..4).filter(|rank| rank != victim) {
            assert_eq!(ranks[rank].outcome(), Ok("3".into()), "rank {victim} was stopped");
        }
        ranks[*victim].signal(Signal::CONT);
        let outcome = ranks[*victim].outcome();
        assert!(matches!(&outcome, Err(Error::Shrink { .. })), "rank {victim} was stopped: {outcome:?}");
    }
}

#[test]
fn messages_flow_after_rank_0_has_left_and_the_next_rank_to_go_is_named() {
    let cases: Vec<_> = KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]).collect();
    in_parallel(&cases, cases.len(), |&(kind, panics)| {
        let (gone, stopped) = (Arc::new(Barrier::new(4)), Arc::new(Barrier::new(3)));
        let results = star(kind, 4, move |group| {
            group.barrier().unwrap();
            let rank = group.rank();
            if rank == 0 {
                drop(group);
                gone.wait();
                return None;
            }
            gone.wait();
            // A token circulates among the three for longer than they take to connect.
            let (start, to, from) = (Instant::now(), rank % 3 + 1, (rank + 1) % 3 + 1);
            let mut token = [1u8];
            while token == [1] {
                if rank == 1 {
                    token = [u8::from(start.elapsed() < Duration::from_secs(4))];
                    group.send(&token, to).unwrap();
                }
                group.recv(&mut token, from).unwrap();
                if rank != 1 {
                    group.send(&token, to).unwrap();
                }
            }
            // A rank that fails ends all messages in the group, also one that is on its way: all have arrived now.
            stopped.wait();
            if rank != 3 {
                return group.recv(&mut token, 3).err();
            }
            if panics {
                die(group);
            }
            None
        });
        for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| [1, 2].contains(rank)) {
            let named = match &result {
                Some(Error::Left { rank: 3, .. }) => !panics,
                Some(Error::PeerLost { peer: 3, .. }) => panics,
                _ => false,
            };
            assert!(named, "{kind:?}, panics: {panics}: rank {rank} got {result:?}");
        }
    });
}

/// Processes of a large group.
const PROCESSES: usize = 128;

/// Returns the number of this process's sockets, connections included.
fn sockets() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").expect("open files");
    let target = |file: std::io::Result<std::fs::DirEntry>| std::fs::read_link(file.ok()?.path()).ok();
    files.filter_map(target).filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

#[test]
#[cfg(target_os = "linux")]
fn each_of_128_processes_needs_few_sockets() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        let mut ranks = [group.rank() as u64];
        group.all_reduce(&mut ranks, ReduceOp::Sum).expect("all ranks are there");
        report(&Ok(format!("{} {}", ranks[0], sockets())));
        // All ranks have connected before any counts, and the barrier keeps every rank until all have counted.
        return group.barrier().expect("all ranks are there");
    }
    let mut ranks = Process::start_ranks("each_of_128_processes_needs_few_sockets", PROCESSES, "auto", "60");
    for (rank, process) in ranks.iter_mut().enumerate() {
        let outcome = process.outcome().expect("all ranks are there");
        let (sum, sockets) = outcome.split_once(' ').expect("two numbers");
        assert_eq!(sum.parse(), Ok(PROCESSES * (PROCESSES - 1) / 2));
        let sockets: usize = sockets.parse().expect("a number");
        // Few, whatever the world size.
        assert!(rank == 0 || sockets < 12, "rank {rank} has {sockets} sockets");
    }
    ranks.iter_mut().for_each(|rank| assert!(rank.end().success()));
}

#[test]
fn a_missing_process_of_128_is_named_by_all_peers() {
    const MISSING: usize = 77;
    if is_child() {
        // Longer than it takes to start all processes.
        let builder = Builder::from_env().expect("settings").rendezvous_timeout(Duration::from_secs(10));
        return report(&builder.connect().map(|group| group.rank().to_string()));
    }
    let name = "a_missing_process_of_128_is_named_by_all_peers";
    let address = bonfire_testing::free_address();
    let start = |rank: usize| {
        let variables = [
            ("BONFIRE_RANK", rank.to_string()),
            ("BONFIRE_WORLD_SIZE", PROCESSES.to_string()),
            ("BONFIRE_ADDRESS", address.clone()),
        ];
        (rank, Process::start(name, &variables))
    };
    let ranks: Vec<_> = (0..PROCESSES).filter(|rank| *rank != MISSING).map(start).collect();
    for (rank, process) in &ranks {
        let error = process.outcome().expect_err("a rank is missing");
        let Error::Rendezvous { reason, .. } = &error else { panic!("rank {rank}: {error:?}") };
        assert!(reason.contains(&format!("rank {MISSING} did not come")), "rank {rank}: {reason}");
    }
}
