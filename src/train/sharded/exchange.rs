//! Communication of a sharded step: reduces gradients to the ranks that keep their state, and gathers parameters.

use std::collections::VecDeque;

use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{FloatDType, TensorData};
use bytemuck::{cast_slice, cast_slice_mut};
use half::f16;

use super::layout::{BucketLayout, bytes};
use crate::train::agree::{Parameter, all_gather_values};
use crate::train::bucket::{Bucket, BucketOp, Weighting, pop_if_full, scale, sum_of_squares};
use bonfire_core::{Buffer, DType, Error, Group, Work};

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
}

/// A bucket, or this rank's part of it, with its index in the layout.
pub(super) type NumberedBucket = (usize, Bucket);

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
    ) -> Result<Vec<NumberedBucket>, Error> {
        let (mut reducing, mut replicating) = (VecDeque::new(), Vec::new());
        for number in 0..self.layout.len() {
            if !self.layout[number].spans.iter().any(|span| exists[span.position]) {
                continue;
            }
            if let Some((number, oldest)) = pop_if_full(&mut reducing) {
                replicating.push((number, self.replicate(number, oldest, weighting)?));
            }
            let carrier = weighting.carrier(self.layout[number].dtype);
            let mut bucket = self.pack(number, &mut grads, carrier)?;
            if weighting.factor() != 1.0 {
                scale(bucket.bytes(), carrier, weighting.factor());
            }
            let op = BucketOp::ReduceScatter(weighting.reduction());
            reducing.push_back((number, bucket.start(&self.shard_group, carrier, op)?));
        }
        for (number, oldest) in reducing {
            replicating.push((number, self.replicate(number, oldest, weighting)?));
        }
        let mut parts = Vec::with_capacity(replicating.len());
        for (number, work) in replicating {
            let (part, dtype) = (wait(work)?, self.layout[number].dtype);
            let part = if weighting.carrier(dtype) == dtype { part } else { self.narrow(part)? };
            parts.push((number, part));
        }
        Ok(parts)
    }

    /// Waits for this rank's part of the block's reduction, and starts the reduction over the blocks.
    #[track_caller]
    fn replicate(&mut self, number: usize, work: Work<Bucket>, weighting: Weighting) -> Result<Work<Bucket>, Error> {
        let BucketLayout { dtype, own, .. } = &self.layout[number];
        let carrier = weighting.carrier(*dtype);
        let mut whole = wait(work)?;
        let own = &whole.bytes()[bytes(own.clone(), carrier)];
        let mut part = Bucket::packed(&self.replica_group, self.part_memory.pop(), own.len())?;
        part.bytes().copy_from_slice(own);
        self.bucket_memory.extend(whole.into_memory());
        part.start(&self.replica_group, carrier, BucketOp::AllReduce(weighting.reduction()))
    }

    /// Rounds the elements of a part, which are f32, to f16.
    fn narrow(&mut self, mut wide: Bucket) -> Result<Bucket, Error> {
        let elements = cast_slice::<u8, f32>(wide.bytes());
        let mut part = Bucket::packed(&self.replica_group, self.part_memory.pop(), size_of_val(elements) / 2)?;
        let rounded = cast_slice_mut::<u8, f16>(part.bytes()).iter_mut();
        rounded.zip(elements).for_each(|(to, from)| *to = f16::from_f32(*from));
        self.part_memory.extend(wide.into_memory());
        Ok(part)
    }

    /// Packs a bucket's gradients as elements of type `carrier`: f32 or their own type. A gradient that this rank does
    /// not have counts as zero.
    fn pack(&mut self, number: usize, grads: &mut GradientsParams, carrier: DType) -> Result<Bucket, Error> {
        let layout = &self.layout[number];
        let mut read = Vec::with_capacity(layout.spans.len());
        for span in &layout.spans {
            let grad = grads.remove::<B::InnerBackend, 1>(self.parameters[span.position].id);
            let widened = grad.map(|grad| if carrier == layout.dtype { grad } else { grad.cast(FloatDType::F32) });
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

    /// Returns a bucket of unspecified contents, for elements of type `dtype`.
    pub fn whole(&mut self, number: usize, dtype: DType) -> Result<Bucket, Error> {
        let len = self.layout[number].len;
        Bucket::packed(&self.shard_group, self.bucket_memory.pop(), len * dtype.size())
    }

    /// Waits for the all-gather of a bucket's parameters in the block, and stores those for which a gradient exists in
    /// `gathered`, by position.
    pub fn finish_gather(
        &mut self,
        number: usize,
        work: Work<Bucket>,
        exists: &[bool],
        gathered: &mut [Option<TensorData>],
    ) -> Result<(), Error> {
        let mut whole = wait(work)?;
        let layout = &self.layout[number];
        for span in layout.spans.iter().filter(|span| exists[span.position]) {
            let parameter = &self.parameters[span.position];
            let data = whole.bytes()[bytes(span.range.clone(), layout.dtype)].to_vec();
            gathered[span.position] = Some(TensorData::from_bytes_vec(data, parameter.shape.clone(), parameter.dtype));
        }
        self.bucket_memory.extend(whole.into_memory());
        Ok(())
    }

    /// Scales the gradients down to norm `max` if their norm over all parameters exceeds it. Every element counts once,
    /// because the parts of a block do not overlap. The ranks' sums are added in rank order, independently of the
    /// algorithm of the all-gather, so all blocks get bit-identical norms.
    #[track_caller]
    pub fn clip(&self, parts: &mut [NumberedBucket], max: f64) -> Result<(), Error> {
        let own: f64 =
            parts.iter_mut().map(|(number, part)| sum_of_squares(part.bytes(), self.layout[*number].dtype)).sum();
        let norm = all_gather_values(&self.shard_group, [own])?.as_flattened().iter().sum::<f64>().sqrt();
        if norm > max {
            for (number, part) in parts {
                scale(part.bytes(), self.layout[*number].dtype, max / norm);
            }
        }
        Ok(())
    }
}

fn wait(work: Work<Bucket>) -> Result<Bucket, Error> {
    work.wait().map_err(|(error, _)| error)
}
