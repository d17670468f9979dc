//! Gradients on their way to the ranks that keep the state for them, and parameters on their way back.

use std::collections::VecDeque;

use burn::optim::GradientsParams;
use burn::tensor::TensorData;
use burn::tensor::backend::AutodiffBackend;
use bytemuck::{Pod, cast_slice};
use half::{bf16, f16};

use super::layout::{Shared, bytes};
use crate::train::agree::{Parameter, tell_all};
use crate::train::bucket::{Bucket, Exchange, due, scale};
use bonfire_core::{Buffer, DType, Error, Group, Work};

/// Who shares what with whom, and the memory for it.
pub(super) struct Shards<B: AutodiffBackend> {
    /// The ranks among which the state is dealt out.
    pub inside: Group,
    /// The ranks that keep the same part of it, one in each block.
    pub across: Group,
    /// The parameters that need gradients, in the order that is the same on all ranks.
    pub parameters: Vec<Parameter<B>>,
    pub layout: Vec<Shared>,
    /// Memory of whole buckets, and of this rank's parts of them, that is not in use.
    pub wholes: Vec<Buffer<u64>>,
    pub parts: Vec<Buffer<u64>>,
}

/// A bucket, or this rank's part of it, by its number in the layout.
pub(super) type Numbered = (usize, Bucket);

impl<B: AutodiffBackend> Shards<B> {
    /// This rank's part of the mean gradients, for each bucket in which a gradient exists: the mean over the ranks of a
    /// block first, then over all blocks.
    #[track_caller]
    pub fn reduce(&mut self, exists: &[bool], mut grads: GradientsParams, factor: f64) -> Result<Vec<Numbered>, Error> {
        let (mut inside, mut across) = (VecDeque::new(), Vec::new());
        for number in 0..self.layout.len() {
            if !self.layout[number].places.iter().any(|place| exists[place.position]) {
                continue;
            }
            if let Some((number, oldest)) = due(&mut inside) {
                across.push((number, self.replicate(number, oldest)?));
            }
            let (mut bucket, dtype) = (self.pack(number, &mut grads)?, self.layout[number].dtype);
            if factor != 1.0 {
                scale(bucket.bytes(), dtype, factor);
            }
            inside.push_back((number, bucket.start(&self.inside, dtype, Exchange::ReduceScatter)?));
        }
        for (number, oldest) in inside {
            across.push((number, self.replicate(number, oldest)?));
        }
        across.into_iter().map(|(number, work)| Ok((number, wait(work)?))).collect()
    }

    /// Waits for this rank's part of a block's mean, and starts the mean over all blocks.
    #[track_caller]
    fn replicate(&mut self, number: usize, work: Work<Bucket>) -> Result<Work<Bucket>, Error> {
        let Shared { dtype, own, .. } = &self.layout[number];
        let mut whole = wait(work)?;
        let own = &whole.bytes()[bytes(own.clone(), *dtype)];
        let mut part = Bucket::packed(&self.across, self.parts.pop(), own.len())?;
        part.bytes().copy_from_slice(own);
        self.wholes.extend(whole.into_memory());
        part.start(&self.across, *dtype, Exchange::AllReduce)
    }

    /// Takes a bucket's gradients. One that this rank does not have counts as zero.
    fn pack(&mut self, number: usize, grads: &mut GradientsParams) -> Result<Bucket, Error> {
        let shared = &self.layout[number];
        let mut read = Vec::with_capacity(shared.places.len());
        for place in &shared.places {
            let grad = grads.remove::<B::InnerBackend, 1>(self.parameters[place.position].id);
            let data = grad.map(|grad| grad.try_into_data().map_err(|e| Error::io("reading a gradient", e)));
            read.push(data.transpose()?.map(|data| data.bytes));
        }
        if let [Some(data)] = &mut read[..]
            && let Some(bucket) = Bucket::own(data, shared.dtype)
        {
            return Ok(bucket);
        }
        let bucket = self.whole(number)?;
        let shared = &self.layout[number];
        let lens = shared.places.iter().map(|place| bytes(place.range.clone(), shared.dtype).len());
        Ok(bucket.fill(read.iter().map(Option::as_deref).zip(lens)))
    }

    /// A bucket with anything in it.
    pub fn whole(&mut self, number: usize) -> Result<Bucket, Error> {
        let Shared { len, dtype, .. } = &self.layout[number];
        Bucket::packed(&self.inside, self.wholes.pop(), len * dtype.size())
    }

    /// Collects what all ranks of the block have of a bucket's parameters, and gives those for which a gradient exists,
    /// by position.
    pub fn finish_gather(
        &mut self,
        number: usize,
        work: Work<Bucket>,
        exists: &[bool],
        gathered: &mut [Option<TensorData>],
    ) -> Result<(), Error> {
        let mut whole = wait(work)?;
        let shared = &self.layout[number];
        for place in shared.places.iter().filter(|place| exists[place.position]) {
            let parameter = &self.parameters[place.position];
            let data = whole.bytes()[bytes(place.range.clone(), shared.dtype)].to_vec();
            gathered[place.position] = Some(TensorData::from_bytes_vec(data, parameter.shape.clone(), parameter.dtype));
        }
        self.wholes.extend(whole.into_memory());
        Ok(())
    }

    /// Scales the gradients down where their norm over all parameters is above `max`. Every element counts once,
    /// because the parts of a block do not overlap. The ranks' sums are added up in the order of ranks, whatever the
    /// algorithm of the exchange, so that all blocks come to the same bits.
    #[track_caller]
    pub fn clip(&self, parts: &mut [Numbered], max: f64) -> Result<(), Error> {
        let own: f64 = parts.iter_mut().map(|(number, part)| squares(part.bytes(), self.layout[*number].dtype)).sum();
        let norm = tell_all(&self.inside, [own])?.as_flattened().iter().sum::<f64>().sqrt();
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

/// The sum of the elements' squares, in f64.
fn squares(bytes: &[u8], dtype: DType) -> f64 {
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
