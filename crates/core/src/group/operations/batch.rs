//! Batches: several operations run as one.

use std::panic::Location;

use bytemuck::{cast_slice, cast_slice_mut};

use super::super::check;
use super::super::execute::Task;
use super::super::handle::Group;
use super::super::record::CallSite;
use super::super::request::Request;
use crate::reduce::Scratch;
use crate::sync::Deadline;
use crate::transport::Buffers;
use crate::types::{Call, Element, Error, Fingerprint, Operation, Parts, ReduceOp};

/// A batch of operations that run together; see [`Group::batch`].
#[must_use = "nothing moves before `run`"]
pub struct Batch<'a> {
    group: &'a Group,
    collectives: Vec<(Call, &'a mut [u8])>,
    /// The peer and the data of each message.
    sends: Vec<(usize, &'a [u8])>,
    receives: Vec<(usize, &'a mut [u8])>,
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
    /// rank to another are received in the order in which they were added. Only their total length in bytes is
    /// compared.
    pub fn send<T: Element>(mut self, data: &'a [T], to: usize) -> Self {
        self.invalid = self.invalid.or_else(|| check::peer("batch", to, self.group.rank_and_size()).err());
        self.sends.push((to, cast_slice(data)));
        self
    }

    /// Adds a message from rank `from`, which adds a [`send`](Self::send) of the same type and length.
    pub fn recv<T: Element>(mut self, data: &'a mut [T], from: usize) -> Self {
        self.invalid = self.invalid.or_else(|| check::peer("batch", from, self.group.rank_and_size()).err());
        self.receives.push((from, cast_slice_mut(data)));
        self
    }

    fn add<T: Element>(mut self, request: Request<'_>, data: &'a mut [T]) -> Self {
        match request.in_place(self.group.world_size(), data.len()) {
            Ok(call) => self.collectives.push((call, cast_slice_mut(data))),
            Err(error) => self.invalid = self.invalid.or(Some(error)),
        }
        self
    }

    /// Runs all operations of the batch: first the collectives, then the messages. Blocks until all are complete. Each
    /// kind of collectives, and the messages together, have a deadline of their own. After an error the contents of the
    /// buffers are unspecified.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], before anything is sent, if a root is not a rank, or if a peer is this rank or not a
    /// rank; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn run(self) -> Result<(), Error> {
        let Batch { group, mut collectives, mut sends, mut receives, invalid } = self;
        if let Some(error) = invalid {
            return Err(error);
        }
        let at = Location::caller();
        let _turn = group.turn();
        let mut packed = Scratch::default();
        while let Some((first, _)) = collectives.first() {
            let kind = Call { count: 0, ..*first };
            let (mut same, others) = collectives.into_iter().partition(|(call, _)| Call { count: 0, ..*call } == kind);
            collectives = others;
            run_packed(group, kind, &mut same, &mut packed, at)?;
        }
        let deadline = Deadline::after(group.deadline());
        let (rank, n) = (group.rank(), group.world_size());
        // No deadlock: ranks wait for each other at the same distance, and all at the smallest distance can proceed.
        for distance in 1..n {
            let (to, from) = ((rank + distance) % n, (rank + n - distance) % n);
            let outgoing: Vec<_> = sends.extract_if(.., |(peer, _)| *peer == to).map(|(_, data)| data).collect();
            let incoming: Vec<_> = receives.extract_if(.., |(peer, _)| *peer == from).map(|(_, data)| data).collect();
            if outgoing.is_empty() && incoming.is_empty() {
                continue;
            }
            let sent = outgoing.concat();
            let received = packed.bytes(incoming.iter().map(|data| data.len()).sum());
            let call = Request::of::<u8>(Operation::Exchange).call(0);
            let out = (!outgoing.is_empty()).then_some((to, &sent[..]));
            let into = (!incoming.is_empty()).then_some((from, &mut *received));
            group.core.run(call, Task::Message { outgoing: out, incoming: into }, &deadline, at)?;
            unpack(received, incoming);
        }
        Ok(())
    }
}

/// Copies consecutive data to its destinations.
fn unpack<'a>(mut packed: &[u8], targets: impl IntoIterator<Item = &'a mut [u8]>) {
    for target in targets {
        let (head, rest) = packed.split_at(target.len());
        target.copy_from_slice(head);
        packed = rest;
    }
}

/// Runs collectives that differ only in their lengths as one.
fn run_packed(
    group: &Group,
    kind: Call,
    same: &mut [(Call, &mut [u8])],
    packed: &mut Scratch,
    at: CallSite,
) -> Result<(), Error> {
    let counts = same.iter().map(|(call, _)| call.count);
    let call = Call { count: counts.clone().sum(), ..kind }.shaped(Fingerprint::of(counts));
    let output = packed.bytes(call.bytes());
    let mut start = 0;
    for (_, data) in same.iter() {
        output[start..start + data.len()].copy_from_slice(data);
        start += data.len();
    }
    let buffers = Buffers { input: None, output: &mut *output, parts: Parts::Even };
    group.core.run(call, Task::Collective(buffers), &Deadline::after(group.deadline()), at)?;
    unpack(output, same.iter_mut().map(|(_, data)| &mut **data));
    Ok(())
}
