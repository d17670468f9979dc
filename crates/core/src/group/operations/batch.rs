//! Several operations as one.

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

/// Operations that run together, see [`Group::batch`].
#[must_use = "nothing moves before `run`"]
pub struct Batch<'a> {
    group: &'a Group,
    collectives: Vec<(Call, &'a mut [u8])>,
    /// With the rank that each is for.
    sends: Vec<(usize, &'a [u8])>,
    receives: Vec<(usize, &'a mut [u8])>,
    refused: Option<Error>,
}

impl Group {
    /// Collects operations to run as one: what would be many small messages is few. Collectives of one kind, element type,
    /// reduction and root become one operation on all their elements; what one rank sends to another becomes one message;
    /// and messages are sent and received all at once, so that their order on different ranks cannot make these wait for
    /// each other. All ranks add the same collectives in the same order, and run their batches at the same place; a rank
    /// that adds none runs it only if messages concern it.
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
        Batch { group: self, collectives: Vec::new(), sends: Vec::new(), receives: Vec::new(), refused: None }
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

    /// Adds a message to rank `to`, which adds a [`recv`](Self::recv) of the same length. Of several between two ranks the
    /// first sent is the first received.
    pub fn send<T: Element>(mut self, data: &'a [T], to: usize) -> Self {
        self.refused = self.refused.or_else(|| check::peer("batch", to, self.group.place()).err());
        self.sends.push((to, cast_slice(data)));
        self
    }

    /// Adds a message from rank `from`.
    pub fn recv<T: Element>(mut self, data: &'a mut [T], from: usize) -> Self {
        self.refused = self.refused.or_else(|| check::peer("batch", from, self.group.place()).err());
        self.receives.push((from, cast_slice_mut(data)));
        self
    }

    fn add<T: Element>(mut self, request: Request<'_>, data: &'a mut [T]) -> Self {
        match request.in_place(self.group.world_size(), data.len()) {
            Ok(call) => self.collectives.push((call, cast_slice_mut(data))),
            Err(error) => self.refused = self.refused.or(Some(error)),
        }
        self
    }

    /// Runs all of it. After an error the contents of the buffers are unspecified.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], before anything moves, for roots and peers that are no other ranks of the group; else as
    /// the operations.
    #[track_caller]
    pub fn run(self) -> Result<(), Error> {
        let Batch { group, mut collectives, mut sends, mut receives, refused } = self;
        if let Some(error) = refused {
            return Err(error);
        }
        let at = Location::caller();
        let _turn = group.turn();
        let mut packed = Scratch::default();
        while let Some((first, _)) = collectives.first() {
            let like = Call { count: 0, ..*first };
            let (mut some, others) = collectives.into_iter().partition(|(call, _)| Call { count: 0, ..*call } == like);
            collectives = others;
            together(group, like, &mut some, &mut packed, at)?;
        }
        let deadline = Deadline::after(group.deadline());
        let (rank, n) = (group.rank(), group.world_size());
        // Ranks that wait for each other are at the same distance, and of those at the least distance all can go on.
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

/// Copies what lies one after the other to its places.
fn unpack<'a>(mut packed: &[u8], places: impl IntoIterator<Item = &'a mut [u8]>) {
    for place in places {
        let (piece, rest) = packed.split_at(place.len());
        place.copy_from_slice(piece);
        packed = rest;
    }
}

/// Collectives that differ in their lengths only.
fn together(
    group: &Group,
    like: Call,
    some: &mut [(Call, &mut [u8])],
    packed: &mut Scratch,
    at: CallSite,
) -> Result<(), Error> {
    let counts = some.iter().map(|(call, _)| call.count);
    let call = Call { count: counts.clone().sum(), ..like }.shaped(Fingerprint::of(counts));
    let output = packed.bytes(call.bytes());
    let mut start = 0;
    for (_, data) in some.iter() {
        output[start..start + data.len()].copy_from_slice(data);
        start += data.len();
    }
    let buffers = Buffers { input: None, output: &mut *output, parts: Parts::Even };
    group.core.run(call, Task::Collective(buffers), &Deadline::after(group.deadline()), at)?;
    unpack(output, some.iter_mut().map(|(_, data)| &mut **data));
    Ok(())
}
