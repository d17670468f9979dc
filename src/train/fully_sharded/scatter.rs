//! Reduces the gradients of blocks to the ranks that keep their parts.

use std::collections::VecDeque;
use std::sync::Arc;

use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{Float, Shape, TensorData, TensorPrimitive};

use super::gather::reuse;
use super::layout::{Layout, block_name};
use super::on_device::{self, Lane, Weighted};
use crate::tensor::device::{start_all_reduce, uses_collective_devices};
use crate::tensor::host::Source;
use crate::train::agree::Parameter;
use crate::train::bucket::{Bucket, BucketOp, BucketTable, Weighting, scale};
use crate::train::in_flight::{Elements, InFlight};
use crate::train::schedule::Schedule;
use bonfire_core::internal::Ranges;
use bonfire_core::{Buffer, DType, Error, Group};

/// How many buffers for whole gradients are kept, where they are bounded: one is reduced while another is filled. At
/// the end of a pass, where no block is gathered again, a third may be in flight.
const KEPT: usize = 2;

/// Reduces gradients over the ranks that keep their parts, and then each part over its replicas.
pub(super) struct Scatterer<B: AutodiffBackend> {
    pub lane: Group,
    pub replicas: Group,
    pub layout: Arc<Layout>,
    /// By position.
    pub parameters: Arc<[Parameter<B>]>,
    /// Whether [`bound`](Self::bound) waits.
    bounded: bool,
    /// Unused memory for whole gradients.
    memory: Vec<Buffer<u64>>,
}

/// The whole gradients of a bucket that is being filled.
enum Filling<B: AutodiffBackend> {
    Host(Bucket),
    /// Tensors, and the bytes of the bucket that they are.
    Device(Vec<(FloatTensor<B::InnerBackend>, Ranges)>),
}

/// The gradients of one step.
pub(super) struct Scatter<B: AutodiffBackend> {
    weighting: Weighting,
    /// By bucket of the schedule, its number in the layout.
    numbers: Vec<usize>,
    schedule: Schedule,
    /// By number in the layout.
    filling: Vec<Option<Filling<B>>>,
    /// By position, whether the bucket has the gradient.
    filled: Vec<bool>,
    /// The index of the next bucket in `numbers`.
    next: usize,
    /// Reductions over the ranks that keep the parts, by bucket. On devices they make this rank's part of each
    /// gradient.
    reducing: VecDeque<(usize, InFlight<B::InnerBackend>)>,
    /// Reductions of these parts over the replicas.
    replicating: VecDeque<(usize, InFlight<B::InnerBackend>)>,
    pub results: GradientsParams,
}

impl<B: AutodiffBackend> Scatter<B> {
    /// Begins a step in which the gradients of these blocks are sent, in this order.
    pub fn new(layout: &Layout, weighting: Weighting, blocks: &[usize]) -> Scatter<B> {
        let of_block = |block: &usize| {
            let block = *block;
            (0..layout.buckets.len()).filter(move |number| layout.buckets[*number].block == block)
        };
        let numbers: Vec<usize> = blocks.iter().flat_map(of_block).collect();
        let table: BucketTable = numbers.iter().map(|number| layout.buckets[*number].positions.clone()).collect();
        Scatter {
            weighting,
            schedule: Schedule::new(table, layout.parts.len()),
            numbers,
            filling: layout.buckets.iter().map(|_| None).collect(),
            filled: vec![false; layout.parts.len()],
            next: 0,
            reducing: VecDeque::new(),
            replicating: VecDeque::new(),
            results: GradientsParams::new(),
        }
    }
}

impl<B: AutodiffBackend> Scatterer<B> {
    /// `bounded` limits the memory of gradients in flight; it must not be set if ranks are threads of one process.
    pub fn new(
        [lane, replicas]: [Group; 2],
        layout: Arc<Layout>,
        parameters: Arc<[Parameter<B>]>,
        bounded: bool,
    ) -> Scatterer<B> {
        Scatterer { lane, replicas, layout, parameters, bounded, memory: Vec::new() }
    }

    /// Waits until the whole gradients of at most one block are in flight. The backward pass calls it before each
    /// block, or it would fill the memory where it is faster than the network.
    ///
    /// Ranks that are threads of one process do not wait: a rank may send gradients only after its backward pass, at
    /// whose end burn-autodiff waits for the backward passes of all other threads.
    pub fn bound(&mut self, scatter: &mut Scatter<B>) -> Result<(), Error> {
        let layout = self.layout.clone();
        let block = |(number, _): &(usize, InFlight<B::InnerBackend>)| layout.buckets[*number].block;
        while self.bounded && scatter.reducing.front().map(block) != scatter.reducing.back().map(block) {
            self.finish_oldest(scatter)?;
        }
        Ok(())
    }

    /// Takes the gradient of the parameter at `position`, or zeros, and sends the buckets that are complete. It waits
    /// for no other rank.
    pub fn add(
        &mut self,
        scatter: &mut Scatter<B>,
        position: usize,
        gradient: Option<FloatTensor<B::InnerBackend>>,
    ) -> Result<(), Error> {
        if !scatter.schedule.complete(position) {
            return Err(Error::broken("reducing gradients", "a gradient is in no block of this step"));
        }
        self.fill(scatter, position, gradient)?;
        while scatter.reducing.front().is_some_and(|(_, oldest)| oldest.is_finished()) {
            self.finish_oldest(scatter)?;
        }
        while scatter.schedule.ready().is_some() {
            self.send(scatter)?;
        }
        Ok(())
    }

    /// Sends what is left, with zeros for missing gradients, and waits for all results.
    pub fn finish(&mut self, scatter: &mut Scatter<B>) -> Result<(), Error> {
        while let Some(positions) = scatter.schedule.next().map(<[usize]>::to_vec) {
            for position in positions {
                if !scatter.filled[position] {
                    self.fill(scatter, position, None)?;
                }
            }
            self.send(scatter)?;
        }
        while !scatter.reducing.is_empty() {
            self.finish_oldest(scatter)?;
        }
        while let Some((number, reduction)) = scatter.replicating.pop_front() {
            match reduction.wait()? {
                Elements::Host(mut parts) => self.register(scatter, number, parts.bytes()),
                Elements::Device(parts) => self.register_tensors(scatter, number, parts),
            }
        }
        Ok(())
    }

    /// Writes a gradient, or zeros, to its bucket: for each rank, its part.
    fn fill(
        &mut self,
        scatter: &mut Scatter<B>,
        position: usize,
        gradient: Option<FloatTensor<B::InnerBackend>>,
    ) -> Result<(), Error> {
        let (number, parameter) = (self.layout.parts[position].bucket, &self.parameters[position]);
        let carrier = scatter.weighting.carrier(parameter.element);
        let gradient = gradient.map(|gradient| parameter.widen(gradient, carrier));
        let filling = match &mut scatter.filling[number] {
            Some(filling) => filling,
            none if uses_collective_devices::<B::InnerBackend>() => none.insert(Filling::Device(Vec::new())),
            none => {
                let bytes = self.layout.reduced_bytes(number, carrier.size());
                none.insert(Filling::Host(Bucket::packed(&self.lane, reuse(&mut self.memory, bytes), bytes)?))
            }
        };
        let bytes = parameter.shape.num_elements() * carrier.size();
        let (values, padding) = self.layout.reduced(position, bytes, carrier.size());
        match filling {
            Filling::Host(bucket) => {
                let source = gradient.map(|gradient| {
                    Source::read::<B::InnerBackend, Float>("reading a gradient", TensorPrimitive::Float(gradient))
                });
                let source = source.transpose()?.map(|(source, _)| source);
                for (at, range) in values.places() {
                    let to = &mut bucket.bytes()[range];
                    match &source {
                        Some(source) => to.copy_from_slice(&source.bytes()[at..][..to.len()]),
                        None => to.fill(0),
                    }
                }
                padding.places().for_each(|(_, range)| bucket.bytes()[range].fill(0));
            }
            Filling::Device(tensors) => {
                let weighted = Weighted { carrier, factor: scatter.weighting.factor() };
                on_device::fill(tensors, weighted, parameter, gradient, (values, padding));
            }
        }
        scatter.filled[position] = true;
        Ok(())
    }

    /// Starts the reduction of the next bucket, which is filled.
    fn send(&mut self, scatter: &mut Scatter<B>) -> Result<(), Error> {
        let number = scatter.numbers[scatter.next];
        let carrier = self.carrier(number, scatter.weighting);
        let request = BucketOp::ReduceScatter(scatter.weighting.reduction()).request(carrier);
        let request = request.part_of(&block_name(self.layout.buckets[number].block));
        let reduction = match scatter.filling[number].take() {
            Some(Filling::Host(mut bucket)) => {
                if scatter.weighting.factor() != 1.0 {
                    scale(bucket.bytes(), carrier, scatter.weighting.factor());
                }
                InFlight::Host(bucket.start_request(&self.lane, request)?)
            }
            Some(Filling::Device(tensors)) => {
                let lane = Lane { group: &self.lane, layout: &self.layout, parameters: &self.parameters };
                InFlight::Device(on_device::reduce(lane, number, carrier, request, tensors)?)
            }
            None => return Err(Error::broken("reducing gradients", "a bucket was not filled")),
        };
        scatter.reducing.push_back((number, reduction));
        scatter.schedule.sent();
        scatter.next += 1;
        Ok(())
    }

    /// Waits for this rank's part of the oldest reduction. Starts the reduction over the replicas, if there are any.
    fn finish_oldest(&mut self, scatter: &mut Scatter<B>) -> Result<(), Error> {
        let Some((number, oldest)) = scatter.reducing.pop_front() else { return Ok(()) };
        let carrier = self.carrier(number, scatter.weighting);
        let op = BucketOp::AllReduce(scatter.weighting.reduction());
        let mut whole = match oldest.wait()? {
            Elements::Host(whole) => whole,
            Elements::Device(parts) => {
                if self.replicas.world_size() == 1 {
                    self.register_tensors(scatter, number, parts);
                } else {
                    let pending = start_all_reduce::<B::InnerBackend>(&self.replicas, parts, op.request(carrier))?;
                    scatter.replicating.push_back((number, InFlight::Device(pending)));
                }
                return Ok(());
            }
        };
        let bytes = self.layout.buckets[number].elements * carrier.size();
        let own = &whole.bytes()[self.layout.rank * bytes..][..bytes];
        if self.replicas.world_size() == 1 {
            self.register(scatter, number, own);
        } else {
            let mut part = Bucket::packed(&self.replicas, None, bytes)?;
            part.bytes().copy_from_slice(own);
            let work = part.start(&self.replicas, carrier, op)?;
            scatter.replicating.push_back((number, InFlight::Host(work)));
        }
        if !self.bounded || self.memory.len() < KEPT {
            self.memory.extend(whole.into_memory());
        }
        Ok(())
    }

    /// Adds this rank's parts of a bucket's gradients to the results.
    fn register(&self, scatter: &mut Scatter<B>, number: usize, mut parts: &[u8]) {
        let carrier = self.carrier(number, scatter.weighting);
        let tensors = self.layout.buckets[number].positions.iter().map(|&position| {
            let (parameter, shape) = (&self.parameters[position], &self.layout.parts[position].shape);
            let (part, rest) = parts.split_at(shape.num_elements() * carrier.size());
            parts = rest;
            let data = TensorData::from_bytes_vec(part.to_vec(), Shape::clone(shape), parameter.dtype_of(carrier));
            B::InnerBackend::float_from_data(data, &parameter.device)
        });
        let tensors = tensors.collect();
        self.register_tensors(scatter, number, tensors);
    }

    /// The same of tensors.
    fn register_tensors(&self, scatter: &mut Scatter<B>, number: usize, parts: Vec<FloatTensor<B::InnerBackend>>) {
        for (&position, part) in self.layout.buckets[number].positions.iter().zip(parts) {
            self.parameters[position].register(part, &mut scatter.results);
        }
    }

    /// The element type in which a bucket is reduced.
    fn carrier(&self, number: usize, weighting: Weighting) -> DType {
        weighting.carrier(self.parameters[self.layout.buckets[number].positions[0]].element)
    }
}
