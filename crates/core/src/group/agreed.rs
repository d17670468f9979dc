//! Operations whose data the group does not carry: its ranks agree on what they do, and do it another way.

use std::panic::Location;
use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};

use super::core::Core;
use super::execute::Task;
use super::handle::{Group, Keepsake};
use super::progress::Work;
use super::record::CallSite;
use super::request::Request;
use crate::sync::Deadline;
use crate::transport::Buffers;
use crate::types::{Call, DType, Error, Operation, Parts, Site};

/// What ranks do with each other beside operations.
pub trait Agreement {
    /// Starts an operation that the group does not carry itself. When its turn has come, `prepare` is called, then all ranks
    /// tell each other what they call, and then `run`, with what is left of the time. Errors of any of these end the group.
    ///
    /// To a rank that calls something that the group does carry, this is an `all_gather` of so many tags.
    fn start_agreed<P, T: Send + 'static>(
        &self,
        call: Call,
        prepare: impl FnOnce() -> Result<P, Error> + Send + 'static,
        run: impl FnOnce(P, &Site, &Deadline) -> Result<T, Error> + Send + 'static,
    ) -> Result<Agreed<T>, Error>;

    /// What every rank says, or the error of the first that has one: the same on all ranks.
    fn tell_all<T: Serialize + DeserializeOwned>(&self, own: Result<T, Error>) -> Result<Vec<T>, Error>;

    /// Ends the group because this rank cannot go on in it, so that no rank waits for it.
    fn abandon(&self, error: Error);

    /// What a layer above has for this group: made when it is first asked for, and kept until the last handle is dropped.
    /// It must hold no handle itself.
    fn keep<T: Keepsake>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error>;
}

/// An operation that was started with [`start_agreed`](Agreement::start_agreed).
pub struct Agreed<T> {
    work: Work<Option<(T, Site, Deadline)>>,
    core: Arc<Core>,
}

impl<T> Agreed<T> {
    /// Waits until all ranks have called it and `run` has returned on this one; then for `finish`, which gets what `run`
    /// gave, and may ask what has happened that the operation may not survive. Its error ends the group.
    pub fn wait(self, finish: impl FnOnce(T, &dyn Fn() -> Option<Error>) -> Result<(), Error>) -> Result<(), Error> {
        let Some((started, site, deadline)) = self.work.wait().map_err(|(error, _)| error)? else { return Ok(()) };
        let outcome = finish(started, &|| self.core.trouble(site, &deadline));
        outcome.map_err(|error| self.core.give_up(error, site.sequence))
    }
}

impl Agreement for Group {
    #[track_caller]
    fn start_agreed<P, T: Send + 'static>(
        &self,
        call: Call,
        prepare: impl FnOnce() -> Result<P, Error> + Send + 'static,
        run: impl FnOnce(P, &Site, &Deadline) -> Result<T, Error> + Send + 'static,
    ) -> Result<Agreed<T>, Error> {
        let (limit, at) = (self.deadline(), Location::caller());
        let work = self.progress()?.start(&self.core, None, move |core, result| {
            let deadline = Deadline::after(limit);
            let prepared = prepare().map_err(|error| core.abandon(error))?;
            let site = Site { call, sequence: agree(core, call, &deadline, at)? };
            let started = run(prepared, &site, &deadline).map_err(|error| core.abandon(error))?;
            *result = Some((started, site, deadline));
            Ok(())
        });
        Ok(Agreed { work, core: self.core.clone() })
    }

    #[track_caller]
    fn tell_all<T: Serialize + DeserializeOwned>(&self, own: Result<T, Error>) -> Result<Vec<T>, Error> {
        let unreadable = |error: postcard::Error| Error::io("reading what ranks tell each other", error);
        let bytes = postcard::to_stdvec(&own).map_err(unreadable)?;
        let (all, sizes) = self.all_gather_v(&bytes)?;
        let mut rest = &all[..];
        let each = sizes.into_iter().map(|size| {
            let (one, others) = rest.split_at(size);
            rest = others;
            postcard::from_bytes::<Result<T, Error>>(one).map_err(unreadable)?
        });
        each.collect()
    }

    fn abandon(&self, error: Error) {
        let _turn = self.turn();
        self.core.abandon(error);
    }

    fn keep<T: Keepsake>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error> {
        self.kept(make)
    }
}

/// Returns once all ranks have made this call, with its number.
fn agree(core: &Core, call: Call, deadline: &Deadline, at: CallSite) -> Result<u64, Error> {
    let tag = Site { sequence: 0, call }.to_bytes();
    let mut tags = vec![0; Site::BYTES * core.world_size()];
    tags[Site::BYTES * core.rank()..][..Site::BYTES].copy_from_slice(&tag);
    let gather = Request::new(Operation::AllGather, DType::U8).call(tags.len());
    let buffers = Buffers { input: None, output: &mut tags, parts: Parts::Even };
    let sequence = core.run_for(Some(call), gather, Task::Collective(buffers), deadline, at)?;
    let calls = tags.as_chunks::<{ Site::BYTES }>().0;
    if calls.iter().all(|other| *other == tag) {
        return Ok(sequence);
    }
    let readable = calls.iter().map(Site::from_bytes).enumerate();
    let calls = readable.filter_map(|(rank, tag)| Some((rank, tag?.call))).collect();
    Err(core.abandon(Error::Mismatch { sequence, calls }))
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

    /// What comes of an agreed operation of each rank, which prepares and runs as the two functions say.
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
    fn every_rank_runs_what_it_prepared() {
        let results = start(3, |_| all_reduce(5), |rank| Ok(rank * 10), |it| Ok(it + 1));
        assert_eq!(results, [Ok(Some(1)), Ok(Some(11)), Ok(Some(21))]);
    }

    #[test]
    fn ranks_that_call_something_else_learn_who_called_what() {
        let results = start(3, |rank| all_reduce(5 + rank / 2), Ok, |_| panic!("it must not run"));
        let calls = vec![(0, all_reduce(5)), (1, all_reduce(5)), (2, all_reduce(6))];
        for result in results {
            assert_eq!(result, Err(Error::Mismatch { sequence: 1, calls: calls.clone() }));
        }
    }

    #[test]
    fn a_rank_that_cannot_keeps_nobody_waiting() {
        let cause = || Error::argument("test", "on purpose");
        let fails = move |rank| if rank == 1 { Err(cause()) } else { Ok(rank) };
        assert_eq!(start(2, |_| all_reduce(1), fails, Ok), [Err(cause()), Err(cause())]);
        let late = start(2, |_| all_reduce(1), Ok, fails);
        assert_eq!(late[1], Err(cause()));
    }

    #[test]
    fn every_rank_gets_what_every_rank_says_or_the_first_error() {
        let run = |n: usize, bad: &'static [usize]| {
            let ranks = Group::threads(n).unwrap().into_iter().map(|group| {
                thread::spawn(move || {
                    let rank = group.rank();
                    let own =
                        if bad.contains(&rank) { Err(Error::Config(rank.to_string())) } else { Ok(vec![rank; rank]) };
                    group.tell_all(own)
                })
            });
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        };
        assert!(run(3, &[]).iter().all(|all| *all == Ok(vec![vec![], vec![1], vec![2, 2]])));
        assert!(run(3, &[1, 2]).iter().all(|all| *all == Err(Error::Config("1".into()))));
    }

    #[test]
    fn a_rank_that_cannot_go_on_keeps_nobody_waiting() {
        let mut groups = Group::threads(2).unwrap();
        let (one, zero) = (groups.pop().unwrap(), groups.pop().unwrap());
        let cause = Error::argument("test", "on purpose");
        let waiting = thread::spawn(move || zero.all_reduce(&mut [1.0f32; 1000], ReduceOp::Sum));
        one.abandon(cause.clone());
        assert_eq!(waiting.join().unwrap(), Err(cause.clone()));
        assert_eq!(one.barrier(), Err(cause));
    }
}
