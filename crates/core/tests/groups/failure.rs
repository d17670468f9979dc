//! Ranks that are missing, leave or panic.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::{Error, Group, ReduceOp, TransportKind};
use bonfire_testing::relay::{Recording, between, forward};
use bonfire_testing::{DEADLINE, Kind, errors, free_address, in_parallel, run_ranks, run_ranks_with, wire};

type Act = fn(&Group) -> Result<(), Error>;

const ACTS: [Act; 7] = [
    |g| g.all_reduce(&mut [1f32; 8], ReduceOp::Sum),
    |g| g.all_reduce(&mut vec![1f32; 300_000], ReduceOp::Sum),
    |g| g.broadcast(&mut [1u8; 8], 0),
    |g| g.reduce(&mut [1i32; 8], ReduceOp::Max, 0),
    |g| g.all_gather(&mut vec![1f64; 10_000]),
    |g| g.barrier(),
    |g| g.all_to_all(&mut vec![1f64; 12_000]),
];

/// Ranks in `absent` never call `act`; the others get a timeout that names all of them.
fn timeout(kind: Kind, n: usize, absent: &'static [usize], before: bool, act: Act, limit: Duration, per_call: bool) {
    // The absent ranks keep their groups until the others have their errors.
    let end = Arc::new(Barrier::new(n));
    let results = run_ranks_with(
        kind,
        n,
        |builder| if per_call { builder } else { builder.deadline(limit) },
        move |group| {
            let lenient = group.with_deadline(bonfire_testing::DEADLINE);
            if before {
                lenient.barrier().unwrap();
            }
            let missing = absent.contains(&group.rank());
            let limited = group.with_deadline(if per_call { limit } else { group.deadline() });
            let result = if missing { Ok(()) } else { act(&limited) };
            end.wait();
            // The absent ranks call too late. What their peers have sent may complete a call before the peers' error
            // arrives, but not for long.
            let late = (0..10_000).try_for_each(|_| act(&lenient));
            end.wait();
            (missing, result, late)
        },
    );
    let label = format!("{kind:?}, ranks {absent:?} of {n} missing, {limit:?}");
    for (missing, result, late) in results {
        if !missing {
            match &result {
                Err(Error::Timeout { missing, .. }) => assert_eq!(missing, absent, "{label}"),
                other => panic!("{label}: {other:?} is no timeout"),
            }
            assert_eq!(late, result, "{label}: later calls return the first cause");
        }
        assert!(
            matches!(&late, Err(Error::Timeout { rank, missing, elapsed, .. })
                if missing == absent && !absent.contains(rank) && *elapsed >= limit),
            "{label}: the late rank gets {late:?}, which must say which rank waited"
        );
    }
}

#[test]
fn ranks_that_never_call_are_named_by_all_peers() {
    let mut cases = Vec::new();
    for kind in Kind::ALL {
        for (n, absent) in [(2, &[0][..]), (3, &[1]), (4, &[3]), (5, &[0, 2])] {
            for (i, act) in ACTS.into_iter().enumerate() {
                cases.push((kind, n, absent, act, i % 2 == 0));
            }
        }
    }
    in_parallel(&cases, 12, |(kind, n, absent, act, odd)| {
        timeout(*kind, *n, absent, *odd, *act, Duration::from_millis(500), !*odd);
    });
}

#[test]
fn a_short_deadline_names_the_missing_ranks_too() {
    for kind in Kind::ALL {
        timeout(kind, 4, &[2], true, ACTS[1], Duration::from_millis(150), true);
        timeout(kind, 4, &[2], false, ACTS[5], Duration::from_millis(150), true);
    }
}

#[test]
fn an_infinite_deadline_never_expires() {
    for kind in Kind::ALL {
        run_ranks_with(
            kind,
            3,
            |builder| builder.deadline(Duration::MAX),
            |group| {
                group.all_reduce(&mut vec![1f32; 50_000], ReduceOp::Sum).unwrap();
                if group.rank() == 0 {
                    // Long enough for the other ranks to fall asleep.
                    std::thread::sleep(Duration::from_millis(300));
                }
                group.barrier().unwrap();
            },
        );
    }
}

#[test]
fn a_receive_that_times_out_names_the_sender() {
    for kind in Kind::ALL {
        let end = Arc::new(Barrier::new(3));
        let results = run_ranks(kind, 3, move |group| {
            let limited = group.with_deadline(Duration::from_millis(300));
            let result = if group.rank() == 0 { limited.recv(&mut [0u8; 4], 2) } else { Ok(()) };
            end.wait();
            result
        });
        assert!(matches!(&results[0], Err(Error::Timeout { missing, .. }) if *missing == [2]), "{:?}", results[0]);
    }
}

#[test]
fn operations_before_a_rank_leaves_complete_and_the_next_call_names_it() {
    let mut cases = Vec::new();
    for kind in Kind::ALL {
        for n in 2..=4 {
            for leaver in 0..n {
                cases.extend(ACTS.map(|act| (kind, n, leaver, act)));
            }
        }
    }
    in_parallel(&cases, 4, |(kind, n, leaver, act)| {
        let (leaver, act) = (*leaver, *act);
        let results = run_ranks(*kind, *n, move |group| {
            act(&group).unwrap();
            act(&group).unwrap();
            if group.rank() == leaver { Ok(()) } else { act(&group) }
        });
        for (rank, result) in results.into_iter().enumerate() {
            let left = matches!(result, Err(Error::Left { rank: gone, .. }) if gone == leaver);
            assert!(rank == leaver || left, "{kind:?}, rank {leaver} of {n} left: rank {rank} got {result:?}");
        }
    });
}

#[test]
fn an_operation_that_all_threads_entered_succeeds_although_a_rank_then_leaves() {
    for _ in 0..2000 {
        let results = run_ranks(Kind::Threads, 4, |group| {
            // Rank 0 leaves at once. A fast rank may learn that before a slow one has checked the barrier.
            let first = group.barrier();
            (first, if group.rank() == 0 { Ok(()) } else { group.barrier() })
        });
        for (rank, (first, second)) in results.into_iter().enumerate() {
            assert_eq!(first, Ok(()), "rank {rank}");
            assert!(rank == 0 || matches!(second, Err(Error::Left { rank: 0, .. })), "rank {rank} got {second:?}");
        }
    }
}

#[test]
fn the_last_message_of_a_leaving_rank_arrives() {
    for kind in Kind::ALL {
        let rounds: Vec<usize> = (0..100).collect();
        in_parallel(&rounds, 4, |round| {
            // In both directions, since either rank may open the connection.
            let (from, to) = if round % 2 == 0 { (0, 1) } else { (1, 0) };
            run_ranks(kind, 2, move |group| {
                let mut data = [group.rank() as u8; 100];
                if group.rank() == from {
                    group.send(&data, to).unwrap();
                } else {
                    group.recv(&mut data, from).unwrap();
                    assert_eq!(data, [from as u8; 100]);
                    let after = group.recv(&mut data, from);
                    assert!(matches!(after, Err(Error::Left { rank, .. }) if rank == from), "{kind:?}: {after:?}");
                }
            });
        });
    }
}

#[test]
fn a_message_to_a_rank_that_left_is_an_error() {
    for kind in Kind::ALL {
        for before in [false, true] {
            let results = run_ranks(kind, 2, move |group| {
                if before {
                    group.barrier().unwrap();
                }
                if group.rank() == 0 {
                    return Ok(());
                }
                // Until the goodbye message arrives, sends may still succeed.
                (0..1_000_000).try_for_each(|_| group.send(&[0u8; 8], 0))
            });
            assert!(matches!(results[1], Err(Error::Left { rank: 0, .. })), "{kind:?}: {:?}", results[1]);
        }
    }
}

#[test]
fn a_thread_that_panics_is_lost() {
    let hosts = Kind::Hosts(&[0, 0, 1]);
    let threads = [2, 3, 4].map(|n| (Kind::Threads, n));
    for (kind, n) in threads.into_iter().chain([(Kind::Shm, 2), (Kind::Shm, 3), (hosts, 3), (hosts, 4)]) {
        for lost in 0..n {
            let results = run_ranks(kind, n, move |group| {
                let first = group.barrier();
                // Between hosts, the report of the panic may overtake the barrier that the lost rank completed.
                assert!(first.is_ok() || kind == hosts && group.rank() != lost, "{first:?}");
                if group.rank() != lost {
                    return first.and_then(|()| group.all_reduce(&mut [1f32; 1000], ReduceOp::Sum));
                }
                let panicked = catch_unwind(AssertUnwindSafe(|| {
                    let _group = group;
                    panic!("on purpose");
                }));
                assert!(panicked.is_err());
                Ok(())
            });
            for (rank, result) in results.into_iter().enumerate() {
                let named = matches!(result, Err(Error::PeerLost { peer, .. }) if peer == lost);
                assert!(rank == lost || named, "{kind:?}, rank {lost} of {n} panicked: rank {rank} got {result:?}");
            }
        }
    }
}

/// Something between two ranks ends their data connection, and nothing else.
#[test]
fn a_data_connection_that_breaks_alone_is_reported_as_that_and_shrink_goes_on_with_all_ranks() {
    let address = free_address();
    let data: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
    let kept = data.clone();
    let relayed = between(address.clone(), move |mut dialled, mut target| {
        let mut head = [0; 8];
        dialled.read_exact(&mut head).and_then(|()| target.write_all(&head)).unwrap();
        if head[7] == wire::DATA {
            kept.lock().unwrap().extend([&dialled, &target].map(|stream| stream.try_clone().unwrap()));
        }
        forward(dialled, target, Recording::default());
    });
    // Less than what a rank waits at most for news of its peer.
    let deadline = Duration::from_secs(2);
    let step = Arc::new(Barrier::new(3));
    let rank = |(rank, address): (usize, String)| {
        let (builder, step) = (Group::builder().rank(rank).world_size(2).address(address), step.clone());
        let builder = builder.transport(TransportKind::Tcp).deadline(DEADLINE).rendezvous_timeout(DEADLINE);
        thread::spawn(move || {
            let group = builder.connect().unwrap();
            let sum = |group: &Group| group.all_reduce(&mut [1i64; 1000], ReduceOp::Sum);
            sum(&group).unwrap();
            step.wait();
            step.wait();
            let start = Instant::now();
            let error = sum(&group.with_deadline(deadline)).unwrap_err();
            (error, start.elapsed(), group.shrink().and_then(|group| sum(&group).map(|()| group.world_size())))
        })
    };
    let ranks: Vec<_> = [address, relayed.to_string()].into_iter().enumerate().map(rank).collect();
    step.wait();
    data.lock().unwrap().iter().for_each(|stream| stream.shutdown(Shutdown::Both).unwrap());
    step.wait();
    for (rank, result) in ranks.into_iter().map(|rank| rank.join().unwrap()).enumerate() {
        let (error, elapsed, shrunk) = result;
        assert!(matches!(error, Error::Disconnected { .. }), "{error}");
        assert!(elapsed < Duration::from_secs(5), "rank {rank}: {elapsed:?}");
        assert_eq!(shrunk, Ok(2));
    }
}

#[test]
fn every_rank_gets_the_same_error_and_keeps_it() {
    for kind in Kind::ALL {
        let results = run_ranks(kind, 3, |group| {
            if group.rank() == 0 {
                return Err(None);
            }
            let first = group.all_reduce(&mut [1f32; 8], ReduceOp::Sum).unwrap_err();
            let later = [group.barrier(), group.broadcast(&mut [0u8; 2], 0), group.send(&[0u8; 2], 0)];
            for error in errors(later.into()) {
                assert_eq!(error, first);
            }
            assert_eq!(group.failure(), Some(first.clone()));
            assert_eq!(group.clone().failure(), Some(first.clone()));
            Err::<(), _>(Some(first))
        });
        assert!(matches!(results[1], Err(Some(Error::Left { rank: 0, .. }))), "{:?}", results[1]);
        assert_eq!(results[1], results[2], "{kind:?}");
    }
}
