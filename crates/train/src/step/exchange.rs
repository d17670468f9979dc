//! The exchange of one step's gradients: full buckets leave at once, in the same order on all ranks.

use std::collections::VecDeque;
use std::mem::{replace, take};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::finite::Finite;
use super::model::Model;
use crate::bucket::{BucketTable, Schedule, WINDOW, Weighting};
use crate::compression::Compressor;
use crate::lane::{Call, Input, Lane, Pending, Source, Target, Tensor, Unconfirmed, input};
use crate::protocol::{Problem, Refusal};
use crate::shards::Placement;
use bonfire_core::internal::{AgreedOperations, Request};
use bonfire_core::{DType, Error, Group, Operation};

/// How long a wait with a limit sleeps at a time: little beside the transfer of a block.
const POLL: Duration = Duration::from_micros(50);

/// The lanes of gradients: they are reduced over the ranks that have different parts, and then over those that have the
/// same ones.
pub(crate) struct Channel {
    pub shards: Box<dyn Lane>,
    pub replicas: Box<dyn Lane>,
    /// If gradients travel compressed, as f32.
    pub compressor: Option<Compressor>,
}

impl Channel {
    /// The lane that takes gradients.
    fn first(&self) -> &dyn Lane {
        if self.shards.group().world_size() > 1 { &*self.shards } else { &*self.replicas }
    }

    /// The lane of the most bytes.
    pub fn widest(&mut self) -> &mut dyn Lane {
        if self.shards.group().world_size() > 1 { &mut *self.shards } else { &mut *self.replicas }
    }

    /// Whether a single rank exchanges nothing.
    fn is_alone(&self) -> bool {
        self.groups().into_iter().all(|group| group.world_size() == 1)
    }

    fn groups(&self) -> [&Group; 2] {
        [self.shards.group(), self.replicas.group()]
    }

    /// Returns why a group has failed.
    pub fn failure(&self) -> Option<Error> {
        self.groups().into_iter().find_map(Group::failure)
    }

    /// Fails both groups, so that no rank waits for this one. Returns the first cause.
    pub fn abandon(&self, error: Error) -> Error {
        self.groups().into_iter().fold(error, |error, group| group.abandon(error))
    }

    /// Ends a step whose operations have all ended: see [`Compressor::end_step`].
    pub fn end_step(&self, main: &Group, operation: &'static str) -> Result<Option<Refusal>, Error> {
        self.compressor.as_ref().map_or(Ok(None), |compressor| compressor.end_step(main, operation))
    }
}

/// A gradient of this rank.
enum Gradient {
    Missing,
    /// It waits for the weights.
    Arrived(Tensor),
    /// It can be sent once it is read.
    Input(Input),
    Sent,
}

/// Operations on the buckets of one step.
pub(crate) struct Exchange {
    model: Arc<Model>,
    pub channel: Channel,
    weighting: Option<Weighting>,
    buckets: BucketTable,
    schedule: Schedule,
    /// By position.
    gradients: Vec<Gradient>,
    /// The positions of gradients that arrived before the weights.
    waiting: Vec<usize>,
    /// Buckets that are reduced, by their numbers: to all ranks, or each part to the rank that keeps it.
    reducing: VecDeque<(usize, Box<dyn Pending>)>,
    /// Parts that are reduced over the ranks that keep the same ones.
    replicating: VecDeque<(usize, Box<dyn Pending>)>,
    unconfirmed: Unconfirmed,
    /// If gradients that are not finite leave out the step.
    finite: Option<Finite>,
    /// By position, the mean, or this rank's part of it.
    results: Vec<Option<Tensor>>,
}

impl Exchange {
    pub fn new(model: Arc<Model>, channel: Channel, buckets: BucketTable) -> Exchange {
        let count = model.parameters.len();
        Exchange {
            schedule: Schedule::new(&buckets, count),
            model,
            channel,
            weighting: None,
            buckets,
            gradients: (0..count).map(|_| Gradient::Missing).collect(),
            waiting: Vec::new(),
            reducing: VecDeque::new(),
            replicating: VecDeque::new(),
            unconfirmed: Unconfirmed::default(),
            finite: None,
            results: (0..count).map(|_| None).collect(),
        }
    }

    /// Looks whether gradients are finite, if `skips` says so.
    pub fn checked(mut self, skips: bool) -> Exchange {
        self.finite = skips.then(|| Finite::new(self.model.clone()));
        self
    }

    /// Looks whether a gradient is finite that does not [arrive](Self::arrive) now.
    pub fn check(&mut self, position: usize, gradient: &Tensor) {
        if let Some(finite) = &mut self.finite {
            finite.add(position, gradient);
        }
    }

    /// Returns the first gradient so far that is not finite.
    pub fn not_finite(&self) -> Result<Option<Problem>, Error> {
        self.finite.as_ref().map_or(Ok(None), Finite::problem)
    }

    /// Whether a gradient has arrived.
    pub fn has(&self, position: usize) -> bool {
        !matches!(self.gradients[position], Gradient::Missing)
    }

    /// Whether a bucket that was not sent waits for a gradient.
    pub fn takes(&self, position: usize) -> bool {
        !self.has(position) && (self.channel.is_alone() || self.schedule.expects(position))
    }

    /// Takes a gradient that it [takes](Self::takes).
    pub fn arrive(&mut self, position: usize, gradient: Tensor) {
        self.check(position, &gradient);
        if self.channel.is_alone() {
            self.gradients[position] = Gradient::Sent;
            self.results[position] = Some(gradient);
            return;
        }
        self.gradients[position] = Gradient::Arrived(gradient);
        self.schedule.complete(position);
        self.waiting.push(position);
    }

    /// Takes a gradient that counts nothing, in place of one.
    pub fn arrive_zeros(&mut self, position: usize) {
        self.gradients[position] = Gradient::Input(Input::Zeros);
        self.schedule.complete(position);
    }

    /// Says how this rank's gradients enter the mean. Nothing is sent before.
    pub fn agree(&mut self, weighting: Weighting) {
        self.weighting.get_or_insert(weighting);
    }

    /// Sends the buckets that are complete. Unless it may `wait`, only those whose gradients are read.
    pub fn advance(&mut self, wait: bool) -> Result<(), Error> {
        let Some(weighting) = self.weighting else { return Ok(()) };
        self.read(weighting);
        while self.reducing.front().is_some_and(|(_, oldest)| oldest.is_finished() == Some(true)) {
            self.finish_oldest(weighting)?;
        }
        while let Some(number) = self.schedule.ready() {
            let mut positions = self.buckets[number].positions.iter();
            if !positions.all(|position| match &mut self.gradients[*position] {
                Gradient::Input(input) => wait || input.is_ready(),
                _ => true,
            }) {
                return Ok(());
            }
            self.send(number, weighting)?;
        }
        Ok(())
    }

    /// Waits until the gradients of at most one block are in flight, or for `patience`: a rank that lacks a gradient
    /// sends its bucket at the end of its pass only, for which it may need what this rank does next.
    pub fn bound(&mut self, patience: Duration) -> Result<(), Error> {
        let Some(weighting) = self.weighting else { return Ok(()) };
        let (buckets, start) = (self.buckets.clone(), Instant::now());
        let block = |entry: Option<&(usize, Box<dyn Pending>)>| entry.map(|(number, _)| buckets[*number].block);
        while block(self.reducing.front()) != block(self.reducing.back()) {
            while self.reducing.front().is_some_and(|(_, oldest)| oldest.is_finished() == Some(false)) {
                if start.elapsed() > patience {
                    return Ok(());
                }
                thread::sleep(POLL);
            }
            self.finish_oldest(weighting)?;
        }
        Ok(())
    }

    /// Sends what is left, and waits for all results. Returns them by position. Gradients that this rank does not have
    /// count as zero.
    pub fn finish(&mut self) -> Result<Vec<Option<Tensor>>, Error> {
        let none = (0..self.results.len()).map(|_| None).collect();
        if self.channel.is_alone() {
            return Ok(replace(&mut self.results, none));
        }
        let weighting = self.weighting.ok_or_else(|| Error::broken("exchanging gradients", "there are no weights"))?;
        self.read(weighting);
        while let Some(number) = self.schedule.next() {
            // The memory of a bucket is reused once its results were taken.
            if self.reducing.len() >= WINDOW {
                self.finish_oldest(weighting)?;
            }
            self.send(number, weighting)?;
        }
        while !self.reducing.is_empty() {
            self.finish_oldest(weighting)?;
        }
        while let Some((number, parts)) = self.replicating.pop_front() {
            let parts = self.unconfirmed.follow(parts)?;
            self.keep(number, parts, weighting);
        }
        self.unconfirmed.confirm()?;
        Ok(replace(&mut self.results, none))
    }

    /// Exchanges further gradients with the same weights, and returns their means as [`finish`](Self::finish) does.
    pub fn exchange_late(
        &mut self,
        buckets: BucketTable,
        late: Vec<(usize, Tensor)>,
    ) -> Result<Vec<Option<Tensor>>, Error> {
        self.gradients.iter_mut().for_each(|gradient| *gradient = Gradient::Missing);
        self.schedule = Schedule::new(&buckets, self.gradients.len());
        self.buckets = buckets;
        // They were checked before the ranks agreed on the step.
        self.finite = None;
        late.into_iter().for_each(|(position, gradient)| self.arrive(position, gradient));
        self.finish()
    }

    /// The element type in which a gradient is reduced. It is the same for all gradients of a bucket.
    fn carrier(&self, position: usize, weighting: Weighting) -> DType {
        if self.channel.compressor.is_some() {
            DType::F32
        } else {
            weighting.carrier(self.model.parameters[position].dtype)
        }
    }

    /// Begins to read the gradients that have arrived, unless their lane takes them from their device.
    fn read(&mut self, weighting: Weighting) {
        for position in take(&mut self.waiting) {
            let carrier = self.carrier(position, weighting);
            if let Gradient::Arrived(mut tensor) = replace(&mut self.gradients[position], Gradient::Missing) {
                let tensors = &*self.model.tensors;
                if carrier != self.model.parameters[position].dtype {
                    tensor = tensors.cast(position, tensor, carrier);
                }
                self.gradients[position] = Gradient::Input(input(tensors, self.channel.first(), tensor));
            }
        }
    }

    fn place(&self, number: usize, width: usize) -> Placement<'_> {
        self.model.layout.place(self.buckets[number].positions.iter().map(|&position| (position, width)), 1)
    }

    /// Starts the reduction of the next bucket.
    fn send(&mut self, number: usize, weighting: Weighting) -> Result<(), Error> {
        let (buckets, model) = (self.buckets.clone(), self.model.clone());
        let bucket = &buckets[number];
        let carrier = self.carrier(bucket.positions[0], weighting);
        let is_cut = model.layout.ranks > 1;
        let mut call = Call {
            request: bucket
                .request(if is_cut { Operation::ReduceScatter } else { Operation::AllReduce }, carrier)
                .reduction(weighting.reduction()),
            bytes: 0,
            factor: weighting.factor(),
            sources: Vec::new(),
            targets: Vec::new(),
        };
        let inputs =
            bucket.positions.iter().map(|position| match replace(&mut self.gradients[*position], Gradient::Sent) {
                Gradient::Input(input) => input,
                _ => Input::Zeros,
            });
        let inputs: Vec<_> = inputs.collect();
        let place = self.place(number, carrier.size());
        call.bytes = place.bytes();
        for ((index, &position), input) in bucket.positions.iter().enumerate().zip(inputs) {
            let (values, padding) = place.whole(index);
            call.sources.push(Source { position, input, ranges: values });
            if padding.bytes() > 0 {
                call.sources.push(Source { position, input: Input::Zeros, ranges: padding });
            }
            let own = place.own(index);
            if !own.is_empty() {
                let shape = model.layout.shape(position).to_vec();
                call.targets.push(Target { position, shape, dtype: carrier, ranges: own.into() });
            }
        }
        let lane = if is_cut { &mut self.channel.shards } else { &mut self.channel.replicas };
        self.reducing.push_back((number, lane.start(call)?));
        self.schedule.sent();
        Ok(())
    }

    /// Waits for the oldest reduction. Parts of it are then reduced over the ranks that keep the same ones.
    fn finish_oldest(&mut self, weighting: Weighting) -> Result<(), Error> {
        let Some((number, oldest)) = self.reducing.pop_front() else { return Ok(()) };
        let parts = self.unconfirmed.follow(oldest)?;
        if self.model.layout.ranks == 1 || self.channel.replicas.group().world_size() == 1 {
            self.keep(number, parts, weighting);
            return Ok(());
        }
        let mut parts = parts.into_iter();
        let carrier = self.carrier(self.buckets[number].positions[0], weighting);
        let request = Request::new(Operation::AllReduce, carrier).reduction(weighting.reduction());
        let mut call = Call { request, bytes: 0, factor: 1.0, sources: Vec::new(), targets: Vec::new() };
        for position in self.own_positions(number) {
            let Some(part) = parts.next() else { break };
            let shape = self.model.layout.shape(position).to_vec();
            let end = call.bytes + shape.iter().product::<usize>() * carrier.size();
            let ranges = || (call.bytes..end).into();
            let input = input(&*self.model.tensors, &*self.channel.replicas, part);
            call.sources.push(Source { position, input, ranges: ranges() });
            call.targets.push(Target { position, shape, dtype: carrier, ranges: ranges() });
            call.bytes = end;
        }
        if call.bytes > 0 {
            let pending = self.channel.replicas.start(call)?;
            self.replicating.push_back((number, pending));
        }
        Ok(())
    }

    /// Returns the parameters of a bucket of which this rank has a part.
    fn own_positions(&self, number: usize) -> Vec<usize> {
        let positions = self.buckets[number].positions.iter().copied();
        positions.filter(|position| !self.model.layout.shape(*position).contains(&0)).collect()
    }

    /// Keeps the results of a bucket.
    fn keep(&mut self, number: usize, results: Vec<Tensor>, weighting: Weighting) {
        for (position, mut tensor) in self.own_positions(number).into_iter().zip(results) {
            let (carrier, dtype) = (self.carrier(position, weighting), self.model.parameters[position].dtype);
            if carrier != dtype {
                tensor = self.model.tensors.cast(position, tensor, dtype);
            }
            self.results[position] = Some(tensor);
        }
    }
}
