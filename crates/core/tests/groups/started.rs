//! Started operations: their order, their buffers, and works that are never waited for.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::{Error, Group, ReduceOp, Work, partition};
use bonfire_testing::transport::Random;
use bonfire_testing::{Kind, errors, run_ranks, run_ranks_with};

fn wait<B>(work: Work<B>) -> Result<B, Error> {
    work.wait().map_err(|(error, _)| error)
}

#[test]
fn every_operation_can_be_started() {
    for kind in Kind::ALL {
        run_ranks(kind, 3, |group| {
            let rank = group.rank();
            let own = partition(7, 3, rank);
            let mine: Vec<i32> = (0..7).map(|i| (rank * 10 + i) as i32).collect();
            let sums: Vec<i32> = (0..7).map(|i| 30 + 3 * i).collect();

            let all = group.start_all_reduce(mine.clone(), ReduceOp::Sum).unwrap();
            let one = group.start_reduce(mine.clone(), ReduceOp::Sum, 2).unwrap();
            let cast = group.start_broadcast(mine.clone(), 1).unwrap();
            let gathered = group.start_all_gather(mine.clone()).unwrap();
            let scattered = group.start_reduce_scatter(mine.clone(), ReduceOp::Sum).unwrap();
            let swapped = group.start_all_to_all(mine[..6].to_vec()).unwrap();
            let barrier = group.start_barrier().unwrap();
            let sent = (rank == 0).then(|| group.start_send(mine.clone(), 1).unwrap());
            let received = (rank == 1).then(|| group.start_recv(vec![0i32; 7], 0).unwrap());

            assert_eq!(wait(all).unwrap(), sums);
            assert_eq!(wait(one).unwrap(), if rank == 2 { sums.clone() } else { mine.clone() });
            assert_eq!(wait(cast).unwrap(), (10..17).collect::<Vec<i32>>());
            let parts = (0..3).flat_map(|r| partition(7, 3, r).map(move |i| (r * 10 + i) as i32));
            assert!(wait(gathered).unwrap().into_iter().eq(parts));
            assert_eq!(wait(scattered).unwrap()[own.clone()], sums[own]);
            assert!(wait(swapped).unwrap().into_iter().eq((0..6).map(|i| (i / 2 * 10 + rank * 2 + i % 2) as i32)));
            wait(barrier).unwrap();
            assert_eq!(sent.map(|work| wait(work).unwrap()), (rank == 0).then(|| mine.clone()));
            assert_eq!(received.map(|work| wait(work).unwrap()), (rank == 1).then(|| (0..7).collect()));
        });
    }
}

/// A buffer that panics when the operation takes its elements, and not yet when it is started.
struct Explosive {
    taken: usize,
    data: Vec<i64>,
}

impl AsMut<[i64]> for Explosive {
    fn as_mut(&mut self) -> &mut [i64] {
        self.taken += 1;
        assert!(self.taken < 2, "on purpose");
        &mut self.data
    }
}

#[test]
fn a_buffer_that_panics_fails_the_operation_on_all_ranks() {
    for kind in Kind::ALL {
        let results = run_ranks(kind, 3, move |group| {
            let first = if group.rank() == 1 {
                let buffer = Explosive { taken: 0, data: vec![1000; 5] };
                let work = group.start_all_reduce(buffer, ReduceOp::Sum).unwrap();
                let waited = catch_unwind(AssertUnwindSafe(|| work.wait().is_ok()));
                assert!(waited.is_err(), "{kind:?}: the panic is passed on");
                group.failure().map_or(Ok(()), Err)
            } else {
                wait(group.start_all_reduce(vec![1i64; 5], ReduceOp::Sum).unwrap()).map(drop)
            };
            // Without a failure this one would be paired with the operation that rank 1 has missed.
            let later = group.all_reduce(&mut [1i64; 5], ReduceOp::Sum);
            (first, later)
        });
        for (rank, (first, later)) in results.into_iter().enumerate() {
            let error = first.expect_err("rank 1 could not take part");
            assert!(matches!(error, Error::Broken { .. }), "{kind:?}, rank {rank}: {error:?}");
            assert!(error.to_string().contains("all_reduce(i64 x 5, sum): rank 1 panicked"), "{kind:?}: {error}");
            assert_eq!(later, Err(error), "{kind:?}, rank {rank}");
        }
    }
}

#[test]
fn a_call_behind_a_hanging_operation_ends_by_its_own_deadline() {
    for kind in Kind::ALL {
        for blocking in [true, false] {
            let end = Arc::new(Barrier::new(2));
            let results = run_ranks(kind, 2, move |group| {
                let errors = (group.rank() == 0).then(|| {
                    let hanging = group.start_barrier().unwrap();
                    let soon = group.with_deadline(Duration::from_millis(100));
                    let second = if blocking { soon.barrier() } else { wait(soon.start_barrier().unwrap()) };
                    (wait(hanging), second)
                });
                end.wait();
                errors
            });
            let (first, second) = results.into_iter().flatten().next().expect("rank 0 has errors");
            let error = second.expect_err("rank 1 does not call");
            let Error::Timeout { rank: 0, missing, elapsed, .. } = &error else { panic!("{kind:?}: {error:?}") };
            // The operation in front has a deadline of a minute.
            assert!(missing.is_empty() && *elapsed < bonfire_testing::DEADLINE / 2, "{kind:?}: {error:?}");
            assert_eq!(first, Err(error), "{kind:?}: the operation in front ends with the group");
        }
    }
}

#[test]
fn blocking_calls_run_after_operations_started_before_them() {
    for kind in Kind::ALL {
        run_ranks(kind, 3, |group| {
            for round in 0..100 {
                // Different lengths: an operation out of order would be a mismatch.
                let first = group.start_all_reduce(vec![1i64; 1000 + round], ReduceOp::Sum).unwrap();
                let mut second = vec![2i64; 2000 + round];
                group.all_reduce(&mut second, ReduceOp::Sum).unwrap();
                let third = group.start_all_reduce(vec![3i64; round], ReduceOp::Sum).unwrap();
                group.barrier().unwrap();
                assert!(second.iter().all(|x| *x == 6));
                assert_eq!(wait(third).unwrap(), vec![9; round]);
                assert_eq!(wait(first).unwrap(), vec![3; 1000 + round]);
            }
        });
    }
}

#[test]
fn many_in_flight_are_waited_for_in_any_order() {
    for kind in Kind::ALL {
        run_ranks(kind, 3, |group| {
            let mut works: Vec<_> = (0..200)
                .map(|i| (i, group.start_all_reduce(vec![i as f32; i * 37 % 500], ReduceOp::Sum).unwrap()))
                .collect();
            // In a different order on each rank.
            let mut random = Random(group.rank() as u64 + 1);
            while !works.is_empty() {
                let (i, work) = works.swap_remove(random.next() as usize % works.len());
                assert_eq!(wait(work).unwrap(), vec![3.0 * i as f32; i * 37 % 500], "work {i}");
            }
        });
    }
}

#[test]
fn dropped_works_still_complete() {
    for kind in Kind::ALL {
        run_ranks(kind, 3, |group| {
            for _ in 0..50 {
                let work = group.start_all_reduce(vec![1.0f32; 5000], ReduceOp::Sum).unwrap();
                if group.rank() == 1 {
                    drop(work);
                } else {
                    assert_eq!(wait(work).unwrap(), [3.0; 5000]);
                }
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn works_outlive_the_group_and_complete() {
    for kind in Kind::ALL {
        run_ranks(kind, 3, |group| {
            let works: Vec<_> =
                (1..30).map(|i| group.start_all_reduce(vec![i as i32; i * 500], ReduceOp::Sum).unwrap()).collect();
            let rank = group.rank();
            drop(group);
            for (i, work) in (1..).zip(works) {
                // Rank 2 waits for none of them.
                if rank != 2 {
                    assert_eq!(wait(work).unwrap(), vec![3 * i; i as usize * 500]);
                }
            }
        });
    }
}

#[test]
fn errors_return_the_buffer_and_later_works_get_the_first_error() {
    for kind in Kind::ALL {
        let results = run_ranks_with(
            kind,
            3,
            |builder| builder.deadline(Duration::from_secs(20)),
            |group| {
                let len = if group.rank() == 2 { 11 } else { 10 };
                let first = group.start_all_reduce(vec![group.rank() as f32; len], ReduceOp::Sum).unwrap();
                let second = group.start_broadcast(vec![7u8; 3], 0).unwrap();
                let blocking = group.barrier();
                let (error, buffer) = first.wait().unwrap_err();
                assert_eq!(buffer.len(), len);
                let (later, buffer) = second.wait().unwrap_err();
                assert_eq!(buffer, [7; 3], "an operation that never ran leaves its buffer alone");
                assert_eq!(later, error);
                assert_eq!(blocking, Err(error.clone()));
                Err::<(), _>(error)
            },
        );
        let errors = errors(results);
        assert!(matches!(errors[0], Error::Mismatch { sequence: 0, .. }), "{kind:?}: {:?}", errors[0]);
        assert!(errors.iter().all(|error| *error == errors[0]), "{kind:?}: {errors:?}");
    }
}

#[test]
fn a_started_operation_says_when_it_has_ended() {
    let (told, heard) = channel();
    let mut groups = Group::threads(2).unwrap();
    let (one, zero) = (groups.pop().unwrap(), groups.pop().unwrap());
    let other = thread::spawn(move || {
        heard.recv().unwrap();
        one.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
    });
    let work = zero.start_all_reduce(vec![1.0f32], ReduceOp::Sum).unwrap();
    assert!(!work.is_finished());
    told.send(()).unwrap();
    other.join().unwrap();
    // A wait with an end, in case the operation never says it.
    let start = Instant::now();
    while !work.is_finished() && start.elapsed() < Duration::from_secs(60) {
        thread::yield_now();
    }
    assert!(work.is_finished());
    assert_eq!(work.wait().unwrap(), [2.0]);
}

#[test]
fn invalid_arguments_are_rejected_when_the_operation_is_started() {
    for kind in Kind::ALL {
        run_ranks(kind, 2, |group| {
            let own = group.rank();
            let refused = |error: Option<Error>| assert!(matches!(error, Some(Error::InvalidArgument { .. })));
            refused(group.start_broadcast(vec![0f32; 2], 2).err());
            refused(group.start_reduce(vec![0f32; 2], ReduceOp::Sum, 2).err());
            refused(group.start_all_to_all(vec![0f32; 3]).err());
            refused(group.start_send(vec![0f32; 2], own).err());
            refused(group.start_recv(vec![0f32; 2], 5).err());
            group.barrier().unwrap();
        });
    }
}

/// A buffer that is one element shorter at every access.
struct ShrinkingBuffer(Vec<i32>);

impl AsMut<[i32]> for ShrinkingBuffer {
    fn as_mut(&mut self) -> &mut [i32] {
        self.0.pop();
        &mut self.0
    }
}

#[test]
fn a_buffer_that_shrinks_after_its_check_fails_the_operation() {
    for kind in Kind::ALL {
        let results = run_ranks(kind, 2, |group| {
            let buffer = ShrinkingBuffer((0..5).map(|i| group.rank() as i32 * 10 + i).collect());
            wait(group.start_all_to_all(buffer).unwrap()).map(|buffer| buffer.0)
        });
        for error in errors(results) {
            assert!(error.to_string().ends_with("4 elements when it was started, and now has 3"), "{kind:?}: {error}");
        }
    }
}

/// The threads of a rank call in some order, which may differ from another rank's: so all make the same call.
fn from_several_threads(kind: Kind, threads: usize, rounds: usize, act: fn(&Group) -> Result<(), Error>) {
    let (done, finished) = channel();
    let test = thread::spawn(move || {
        run_ranks(kind, 2, move |group| {
            thread::scope(|scope| {
                for _ in 0..threads {
                    let (group, done) = (group.clone(), done.clone());
                    scope.spawn(move || {
                        for _ in 0..rounds {
                            act(&group).unwrap();
                            done.send(()).unwrap();
                        }
                    });
                }
            });
            group.barrier().unwrap();
        });
    });
    // A deadlock of threads would not end by any deadline of the group.
    let end = loop {
        match finished.recv_timeout(bonfire_testing::DEADLINE) {
            Ok(()) => {}
            Err(end) => break end,
        }
    };
    assert!(end == RecvTimeoutError::Disconnected, "{kind:?}: the threads of a rank are deadlocked");
    test.join().unwrap();
}

#[test]
fn clones_make_blocking_calls_from_several_threads() {
    for kind in Kind::ALL {
        from_several_threads(kind, 4, 200, |group| {
            let mut data = [1.0f32; 100];
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            assert_eq!(data, [2.0; 100]);
            Ok(())
        });
    }
}

#[test]
fn clones_start_operations_from_several_threads() {
    for kind in Kind::ALL {
        // Several at a time, so that threads often start at the same moment.
        from_several_threads(kind, 8, 1000, |group| {
            let works: Vec<_> = (0..10).map(|_| group.start_barrier()).collect::<Result<_, _>>()?;
            works.into_iter().try_for_each(wait)
        });
    }
}

#[test]
fn clones_mix_started_and_blocking_calls_on_several_threads() {
    for kind in Kind::ALL {
        from_several_threads(kind, 4, 500, |group| {
            let work = group.start_all_reduce(vec![1i32; 10], ReduceOp::Sum)?;
            let mut data = [1i32; 10];
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            assert_eq!((&wait(work)?[..], &data[..]), (&[2; 10][..], &[2; 10][..]));
            Ok(())
        });
    }
}

#[test]
fn works_can_be_waited_for_on_other_threads() {
    for kind in Kind::ALL {
        run_ranks(kind, 2, |group| {
            let (works, queue) = channel();
            let queue = Arc::new(Mutex::new(queue));
            let waiters: Vec<_> = (0..3)
                .map(|_| {
                    let queue = queue.clone();
                    thread::spawn(move || {
                        loop {
                            let Ok((i, work)) = queue.lock().unwrap().recv() else { return };
                            assert_eq!(wait(work).unwrap(), [2 * i; 8]);
                        }
                    })
                })
                .collect();
            for i in 0..100u64 {
                works.send((i, group.start_all_reduce(vec![i; 8], ReduceOp::Sum).unwrap())).unwrap();
            }
            drop(works);
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        });
    }
}
