//! Data-parallel training: the same model on all ranks, and the same gradients in every step.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};

use super::agree::{
    Parameter, ParameterDescription, all_gather_values, broadcast_parameters, check_same_model, parameters, rebuild,
};
use super::bucket::{Limits, Weighting, buckets, pop_if_full};
use super::compression::Compression;
use super::mean::mean;
use super::mesh::DeviceMesh;
use super::overlap::Overlap;
use super::reduction::{Compressor, Reducer, Reduction};
use super::states;
use super::step_header::{AgreedStep, StepHeader};
use super::unused::Unused;
use super::values::{NOTHING, comparison_is_due, digests, positions, values};
use crate::tensor::device::uses_collective_devices;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{DType, Error, Group};

/// Synchronises a model and its gradients over the ranks of a group. Each rank has one.
///
/// [`new`](Self::new) makes the ranks' models equal, and [`sync`](Self::sync) averages their gradients in every step.
/// [`resume`](Self::resume) and [`shrink`](Self::shrink) make all else equal that a training carries: see
/// [`TrainingState`](crate::TrainingState).
/// See [`train`](crate::train) for a training loop. To shard the optimizer state too, use
/// [`ShardedOptimizer`](crate::ShardedOptimizer) in place of `sync`.
pub struct DataParallel<B: AutodiffBackend> {
    /// Reduces gradients over the group. Its parameters are the model's float parameters in visiting order, which is
    /// the same on all ranks; parameter ids are not.
    pub(super) reducer: Reducer<B>,
    /// What overlapped steps need, from the first of them on.
    pub(super) overlap: Option<Overlap<B>>,
    /// The most bytes in a bucket of an overlapped step. `None` until it is measured.
    pub(super) bucket_bytes: Option<usize>,
    /// Steps since the model was distributed or taken over. A rank whose last `sync` failed may be one behind.
    pub(super) steps: u64,
    pub(super) unused: Unused,
}

/// What an exchange ends with.
type Exchanged = Result<Result<GradientsParams, Error>, Error>;

impl<B: AutodiffBackend> DataParallel<B> {
    /// Makes the ranks' models equal and returns this rank's: every parameter gets rank 0's value.
    ///
    /// All ranks must call this; it blocks until they have. It covers floats, ints, bools and running states such as
    /// batch norm's. Each rank passes a model of its own and trains the returned one, whose parameters keep their ids.
    /// If ranks are threads, they may pass clones of one model: the returned models are independent. Load pretrained
    /// weights before; create the optimizer and [`resume`](Self::resume) from a checkpoint afterwards.
    ///
    /// `mesh` is a group, or a [`DeviceMesh`]. Of a mesh, the group are the ranks that differ from this one only along
    /// `replicate` and `shard`: they get the same model. Ranks that differ along another dimension keep other ones.
    ///
    /// A training that then leaves out every [`step`](Self::step) and [`sync`](Self::sync) ends with other weights on
    /// each rank. So if this is dropped on a rank that has called neither, nor [`verify`](Self::verify) or
    /// [`average_states`](Self::average_states), [`launch`](crate::launch()) returns an error for a rank that otherwise
    /// succeeds. Without `launch` a warning is logged.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if the models differ; the group remains usable. It names the first
    /// parameter whose path, kind, element type, shape or need for a gradient differs, and describes it on rank 0 and
    /// on another rank. The same error if a mesh has neither `replicate` nor `shard`. Otherwise [`Error::Io`] if a
    /// parameter cannot be read from its device, or the errors of [`Group::all_reduce`].
    #[track_caller]
    pub fn new<M: AutodiffModule<B>>(mesh: impl Into<DeviceMesh>, model: M) -> Result<(M, Self), Error> {
        let group = mesh.into().replicas("data parallel")?;
        let (model, identities) = rebuild(model);
        let (described, parameters) = describe_parameters(&model);
        check_same_model(&group, "data parallel", &described)?;
        let model = broadcast_parameters(&group, model, identities, 0)?;
        let unused = Unused::new(&group);
        let on_devices = all_gather_values(&group, [u8::from(uses_collective_devices::<B::InnerBackend>())])?;
        let on_devices = on_devices.iter().all(|on_devices| *on_devices == [1]);
        let reducer = Reducer::new(group, parameters.into(), on_devices);
        Ok((model, DataParallel { reducer, overlap: None, bucket_bytes: None, steps: 0, unused }))
    }

    /// Returns the group of ranks.
    pub fn group(&self) -> &Group {
        &self.reducer.group
    }

    /// Makes gradients travel compressed, in [`step`](Self::step) and in [`sync`](Self::sync), and added in f32. All
    /// ranks set the same before the next step. See [`compression`](super::compression) for what it costs; it pays
    /// where the network is slower than a pass over the gradients, a few GB/s. Tensors on collective devices are
    /// compressed on the host. A [`ShardedOptimizer`](crate::ShardedOptimizer) does not compress.
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&Default::default());
    /// let (model, mut ddp) = DataParallel::new(group, linear)?;
    /// ddp.set_compression(bonfire::train::compression::Int8)?;
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// The gradients of a step must be finite then: if one is not, all ranks get [`Error::InvalidArgument`], which
    /// names it, and the group remains usable.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the model has trained parameters of f64, which f32 cannot carry.
    pub fn set_compression(&mut self, compression: impl Compression) -> Result<(), Error> {
        let wide = self.parameters().iter().find(|parameter| parameter.trained && parameter.element == DType::F64);
        if let Some(parameter) = wide {
            let reason = format!("`{}` has elements of f64; train it in f32 or without compression", parameter.path);
            return Err(Error::argument("set_compression", reason));
        }
        self.reducer.compressor = Some(Compressor::new(Arc::new(compression), self.group().rank())?);
        if let Some(overlap) = &mut self.overlap {
            overlap.reducer = None;
        }
        Ok(())
    }

    /// Returns the float parameters in visiting order.
    pub(super) fn parameters(&self) -> &[Parameter<B>] {
        &self.reducer.parameters
    }

    /// Whether the gradients of all ranks are on collective devices.
    pub(super) fn on_devices(&self) -> bool {
        self.reducer.on_devices
    }

    /// Takes over the identities of the parameters of a model that has the same ones.
    pub(super) fn describe<M: AutodiffModule<B>>(&mut self, model: &M) {
        self.reducer.parameters = describe_parameters(model).1.into();
        self.reducer.forget_errors();
        if let Some(overlap) = &mut self.overlap {
            overlap.set_parameters(self.reducer.parameters.clone());
        }
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
        let (digests, changed) = self.due_digests(model)?;
        let header = StepHeader {
            operation: "sync",
            grads,
            samples,
            changed,
            steps: self.steps,
            compression: self.reducer.compression(),
            digests,
            ..Default::default()
        };
        let agreed = header.exchange(&self.reducer.group, &self.reducer.parameters)?;
        let exchanged = self.exchange(agreed).map_err(|error| self.reducer.group.abandon(error));
        let grads = exchanged.and_then(|result| result).inspect_err(|_| self.reducer.forget_errors())?;
        self.steps += 1;
        Ok(grads)
    }

    /// Returns the buckets of a step in which these gradients exist.
    fn buckets(&self, exists: &[bool]) -> Vec<Vec<usize>> {
        // Those of overlapped steps are sent as a whole, so that an element has the same place in its bucket, and the
        // same bits, as in `step`.
        let tuned = self.overlap.as_ref().and_then(Overlap::tuned_buckets);
        let tuned = tuned.into_iter().flat_map(|buckets| buckets.iter());
        let mut whole: Vec<_> =
            tuned.filter(|bucket| bucket.iter().any(|position| exists[*position])).cloned().collect();
        let mut left = exists.to_vec();
        whole.iter().flatten().for_each(|position| left[*position] = false);
        // The last layers' gradients first: the backward pass computes them first.
        let items = self.parameters().iter().enumerate().rev().filter(|(position, _)| left[*position]);
        let limits = Limits::of(self.reducer.on_devices);
        whole.extend(buckets(items.map(|(position, parameter)| parameter.item(position)), limits));
        whole
    }

    /// Replaces this rank's gradients by their mean. After an inner error the group stays usable.
    #[track_caller]
    fn exchange(&mut self, AgreedStep { mut grads, weighting, exists }: AgreedStep) -> Exchanged {
        if self.reducer.group.world_size() == 1 {
            return Ok(Ok(grads));
        }
        let buckets = self.buckets(&exists);
        let mut in_flight = VecDeque::new();
        for positions in buckets {
            if let Some(oldest) = pop_if_full(&mut in_flight) {
                self.reducer.finish(oldest, &mut grads)?;
            }
            in_flight.push_back(self.start(positions, &mut grads, weighting)?);
        }
        in_flight.into_iter().try_for_each(|oldest| self.reducer.finish(oldest, &mut grads))?;
        self.reducer.remove_missing(&exists, &mut grads);
        Ok(self.reducer.end_step("sync")?.map(|()| grads))
    }

    /// Returns the digests of the model if the ranks compare their models in the next step, and the first position
    /// whose trained parameter it lacks.
    pub(super) fn due_digests<M: AutodiffModule<B>>(
        &self,
        model: &M,
    ) -> Result<(Option<Vec<u64>>, Option<usize>), Error> {
        self.unused.end();
        let digests = comparison_is_due(self.steps, self.parameters(), self.on_devices())
            .then(|| self.digests(model))
            .transpose();
        let digests = digests.map_err(|error| self.reducer.group.abandon(error))?;
        let changed = digests.as_ref().and_then(|digests| self.lacks(digests));
        Ok((digests, changed))
    }

    /// Returns the digests of the model's trained parameters, by position.
    pub(super) fn digests<M: AutodiffModule<B>>(&self, model: &M) -> Result<Vec<u64>, Error> {
        let parameters = self.parameters();
        digests(parameters, &values(model, parameters, &positions(parameters)))
    }

    /// Returns the first position whose trained parameter a model with these digests lacks.
    pub(super) fn lacks(&self, digests: &[u64]) -> Option<usize> {
        (0..digests.len()).find(|&position| self.reducer.parameters[position].trained && digests[position] == NOTHING)
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
        mean(&self.reducer.group, values, samples)
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
        states::average(&self.reducer.group, model, |_| true)
    }

    /// Takes the gradients of a bucket and starts their reduction.
    #[track_caller]
    fn start(
        &mut self,
        positions: Vec<usize>,
        grads: &mut GradientsParams,
        weighting: Weighting,
    ) -> Result<Reduction<B>, Error> {
        let reducer = &mut self.reducer;
        let tensors = positions.iter().map(|&position| {
            match grads.remove::<B::InnerBackend, 1>(reducer.parameters[position].id) {
                Some(grad) => reducer.widen(position, grad.into_primitive().tensor(), weighting),
                None => reducer.zeros(position, weighting),
            }
        });
        let tensors: Vec<_> = tensors.collect();
        if reducer.is_on_device() {
            return reducer.start_on_device(positions, tensors, weighting);
        }
        let read = positions.into_iter().zip(tensors).map(|(position, tensor)| {
            let grad = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(tensor));
            Ok((position, grad.try_into_data().map_err(|e| Error::io("reading a gradient", e))?))
        });
        let read = read.collect::<Result<_, Error>>()?;
        reducer.start(read, weighting)
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
        let parameters = self.reducer.parameters.len();
        f.debug_struct("DataParallel").field("group", &self.reducer.group).field("parameters", &parameters).finish()
    }
}
