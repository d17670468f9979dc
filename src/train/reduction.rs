//! Reductions of gradients, bucket by bucket.

mod compressed;

use std::sync::Arc;

use burn::optim::GradientsParams;
use burn::tensor::TensorData;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};

pub(super) use self::compressed::Compressor;
use self::compressed::Exchange;
use super::agree::Parameter;
use super::bucket::{Bucket, BucketOp, Weighting, scale, scale_tensor};
use crate::tensor::device::{PendingTensors, start_all_reduce, uses_collective_devices};
use bonfire_core::internal::Request;
use bonfire_core::{Buffer, DType, Error, Group, Operation, Work};

/// Reduces buckets of gradients over a group.
pub(super) struct Reducer<B: AutodiffBackend> {
    pub group: Group,
    /// The parameters whose gradients are reduced. Positions of gradients are positions in this list.
    pub parameters: Arc<[Parameter<B>]>,
    /// Whether the gradients of all ranks are on collective devices. The ranks have agreed on it.
    pub on_devices: bool,
    /// If buckets travel compressed.
    pub compressor: Option<Compressor>,
    /// Unused memory for packed buckets, which suits the group.
    memory: Vec<Buffer<u64>>,
    /// Unused memory for compressed ones.
    exchanges: Vec<Exchange>,
}

/// A bucket whose reduction is in flight.
pub(super) enum Reduction<B: AutodiffBackend> {
    /// On the host: its gradients, by position, and the operation. A gradient that is a bucket of its own is empty
    /// meanwhile, because the operation holds its memory.
    Host { gradients: Vec<(usize, TensorData)>, work: Work<Bucket> },
    /// On the host, compressed.
    Compressed { compressor: Compressor, work: Work<Option<Exchange>> },
    /// On a collective device: the positions of its gradients, and the operation.
    Device { positions: Vec<usize>, pending: PendingTensors<FloatTensor<B::InnerBackend>> },
}

impl<B: AutodiffBackend> Reduction<B> {
    /// Whether [`Reducer::finish`] would return at once. It is not known of reductions on devices.
    pub fn is_finished(&self) -> bool {
        match self {
            Reduction::Host { work, .. } => work.is_finished(),
            Reduction::Compressed { work, .. } => work.is_finished(),
            Reduction::Device { .. } => false,
        }
    }
}

impl<B: AutodiffBackend> Reducer<B> {
    pub fn new(group: Group, parameters: Arc<[Parameter<B>]>, on_devices: bool) -> Reducer<B> {
        Reducer { group, parameters, on_devices, compressor: None, memory: Vec::new(), exchanges: Vec::new() }
    }

    /// A reducer of the same gradients over another group.
    pub fn over(&self, group: Group) -> Reducer<B> {
        Reducer { compressor: self.compressor.clone(), ..Reducer::new(group, self.parameters.clone(), self.on_devices) }
    }

    /// Whether the reduction takes gradients from their device. Otherwise it takes what was read from them.
    pub fn is_on_device(&self) -> bool {
        self.compressor.is_none() && uses_collective_devices::<B::InnerBackend>()
    }

    /// The element type in which a gradient is reduced. It is the same for all gradients of a bucket.
    fn carrier(&self, position: usize, weighting: Weighting) -> DType {
        match self.compressor {
            Some(_) => DType::F32,
            None => weighting.carrier(self.parameters[position].element),
        }
    }

    /// Returns a gradient in the element type in which it is reduced.
    pub fn widen(
        &self,
        position: usize,
        tensor: FloatTensor<B::InnerBackend>,
        weighting: Weighting,
    ) -> FloatTensor<B::InnerBackend> {
        self.parameters[position].widen(tensor, self.carrier(position, weighting))
    }

    /// Returns the gradient of a rank that has none, as it is reduced.
    pub fn zeros(&self, position: usize, weighting: Weighting) -> FloatTensor<B::InnerBackend> {
        let parameter = &self.parameters[position];
        let dtype = parameter.dtype_of(self.carrier(position, weighting));
        B::InnerBackend::float_zeros(parameter.shape.clone(), &parameter.device, dtype.into())
    }

    /// The same, as it is read.
    pub fn zeros_on_host(&self, position: usize, weighting: Weighting) -> TensorData {
        let parameter = &self.parameters[position];
        TensorData::full_dtype(parameter.shape.clone(), 0, parameter.dtype_of(self.carrier(position, weighting)))
    }

    /// Starts the reduction of a bucket whose gradients, which [`widen`](Self::widen) returned, are taken
    /// [from their device](Self::is_on_device).
    #[track_caller]
    pub fn start_on_device(
        &self,
        positions: Vec<usize>,
        mut tensors: Vec<FloatTensor<B::InnerBackend>>,
        weighting: Weighting,
    ) -> Result<Reduction<B>, Error> {
        let (dtype, factor) = (self.carrier(positions[0], weighting), weighting.factor());
        if factor != 1.0 {
            let scaled = tensors.into_iter().map(|tensor| scale_tensor::<B::InnerBackend>(tensor, dtype, factor));
            tensors = scaled.collect();
        }
        let request = Request::new(Operation::AllReduce, dtype).reduction(weighting.reduction());
        let pending = start_all_reduce::<B::InnerBackend>(&self.group, tensors, request)?;
        Ok(Reduction::Device { positions, pending })
    }

    /// Starts the reduction of a bucket of gradients that were read from [widened](Self::widen) tensors, by position.
    #[track_caller]
    pub fn start(
        &mut self,
        mut gradients: Vec<(usize, TensorData)>,
        weighting: Weighting,
    ) -> Result<Reduction<B>, Error> {
        if let Some(compressor) = &self.compressor {
            let factor = match weighting {
                Weighting::Equal => 1.0 / self.group.world_size() as f32,
                Weighting::Share(share) => share as f32,
            };
            let exchange = self.exchanges.pop().unwrap_or_default();
            let work = compressor.start(&self.group, gradients, factor, exchange)?;
            return Ok(Reduction::Compressed { compressor: compressor.clone(), work });
        }
        let dtype = self.carrier(gradients[0].0, weighting);
        let mut bucket = self.pack(&mut gradients, dtype)?;
        if weighting.factor() != 1.0 {
            scale(bucket.bytes(), dtype, weighting.factor());
        }
        let op = BucketOp::AllReduce(weighting.reduction());
        Ok(Reduction::Host { work: bucket.start(&self.group, dtype, op)?, gradients })
    }

    fn pack(&mut self, gradients: &mut [(usize, TensorData)], dtype: DType) -> Result<Bucket, Error> {
        if let [(_, data)] = gradients
            && let Some(bucket) = Bucket::single(&mut data.bytes, dtype)
        {
            return Ok(bucket);
        }
        let parts = gradients.iter().map(|(_, data)| (Some(&data.bytes[..]), data.bytes.len()));
        let bytes = parts.clone().map(|(_, bytes)| bytes).sum();
        Ok(Bucket::packed(&self.group, self.memory.pop(), bytes)?.fill(parts))
    }

    /// Waits for a reduction and adds its results to `results`.
    pub fn finish(&mut self, reduction: Reduction<B>, results: &mut GradientsParams) -> Result<(), Error> {
        let (mut gradients, work) = match reduction {
            Reduction::Device { positions, pending } => {
                let reduced = positions.into_iter().zip(pending.wait()?);
                reduced.for_each(|(position, tensor)| self.parameters[position].register(tensor, results));
                return Ok(());
            }
            Reduction::Compressed { compressor, work } => {
                let mut exchange = compressor.finish(work)?;
                let gradients = std::mem::take(&mut exchange.gradients);
                self.exchanges.push(exchange);
                self.upload(gradients, results);
                return Ok(());
            }
            Reduction::Host { gradients, work } => (gradients, work),
        };
        match work.wait().map_err(|(error, _)| error)? {
            Bucket::Single(bytes) => gradients[0].1.bytes = bytes,
            Bucket::Packed(memory, bytes) => {
                let mut rest = &bytemuck::cast_slice(&memory)[..bytes];
                for (_, data) in &mut gradients {
                    let (part, after) = rest.split_at(data.bytes.len());
                    data.bytes.copy_from_slice(part);
                    rest = after;
                }
                self.memory.push(memory);
            }
        }
        self.upload(gradients, results);
        Ok(())
    }

    /// Returns a hash of the name of the compression; 0 without one.
    pub fn compression(&self) -> u64 {
        self.compressor.as_ref().map_or(0, Compressor::digest)
    }

    /// Forgets what compression has lost, after a step whose result is not used.
    pub fn forget_errors(&self) {
        if let Some(compressor) = &self.compressor {
            compressor.forget();
        }
    }

    /// Ends a step whose reductions have all ended: see [`Compressor::end_step`].
    pub fn end_step(&self, operation: &'static str) -> Result<Result<(), Error>, Error> {
        let path = |position: usize| self.parameters.get(position).map(|parameter| parameter.path.as_str());
        self.compressor.as_ref().map_or(Ok(Ok(())), |compressor| compressor.end_step(&self.group, operation, path))
    }

    /// Adds gradients that are on the host to `results`.
    fn upload(&self, gradients: Vec<(usize, TensorData)>, results: &mut GradientsParams) {
        for (position, data) in gradients {
            let parameter = &self.parameters[position];
            parameter.register(B::InnerBackend::float_from_data(data, &parameter.device), results);
        }
    }

    /// Removes the results for gradients that no rank had: they were reduced as zeros.
    pub fn remove_missing(&self, exists: &[bool], results: &mut GradientsParams) {
        for (parameter, _) in self.parameters.iter().zip(exists).filter(|(_, exists)| !**exists) {
            results.remove::<B::InnerBackend, 1>(parameter.id);
        }
    }
}
