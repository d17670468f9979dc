//! Shrinking: ranks continue without those that are lost.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use bonfire_core::error::ShrinkError;
use bonfire_core::{Algorithm, Builder, Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::transport::Channels;
use bonfire_testing::{DEADLINE, Kind, in_parallel, run_ranks, run_ranks_with};
use rustix::process::Signal;

/// Calls small, large and rooted operations of all kinds, so that every path is taken. Returns the members as a mask of
/// their ranks in the original group.
fn roll_call(group: &Group, identity: usize) -> Result<u32, Error> {
    let n = group.world_size();
    let mut mask = [1u32 << identity];
    group.all_reduce(&mut mask, ReduceOp::Sum)?;
    let mut identities = vec![0u32; n];
    identities[group.rank()] = 1 << identity;
    group.all_gather(&mut identities)?;
    assert_eq!(identities.iter().sum::<u32>(), mask[0]);
    assert!(identities.is_sorted(), "ranks keep their order: {identities:?}");
    let mut large = vec![1f32; 300_001];
    group.all_reduce(&mut large, ReduceOp::Sum)?;
    assert!(large.iter().all(|x| *x == n as f32));
    let mut root = [mask[0] * u32::from(group.rank() + 1 == n)];
    group.broadcast(&mut root, n - 1)?;
    assert_eq!(root, mask);
    let (to, from) = ((group.rank() + 1) % n, (group.rank() + n - 1) % n);
    if n > 1 {
        let mut got = [0u32];
        let send = || group.send(&identities[group.rank()..][..1], to);
        if group.rank() == 0 {
            send()?;
        }
        group.recv(&mut got, from)?;
        if group.rank() > 0 {
            send()?;
        }
        assert_eq!(got[0], identities[from]);
    }
    group.barrier()?;
    assert_eq!(mask[0].count_ones() as usize, n);
    Ok(mask[0])
}

/// Calls until `group` fails, then shrinks it until `calls` roll calls in a row have succeeded.
fn shrink_until_usable(mut group: Group, calls: usize) -> Result<(Group, u32), Error> {
    let identity = group.rank();
    let mut data = vec![1f32; 50_000];
    while group.all_reduce(&mut data, ReduceOp::Mean).is_ok() {}
    loop {
        group = group.shrink()?;
        let masks: Result<Vec<u32>, Error> = (0..calls).map(|_| roll_call(&group, identity)).collect();
        if let Ok(masks) = masks {
            return Ok((group, masks[0]));
        }
    }
}

#[test]
fn survivors_shrink_after_ranks_leave_or_panic() {
    for kind in Kind::ALL {
        for (n, gone, panics) in
            [(2, 0b10, false), (2, 0b01, true), (3, 0b010, true), (4, 0b1001, false), (5, 0b11011, true)]
        {
            let results = run_ranks(kind, n, move |group| {
                // A rank that panics right after it may fail it on its peers.
                let _ = group.barrier();
                if gone >> group.rank() & 1 == 0 {
                    return shrink_until_usable(group, 3).map(|(_, mask)| mask);
                }
                if panics {
                    catch_unwind(AssertUnwindSafe(move || {
                        let _group = group;
                        panic!("on purpose")
                    }))
                    .unwrap_err();
                }
                Ok(0)
            });
            let left = (1 << n) - 1 - gone;
            for (rank, result) in results.into_iter().enumerate() {
                assert_eq!(
                    result,
                    Ok(if gone >> rank & 1 == 0 { left } else { 0 }),
                    "{kind:?}, {n} ranks, rank {rank}"
                );
            }
        }
    }
}

#[test]
fn shrinking_a_healthy_group_creates_one_of_the_same_ranks_once() {
    for kind in Kind::ALL {
        let settings = |builder: Builder| match kind {
            Kind::Threads | Kind::Tcp => builder.algorithms(Algorithm::Ring),
            _ => builder,
        };
        let results = run_ranks_with(kind, 3, settings, |group| {
            let group = group.with_deadline(Duration::from_secs(45));
            let other = group.shrink()?;
            assert_eq!((other.rank(), other.world_size(), other.deadline()), (group.rank(), 3, group.deadline()));
            let operation = bonfire_core::Operation::AllReduce;
            assert_eq!(other.algorithms(operation).to_string(), group.algorithms(operation).to_string());
            assert!(matches!(group.shrink(), Err(Error::InvalidArgument { .. })));
            // Both groups are complete, and do not interfere.
            let both = (roll_call(&other, group.rank())?, roll_call(&group, group.rank())?);
            drop(group);
            Ok::<_, Error>((both, roll_call(&other.shrink()?, other.rank())?))
        });
        assert_eq!(results, vec![Ok(((7, 7), 7)); 3], "{kind:?}");
    }
}

const KINDS: [(Kind, bool); 6] = [
    (Kind::Threads, false),
    (Kind::Tcp, false),
    (Kind::Shm, false),
    (Kind::Hosts(&[0, 1]), false),
    (Kind::Tcp, true),
    (Kind::Shm, true),
];

/// Runs the ranks that `rank` returns on every kind of group, also in stars, with so long a hang timeout.
fn with_hang_timeout<T: Send + 'static, F: Fn(Group) -> T + Clone + Send + 'static>(
    n: usize,
    hang: Duration,
    rank: impl Fn() -> F + Sync,
    check: impl Fn(Vec<T>, &str) + Sync,
) {
    in_parallel(&KINDS, KINDS.len(), |(kind, star)| {
        let settings = |builder: Builder| if *star { builder.full_mesh_limit(2) } else { builder }.hang_timeout(hang);
        check(run_ranks_with(*kind, n, settings, rank()), &format!("{kind:?}, star: {star}"));
    });
}

const SOON: Duration = Duration::from_millis(300);

#[test]
fn a_majority_leaves_out_ranks_that_live_and_do_not_call_and_these_learn_of_it() {
    for (n, hung) in [(3, 0b010), (4, 0b0001), (2, 0b10), (5, 0b01010)] {
        let rank = |done: Arc<Barrier>| {
            move |group: Group| {
                group.barrier().unwrap();
                if hung >> group.rank() & 1 == 1 {
                    done.wait();
                    // It calls when the others have gone on. At first it may only know that they are about to.
                    let minority =
                        |error: &Error| matches!(error, Error::Shrink { why: ShrinkError::Minority { .. }, .. });
                    let errors = std::iter::repeat_with(|| group.shrink().unwrap_err());
                    let excluded: Vec<_> = errors.skip_while(minority).take(2).collect();
                    done.wait();
                    return Err(excluded);
                }
                // One of them fails in an operation, the others in the next one, which fails at once.
                let failed = group.with_deadline(SOON).all_reduce(&mut [1u8], ReduceOp::Sum).unwrap_err();
                assert!(matches!(failed, Error::Timeout { .. }), "{failed:?}");
                let small = group.shrink().unwrap();
                let mask = roll_call(&small, group.rank());
                done.wait();
                done.wait();
                Ok((mask, small.shrink().map(|again| again.world_size())))
            }
        };
        with_hang_timeout(
            n,
            SOON,
            || rank(Arc::new(Barrier::new(n))),
            |results, label| {
                let left = (1u32 << n) - 1 - hung;
                for (rank, result) in results.into_iter().enumerate() {
                    match result {
                        Ok(result) => {
                            assert_eq!(result, (Ok(left), Ok(left.count_ones() as usize)), "{label}, {hung:b}")
                        }
                        Err(excluded) => assert!(
                            excluded
                                .iter()
                                .all(|error| matches!(error, Error::Shrink { why: ShrinkError::Excluded { by }, .. }
                            if hung >> by & 1 == 0)),
                            "{label}, rank {rank} of {n}: {excluded:?}"
                        ),
                    }
                }
            },
        );
    }
}

#[test]
fn a_minority_waits_for_live_ranks_and_calls_again_until_they_come() {
    for (n, late) in [(2, 0b01), (3, 0b110), (4, 0b0011)] {
        let hang = Duration::from_secs(2);
        let rank = |failed: Arc<Barrier>| {
            move |group: Group| {
                group.barrier().unwrap();
                let start = Instant::now();
                while late >> group.rank() & 1 == 0 && start.elapsed() < hang + SOON {
                    let error = group.with_deadline(SOON).shrink().unwrap_err();
                    let Error::Shrink { why: ShrinkError::Missing { ranks, .. }, rank, .. } = &error else {
                        panic!("{error:?}")
                    };
                    assert!(*rank == group.rank() && ranks.iter().all(|rank| late >> rank & 1 == 1), "{error:?}");
                }
                failed.wait();
                roll_call(&group.shrink()?, group.rank())
            }
        };
        with_hang_timeout(
            n,
            hang,
            || rank(Arc::new(Barrier::new(n))),
            |results, label| {
                assert_eq!(results, vec![Ok((1 << n) - 1); n], "{label}, {late:b} are late");
            },
        );
    }
}

#[test]
fn a_longer_hang_timeout_than_the_deadline_counts_over_all_calls() {
    let rank = |done: Arc<Barrier>| {
        move |group: Group| {
            group.barrier().unwrap();
            let outcome = if group.rank() == 1 {
                Ok((0, Duration::ZERO))
            } else {
                let (start, short) = (Instant::now(), group.with_deadline(SOON));
                let mut results = std::iter::repeat_with(|| short.shrink());
                let small = results.find(|result| {
                    let missing = matches!(result, Err(Error::Shrink { why: ShrinkError::Missing { .. }, .. }));
                    assert_eq!(missing, result.is_err(), "{result:?}");
                    !missing
                });
                let small = small.expect("it ends with one").unwrap().with_deadline(DEADLINE);
                roll_call(&small, group.rank()).map(|mask| (mask, start.elapsed()))
            };
            done.wait();
            outcome
        }
    };
    with_hang_timeout(
        3,
        SOON * 4,
        || rank(Arc::new(Barrier::new(3))),
        |results, label| {
            let (masks, times): (Vec<_>, Vec<_>) = results.into_iter().map(|result| result.unwrap()).unzip();
            assert_eq!(masks, [0b101, 0, 0b101], "{label}");
            // The first of the two to call decides.
            assert!(times.into_iter().max() >= Some(SOON * 4), "{label}");
        },
    );
}

#[test]
fn without_a_hang_timeout_the_deadline_decides_and_an_endless_one_leaves_out_no_rank() {
    let all = [(None, 8), (Some(Duration::MAX), 1)];
    let cases: Vec<_> = all.into_iter().flat_map(|case| Kind::ALL.map(|kind| (kind, case))).collect();
    in_parallel(&cases, cases.len(), |(kind, (set, limit))| {
        let (done, limit) = (Arc::new(Barrier::new(3)), Duration::from_secs(*limit));
        let settings = |builder: Builder| set.iter().fold(builder, |builder, limit| builder.hang_timeout(*limit));
        let results = run_ranks_with(*kind, 3, settings, move |group| {
            group.barrier().unwrap();
            let result = match group.rank() {
                1 => Ok(0),
                _ => group.with_deadline(limit).shrink().map(|small| small.world_size()),
            };
            done.wait();
            result
        });
        for rank in [0, 2] {
            match &results[rank] {
                Ok(2) if set.is_none() => {}
                Err(Error::Shrink { why: ShrinkError::Missing { ranks, .. }, .. }) if set.is_some() => {
                    assert_eq!(ranks, &[1], "{kind:?}");
                }
                other => panic!("{kind:?}, {set:?}: {other:?}"),
            }
        }
    });
}

#[test]
fn a_group_on_a_custom_transport_cannot_shrink() {
    let group = Group::on(std::sync::Arc::new(Channels::group(1).remove(0)));
    assert!(matches!(group.shrink(), Err(Error::InvalidArgument { .. })));
    assert_eq!(group.barrier(), Ok(()));
}

/// The body of a child of the tests below.
fn child() {
    let builder = Builder::from_env().expect("settings");
    let rank: usize = std::env::var("BONFIRE_RANK").expect("a rank").parse().expect("a number");
    let group = builder.machine(format!("machine {}", rank % 2)).connect().expect("ranks find each other");
    group.barrier().expect("all ranks are there");
    send_line("going");
    report(&shrink_until_usable(group, 5).map(|(_, mask)| mask.to_string()));
}

/// With `auto`, ranks with even numbers are on one machine and the others on another.
const TRANSPORTS: [&str; 3] = ["tcp", "shm", "auto"];

fn start(name: &str, n: usize, transport: &str) -> Vec<Process> {
    let ranks = Process::start_ranks_with(name, n, transport, "60", &[("BONFIRE_HEARTBEAT_TIMEOUT", "3".to_owned())]);
    ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
    ranks
}

#[test]
fn processes_shrink_whichever_ranks_are_killed() {
    if is_child() {
        return child();
    }
    for transport in TRANSPORTS {
        for (n, gone) in [(2, 0b01), (2, 0b10), (3, 0b001), (3, 0b100), (4, 0b0011), (4, 0b1110)] {
            let mut ranks = start("processes_shrink_whichever_ranks_are_killed", n, transport);
            let survives = |rank: &usize| gone >> rank & 1 == 0;
            (0..n).filter(|rank| !survives(rank)).for_each(|rank| ranks[rank].signal(Signal::KILL));
            let left = (1 << n) - 1 - gone;
            for rank in (0..n).filter(survives) {
                assert_eq!(ranks[rank].outcome(), Ok(left.to_string()), "{transport}, {gone:b} of {n} killed");
                assert!(ranks[rank].end().success());
            }
        }
    }
}

#[test]
fn processes_shrink_although_another_one_is_killed_meanwhile() {
    if is_child() {
        return child();
    }
    for transport in TRANSPORTS {
        for pause in 0..12 {
            let mut ranks = start("processes_shrink_although_another_one_is_killed_meanwhile", 4, transport);
            ranks[pause % 4].signal(Signal::KILL);
            // At many moments of the shrink. The outcome must be the same at each of them.
            std::thread::sleep(Duration::from_micros(300) * pause as u32);
            ranks[(pause + 1) % 4].signal(Signal::KILL);
            let left = (1 << 4) - 1 - (1 << (pause % 4)) - (1 << ((pause + 1) % 4));
            for rank in [(pause + 2) % 4, (pause + 3) % 4] {
                assert_eq!(ranks[rank].outcome(), Ok(left.to_string()), "{transport}, {pause}");
                assert!(ranks[rank].end().success());
            }
        }
    }
}

#[test]
fn silent_ranks_are_excluded_and_a_minority_does_not_continue() {
    if is_child() {
        return child();
    }
    let name = "silent_ranks_are_excluded_and_a_minority_does_not_continue";
    let mut all: Vec<_> = ["tcp", "shm"]
        .into_iter()
        .flat_map(|transport| [(transport, 3, 1), (transport, 3, 0), (transport, 2, 1), (transport, 2, 0)])
        .map(|(transport, n, victim)| (transport, n, victim, start(name, n, transport)))
        .collect();
    all.iter().for_each(|(_, _, victim, ranks)| ranks[*victim].signal(Signal::STOP));
    for (transport, n, victim, ranks) in &mut all {
        let label = format!("{transport}, rank {victim} of {n}");
        for rank in (0..*n).filter(|rank| rank != victim) {
            let outcome = ranks[rank].outcome();
            if (*n, *victim) == (2, 0) {
                let why = ShrinkError::Minority { silent: vec![0] };
                assert!(
                    matches!(&outcome, Err(Error::Shrink { why: w, rank: 1, .. }) if *w == why),
                    "{label}: {outcome:?}"
                );
            } else {
                assert_eq!(outcome, Ok(((1 << *n) - 1 - (1 << *victim)).to_string()), "{label}");
            }
        }
        ranks[*victim].signal(Signal::CONT);
        let outcome = ranks[*victim].outcome();
        if (*n, *victim) == (2, 0) {
            // No other rank continues.
            assert_eq!(outcome, Ok("1".into()), "{label}");
        } else {
            // It may learn that its peers are about to shrink before it learns that they have.
            let excluded = matches!(
                &outcome,
                Err(Error::Shrink { why: ShrinkError::Excluded { .. } | ShrinkError::Minority { .. }, .. })
            );
            assert!(excluded, "{label}: {outcome:?}");
        }
    }
}

#[test]
fn an_interrupted_process_leaves_the_shrunk_group_too() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other").shrink().expect("all are there");
        group.barrier().expect("all are there");
        send_line("going");
        let mut data = [1f32; 10];
        let error = std::iter::repeat_with(|| group.all_reduce(&mut data, ReduceOp::Sum)).find_map(Result::err);
        return report(&Err(error.expect("the loop ends with an error")));
    }
    for transport in ["tcp", "shm"] {
        let mut ranks = start("an_interrupted_process_leaves_the_shrunk_group_too", 2, transport);
        ranks[1].signal(Signal::INT);
        let error = ranks[0].outcome().unwrap_err();
        assert!(matches!(error, Error::Left { rank: 1, .. }), "{transport}: {error:?}");
        assert!(!ranks[1].end().success());
    }
}

#[test]
fn a_rank_that_computes_for_long_still_detects_a_killed_peer() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        let identity = group.rank();
        group.barrier().expect("all ranks are there");
        send_line("going");
        // A long step: longer than the heartbeat timeout.
        std::thread::sleep(Duration::from_secs(5));
        return report(&group.shrink().and_then(|group| roll_call(&group, identity)).map(|mask| mask.to_string()));
    }
    let ranks = start("a_rank_that_computes_for_long_still_detects_a_killed_peer", 2, "tcp");
    ranks[0].signal(Signal::KILL);
    assert_eq!(ranks[1].outcome(), Ok("2".into()));
}

#[test]
fn an_infinite_deadline_does_not_limit_a_shrink() {
    let results = run_ranks(Kind::Threads, 2, |group| {
        roll_call(&group.with_deadline(Duration::MAX).shrink().unwrap(), group.rank()).unwrap()
    });
    assert_eq!(results, [3, 3]);
}
