//! Mismatched calls: every rank gets the same error, which lists the call of each rank, and no rank succeeds.

use std::time::Duration;

use bonfire_core::{Builder, Call, DType, Error, Group, Operation, ReduceOp, Selection};
use bonfire_testing::{Kind, errors, in_parallel, run_ranks, run_ranks_with};

type Act = fn(&Group) -> Result<(), Error>;

/// Far more than it takes to detect a mismatch, far less than the harness allows.
fn soon(builder: Builder) -> Builder {
    builder.deadline(Duration::from_secs(20))
}

/// The call of most ranks, and the offender's call instead.
const PAIRS: &[(&str, Act, Act)] = &[
    ("lengths", |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum), |g| g.all_reduce(&mut [0f32; 9], ReduceOp::Sum)),
    (
        "lengths that choose different algorithms",
        |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum),
        |g| g.all_reduce(&mut vec![0f32; 1_000_000], ReduceOp::Sum),
    ),
    (
        "large lengths",
        |g| g.all_reduce(&mut vec![0f32; 1_000_000], ReduceOp::Sum),
        |g| g.all_reduce(&mut vec![0f32; 999_999], ReduceOp::Sum),
    ),
    (
        "empty and not empty",
        |g| g.all_reduce::<f32>(&mut [], ReduceOp::Sum),
        |g| g.all_reduce(&mut [0f32], ReduceOp::Sum),
    ),
    ("empty and large", |g| g.all_gather::<u8>(&mut []), |g| g.all_gather(&mut vec![0u8; 1_000_000])),
    ("types", |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum), |g| g.all_reduce(&mut [0i32; 8], ReduceOp::Sum)),
    (
        "types with and without a wide accumulator",
        |g| g.all_reduce(&mut [half::f16::ONE; 4000], ReduceOp::Sum),
        |g| g.all_reduce(&mut [0u16; 4000], ReduceOp::Sum),
    ),
    (
        "types of empty slices",
        |g| g.all_reduce::<f32>(&mut [], ReduceOp::Sum),
        |g| g.all_reduce::<f64>(&mut [], ReduceOp::Sum),
    ),
    ("reductions", |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum), |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Mean)),
    (
        "large reductions",
        |g| g.reduce_scatter(&mut vec![0f64; 100_000], ReduceOp::Max),
        |g| g.reduce_scatter(&mut vec![0f64; 100_000], ReduceOp::Min),
    ),
    ("roots of reduce", |g| g.reduce(&mut [0f32; 8], ReduceOp::Sum, 0), |g| g.reduce(&mut [0f32; 8], ReduceOp::Sum, 1)),
    ("roots of broadcast", |g| g.broadcast(&mut vec![0f32; 200_000], 1), |g| g.broadcast(&mut vec![0f32; 200_000], 0)),
    ("lengths of broadcast", |g| g.broadcast(&mut [0u8; 5], 0), |g| g.broadcast(&mut [0u8; 6], 0)),
    ("all_reduce and broadcast", |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum), |g| g.broadcast(&mut [0f32; 8], 0)),
    ("all_reduce and barrier", |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum), |g| g.barrier()),
    ("barrier and all_reduce", |g| g.barrier(), |g| g.all_reduce(&mut vec![0f32; 300_000], ReduceOp::Sum)),
    ("barrier and broadcast", |g| g.barrier(), |g| g.broadcast::<u8>(&mut [], 0)),
    ("reduce and broadcast", |g| g.reduce(&mut [0f32; 8], ReduceOp::Sum, 0), |g| g.broadcast(&mut [0f32; 8], 0)),
    (
        "all_gather and reduce_scatter",
        |g| g.all_gather(&mut [0f32; 20]),
        |g| g.reduce_scatter(&mut [0f32; 20], ReduceOp::Sum),
    ),
    (
        "all_reduce and all_gather",
        |g| g.all_reduce(&mut vec![0f32; 100_000], ReduceOp::Sum),
        |g| g.all_gather(&mut vec![0f32; 100_000]),
    ),
    ("lengths of all_to_all", |g| g.all_to_all(&mut [0f32; 60]), |g| g.all_to_all(&mut vec![0f32; 600_000])),
    ("empty and large all_to_all", |g| g.all_to_all::<u8>(&mut []), |g| g.all_to_all(&mut vec![0u8; 600_000])),
    ("types of all_to_all", |g| g.all_to_all(&mut [0f32; 60]), |g| g.all_to_all(&mut [0u32; 60])),
    (
        "sizes with the same sum",
        |g| g.all_gather_v_into(&[0f32; 2], &vec![2; g.world_size()], &mut vec![0f32; 2 * g.world_size()]),
        |g| {
            let mut sizes = vec![2; g.world_size()];
            (sizes[0], sizes[1]) = if g.rank() == 0 { (1, 3) } else { (3, 1) };
            let mine = vec![0f32; sizes[g.rank()]];
            g.all_gather_v_into(&mine, &sizes, &mut vec![0f32; 2 * g.world_size()])
        },
    ),
    (
        "even and given sizes",
        |g| g.all_gather_into(&[0f32; 2], &mut vec![0f32; 2 * g.world_size()]),
        |g| {
            let n = g.world_size();
            g.all_gather_v_into(&[0f32; 2], &vec![2; n], &mut vec![0f32; 2 * n])
        },
    ),
    ("roots of gather", |g| g.gather(&mut [0f32; 20], 0), |g| g.gather(&mut [0f32; 20], 1)),
    ("roots of a large gather", |g| g.gather(&mut vec![0f32; 90_000], 0), |g| g.gather(&mut vec![0f32; 90_000], 1)),
    ("gather and scatter", |g| g.gather(&mut [0u8; 4], 0), |g| g.scatter(&mut [0u8; 4], 0)),
    (
        "all_to_all and all_to_all_v",
        |g| g.all_to_all(&mut vec![0u8; g.world_size()]),
        |g| {
            let ones = vec![1; g.world_size()];
            g.all_to_all_v_into(&vec![0u8; g.world_size()], &ones, &mut vec![0u8; g.world_size()], &ones)
        },
    ),
    (
        "lengths within a batch",
        |g| g.batch().all_reduce(&mut [0f32; 3], ReduceOp::Sum).all_reduce(&mut [0f32; 4], ReduceOp::Sum).run(),
        |g| g.batch().all_reduce(&mut [0f32; 4], ReduceOp::Sum).all_reduce(&mut [0f32; 3], ReduceOp::Sum).run(),
    ),
    ("all_to_all and all_gather", |g| g.all_to_all(&mut [0f64; 60]), |g| g.all_gather(&mut [0f64; 60])),
];

/// Checks that all errors are the same mismatch, and returns the calls that it lists.
fn agreed(label: &str, errors: &[Error], at: u64) -> Vec<(usize, Call)> {
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(*error, errors[0], "{label}: rank {rank} and rank 0 got different errors");
    }
    match &errors[0] {
        Error::Mismatch { sequence, calls, .. } => {
            assert_eq!(*sequence, at, "{label}");
            calls.clone()
        }
        other => panic!("{label}: {other:?} is no mismatch"),
    }
}

/// One case: after `before` barriers rank `offender` of `n` makes a different call.
fn check(kind: Kind, n: usize, offender: usize, before: u64, (name, usual, other): (&str, Act, Act)) {
    let label = format!("{name}: {kind:?}, rank {offender} of {n} after {before} barriers");
    let results = run_ranks_with(kind, n, soon, move |group| {
        (0..before).for_each(|_| group.barrier().expect("ranks agree so far"));
        let result = if group.rank() == offender { other(&group) } else { usual(&group) };
        let later = [group.barrier(), usual(&group), group.failure().map_or(Ok(()), Err)];
        (result, later)
    });
    let (first, later): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    let first = errors(first);
    for error in errors(later.into_iter().flatten().collect()) {
        assert_eq!(error, first[0], "{label}: a later call must return the first cause");
    }
    let calls = agreed(&label, &first, before);
    assert!(calls.iter().map(|(rank, _)| *rank).eq(0..n), "{label}: {calls:?} do not list every rank");
    let usual = calls[(offender + 1) % n].1;
    for (rank, call) in calls {
        assert_eq!(call != usual, rank == offender, "{label}: rank {rank} did not call {call}");
    }
}

fn every_pair(kind: Kind, worlds: std::ops::RangeInclusive<usize>) {
    let mut cases = Vec::new();
    for n in worlds {
        for offender in 0..n {
            // With and without an operation before, after which ranks may have connections already.
            cases.extend(PAIRS.iter().enumerate().map(|(i, pair)| (n, offender, (i + offender) as u64 % 2, *pair)));
        }
    }
    in_parallel(&cases, 8, |(n, offender, before, pair)| check(kind, *n, *offender, *before, *pair));
}

#[test]
fn one_offender_among_threads() {
    every_pair(Kind::Threads, 2..=5);
}

#[test]
fn one_offender_over_tcp_2_to_4() {
    every_pair(Kind::Tcp, 2..=4);
}

#[test]
fn one_offender_over_tcp_5() {
    every_pair(Kind::Tcp, 5..=5);
}

#[test]
fn one_offender_in_shared_memory() {
    every_pair(Kind::Shm, 2..=4);
}

#[test]
fn one_offender_on_hosts_of_equal_size() {
    every_pair(Kind::Hosts(&[0, 0, 1, 1]), 4..=4);
}

#[test]
fn one_offender_on_hosts_of_different_size() {
    every_pair(Kind::Hosts(&[0, 1, 0]), 3..=4);
}

#[test]
fn every_rank_makes_a_different_call() {
    const ACTS: [Act; 5] = [
        |g| g.all_reduce(&mut vec![0f32; 500_000], ReduceOp::Sum),
        |g| g.barrier(),
        |g| g.broadcast(&mut [0u8; 3], 1),
        |g| g.all_gather(&mut vec![0i64; 50_000]),
        |g| g.reduce(&mut [0f64; 3], ReduceOp::Max, 0),
    ];
    for kind in Kind::ALL {
        for n in 2..=5 {
            let results = run_ranks_with(kind, n, soon, |group| ACTS[group.rank()](&group));
            let calls = agreed(&format!("{kind:?} of {n}"), &errors(results), 0);
            let operations: Vec<Operation> = calls.iter().map(|(_, call)| call.operation).collect();
            let all = [
                Operation::AllReduce,
                Operation::Barrier,
                Operation::Broadcast,
                Operation::AllGather,
                Operation::Reduce,
            ];
            assert_eq!(operations, all[..n], "{kind:?}");
        }
    }
}

/// Half of the ranks run an engine and half a plan, or each half runs a plan of its own.
#[test]
fn two_halves_that_select_different_algorithms() {
    for (kind, table) in Kind::ALL.into_iter().flat_map(|kind| {
        ["native:0-65535;ring:65536-", "tree:0-65535;native:65536-", "doubling:0-65535;ring:65536-"]
            .map(|table| (kind, table))
    }) {
        let algorithms: Selection = table.parse().expect("a table");
        if kind == Kind::Shm && !table.contains("native") {
            continue;
        }
        for n in [2, 5] {
            let results = run_ranks_with(
                kind,
                n,
                |builder| soon(builder).algorithms(algorithms.clone()),
                |group| {
                    group.all_reduce(&mut [1f32; 10], ReduceOp::Sum).expect("ranks agree so far");
                    let len = if group.rank() % 2 == 0 { 10 } else { 100_000 };
                    group.all_reduce(&mut vec![1f32; len], ReduceOp::Sum)
                },
            );
            let calls = agreed(&format!("{kind:?} of {n}, {table}"), &errors(results), 1);
            assert_eq!(calls.len(), n, "{kind:?} of {n}, {table}");
        }
    }
}

#[test]
fn two_halves_with_different_lengths() {
    for kind in Kind::ALL {
        for n in 4..=5 {
            let results = run_ranks_with(kind, n, soon, |group| {
                let len = if group.rank() % 2 == 0 { 10 } else { 100_000 };
                group.all_reduce(&mut vec![1f32; len], ReduceOp::Sum)
            });
            let calls = agreed(&format!("{kind:?} of {n}"), &errors(results), 0);
            assert!(calls.iter().all(|(rank, call)| call.count == if rank % 2 == 0 { 10 } else { 100_000 }));
        }
    }
}

#[test]
fn the_error_lists_the_call_of_each_rank() {
    for kind in Kind::ALL {
        let results = run_ranks_with(kind, 2, soon, |group| match group.rank() {
            0 => group.all_reduce(&mut [0f32; 8], ReduceOp::Sum),
            _ => group.reduce(&mut [0i8; 9], ReduceOp::Max, 1),
        });
        let text = errors(results)[0].to_string();
        for part in ["#0", "rank 0 called all_reduce(f32 x 8, sum)", "rank 1 called reduce(i8 x 9, max, root 1)"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

/// Rank 0 sends, rank 1 receives something else, and the other `n - 2` ranks wait in a barrier.
fn message(kind: Kind, n: usize, before: usize, send: Act, receive: Act) {
    let results = run_ranks_with(kind, n, soon, move |group| {
        // Collectives before the message must not be taken for it: they are numbered separately.
        (0..before).for_each(|_| group.all_reduce(&mut [0f32; 5], ReduceOp::Sum).expect("ranks agree so far"));
        match group.rank() {
            0 => send(&group).and_then(|()| group.barrier()),
            1 => receive(&group),
            _ => group.barrier(),
        }
    });
    let calls = agreed(&format!("{kind:?} of {n}"), &errors(results), 0);
    assert!(calls.iter().map(|(rank, _)| *rank).eq([0, 1]), "{calls:?} are not the sender and the receiver");
    assert_ne!(calls[0].1, calls[1].1);
}

#[test]
fn a_mismatch_of_sender_and_receiver_is_reported_to_all_ranks() {
    let pairs: [(Act, Act); 4] = [
        (|g| g.send(&[0f32; 8], 1), |g| g.recv(&mut [0f32; 9], 0)),
        (|g| g.send(&[0f32; 8], 1), |g| g.recv(&mut [0u32; 8], 0)),
        (|g| g.send::<f32>(&[], 1), |g| g.recv(&mut vec![0f32; 1_000_000], 0)),
        (|g| g.send(&vec![0f32; 1_000_000], 1), |g| g.recv::<f32>(&mut [], 0)),
    ];
    let mut cases = Vec::new();
    for kind in Kind::ALL {
        for n in 2..=4 {
            cases.extend(pairs.iter().flat_map(|pair| [0, 1].map(|before| (kind, n, before, *pair))));
        }
    }
    in_parallel(&cases, 8, |(kind, n, before, (send, receive))| message(*kind, *n, *before, *send, *receive));
}

#[test]
fn the_sender_learns_of_a_mismatch_by_a_later_message() {
    for kind in Kind::ALL {
        let (failed, failure) = std::sync::mpsc::channel();
        let failure = std::sync::Arc::new(std::sync::Mutex::new(failure));
        let results = run_ranks_with(kind, 3, soon, move |group| match group.rank() {
            0 => {
                let first = group.send(&[1u8; 4], 1);
                failure.lock().unwrap().recv().expect("rank 1 reports its failure");
                // The error travels on its own connection: any number of messages may be sent before it arrives.
                first.and_then(|()| (0..1_000_000).try_for_each(|_| group.send(&[1u8; 4], 1)))
            }
            1 => {
                let result = group.recv(&mut [0u8; 5], 0);
                failed.send(()).unwrap();
                result.and_then(|()| group.barrier())
            }
            _ => group.recv(&mut [0u8; 5], 1),
        });
        agreed(&format!("{kind:?}"), &errors(results), 0);
    }
}

#[test]
fn a_fresh_group_works_after_a_mismatch() {
    for kind in Kind::ALL {
        check(kind, 3, 1, 0, PAIRS[0]);
        let sums = run_ranks(kind, 3, |group| {
            let mut data = [group.rank() as f32 + 1.0; 4];
            group.all_reduce(&mut data, ReduceOp::Sum).map(|()| data)
        });
        assert!(sums.into_iter().all(|sum| sum == Ok([6.0; 4])));
    }
}

#[test]
fn messages_of_other_types_in_a_batch_are_a_mismatch_at_the_receiver() {
    for kind in Kind::ALL {
        let results = run_ranks_with(kind, 2, soon, |group| {
            let (mut first, mut second) = ([0u8; 2], [0i32; 3]);
            match group.rank() {
                0 => group.batch().send(&[1u8; 2], 1).send(&[1f32; 3], 1).run(),
                _ => group.batch().recv(&mut first, 0).recv(&mut second, 0).run(),
            }
        });
        let error = results[1].clone().expect_err("the types differ");
        let Error::Mismatch { calls, .. } = &error else { panic!("{kind:?}: {error:?}") };
        let calls: Vec<_> = calls.iter().map(|(rank, call)| (*rank, call.dtype, call.count)).collect();
        assert_eq!(calls, [(0, DType::F32, 3), (1, DType::I32, 3)], "{kind:?}");
    }
}
