//! Communication of a sharded step: reduces gradients to the ranks that keep their state, and gathers parameters.

use std::collections::VecDeque;

use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{FloatDType, Tensor, TensorData};
use bytemuck::{cast_slice, cast_slice_mut};
use half::f16;

use super::layout::{BucketLayout, bytes};
use super::on_device::{self, OfBucket, flat};
use crate::tensor::device::{start_all_reduce, uses_collective_devices};
use crate::train::agree::{Parameter, all_gather_values};
use crate::train::bucket::{Bucket, BucketOp, Weighting, pop_if_full};
use crate::train::bucket::{scale, scale_tensor, sum_of_squares, sum_of_squares_on_device};
use crate::train::in_flight::{Elements, InFlight, Unconfirmed};
use crate::train::values::{Flat, Values};
use bonfire_core::{Buffer, DType, Error, Group};

/// The groups and the bucket layouts of a sharded optimizer, and memory for the buckets.
pub(super) struct Shards<B: AutodiffBackend> {
    /// The ranks of this rank's block, over which the state is partitioned.
    pub shard_group: Group,
    /// The ranks that keep the same part of the state, one in each block.
    pub replica_group: Group,
    /// The parameters that need gradients, in the same order on all ranks.
    pub parameters: Vec<Parameter<B>>,
    pub layout: Vec<BucketLayout>,
    /// Unused memory for whole buckets.
    pub bucket_memory: Vec<Buffer<u64>>,
    /// Unused memory for this rank's parts of buckets.
    pub part_memory: Vec<Buffer<u64>>,
    /// The operation of this step whose tensors are in use already.
    pub unconfirmed: Unconfirmed,
}

/// The index of a bucket in the layout, and this rank's part of it: on a collective device, a tensor for each span with
/// a gradient that has elements in it, in their order.
pub(super) type NumberedPart<B> = (usize, Elements<<B as AutodiffBackend>::InnerBackend>);

impl<B: AutodiffBackend> Shards<B> {
    /// Reduces the gradients and returns this rank's part of the mean, for each bucket in which a gradient exists.
    /// Reduces over the ranks of a block first, then over the blocks, and so rounds twice if the mean is not exact. A
    /// sum with one division at the end could overflow.
    #[track_caller]
    pub fn reduce(
        &mut self,
        exists: &[bool],
        mut grads: GradientsParams,
        weighting: Weighting,
    ) -> Result<Vec<NumberedPart<B>>, Error> {
        let (mut reducing, mut replicating) = (VecDeque::new(), Vec::new());
        for number in 0..self.layout.len() {
            if !self.layout[number].spans.iter().any(|span| exists[span.position]) {
                continue;
            }
            if let Some((number, oldest)) = pop_if_full(&mut reducing) {
                replicating.push((number, self.replicate(number, oldest, weighting)?));
            }
            let started = if uses_collective_devices::<B::InnerBackend>() {
                InFlight::Device(on_device::reduce(self.of(number), exists, &mut grads, weighting)?)
            } else {
                let carrier = weighting.carrier(self.layout[number].dtype);
                let mut bucket = self.pack(number, &mut grads, carrier)?;
                if weighting.factor() != 1.0 {
                    scale(bucket.bytes(), carrier, weighting.factor());
                }
                let op = BucketOp::ReduceScatter(weighting.reduction());
                InFlight::Host(bucket.start(&self.shard_group, carrier, op)?)
            };
            reducing.push_back((number, started));
        }
        for (number, oldest) in reducing {
            replicating.push((number, self.replicate(number, oldest, weighting)?));
        }
        let mut parts = Vec::with_capacity(replicating.len());
        for (number, in_flight) in replicating {
            let (part, dtype) = (in_flight.follow(&mut self.unconfirmed)?, self.layout[number].dtype);
            let part = if weighting.carrier(dtype) == dtype { part } else { self.narrow(part)? };
            parts.push((number, part));
        }
        Ok(parts)
    }

    /// Waits for this rank's part of the block's reduction, and starts the reduction over the blocks.
    #[track_caller]
    fn replicate(
        &mut self,
        number: usize,
        in_flight: InFlight<B::InnerBackend>,
        weighting: Weighting,
    ) -> Result<InFlight<B::InnerBackend>, Error> {
        let reduced = in_flight.follow(&mut self.unconfirmed)?;
        let BucketLayout { dtype, own, .. } = &self.layout[number];
        let carrier = weighting.carrier(*dtype);
        let op = BucketOp::AllReduce(weighting.reduction());
        match reduced {
            Elements::Host(mut whole) => {
                let own = &whole.bytes()[bytes(own.clone(), carrier)];
                let mut part = Bucket::packed(&self.replica_group, self.part_memory.pop(), own.len())?;
                part.bytes().copy_from_slice(own);
                self.bucket_memory.extend(whole.into_memory());
                part.start(&self.replica_group, carrier, op).map(InFlight::Host)
            }
            Elements::Device(part) => {
                start_all_reduce::<B::InnerBackend>(&self.replica_group, part, op.request(carrier))
                    .map(InFlight::Device)
            }
        }
    }

    /// Rounds the elements of a part, which are f32, to f16.
    fn narrow(&mut self, wide: Elements<B::InnerBackend>) -> Result<Elements<B::InnerBackend>, Error> {
        let mut wide = match wide {
            Elements::Host(wide) => wide,
            Elements::Device(wide) => {
                let narrow = |tensor| B::InnerBackend::float_cast(tensor, FloatDType::F16);
                return Ok(Elements::Device(wide.into_iter().map(narrow).collect()));
            }
        };
        let elements = cast_slice::<u8, f32>(wide.bytes());
        let mut part = Bucket::packed(&self.replica_group, self.part_memory.pop(), size_of_val(elements) / 2)?;
        let rounded = cast_slice_mut::<u8, f16>(part.bytes()).iter_mut();
        rounded.zip(elements).for_each(|(to, from)| *to = f16::from_f32(*from));
        self.part_memory.extend(wide.into_memory());
        Ok(Elements::Host(part))
    }

    /// Packs a bucket's gradients as elements of type `carrier`: f32 or their own type. A gradient that this rank does
    /// not have counts as zero.
    fn pack(&mut self, number: usize, grads: &mut GradientsParams, carrier: DType) -> Result<Bucket, Error> {
        let layout = &self.layout[number];
        let mut read = Vec::with_capacity(layout.spans.len());
        for span in &layout.spans {
            let parameter = &self.parameters[span.position];
            let grad = grads.remove::<B::InnerBackend, 1>(parameter.id);
            let widened = grad.map(|grad| flat::<B>(parameter.widen(grad.into_primitive().tensor(), carrier)));
            let data = widened.map(|grad| grad.try_into_data().map_err(|e| Error::io("reading a gradient", e)));
            read.push(data.transpose()?.map(|data| data.bytes));
        }
        if let [Some(data)] = &mut read[..]
            && let Some(bucket) = Bucket::single(data, carrier)
        {
            return Ok(bucket);
        }
        let bucket = self.whole(number, carrier)?;
        let spans = self.layout[number].spans.iter();
        let lens = spans.map(|span| bytes(span.range.clone(), carrier).len());
        Ok(bucket.fill(read.iter().map(Option::as_deref).zip(lens)))
    }

    /// Returns what an operation on a bucket's tensors needs.
    fn of(&self, number: usize) -> OfBucket<'_, B> {
        OfBucket { group: &self.shard_group, layout: &self.layout[number], parameters: &self.parameters }
    }

    /// Returns a bucket of unspecified contents, for elements of type `dtype`.
    fn whole(&mut self, number: usize, dtype: DType) -> Result<Bucket, Error> {
        let len = self.layout[number].len;
        Bucket::packed(&self.shard_group, self.bucket_memory.pop(), len * dtype.size())
    }

    /// Returns, for each parameter with a gradient that has elements in this rank's part of a bucket, its position and
    /// these elements of the parameter and of the gradient. `values` are the values of all parameters. None is missing:
    /// the exchange of the header refuses such a step.
    pub fn slices(
        &mut self,
        number: usize,
        part: Elements<B::InnerBackend>,
        exists: &[bool],
        values: &Values<B>,
    ) -> Vec<(usize, Flat<B>, Flat<B>)> {
        let layout = &self.layout[number];
        let slices = layout.own_spans(exists).filter_map(|span| {
            let value = Flat::<B>::clone(values[span.position].as_ref()?);
            Some((span, value.slice(span.slice())))
        });
        let mut part = match part {
            Elements::Host(part) => part,
            Elements::Device(part) => {
                return slices.zip(part).map(|((span, value), grad)| (span.position, value, flat::<B>(grad))).collect();
            }
        };
        let begin = bytes(layout.own.clone(), layout.dtype).start;
        let slices = slices.map(|(span, value)| {
            let own = bytes(span.own(), layout.dtype);
            let data = part.bytes()[own.start - begin..own.end - begin].to_vec();
            let data = TensorData::from_bytes_vec(data, [span.own().len()], value.dtype());
            let grad = Tensor::from_data(data, (&value.device(), value.dtype()));
            (span.position, value, grad)
        });
        let slices = slices.collect();
        self.part_memory.extend(part.into_memory());
        slices
    }

    /// Starts the all-gather of a bucket's parameters in the block. `updated` are the new values of this rank's part,
    /// one for each span with a gradient that has elements in it, in their order.
    #[track_caller]
    pub fn gather(
        &mut self,
        number: usize,
        exists: &[bool],
        updated: Vec<Flat<B>>,
    ) -> Result<InFlight<B::InnerBackend>, Error> {
        if uses_collective_devices::<B::InnerBackend>() {
            return on_device::gather(self.of(number), exists, updated).map(InFlight::Device);
        }
        let dtype = self.layout[number].dtype;
        let mut whole = self.whole(number, dtype)?;
        for (span, value) in self.layout[number].own_spans(exists).zip(updated) {
            let data = value.try_into_data().map_err(|e| Error::io("reading a parameter", e))?;
            whole.bytes()[bytes(span.own(), dtype)].copy_from_slice(&data.bytes);
        }
        whole.start(&self.shard_group, dtype, BucketOp::AllGather).map(InFlight::Host)
    }

    /// Waits for the all-gather of a bucket's parameters, and stores those for which a gradient exists in `gathered`,
    /// by position.
    pub fn finish_gather(
        &mut self,
        number: usize,
        in_flight: InFlight<B::InnerBackend>,
        exists: &[bool],
        gathered: &mut Values<B>,
    ) -> Result<(), Error> {
        let gathering = in_flight.follow(&mut self.unconfirmed)?;
        let layout = &self.layout[number];
        let spans = layout.spans.iter().filter(|span| exists[span.position]);
        let mut whole = match gathering {
            Elements::Host(whole) => whole,
            Elements::Device(values) => {
                spans.zip(values).for_each(|(span, value)| gathered[span.position] = Some(flat::<B>(value)));
                return Ok(());
            }
        };
        for span in spans {
            let parameter = &self.parameters[span.position];
            let data = whole.bytes()[bytes(span.range.clone(), layout.dtype)].to_vec();
            let data = TensorData::from_bytes_vec(data, [span.range.len()], parameter.dtype);
            gathered[span.position] = Some(Tensor::from_data(data, (&parameter.device, parameter.dtype)));
        }
        self.bucket_memory.extend(whole.into_memory());
        Ok(())
    }

    /// Scales the gradients down to norm `max` if their norm over all parameters exceeds it. Every element counts once,
    /// because the parts of a block do not overlap. All ranks get bit-identical norms: the sums of the first block are
    /// used, because devices may add the same elements in different orders, and they are added in rank order.
    #[track_caller]
    pub fn clip(&mut self, parts: &mut [NumberedPart<B>], max: f64) -> Result<(), Error> {
        self.unconfirmed.confirm()?;
        let (mut own, mut on_devices) = (0.0, Vec::new());
        for (number, part) in parts.iter_mut() {
            match part {
                Elements::Host(part) => own += sum_of_squares(part.bytes(), self.layout[*number].dtype),
                Elements::Device(part) => on_devices.extend(part.iter().cloned()),
            }
        }
        own += sum_of_squares_on_device::<B::InnerBackend>(on_devices)?;
        [own] = all_gather_values(&self.replica_group, [own])?[0];
        let norm = all_gather_values(&self.shard_group, [own])?.as_flattened().iter().sum::<f64>().sqrt();
        if norm > max {
            for (number, part) in parts {
                let dtype = self.layout[*number].dtype;
                match part {
                    Elements::Host(part) => scale(part.bytes(), dtype, max / norm),
                    Elements::Device(part) => {
                        let scale = |tensor: &mut _| {
                            *tensor = scale_tensor::<B::InnerBackend>(Clone::clone(tensor), dtype, max / norm)
                        };
                        part.iter_mut().for_each(scale);
                    }
                }
            }
        }
        Ok(())
    }
}
