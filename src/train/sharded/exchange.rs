//! Communication of a sharded step: reduces gradients to the ranks that keep their state, and gathers parameters.

use std::collections::VecDeque;

use burn::optim::GradientsParams;
use burn::tensor::TensorData;
use burn::tensor::backend::AutodiffBackend;
use bytemuck::{Pod, cast_slice};
use half::{bf16, f16};

use super::layout::{BucketLayout, bytes};
use crate::train::agree::{Parameter, all_gather_values};
use crate::train::bucket::{Bucket, BucketOp, pop_if_full, scale};
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
    /// Takes the mean over the ranks of a block first, then over the blocks, and so rounds twice if the mean is not
    /// exact. A sum with one division at the end could overflow f16.
    #[track_caller]
    pub fn reduce(
        &mut self,
        exists: &[bool],
        mut grads: GradientsParams,
        factor: f64,
    ) -> Result<Vec<NumberedBucket>, Error> {
        let (mut reducing, mut replicating) = (VecDeque::new(), Vec::new());
        for number in 0..self.layout.len() {
            if !self.layout[number].spans.iter().any(|span| exists[span.position]) {
                continue;
            }
            if let Some((number, oldest)) = pop_if_full(&mut reducing) {
                replicating.push((number, self.replicate(number, oldest)?));
            }
            let (mut bucket, dtype) = (self.pack(number, &mut grads)?, self.layout[number].dtype);
            if factor != 1.0 {
                scale(bucket.bytes(), dtype, factor);
            }
            reducing.push_back((number, bucket.start(&self.shard_group, dtype, BucketOp::ReduceScatter)?));
        }
        for (number, oldest) in reducing {
            replicating.push((number, self.replicate(number, oldest)?));
        }
        replicating.into_iter().map(|(number, work)| Ok((number, wait(work)?))).collect()
    }

    /// Waits for this rank's part of the block's mean, and starts the mean over the blocks.
    #[track_caller]
    fn replicate(&mut self, number: usize, work: Work<Bucket>) -> Result<Work<Bucket>, Error> {
        let BucketLayout { dtype, own, .. } = &self.layout[number];
        let mut whole = wait(work)?;
        let own = &whole.bytes()[bytes(own.clone(), *dtype)];
        let mut part = Bucket::packed(&self.replica_group, self.part_memory.pop(), own.len())?;
        part.bytes().copy_from_slice(own);
        self.bucket_memory.extend(whole.into_memory());
        part.start(&self.replica_group, *dtype, BucketOp::AllReduce)
    }

    /// Packs a bucket's gradients. A gradient that this rank does not have counts as zero.
    fn pack(&mut self, number: usize, grads: &mut GradientsParams) -> Result<Bucket, Error> {
        let layout = &self.layout[number];
        let mut read = Vec::with_capacity(layout.spans.len());
        for span in &layout.spans {
            let grad = grads.remove::<B::InnerBackend, 1>(self.parameters[span.position].id);
            let data = grad.map(|grad| grad.try_into_data().map_err(|e| Error::io("reading a gradient", e)));
            read.push(data.transpose()?.map(|data| data.bytes));
        }
        if let [Some(data)] = &mut read[..]
            && let Some(bucket) = Bucket::single(data, layout.dtype)
        {
            return Ok(bucket);
        }
        let bucket = self.whole(number)?;
        let layout = &self.layout[number];
        let lens = layout.spans.iter().map(|span| bytes(span.range.clone(), layout.dtype).len());
        Ok(bucket.fill(read.iter().map(Option::as_deref).zip(lens)))
    }

    /// Returns a bucket of unspecified contents.
    pub fn whole(&mut self, number: usize) -> Result<Bucket, Error> {
        let BucketLayout { len, dtype, .. } = &self.layout[number];
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

/// Returns the sum of the elements' squares, in f64.
fn sum_of_squares(bytes: &[u8], dtype: DType) -> f64 {
    fn sum<T: Pod>(bytes: &[u8], f64: impl Fn(T) -> f64) -> f64 {
        cast_slice::<u8, T>(bytes).iter().map(|x| f64(*x)).map(|x| x * x).sum()
    }
    match dtype {
        DType::F64 => sum(bytes, |x: f64| x),
        DType::F16 => sum(bytes, f16::to_f64),
        DType::BF16 => sum(bytes, bf16::to_f64),
        _ => sum(bytes, f64::from as fn(f32) -> f64),
    }
}
