//! What the error at the deadline says of the ranks that did not come: where they are in their programs.

use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use bonfire_core::error::Whereabouts;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group, ReduceOp};
use bonfire_testing::{Kind, in_parallel, run_ranks_with};

const LIMIT: Duration = Duration::from_secs(4);

/// All kinds, with a connection between each two ranks or through rank 0.
fn cases() -> Vec<(Kind, bool)> {
    Kind::ALL.into_iter().flat_map(|kind| [(kind, false), (kind, true)]).collect()
}

/// Runs three ranks, and returns their results.
fn run<T: Send + 'static>((kind, star): (Kind, bool), rank: impl Fn(Group) -> T + Clone + Send + 'static) -> Vec<T> {
    run_ranks_with(kind, 3, |builder| if star { builder.full_mesh_limit(2) } else { builder }, rank)
}

fn place(line: u32) -> String {
    format!("{}:{line}", file!())
}

#[test]
fn ranks_that_wait_in_another_group_are_named_with_the_lines_of_all() {
    in_parallel(&cases(), 4, |case| {
        let lines = Arc::new(Mutex::new([0; 3]));
        let of_ranks = lines.clone();
        // Rank 0 leaves when one of the others has, which must not be before the last of them has given up.
        let given_up = Arc::new(Barrier::new(2));
        let results = run(*case, move |group| {
            let lane = group.subgroup(&[0, 1, 2]).unwrap();
            let limited = group.with_deadline(LIMIT);
            let (rank, at) = (group.rank(), |line| of_ranks.lock().unwrap()[group.rank()] = line);
            let result = match rank {
                0 => {
                    at(line!() + 1);
                    lane.broadcast(&mut [1u8], 0)
                }
                1 => {
                    at(line!() + 1);
                    limited.all_reduce(&mut vec![1f32; 100_000], ReduceOp::Sum)
                }
                _ => {
                    // As a layer above does, whose function calls the program's code and other operations.
                    at(line!() + 1);
                    let _call = limited.enter("sync");
                    let deeper = || limited.all_reduce(&mut vec![1f32; 100_000], ReduceOp::Sum);
                    deeper()
                }
            };
            if rank > 0 {
                given_up.wait();
            }
            result
        });
        let [save, reduce, sync] = lines.lock().unwrap().map(place);
        assert!(results[0].is_err(), "the others leave");
        for result in &results[1..] {
            let Err(error @ Error::Timeout { missing, .. }) = result else { panic!("{case:?}: {result:?}") };
            let (error, rank_0) = (error.to_string(), format!("rank 0 is in broadcast at {save}"));
            assert_eq!(missing, &[0], "{case:?}");
            let others = [format!("rank 1 is in all_reduce at {reduce}"), format!("rank 2 is in sync at {sync}")];
            let who = usize::from(error.contains("while rank 2 waited"));
            for expected in [&rank_0, &others[who], "and broadcast is called by all ranks", "in the same order"] {
                assert!(error.contains(expected), "{case:?}: {expected}: {error}");
            }
            assert!(others.iter().all(|other| error.contains(other)), "{case:?}: {error}");
            assert!(!error.contains("raise the deadline"), "{case:?}: {error}");
        }
    });
}

#[test]
fn a_rank_that_computes_is_said_to_and_may_be_slow() {
    in_parallel(&cases(), 4, |case| {
        let (end, line) = (Arc::new(Barrier::new(3)), line!() + 3);
        let results = run(*case, move |group| {
            // Its last call.
            group.barrier().unwrap();
            let result = match group.rank() {
                2 => Ok(()),
                _ => group.with_deadline(LIMIT).barrier(),
            };
            end.wait();
            result
        });
        for result in &results[..2] {
            let Err(error @ Error::Timeout { missing, whereabouts, .. }) = result else {
                panic!("{case:?}: {result:?}")
            };
            let of_2: Vec<&Whereabouts> =
                whereabouts.iter().filter(|(rank, _)| *rank == 2).map(|(_, whereabouts)| whereabouts).collect();
            assert_eq!((&missing[..], of_2.len()), (&[2][..], 1), "{case:?}: {error}");
            let last = of_2[0].last.as_ref().map(|call| (&*call.function, &*call.at));
            assert_eq!((of_2[0].calls.len(), last), (0, Some(("barrier", &*place(line)))), "{case:?}");
            let error = error.to_string();
            let expected = ["rank 2 is in no call of Bonfire's for", "since barrier at", "raise the deadline"];
            assert!(expected.iter().all(|expected| error.contains(expected)), "{case:?}: {error}");
        }
    });
}

#[test]
fn a_rank_that_needed_another_says_where_it_was_when_that_one_had_left() {
    in_parallel(&cases(), 4, |case| {
        let (given_up, line) = (Arc::new(Barrier::new(2)), line!() + 5);
        let results = run(*case, move |group| {
            if group.rank() == 2 {
                return Ok(());
            }
            let result = group.barrier();
            given_up.wait();
            result
        });
        for result in &results[..2] {
            let Err(error @ Error::Left { rank: 2, .. }) = result else { panic!("{case:?}: {result:?}") };
            let text = error.to_string();
            // Rank 0 or 1 noticed it, and told the other.
            let noticed = |rank| text.ends_with(&format!("; rank {rank} is in barrier at {}", place(line)));
            assert!(noticed(0) || noticed(1), "{case:?}: {text}");
        }
    });
}

/// A hook or a thread of a library has no caller in the program.
#[test]
fn a_hook_has_the_line_where_its_call_began() {
    let mut groups = Group::threads(2).unwrap();
    let (one, zero) = (groups.pop().unwrap(), groups.pop().unwrap());
    let at = bonfire_core::internal::call_site();
    let line = line!() - 1;
    let peer = thread::spawn(move || one.barrier());
    thread::scope(|scope| {
        scope.spawn(|| {
            let _call = bonfire_core::internal::go_on(at);
            zero.barrier().unwrap();
        });
    });
    peer.join().unwrap().unwrap();
    assert_eq!(zero.trace().operations[0].at, place(line));
}
