//! Reduces the gradients of blocks to the ranks that keep their parts.

use std::collections::VecDeque;
use std::sync::Arc;

use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{Float, FloatDType, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive};

use super::gather::reuse;
use super::layout::{BucketLayout, Layout, Part, block_name, cut};
use crate::tensor::host::{Source, float};
use crate::train::agree::Parameter;
use crate::train::bucket::{Bucket, BucketOp, BucketTable, Weighting, scale};
use crate::train::schedule::Schedule;
use bonfire_core::{Buffer, DType, Error, Group, Work};

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

/// The gradients of one step.
pub(super) struct Scatter {
    weighting: Weighting,
    /// By bucket of the schedule, its number in the layout.
    numbers: Vec<usize>,
    schedule: Schedule,
    /// By number in the layout, the whole gradients of a bucket that is being filled.
    filling: Vec<Option<Bucket>>,
    /// By position, whether the bucket has the gradient.
    filled: Vec<bool>,
    /// The index of the next bucket in `numbers`.
    next: usize,
    reducing: VecDeque<(usize, Work<Bucket>)>,
    replicating: VecDeque<(usize, Work<Bucket>)>,
    pub results: GradientsParams,
}

impl Scatter {
    /// Begins a step in which the gradients of these blocks are sent, in this order.
    pub fn new(layout: &Layout, weighting: Weighting, blocks: &[usize]) -> Scatter {
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
    pub fn bound(&mut self, scatter: &mut Scatter) -> Result<(), Error> {
        let layout = self.layout.clone();
        let block = |(number, _): &(usize, Work<Bucket>)| layout.buckets[*number].block;
        while self.bounded && scatter.reducing.front().map(block) != scatter.reducing.back().map(block) {
            self.finish_oldest(scatter)?;
        }
        Ok(())
    }

    /// Takes the gradient of the parameter at `position`, or zeros, and sends the buckets that are complete. It waits
    /// for no other rank.
    pub fn add(
        &mut self,
        scatter: &mut Scatter,
        position: usize,
        gradient: Option<FloatTensor<B::InnerBackend>>,
    ) -> Result<(), Error> {
        if !scatter.schedule.complete(position) {
            return Err(Error::broken("reducing gradients", "a gradient is in no block of this step"));
        }
        self.fill(scatter, position, gradient)?;
        while scatter.reducing.front().is_some_and(|(_, work)| work.is_finished()) {
            self.finish_oldest(scatter)?;
        }
        while scatter.schedule.ready().is_some() {
            self.send(scatter)?;
        }
        Ok(())
    }

    /// Sends what is left, with zeros for missing gradients, and waits for all results.
    pub fn finish(&mut self, scatter: &mut Scatter) -> Result<(), Error> {
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
        while let Some((number, work)) = scatter.replicating.pop_front() {
            let mut part = wait(work)?;
            self.register(scatter, number, part.bytes());
        }
        Ok(())
    }

    /// Writes a gradient, or zeros, to its bucket: for each rank, its part.
    fn fill(
        &mut self,
        scatter: &mut Scatter,
        position: usize,
        gradient: Option<FloatTensor<B::InnerBackend>>,
    ) -> Result<(), Error> {
        let Part { bucket: number, start, ref shape, .. } = self.layout.parts[position];
        let BucketLayout { elements, .. } = &self.layout.buckets[number];
        let carrier = scatter.weighting.carrier(self.parameters[position].element);
        let bucket = match &mut scatter.filling[number] {
            Some(bucket) => bucket,
            none => {
                let bytes = elements * self.layout.ranks * carrier.size();
                none.insert(Bucket::packed(&self.lane, reuse(&mut self.memory, bytes), bytes)?)
            }
        };
        let source = gradient.map(|gradient| {
            let wide = carrier != self.parameters[position].element;
            let gradient = if wide { B::InnerBackend::float_cast(gradient, FloatDType::F32) } else { gradient };
            Source::read::<B::InnerBackend, Float>("reading a gradient", TensorPrimitive::Float(gradient))
        });
        let source = source.transpose()?.map(|(source, _)| source);
        let (start, len) = (start * carrier.size(), shape.num_elements() * carrier.size());
        for (rank, parts) in bucket.bytes().chunks_exact_mut((elements * carrier.size()).max(1)).enumerate() {
            cut(source.as_ref().map_or(&[], Source::bytes), rank, &mut parts[start..][..len]);
        }
        scatter.filled[position] = true;
        Ok(())
    }

    /// Starts the reduction of the next bucket, which is filled.
    fn send(&mut self, scatter: &mut Scatter) -> Result<(), Error> {
        let number = scatter.numbers[scatter.next];
        let Some(mut bucket) = scatter.filling[number].take() else {
            return Err(Error::broken("reducing gradients", "a bucket was not filled"));
        };
        let carrier = self.carrier(number, scatter.weighting);
        if scatter.weighting.factor() != 1.0 {
            scale(bucket.bytes(), carrier, scatter.weighting.factor());
        }
        let request = BucketOp::ReduceScatter(scatter.weighting.reduction()).request(carrier);
        let request = request.part_of(&block_name(self.layout.buckets[number].block));
        scatter.reducing.push_back((number, bucket.start_request(&self.lane, request)?));
        scatter.schedule.sent();
        scatter.next += 1;
        Ok(())
    }

    /// Waits for this rank's part of the oldest reduction. Starts the reduction over the replicas, if there are any.
    fn finish_oldest(&mut self, scatter: &mut Scatter) -> Result<(), Error> {
        let Some((number, work)) = scatter.reducing.pop_front() else { return Ok(()) };
        let mut whole = wait(work)?;
        let carrier = self.carrier(number, scatter.weighting);
        let bytes = self.layout.buckets[number].elements * carrier.size();
        let own = &whole.bytes()[self.layout.rank * bytes..][..bytes];
        if self.replicas.world_size() == 1 {
            self.register(scatter, number, own);
        } else {
            let mut part = Bucket::packed(&self.replicas, None, bytes)?;
            part.bytes().copy_from_slice(own);
            let op = BucketOp::AllReduce(scatter.weighting.reduction());
            scatter.replicating.push_back((number, part.start(&self.replicas, carrier, op)?));
        }
        if !self.bounded || self.memory.len() < KEPT {
            self.memory.extend(whole.into_memory());
        }
        Ok(())
    }

    /// Adds this rank's parts of a bucket's gradients to the results.
    fn register(&self, scatter: &mut Scatter, number: usize, mut parts: &[u8]) {
        let carrier = self.carrier(number, scatter.weighting);
        for &position in &self.layout.buckets[number].positions {
            let (parameter, shape) = (&self.parameters[position], &self.layout.parts[position].shape);
            let (part, rest) = parts.split_at(shape.num_elements() * carrier.size());
            parts = rest;
            let dtype = if carrier == parameter.element { parameter.dtype } else { burn::tensor::DType::F32 };
            let data = TensorData::from_bytes_vec(part.to_vec(), Shape::clone(shape), dtype);
            let mut tensor = B::InnerBackend::float_from_data(data, &parameter.device);
            if float(tensor.dtype()) != Some(parameter.element) {
                tensor = B::InnerBackend::float_cast(tensor, parameter.dtype.into());
            }
            let gradient = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(tensor));
            scatter.results.register(parameter.id, gradient);
        }
    }

    /// The element type in which a bucket is reduced.
    fn carrier(&self, number: usize, weighting: Weighting) -> DType {
        weighting.carrier(self.parameters[self.layout.buckets[number].positions[0]].element)
    }
}

fn wait(work: Work<Bucket>) -> Result<Bucket, Error> {
    work.wait().map_err(|(error, _)| error)
}
