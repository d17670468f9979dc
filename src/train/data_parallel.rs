//! Data-parallel training: the same model on all ranks, and the same gradients in every step.
//!
//! # Limits
//! Buckets overlap with each other's packing and with nothing else: without its feature `distributed`, burn 0.21 shows
//! no gradient before the whole backward pass is over.

use std::collections::{HashSet, VecDeque};
use std::fmt;

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{FloatDType, Tensor, TensorData, TensorMetadata, TensorPrimitive};

use super::agree::{Parameter, ParameterDescription, broadcast_parameters, check_same_model, parameters, rebuild};
use super::bucket::{Bucket, BucketOp, Weighting, buckets, pop_if_full, scale, scale_tensor};
use super::states;
use super::step_header::{AgreedStep, StepHeader, no_samples};
use super::values::{NOTHING, comparison_is_due, digests, positions, values};
use crate::tensor::device::{DeviceOutcome, PendingAllReduce, start_all_reduce, uses_collective_devices};
use crate::tensor::host::float;
use bonfire_core::internal::{AgreedOperations, ByteOperations, Request};
use bonfire_core::{Buffer, DType, Error, Group, Operation, ReduceOp, Work};

/// Synchronises a model and its gradients over the ranks of a group. Each rank has one.
///
/// [`new`](Self::new) makes the ranks' models equal, and [`sync`](Self::sync) averages their gradients in every step.
/// [`resume`](Self::resume) and [`shrink`](Self::shrink) make all else equal that a training carries: see
/// [`TrainingState`](crate::TrainingState).
/// See [`train`](crate::train) for a training loop. To shard the optimizer state too, use
/// [`ShardedOptimizer`](crate::ShardedOptimizer) in place of `sync`.
pub struct DataParallel<B: AutodiffBackend> {
    pub(super) group: Group,
    /// The model's float parameters in visiting order. The order is the same on all ranks; parameter ids are not.
    pub(super) parameters: Vec<Parameter<B>>,
    /// Unused memory for packed buckets.
    pub(super) memory: Vec<Buffer<u64>>,
    /// Steps since the model was distributed or taken over. A rank whose last `sync` failed may be one behind.
    pub(super) steps: u64,
}

/// A bucket whose reduction is in flight.
enum InFlight<B: AutodiffBackend> {
    /// On the host: its tensors, by the positions of their parameters, and the operation. A tensor that is a bucket of
    /// its own is empty meanwhile, because the operation holds its memory.
    Host { tensors: Vec<(usize, TensorData)>, work: Work<Bucket> },
    /// On a collective device: the positions of its parameters, and the operation.
    Device { positions: Vec<usize>, pending: PendingAllReduce<B::InnerBackend> },
}

impl<B: AutodiffBackend> DataParallel<B> {
    /// Makes the ranks' models equal and returns this rank's: every parameter gets rank 0's value.
    ///
    /// All ranks must call this; it blocks until they have. It covers floats, ints, bools and running states such as
    /// batch norm's. Each rank passes a model of its own and trains the returned one, whose parameters keep their ids.
    /// If ranks are threads, they may pass clones of one model: the returned models are independent. Load pretrained
    /// weights before; create the optimizer and [`resume`](Self::resume) from a checkpoint afterwards.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if the models differ; the group remains usable. It names the first
    /// parameter whose path, kind, element type, shape or need for a gradient differs, and describes it on rank 0 and
    /// on another rank. Otherwise the errors of [`Group::all_reduce`].
    ///
    /// # Panics
    /// If a parameter cannot be read from its device.
    #[track_caller]
    pub fn new<M: AutodiffModule<B>>(group: Group, model: M) -> Result<(M, Self), Error> {
        let (model, identities) = rebuild(model);
        let (described, parameters) = describe_parameters(&model);
        check_same_model(&group, &described)?;
        let model = broadcast_parameters(&group, model, identities, 0)?;
        Ok((model, DataParallel { group, parameters, memory: Vec::new(), steps: 0 }))
    }

    /// Returns the group of ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Averages the gradients over all ranks, weighted by the number of samples over which each rank's loss was
    /// averaged: `sum(samples * gradient) / sum(samples)`. The result is that of a single rank which averages its loss
    /// over all these samples. It is bit-identical on all ranks.
    ///
    /// All ranks must call this in every step, even a rank without samples: it passes 0 and any gradients, such as
    /// `GradientsParams::new()`, which are ignored. The call blocks until all gradients are exchanged. A gradient that
    /// is missing on some ranks counts as zero there; one that is missing on all ranks stays missing. Gradients keep
    /// their shapes and element types. If numbers of samples differ, f16 gradients are transferred as f32, so that none
    /// overflows or vanishes on the way.
    ///
    /// `model` is the model whose gradients these are. The ranks compare its trained parameters in the first two steps
    /// and in every 64th, and those of a small model more often: of up to 64 KiB in every step, of `n` times that in
    /// every `n`th. If they differ, all ranks return an error: a rank trains another model than the one that
    /// [`new`](Self::new) returned, or with another optimizer, optimizer state or learning rate, or all ranks have left
    /// out a `sync`. What happens after the last comparison remains unseen: [`verify`](Self::verify) compares at any
    /// time, and the optimizer too.
    ///
    /// To accumulate gradients over several micro-batches, call this once, after the last of them, with the number of
    /// samples of all of them. Accumulated gradients are summed, so weight each loss by its share of these samples:
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{GradientsAccumulator, GradientsParams};
    /// # use burn::tensor::Tensor;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&device);
    /// # let (model, mut ddp) = DataParallel::new(group, linear)?;
    /// # let micro_batches = [Tensor::<_, 2>::ones([3, 2], &device), Tensor::ones([1, 2], &device)];
    /// let samples: usize = micro_batches.iter().map(|input| input.dims()[0]).sum();
    /// let mut accumulator = GradientsAccumulator::new();
    /// for input in micro_batches {
    ///     let weight = input.dims()[0] as f32 / samples as f32;
    ///     let loss = model.forward(input).mean() * weight;
    ///     accumulator.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
    /// }
    /// let grads = ddp.sync(&model, accumulator.grads(), samples)?;
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples, if a rank has gradients that do not match the
    /// model's parameters, or if the ranks' parameters differ; the group remains usable. Otherwise the errors of
    /// [`Group::all_reduce`], also if a rank cannot read a gradient from its device. The call may have succeeded on
    /// other ranks then, which are one step ahead: continue with [`shrink`](Self::shrink) or from a checkpoint.
    #[track_caller]
    pub fn sync<M: AutodiffModule<B>>(
        &mut self,
        model: &M,
        grads: GradientsParams,
        samples: usize,
    ) -> Result<GradientsParams, Error> {
        let digests = comparison_is_due(self.steps, &self.parameters).then(|| self.digests(model)).transpose();
        let digests = digests.map_err(|error| self.group.abandon(error))?;
        let changed = digests.as_ref().and_then(|digests| self.lacks(digests));
        let (parameters, steps) = (&self.parameters, self.steps);
        let header = StepHeader { operation: "sync", parameters, grads, samples, changed, steps, rate: 0.0, digests };
        let agreed = header.exchange(&self.group)?;
        let grads = self.exchange(agreed).map_err(|error| self.group.abandon(error))?;
        self.steps += 1;
        Ok(grads)
    }

    /// Replaces this rank's gradients by their mean.
    #[track_caller]
    fn exchange(&mut self, AgreedStep { mut grads, weighting, exists }: AgreedStep) -> Result<GradientsParams, Error> {
        if self.group.world_size() == 1 {
            return Ok(grads);
        }
        // The last layers' gradients first: the backward pass computes them first.
        let items = self.parameters.iter().enumerate().rev().filter(|(position, _)| exists[*position]);
        let items = items.map(|(position, parameter)| parameter.item(position));
        let mut in_flight = VecDeque::new();
        for positions in buckets(items) {
            if let Some(oldest) = pop_if_full(&mut in_flight) {
                self.finish(oldest, &mut grads)?;
            }
            in_flight.push_back(self.start(positions, &mut grads, weighting)?);
        }
        in_flight.into_iter().try_for_each(|oldest| self.finish(oldest, &mut grads))?;
        Ok(grads)
    }

    /// Returns the digests of the model's trained parameters, by position.
    pub(super) fn digests<M: AutodiffModule<B>>(&self, model: &M) -> Result<Vec<u64>, Error> {
        digests(&self.parameters, &values(model, &self.parameters, &positions(&self.parameters)))
    }

    /// Returns the first position whose trained parameter a model with these digests lacks.
    pub(super) fn lacks(&self, digests: &[u64]) -> Option<usize> {
        (0..digests.len()).find(|&position| self.parameters[position].trained && digests[position] == NOTHING)
    }

    /// Averages metrics over all ranks, weighted by the ranks' numbers of samples. All ranks must call this, with the
    /// same number of values; all get the same result. A rank without samples passes 0, and its values are ignored.
    ///
    /// ```
    /// # let device = Default::default();
    /// # let group = bonfire::Group::threads(1)?.remove(0);
    /// # let linear = burn::nn::LinearConfig::new(2, 1).init::<burn::backend::Autodiff<burn::backend::Flex>>(&device);
    /// # let (_, ddp) = bonfire::DataParallel::new(group, linear)?;
    /// let [loss, accuracy] = ddp.mean(&[0.3, 0.9], 50)?;
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples; the group remains usable. Otherwise the errors
    /// of [`Group::all_reduce`].
    #[track_caller]
    pub fn mean<const N: usize>(&self, values: &[f64; N], samples: usize) -> Result<[f64; N], Error> {
        let weighted = values.iter().map(|value| if samples == 0 { 0.0 } else { value * samples as f64 });
        let mut sums: Vec<f64> = weighted.chain([samples as f64]).collect();
        let request = Request::new(Operation::AllReduce, DType::F64).reduction(ReduceOp::Sum).part_of("mean");
        self.group.operate(request, None, bytemuck::cast_slice_mut(&mut sums))?;
        if sums[N] == 0.0 {
            return Err(no_samples("mean"));
        }
        Ok(std::array::from_fn(|i| sums[i] / sums[N]))
    }

    /// Averages the states that differ between the ranks' models, such as the running statistics of batch norm, which
    /// depend on a rank's own samples only. Call it on all ranks before validating or saving.
    ///
    /// States are the float parameters that need no gradient. Each becomes the mean over the ranks, without weights.
    /// One that is bit-identical on all ranks, such as a frozen weight, is not changed. The trained parameters must be
    /// bit-identical. [`SyncBatchNorm`] needs no such call: its statistics are the same on all ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if trained parameters differ: it names the first one and the ranks.
    /// Otherwise the errors of [`Group::all_reduce`]. The model is lost then: pass a clone if you need it.
    ///
    /// # Panics
    /// If a state cannot be read from its device.
    ///
    /// [`SyncBatchNorm`]: crate::SyncBatchNorm
    #[track_caller]
    pub fn average_states<M: AutodiffModule<B>>(&self, model: M) -> Result<M, Error> {
        self.compare_parameters("average_states", &model)?;
        states::average(&self.group, model)
    }

    /// Takes a bucket's gradients, weights them and starts their reduction.
    #[track_caller]
    fn start(
        &mut self,
        positions: Vec<usize>,
        grads: &mut GradientsParams,
        weighting: Weighting,
    ) -> Result<InFlight<B>, Error> {
        let (element, factor) = (self.parameters[positions[0]].element, weighting.factor());
        let dtype = weighting.carrier(element);
        let on_device = factor != 1.0 && uses_collective_devices::<B::InnerBackend>();
        let tensors = positions.iter().map(|&position| {
            let parameter = &self.parameters[position];
            match grads.remove::<B::InnerBackend, 1>(parameter.id) {
                Some(grad) => grad.into_primitive().tensor(),
                None => {
                    let zeros = TensorData::full_dtype(parameter.shape.clone(), 0, parameter.dtype);
                    B::InnerBackend::float_from_data(zeros, &parameter.device)
                }
            }
        });
        // f32 is the only carrier that is not the elements' own type.
        let widen = |tensor| {
            if dtype == element { tensor } else { B::InnerBackend::float_cast(tensor, FloatDType::F32) }
        };
        let scale_tensor =
            |tensor| if on_device { scale_tensor::<B::InnerBackend>(tensor, dtype, factor) } else { tensor };
        let tensors = tensors.map(widen).map(scale_tensor).collect();
        let request = Request::new(Operation::AllReduce, dtype).reduction(weighting.reduction());
        match start_all_reduce::<B::InnerBackend>(&self.group, tensors, request) {
            DeviceOutcome::Handled(pending) => Ok(InFlight::Device { positions, pending: pending? }),
            DeviceOutcome::NotHandled(tensors) => {
                let mut read = Vec::with_capacity(tensors.len());
                for (position, tensor) in positions.into_iter().zip(tensors) {
                    let grad = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(tensor));
                    read.push((position, grad.try_into_data().map_err(|e| Error::io("reading a gradient", e))?));
                }
                let mut bucket = self.pack(&mut read, dtype)?;
                if factor != 1.0 {
                    scale(bucket.bytes(), dtype, factor);
                }
                let op = BucketOp::AllReduce(weighting.reduction());
                Ok(InFlight::Host { work: bucket.start(&self.group, dtype, op)?, tensors: read })
            }
        }
    }

    fn pack(&mut self, tensors: &mut [(usize, TensorData)], dtype: DType) -> Result<Bucket, Error> {
        if let [(_, data)] = tensors
            && let Some(bucket) = Bucket::single(&mut data.bytes, dtype)
        {
            return Ok(bucket);
        }
        let tensors = tensors.iter().map(|(_, data)| (Some(&data.bytes[..]), data.bytes.len()));
        let bytes = tensors.clone().map(|(_, bytes)| bytes).sum();
        Ok(Bucket::packed(&self.group, self.memory.pop(), bytes)?.fill(tensors))
    }

    /// Waits for a reduction and registers the results as gradients.
    fn finish(&mut self, in_flight: InFlight<B>, grads: &mut GradientsParams) -> Result<(), Error> {
        let mut register = |position: usize, mut tensor: FloatTensor<B::InnerBackend>| {
            let parameter = &self.parameters[position];
            if float(tensor.dtype()) != Some(parameter.element) {
                tensor = B::InnerBackend::float_cast(tensor, parameter.dtype.into());
            }
            let grad = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(tensor));
            grads.register(parameter.id, grad);
        };
        let (mut tensors, work) = match in_flight {
            InFlight::Device { positions, pending } => {
                positions.into_iter().zip(pending()?).for_each(|(position, tensor)| register(position, tensor));
                return Ok(());
            }
            InFlight::Host { tensors, work } => (tensors, work),
        };
        match work.wait().map_err(|(error, _)| error)? {
            Bucket::Single(bytes) => tensors[0].1.bytes = bytes,
            Bucket::Packed(memory, bytes) => {
                let mut rest = &bytemuck::cast_slice(&memory)[..bytes];
                for (_, data) in &mut tensors {
                    let (part, after) = rest.split_at(data.bytes.len());
                    data.bytes.copy_from_slice(part);
                    rest = after;
                }
                self.memory.push(memory);
            }
        }
        for (position, data) in tensors {
            register(position, B::InnerBackend::float_from_data(data, &self.parameters[position].device));
        }
        Ok(())
    }
}

/// Returns the descriptions of all parameters, and the float parameters without duplicates.
pub(super) fn describe_parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
) -> (Vec<ParameterDescription>, Vec<Parameter<B>>) {
    let (described, mut parameters) = parameters::<B, M>(model);
    // A parameter that a model uses twice has one id and one gradient.
    let mut seen = HashSet::new();
    parameters.retain(|parameter| seen.insert(parameter.id));
    (described, parameters)
}

impl<B: AutodiffBackend> fmt::Debug for DataParallel<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters = self.parameters.len();
        f.debug_struct("DataParallel").field("group", &self.group).field("parameters", &parameters).finish()
    }
}
