//! Operations whose data the group does not carry: its ranks agree on the call, and another library moves the data.

use std::panic::Location;
use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};

use super::core::Core;
use super::execute::Task;
use super::handle::{Attachment, Group};
use super::progress::Work;
use super::record::CallSite;
use super::request::Request;
use super::turn::Turn;
#[cfg(unix)]
use crate::report;
use crate::sync::Deadline;
use crate::transport::Buffers;
use crate::types::{Call, DType, Error, Operation, Parts, Site};

/// What a layer above can do with a group besides operations.
pub trait AgreedOperations {
    /// Starts an operation whose data the group does not carry. When its turn comes, `prepare` runs, then all ranks
    /// exchange their calls, then `run` runs with the remaining time. An error of any of these poisons the group.
    ///
    /// To a rank that calls one of the group's own operations, this is an `all_gather` of one tag per rank.
    fn start_agreed<P, T: Send + 'static>(
        &self,
        call: Call,
        prepare: impl FnOnce() -> Result<P, Error> + Send + 'static,
        run: impl FnOnce(P, &Site, &Deadline) -> Result<T, Error> + Send + 'static,
    ) -> Result<Agreed<T>, Error>;

    /// Gathers a value from every rank. Returns all values in rank order, or the error of the lowest rank that has one:
    /// the same result on all ranks.
    fn all_gather_results<T: Serialize + DeserializeOwned>(&self, own: Result<T, Error>) -> Result<Vec<T>, Error>;

    /// Poisons the group because this rank cannot continue in it, so that no rank waits for it. Returns the error that
    /// poisoned the group, which may be an earlier one.
    fn abandon(&self, error: Error) -> Error;

    /// Fails if an operation keeps those of this process's other groups waiting until it has ended, so that ranks whose
    /// groups take turns in different orders would wait for each other. `what` needs groups that do not wait.
    fn check_concurrent(&self, what: &str) -> Result<(), Error>;

    /// Makes [`launch`](crate::launch::launch) return this error for this rank, though its body has none, and `bonfire
    /// run` end with status 1, though the rank succeeds: what it did with the group, or with a subgroup, cannot be what
    /// it was meant to do. The group remains usable.
    fn object(&self, error: Error);

    /// Returns the state that a layer above attaches to this group. `make` creates it on first use, and it is kept
    /// until the last handle is dropped. It must not hold a handle itself.
    fn keep<T: Attachment>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error>;
}

/// An operation that was started with [`start_agreed`](AgreedOperations::start_agreed).
pub struct Agreed<T> {
    work: Work<Option<(T, Site, Deadline)>>,
    core: Arc<Core>,
}

impl<T> Agreed<T> {
    /// Waits until all ranks have called it and `run` has returned on this rank, then calls `finish` with the result of
    /// `run`. `finish` may ask for failures that the operation may not survive. Its error poisons the group.
    pub fn wait(self, finish: impl FnOnce(T, &dyn Fn() -> Option<Error>) -> Result<(), Error>) -> Result<(), Error> {
        let Some((started, site, deadline)) = self.work.wait().map_err(|(error, _)| error)? else { return Ok(()) };
        let outcome = finish(started, &|| self.core.known_failure(site, &deadline));
        outcome.map_err(|error| self.core.abort_after(error, site.sequence))
    }
}

impl AgreedOperations for Group {
    #[track_caller]
    fn start_agreed<P, T: Send + 'static>(
        &self,
        call: Call,
        prepare: impl FnOnce() -> Result<P, Error> + Send + 'static,
        run: impl FnOnce(P, &Site, &Deadline) -> Result<T, Error> + Send + 'static,
    ) -> Result<Agreed<T>, Error> {
        let (deadline, at) = (Deadline::after(self.deadline()), Location::caller());
        let work = self.progress()?.start(&self.core, call, deadline, None, move |core, turn, result| {
            let prepared = prepare().map_err(|error| core.abort(error))?;
            let site = Site { call, sequence: agree(core, turn, call, &deadline, at)? };
            let started = run(prepared, &site, &deadline).map_err(|error| core.abort(error))?;
            *result = Some((started, site, deadline));
            Ok(())
        });
        Ok(Agreed { work, core: self.core.clone() })
    }

    #[track_caller]
    fn all_gather_results<T: Serialize + DeserializeOwned>(&self, own: Result<T, Error>) -> Result<Vec<T>, Error> {
        let codec_error = |error: postcard::Error| Error::io("encoding or decoding the values of all ranks", error);
        let bytes = postcard::to_stdvec(&own).map_err(codec_error)?;
        let (all, sizes) = self.all_gather_v(&bytes)?;
        let mut rest = &all[..];
        let each = sizes.into_iter().map(|size| {
            let (one, others) = rest.split_at(size);
            rest = others;
            postcard::from_bytes::<Result<T, Error>>(one).map_err(codec_error)?
        });
        each.collect()
    }

    fn abandon(&self, error: Error) -> Error {
        // After the operations before it, which may still complete.
        let _turn = self.core.queue.turn(&Deadline::after(self.deadline()));
        self.core.abort(error)
    }

    fn check_concurrent(&self, what: &str) -> Result<(), Error> {
        if self.world_size() == 1 || !self.core.executor.engines.block_process() {
            return Ok(());
        }
        Err(Error::Config(format!(
            "{what} needs two groups at once, and with `mpi-blocking` a process is in one operation at a time: set \
             BONFIRE_TRANSPORT=mpi"
        )))
    }

    fn object(&self, error: Error) {
        match self.parent() {
            Some(parent) => parent.object(error),
            None => {
                #[cfg(unix)]
                report::objected(&error);
                // The first is as good as any other.
                let _ = self.core.objection.set(error);
            }
        }
    }

    fn keep<T: Attachment>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error> {
        self.attachment(make)
    }
}

/// Waits until all ranks have made this call. Returns its sequence number.
fn agree(core: &Core, turn: &Turn<'_>, call: Call, deadline: &Deadline, at: CallSite) -> Result<u64, Error> {
    let tag = Site { sequence: 0, call }.to_bytes();
    let mut tags = vec![0; Site::BYTES * core.world_size()];
    tags[Site::BYTES * core.rank()..][..Site::BYTES].copy_from_slice(&tag);
    let gather = Request::new(Operation::AllGather, DType::U8).call(tags.len());
    let buffers = Buffers { input: None, output: &mut tags, parts: Parts::Even };
    let sequence = core.run_for(turn, Some(call), gather, Task::Collective(buffers), deadline, at)?;
    let calls = tags.as_chunks::<{ Site::BYTES }>().0;
    if calls.iter().all(|other| *other == tag) {
        return Ok(sequence);
    }
    let decoded = calls.iter().map(Site::from_bytes).enumerate();
    let calls = decoded.filter_map(|(rank, tag)| Some((rank, tag?.call))).collect();
    Err(core.abort(Error::Mismatch { sequence, calls }))
}

#[cfg(test)]
mod tests {
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
    fn start(
        n: usize,
        call: impl Fn(usize) -> Call + Copy + Send + 'static,
        prepare: impl Fn(usize) -> Result<usize, Error> + Copy + Send + 'static,
        run: impl Fn(usize) -> Result<usize, Error> + Copy + Send + 'static,
    ) -> Vec<Result<Option<usize>, Error>> {
        let ranks = Group::threads(n).unwrap().into_iter().map(|group| {
            thread::spawn(move || {
                let rank = group.rank();
                group.barrier().unwrap();
                let started = group.start_agreed(call(rank), move || prepare(rank), move |it, _, _| run(it))?;
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
        let results = start(3, |_| all_reduce(5), |rank| Ok(rank * 10), |it| Ok(it + 1));
        assert_eq!(results, [Ok(Some(1)), Ok(Some(11)), Ok(Some(21))]);
    }

    #[test]
    fn different_calls_are_a_mismatch_that_lists_all_calls() {
        let results = start(3, |rank| all_reduce(5 + rank / 2), Ok, |_| panic!("it must not run"));
        let calls = vec![(0, all_reduce(5)), (1, all_reduce(5)), (2, all_reduce(6))];
        for result in results {
            assert_eq!(result, Err(Error::Mismatch { sequence: 1, calls: calls.clone() }));
        }
    }

    #[test]
    fn a_failed_prepare_or_run_does_not_hang_peers() {
        let cause = || Error::argument("test", "on purpose");
        let fails = move |rank| if rank == 1 { Err(cause()) } else { Ok(rank) };
        assert_eq!(start(2, |_| all_reduce(1), fails, Ok), [Err(cause()), Err(cause())]);
        let late = start(2, |_| all_reduce(1), Ok, fails);
        assert_eq!(late[1], Err(cause()));
    }

    #[test]
    fn tell_all_returns_all_values_or_the_first_error() {
        let run = |n: usize, bad: &'static [usize]| {
            let ranks = Group::threads(n).unwrap().into_iter().map(|group| {
                thread::spawn(move || {
                    let rank = group.rank();
                    let own =
                        if bad.contains(&rank) { Err(Error::Config(rank.to_string())) } else { Ok(vec![rank; rank]) };
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
}
