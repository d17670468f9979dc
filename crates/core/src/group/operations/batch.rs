//! Batches: several operations run as one.

use bytemuck::{cast_slice, cast_slice_mut};

use super::super::check;
use super::super::execute::Task;
use super::super::handle::Group;
use super::super::journal::call_site;
use super::super::record::CallSite;
use super::super::request::Request;
use super::super::turn::Turn;
use crate::reduce::Scratch;
use crate::sync::Deadline;
use crate::transport::Buffers;
use crate::types::{Call, Element, Error, Fingerprint, Operation, Parts, ReduceOp, Site};

/// A batch of operations that run together; see [`Group::batch`].
#[must_use = "nothing moves before `run`"]
pub struct Batch<'a> {
    group: &'a Group,
    collectives: Vec<(Call, &'a mut [u8])>,
    /// The peer, the call and the data of each message.
    sends: Vec<(usize, Call, &'a [u8])>,
    receives: Vec<(usize, Call, &'a mut [u8])>,
    invalid: Option<Error>,
}

impl Group {
    /// Collects operations to run as one batch, so that many small messages become few. Collectives of the same kind,
    /// element type, reduction and root become one operation on all their elements. Messages from one rank to another
    /// become one message. All messages are sent and received at the same time, so their order on different ranks
    /// cannot cause a deadlock.
    ///
    /// All ranks add the same collectives in the same order, and run their batches at the same position in their
    /// sequence of operations. A batch without collectives is run only by the ranks that send or receive in it.
    /// Messages of a batch match those of a batch only, not [`send`](Self::send) and [`recv`](Self::recv) of the group.
    ///
    /// ```
    /// # use bonfire_core::{Group, ReduceOp};
    /// let ranks: Vec<_> = Group::threads(2)?
    ///     .into_iter()
    ///     .map(|group| std::thread::spawn(move || {
    ///         let (mut loss, mut correct) = ([0.5f32], [7i64, 9]);
    ///         let (mine, mut theirs) = ([group.rank() as u8], [9u8]);
    ///         let other = 1 - group.rank();
    ///         let batch = group.batch().all_reduce(&mut loss, ReduceOp::Mean).all_reduce(&mut correct, ReduceOp::Sum);
    ///         batch.send(&mine, other).recv(&mut theirs, other).run()?;
    ///         Ok::<_, bonfire_core::Error>((loss, correct, theirs))
    ///     }))
    ///     .collect();
    /// let results: Result<Vec<_>, _> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    /// assert_eq!(results?, [([0.5], [14, 18], [1]), ([0.5], [14, 18], [0])]);
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    pub fn batch(&self) -> Batch<'_> {
        Batch { group: self, collectives: Vec::new(), sends: Vec::new(), receives: Vec::new(), invalid: None }
    }
}

impl<'a> Batch<'a> {
    /// Adds an [`all_reduce`](Group::all_reduce).
    pub fn all_reduce<T: Element>(self, data: &'a mut [T], op: ReduceOp) -> Self {
        self.add(Request::of::<T>(Operation::AllReduce).reduction(op), data)
    }

    /// Adds a [`reduce`](Group::reduce).
    pub fn reduce<T: Element>(self, data: &'a mut [T], op: ReduceOp, root: usize) -> Self {
        self.add(Request::of::<T>(Operation::Reduce).reduction(op).root(root), data)
    }

    /// Adds a [`broadcast`](Group::broadcast).
    pub fn broadcast<T: Element>(self, data: &'a mut [T], root: usize) -> Self {
        self.add(Request::of::<T>(Operation::Broadcast).root(root), data)
    }

    /// Adds a message to rank `to`, which adds a [`recv`](Self::recv) of the same type and length. Messages from one
    /// rank to another are received in the order in which they were added.
    pub fn send<T: Element>(mut self, data: &'a [T], to: usize) -> Self {
        self.invalid = self.invalid.or_else(|| check::peer("batch", to, self.group.rank_and_size()).err());
        self.sends.push((to, Request::of::<T>(Operation::Send).call(data.len()), cast_slice(data)));
        self
    }

    /// Adds a message from rank `from`, which adds a [`send`](Self::send) of the same type and length.
    pub fn recv<T: Element>(mut self, data: &'a mut [T], from: usize) -> Self {
        self.invalid = self.invalid.or_else(|| check::peer("batch", from, self.group.rank_and_size()).err());
        self.receives.push((from, Request::of::<T>(Operation::Send).call(data.len()), cast_slice_mut(data)));
        self
    }

    fn add<T: Element>(mut self, request: Request<'_>, data: &'a mut [T]) -> Self {
        match request.in_place(self.group.world_size(), data.len()) {
            Ok(call) => self.collectives.push((call, cast_slice_mut(data))),
            Err(error) => self.invalid = self.invalid.or(Some(error)),
        }
        self
    }

    /// Runs all operations of the batch: first the collectives, then the messages. Blocks until all are complete. All
    /// of them together have one deadline. After an error the contents of the buffers are unspecified.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], before anything is sent, if a root is not a rank, or if a peer is this rank or not a
    /// rank. [`Error::Mismatch`] if two ranks add different messages between them. Otherwise see
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn run(self) -> Result<(), Error> {
        if let Some(error) = self.invalid {
            return Err(error);
        }
        let core = &self.group.core;
        let (deadline, at) = (Deadline::after(self.group.deadline()), call_site());
        let turn = core.turn(Request::of::<u8>(Operation::Exchange).call(0), &deadline)?;
        // A local error, too, is told to the peers, which count on the rest of the batch.
        run_parts(self, &turn, &deadline, at).map_err(|error| core.abort(error))
    }
}

fn run_parts(batch: Batch<'_>, turn: &Turn<'_>, deadline: &Deadline, at: CallSite) -> Result<(), Error> {
    let Batch { group, mut collectives, mut sends, mut receives, .. } = batch;
    let mut packed = Scratch::default();
    while let Some((first, _)) = collectives.first() {
        let kind = Call { count: 0, ..*first };
        let (mut same, others) = collectives.into_iter().partition(|(call, _)| Call { count: 0, ..*call } == kind);
        collectives = others;
        let counts = same.iter().map(|(call, _): &(Call, &mut [u8])| call.count);
        let call = Call { count: counts.clone().sum(), ..kind }.shaped(Fingerprint::of(counts));
        let output = packed.bytes(call.bytes())?;
        pack(&mut *output, same.iter().map(|(_, data)| &**data));
        let buffers = Buffers { input: None, output: &mut *output, parts: Parts::Even };
        group.core.run(turn, call, Task::Collective(buffers), deadline, at)?;
        unpack(output, same.iter_mut().map(|(_, data)| &mut **data));
    }
    let (rank, n) = (group.rank(), group.world_size());
    let mut sent = Scratch::default();
    // No deadlock: ranks wait for each other at the same distance, and all at the smallest distance can proceed.
    for distance in 1..n {
        let (to, from) = ((rank + distance) % n, (rank + n - distance) % n);
        let outgoing: Vec<_> = sends.extract_if(.., |(peer, ..)| *peer == to).collect();
        let mut incoming: Vec<_> = receives.extract_if(.., |(peer, ..)| *peer == from).collect();
        if outgoing.is_empty() && incoming.is_empty() {
            continue;
        }
        // The messages' tags come first: lengths alone do not tell whether the types are equal.
        let announced = tags(outgoing.iter().map(|(_, call, _)| *call));
        let sent = sent.bytes(announced.len() + outgoing.iter().map(|(.., data)| data.len()).sum::<usize>())?;
        pack(sent, std::iter::once(&announced[..]).chain(outgoing.iter().map(|(.., data)| *data)));
        let expected = tags(incoming.iter().map(|(_, call, _)| *call));
        let len = expected.len() + incoming.iter().map(|(.., data)| data.len()).sum::<usize>();
        let received = packed.bytes(len)?;
        let call = Request::of::<u8>(Operation::Exchange).call(0);
        let out = (!outgoing.is_empty()).then_some((to, &*sent));
        let into = (!incoming.is_empty()).then_some((from, &mut *received));
        let sequence = group.core.run(turn, call, Task::Message { outgoing: out, incoming: into }, deadline, at)?;
        let (found, data) = received.split_at(expected.len());
        if found != expected {
            return Err(different_messages(sequence, (rank, &expected), (from, found)));
        }
        unpack(data, incoming.iter_mut().map(|(.., data)| &mut **data));
    }
    Ok(())
}

/// Returns the tags of messages, one after the other.
fn tags(calls: impl Iterator<Item = Call>) -> Vec<u8> {
    calls.zip(0..).flat_map(|(call, sequence)| Site { call, sequence }.to_bytes()).collect()
}

/// Returns the error for the first message of which two ranks have different tags.
fn different_messages(sequence: u64, (rank, own): (usize, &[u8]), (peer, theirs): (usize, &[u8])) -> Error {
    let sites = |tags: &[u8]| tags.as_chunks::<{ Site::BYTES }>().0.iter().map(Site::from_bytes).collect::<Vec<_>>();
    let pair = sites(own).into_iter().zip(sites(theirs)).find(|(own, theirs)| own != theirs);
    let Some((Some(own), Some(theirs))) = pair else {
        return Error::broken("batch", format!("rank {peer} sent messages without valid tags to rank {rank}"));
    };
    let mut calls = vec![(rank, own.call), (peer, theirs.call)];
    calls.sort_by_key(|(rank, _)| *rank);
    Error::Mismatch { sequence, calls, note: String::new() }
}

/// Copies data to consecutive bytes, which are as long as all of them.
fn pack<'a>(mut packed: &mut [u8], sources: impl Iterator<Item = &'a [u8]>) {
    for source in sources {
        let (head, rest) = packed.split_at_mut(source.len());
        head.copy_from_slice(source);
        packed = rest;
    }
}

/// Copies consecutive data to its destinations.
fn unpack<'a>(mut packed: &[u8], targets: impl Iterator<Item = &'a mut [u8]>) {
    for target in targets {
        let (head, rest) = packed.split_at(target.len());
        target.copy_from_slice(head);
        packed = rest;
    }
}
