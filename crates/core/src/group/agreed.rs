//! Operations whose data the group does not carry: its ranks agree on the call, and another library moves the data.

mod message;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytemuck::cast_slice_mut;
use serde::{Serialize, de::DeserializeOwned};

use self::message::{agree_on_message, message_name};
use super::check;
use super::core::Core;
use super::execute::Task;
use super::handle::{Attachment, Group};
use super::journal::{Entered, Waiting, call_site};
use super::progress::Work;
use super::record::CallSite;
use super::request::Request;
use super::turn::Turn;
use crate::sync::Deadline;
use crate::transport::Buffers;
use crate::types::{Call, DType, Error, Operation, Parts, Site};

/// The ranks at the other ends of a message. A collective has neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peers {
    /// The receiver of what this rank sends.
    pub to: Option<usize>,
    /// The sender of what this rank receives.
    pub from: Option<usize>,
}

impl Peers {
    /// Whether the operation is a message.
    pub fn is_message(self) -> bool {
        self != Peers::default()
    }
}

/// What a layer above can do with a group besides operations.
pub trait AgreedOperations {
    /// Starts an operation whose data the group does not carry. When its turn comes, `prepare` runs, then all ranks
    /// exchange their calls, then `run` runs with the remaining time. In between, `propose` may return a number, on all
    /// ranks or on none: then they exchange these too, and `run` gets the largest. An error of any of these poisons the
    /// group.
    ///
    /// To a rank that calls one of the group's own operations, this is an `all_gather` of one tag per rank.
    fn start_agreed<P, T: Send + 'static>(
        &self,
        call: Call,
        prepare: impl FnOnce() -> Result<P, Error> + Send + 'static,
        propose: impl FnOnce(&mut P) -> Option<u64> + Send + 'static,
        run: impl FnOnce(P, Option<u64>, &Site, &Deadline) -> Result<T, Error> + Send + 'static,
    ) -> Result<Agreed<T>, Error>;

    /// Starts a message to a rank, from one, or both at once, whose data the group does not carry. A call describes
    /// what goes in its direction. When the turn comes, `prepare` runs and returns a word for the receiver. The ranks
    /// exchange calls and words, then `run` runs with the word of the sender, which is 0 if nothing comes in. An error
    /// of any of these poisons the group. A receiver that expects another call returns [`Error::Mismatch`].
    ///
    /// To a rank that calls one of the group's own messages, this is a message of one tag and the word.
    fn start_agreed_message<P, T: Send + 'static>(
        &self,
        outgoing: Option<(usize, Call)>,
        incoming: Option<(usize, Call)>,
        prepare: impl FnOnce() -> Result<(P, u64), Error> + Send + 'static,
        run: impl FnOnce(P, u64, &Site, &Deadline) -> Result<T, Error> + Send + 'static,
    ) -> Result<Agreed<T>, Error>;

    /// Enters a function of the layer above, until the result is dropped: errors of ranks that wait for this one, and
    /// traces, name it and the line where the program calls it. Within another such function it is a part of that one.
    /// The caller, and what calls it, are `#[track_caller]` up to the program.
    fn enter(&self, function: &'static str) -> Entered;

    /// As [`enter`](Self::enter), of a function that the program has called `at` this place.
    fn enter_at(&self, function: &'static str, at: CallSite) -> Entered;

    /// Enters a function that the program has called `at` this place, and that goes on here, on a thread of the layer
    /// above and in this group.
    fn enter_behind(&self, function: &'static str, at: CallSite) -> Entered;

    /// Says that this thread waits for one of the layer above that is in an operation of the group, until the result is
    /// dropped.
    fn waits(&self) -> Waiting;

    /// Says how far this rank's program has come, for the errors of ranks that disagree with it or wait for it: a text
    /// such as `after 5 training steps`.
    fn set_progress(&self, progress: String);

    /// Gathers a value from every rank. Returns all values in rank order, or the error of the lowest rank that has one:
    /// the same result on all ranks.
    fn all_gather_results<T: Serialize + DeserializeOwned>(&self, own: Result<T, Error>) -> Result<Vec<T>, Error>;

    /// Poisons the group because this rank cannot continue in it, so that no rank waits for it. Returns the error that
    /// poisoned the group, which may be an earlier one.
    fn abandon(&self, error: Error) -> Error;

    /// As [`abandon`](Self::abandon), without a wait: operations of this rank that others have not begun fail too.
    fn abandon_at_once(&self, error: Error) -> Error;

    /// Fails if an operation keeps those of this process's other groups waiting until it has ended, so that ranks whose
    /// groups take turns in different orders would wait for each other. `what` needs groups that do not wait.
    fn check_concurrent(&self, what: &str) -> Result<(), Error>;

    /// Says that this rank has gone back to an earlier state of what it does, such as a checkpoint.
    fn rewind(&self);

    /// Returns how often this rank has called [`rewind`](Self::rewind), on this group, a subgroup or a group around it.
    fn rewinds(&self) -> u64;

    /// Says that this rank begins to save what the ranks of this group do, which all of them must call.
    fn begin_save(&self);

    /// Returns how often this rank has called [`begin_save`](Self::begin_save).
    fn saves(&self) -> u64;

    /// Returns the state that a layer above attaches to this group. `make` creates it on first use, and it is kept
    /// until the last handle is dropped. It must not hold a handle itself.
    fn keep<T: Attachment>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error>;

    /// Returns the state that [`keep`](Self::keep) has created, if it has.
    fn kept<T: Attachment>(&self) -> Option<Arc<T>>;
}

/// An operation that was started with [`start_agreed`](AgreedOperations::start_agreed).
pub struct Agreed<T> {
    work: Work<Option<(T, Site, Deadline)>>,
    core: Arc<Core>,
}

impl<T> Agreed<T> {
    /// Waits until all ranks have called it and `run` has returned on this rank.
    pub fn started(self) -> Result<Started<T>, Error> {
        let started = self.work.wait().map_err(|(error, _)| error)?;
        let missing = || Error::broken("an operation on a device", "it has not started");
        let (value, site, deadline) = started.ok_or_else(missing)?;
        Ok(Started { value, site, deadline, core: self.core })
    }

    /// Waits as [`started`](Self::started) does, then [finishes](Started::finish).
    pub fn wait(self, finish: impl FnOnce(T, &dyn Fn() -> Option<Error>) -> Result<(), Error>) -> Result<(), Error> {
        self.started()?.finish(finish)
    }
}

/// An operation that all ranks have called, and this one has started.
pub struct Started<T> {
    value: T,
    site: Site,
    deadline: Deadline,
    core: Arc<Core>,
}

impl<T> Started<T> {
    /// Returns what `run` has returned.
    pub fn get(&self) -> &T {
        &self.value
    }

    /// Calls `finish` with the result of `run`. It may ask for failures that the operation may not survive. Its error
    /// poisons the group.
    pub fn finish(self, finish: impl FnOnce(T, &dyn Fn() -> Option<Error>) -> Result<(), Error>) -> Result<(), Error> {
        let Started { value, site, deadline, core } = self;
        let outcome = finish(value, &|| core.known_failure(site, &deadline));
        outcome.map_err(|error| match site.call.operation.is_collective() {
            true => core.abort_after(error, site.sequence),
            // Its number is one of its pair.
            false => core.abort(error),
        })
    }
}

impl AgreedOperations for Group {
    #[track_caller]
    fn start_agreed<P, T: Send + 'static>(
        &self,
        call: Call,
        prepare: impl FnOnce() -> Result<P, Error> + Send + 'static,
        propose: impl FnOnce(&mut P) -> Option<u64> + Send + 'static,
        run: impl FnOnce(P, Option<u64>, &Site, &Deadline) -> Result<T, Error> + Send + 'static,
    ) -> Result<Agreed<T>, Error> {
        let at = call_site();
        let agree = move |core: &Core, turn: &Turn<'_>, mut prepared, deadline: &Deadline| {
            let sequence = agree(core, turn, call, deadline, at)?;
            match propose(&mut prepared) {
                None => Ok((sequence, (prepared, None))),
                Some(own) => {
                    let (sequence, largest) = largest(core, turn, call, own, deadline, at)?;
                    Ok((sequence, (prepared, Some(largest))))
                }
            }
        };
        start(self, call, prepare, agree, |(prepared, largest), site, deadline| run(prepared, largest, site, deadline))
    }

    #[track_caller]
    fn start_agreed_message<P, T: Send + 'static>(
        &self,
        outgoing: Option<(usize, Call)>,
        incoming: Option<(usize, Call)>,
        prepare: impl FnOnce() -> Result<(P, u64), Error> + Send + 'static,
        run: impl FnOnce(P, u64, &Site, &Deadline) -> Result<T, Error> + Send + 'static,
    ) -> Result<Agreed<T>, Error> {
        let at = call_site();
        let (operation, Some((_, call))) = (message_name(outgoing, incoming), outgoing.or(incoming)) else {
            return Err(Error::broken("a message", "it goes to no rank, and comes from none"));
        };
        for (peer, _) in outgoing.iter().chain(&incoming) {
            check::peer(operation, *peer, self.rank_and_size())?;
        }
        let agree = move |core: &Core, turn: &Turn<'_>, (prepared, word), deadline: &Deadline| {
            let (sequence, word) = agree_on_message(core, turn, (outgoing, incoming), word, deadline, at)?;
            Ok((sequence, (prepared, word)))
        };
        start(self, call, prepare, agree, |(prepared, word), site, deadline| run(prepared, word, site, deadline))
    }

    #[track_caller]
    fn enter(&self, function: &'static str) -> Entered {
        self.enter_at(function, call_site())
    }

    fn enter_at(&self, function: &'static str, at: CallSite) -> Entered {
        self.core.journal.enter(function, at)
    }

    fn enter_behind(&self, function: &'static str, at: CallSite) -> Entered {
        self.core.journal.enter_behind(function, at, &self.core.operations)
    }

    fn waits(&self) -> Waiting {
        Waiting::begin(&self.core.operations)
    }

    fn set_progress(&self, progress: String) {
        self.core.journal.set_progress(progress);
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
        self.abandon_at_once(error)
    }

    fn abandon_at_once(&self, error: Error) -> Error {
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

    fn rewind(&self) {
        // Relaxed: it orders nothing else.
        outermost(self).core.rewinds.fetch_add(1, Ordering::Relaxed);
    }

    fn rewinds(&self) -> u64 {
        outermost(self).core.rewinds.load(Ordering::Relaxed)
    }

    fn begin_save(&self) {
        // Relaxed: it orders nothing else.
        self.core.saves.fetch_add(1, Ordering::Relaxed);
    }

    fn saves(&self) -> u64 {
        self.core.saves.load(Ordering::Relaxed)
    }

    fn keep<T: Attachment>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error> {
        self.attachment(make)
    }

    fn kept<T: Attachment>(&self) -> Option<Arc<T>> {
        self.attached()
    }
}

/// Returns the group of which all groups around this one are subgroups.
fn outermost(group: &Group) -> &Group {
    group.parent().map_or(group, outermost)
}

/// Starts an operation that prepares, agrees and runs when its turn comes. `agree` returns its sequence number and what
/// `run` gets.
fn start<P, Q, T: Send + 'static>(
    group: &Group,
    call: Call,
    prepare: impl FnOnce() -> Result<P, Error> + Send + 'static,
    agree: impl FnOnce(&Core, &Turn<'_>, P, &Deadline) -> Result<(u64, Q), Error> + Send + 'static,
    run: impl FnOnce(Q, &Site, &Deadline) -> Result<T, Error> + Send + 'static,
) -> Result<Agreed<T>, Error> {
    let deadline = Deadline::after(group.deadline());
    let work = group.progress()?.start(&group.core, call, deadline, None, move |core, turn, result| {
        let prepared = prepare().map_err(|error| core.abort(error))?;
        let (sequence, agreed) = agree(core, turn, prepared, &deadline)?;
        let site = Site { call, sequence };
        let started = run(agreed, &site, &deadline).map_err(|error| core.abort(error))?;
        *result = Some((started, site, deadline));
        Ok(())
    });
    Ok(Agreed { work, core: group.core.clone() })
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
    Err(core.abort(Error::Mismatch { sequence, calls, note: String::new() }))
}

/// Exchanges the numbers that the ranks propose for this call. Returns the sequence number of the exchange, and the
/// largest of them.
fn largest(
    core: &Core,
    turn: &Turn<'_>,
    call: Call,
    own: u64,
    deadline: &Deadline,
    at: CallSite,
) -> Result<(u64, u64), Error> {
    let mut all = vec![own; core.world_size()];
    let gather = Request::new(Operation::AllGather, DType::U64).call(all.len());
    let buffers = Buffers { input: None, output: cast_slice_mut(&mut all), parts: Parts::Even };
    let sequence = core.run_for(turn, Some(call), gather, Task::Collective(buffers), deadline, at)?;
    Ok((sequence, all.into_iter().max().unwrap_or(own)))
}
