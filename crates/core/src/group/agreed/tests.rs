//! Agreed operations of threads.

use std::thread;

use super::*;
use crate::types::ReduceOp;

fn all_reduce(count: usize) -> Call {
    Call {
        operation: Operation::AllReduce,
        dtype: DType::F32,
        count,
        reduction: Some(ReduceOp::Sum),
        root: None,
        sizes: None,
    }
}

/// Runs one agreed operation on `n` ranks, which prepare and run as the two functions say, and returns the results.
fn run_agreed(
    n: usize,
    call: impl Fn(usize) -> Call + Copy + Send + 'static,
    prepare: impl Fn(usize) -> Result<usize, Error> + Copy + Send + 'static,
    run: impl Fn(usize) -> Result<usize, Error> + Copy + Send + 'static,
) -> Vec<Result<Option<usize>, Error>> {
    let ranks = Group::threads(n).unwrap().into_iter().map(|group| {
        thread::spawn(move || {
            let rank = group.rank();
            group.barrier().unwrap();
            let started =
                group.start_agreed(call(rank), move || prepare(rank), |_| None, move |it, _, _, _| run(it))?;
            let mut result = None;
            started.wait(|it, _| {
                result = Some(it);
                Ok(())
            })?;
            Ok(result)
        })
    });
    ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
}

#[test]
fn each_rank_runs_with_its_prepared_value() {
    let results = run_agreed(3, |_| all_reduce(5), |rank| Ok(rank * 10), |it| Ok(it + 1));
    assert_eq!(results, [Ok(Some(1)), Ok(Some(11)), Ok(Some(21))]);
}

#[test]
fn different_calls_are_a_mismatch_that_lists_all_calls() {
    let results = run_agreed(3, |rank| all_reduce(5 + rank / 2), Ok, |_| panic!("it must not run"));
    let calls = vec![(0, all_reduce(5)), (1, all_reduce(5)), (2, all_reduce(6))];
    for result in results {
        let (calls, note) = (calls.clone(), String::new());
        assert_eq!(result, Err(Error::Mismatch { sequence: 1, calls, note }));
    }
}

#[test]
fn a_failed_prepare_or_run_does_not_hang_peers() {
    let cause = || Error::argument("test", "on purpose");
    let fails = move |rank| if rank == 1 { Err(cause()) } else { Ok(rank) };
    assert_eq!(run_agreed(2, |_| all_reduce(1), fails, Ok), [Err(cause()), Err(cause())]);
    let late = run_agreed(2, |_| all_reduce(1), Ok, fails);
    assert_eq!(late[1], Err(cause()));
}

#[test]
fn the_largest_proposed_number_reaches_all_ranks() {
    let ranks = Group::threads(3).unwrap().into_iter().map(|group| {
        thread::spawn(move || {
            let rank = group.rank() as u64;
            let mut results = Vec::new();
            for round in 0..3 {
                let propose = move |prepared: &mut u64| Some(*prepared + (rank + round) % 3);
                let run = |prepared, largest, _: &Site, _: &Deadline| Ok((prepared, largest));
                let started = group.start_agreed(all_reduce(1), move || Ok(10 * round), propose, run)?;
                started.wait(|result, _| {
                    results.push(result);
                    Ok(())
                })?;
            }
            Ok::<_, Error>(results)
        })
    });
    for rank in ranks.collect::<Vec<_>>() {
        assert_eq!(rank.join().unwrap(), Ok(vec![(0, Some(2)), (10, Some(12)), (20, Some(22))]));
    }
}

#[test]
fn tell_all_returns_all_values_or_the_first_error() {
    let run = |n: usize, bad: &'static [usize]| {
        let ranks = Group::threads(n).unwrap().into_iter().map(|group| {
            thread::spawn(move || {
                let rank = group.rank();
                let own = if bad.contains(&rank) { Err(Error::Config(rank.to_string())) } else { Ok(vec![rank; rank]) };
                group.all_gather_results(own)
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    };
    assert!(run(3, &[]).iter().all(|all| *all == Ok(vec![vec![], vec![1], vec![2, 2]])));
    assert!(run(3, &[1, 2]).iter().all(|all| *all == Err(Error::Config("1".into()))));
}

#[test]
fn a_rank_that_abandons_the_group_does_not_hang_peers() {
    let mut groups = Group::threads(2).unwrap();
    let (one, zero) = (groups.pop().unwrap(), groups.pop().unwrap());
    let cause = Error::argument("test", "on purpose");
    let waiting = thread::spawn(move || zero.all_reduce(&mut [1.0f32; 1000], ReduceOp::Sum));
    one.abandon(cause.clone());
    assert_eq!(waiting.join().unwrap(), Err(cause.clone()));
    assert_eq!(one.barrier(), Err(cause));
}

#[test]
fn abandoning_at_once_ends_an_operation_that_others_have_not_begun() {
    let mut groups = Group::threads(2).unwrap();
    let (one, zero) = (groups.pop().unwrap(), groups.pop().unwrap());
    let cause = Error::argument("test", "on purpose");
    let started = one.start_all_reduce(vec![1.0f32; 1000], ReduceOp::Sum).unwrap();
    one.abandon_at_once(cause.clone());
    assert_eq!(started.wait().unwrap_err().0, cause);
    assert_eq!(zero.barrier(), Err(cause));
}
