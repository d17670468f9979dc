//! Data-parallel training: the same model on all ranks, and the same gradients in every step.

use std::fmt;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

use super::adapter::{BurnTensors, opened};
use super::batch_norm::give_ranks;
use super::model::{Needs, Parameters, broadcast_parameters, check_untied, rebuild};
use super::pass::{Fault, Form, LastPass, Pass, means};
use super::replicas::Replicas;
use crate::tensor::autodiff::hook::check_backend;
use crate::tensor::device::uses_collective_devices;
use bonfire_core::internal::{AgreedOperations, process_number};
use bonfire_core::{Error, Group};
use bonfire_train::DeviceMesh;
use bonfire_train::agree::{all_gather_values, all_or_none};
use bonfire_train::compression::Compression;
use bonfire_train::parameters::check_same_model;
use bonfire_train::protocol::Refusal;
use bonfire_train::shards::Cut;
use bonfire_train::step::{Groups, Means, Outcome, PassWeight, Steps, Unused};

const OPERATION: &str = "data parallel";

/// Trains a model of which every rank has a replica. Each rank has one.
///
/// [`new`](Self::new) makes the ranks' models equal, and a step makes their gradients equal. A step has any number of
/// *passes*, each a forward and a backward pass over a part of the data, with a weight: what its loss is a mean over,
/// such as samples or tokens. It returns the mean over all passes of all ranks.
///
/// | a step | with |
/// |---|---|
/// | of passes over batches | [`run`](Self::run), [`try_run`](Self::try_run) if they can fail |
/// | whose program calls `backward` itself, for several models at once for example | [`pass`](Self::pass), [`last_pass`](Self::last_pass) |
/// | of a rank without data | [`skip`](Self::skip), or [`join`](Self::join) until no rank has any |
/// | of gradients from elsewhere | [`sync`](Self::sync) |
///
/// The gradients of the last pass leave while its backward pass computes the next ones; those of the passes before wait
/// on the rank and leave with them.
///
/// [`resume`](Self::resume) and [`shrink`](Self::shrink) make all else equal that a training carries: see
/// [`TrainingState`](crate::TrainingState). See [`train`](crate::train) for a training loop. To shard the optimizer
/// state too, use [`ShardedOptimizer`](crate::ShardedOptimizer).
///
/// # No gradient is lost
/// Every gradient that exists for a parameter at the end of a step is exchanged exactly once, or the step is an error
/// on all ranks. So parameters may be frozen and unfrozen between steps, on all ranks alike; and what reaches the model
/// in training directly, such as a penalty on its weights, is added to what the pass's model gets.
///
/// # Models in a loop
/// The model of a pass has the parameters' values, ids and states of the model in training, and is for this pass only.
/// Several passes of one `DataParallel` may be open at a time, but none begins while the last one is open. Other calls,
/// such as [`mean`](Self::mean), may be made meanwhile.
///
/// # Buckets
/// The first step with a backward pass measures how fast the group is, and records the order in which gradients arrive.
/// From the second step on all ranks send buckets of the best size in that order. The bits of a sum over three or more
/// ranks may depend on the size: [`set_bucket_bytes`](Self::set_bucket_bytes) fixes it where two runs must have the
/// same bits.
pub struct DataParallel<B: AutodiffBackend> {
    pub(super) replicas: Replicas<B>,
}

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
    /// It is not clear whether to train a parameter whose tensor is the result of an operation, as after `Param::map`,
    /// or needs a gradient where the parameter does not: rank 0 logs its name, what is done with it, and a remedy.
    ///
    /// A training that then leaves out every step ends with other weights on each rank. So if this is dropped on a rank
    /// that has made none, nor called [`verify`](Self::verify) or [`average_states`](Self::average_states), a warning
    /// says so: in the log, or on standard error if there is no logger. The rank's results count.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if the models differ; the group remains usable. It names the first
    /// parameter whose path, kind, element type, shape or need for a gradient differs, and describes it on rank 0 and
    /// on another rank. The same error if a model has a trained parameter twice, under one id, of which burn's
    /// optimizers update only one; if a mesh has neither `replicate` nor `shard`; and for an autodiff backend that is
    /// not burn's. Otherwise [`Error::Io`] if a parameter cannot be read from its device, or the errors of
    /// [`Group::all_reduce`].
    #[track_caller]
    pub fn new<M: AutodiffModule<B>>(mesh: impl Into<DeviceMesh>, model: M) -> Result<(M, Self), Error> {
        check_backend::<B>(OPERATION)?;
        let mesh = mesh.into();
        let _call = mesh.whole().enter("DataParallel::new");
        let group = mesh.replicas(OPERATION)?;
        let needs = Needs::of(&model);
        let (model, identities) = rebuild(model);
        let (described, parameters) = Parameters::of(&model);
        check_same_model(&group, OPERATION, &described)?;
        let model = give_ranks(broadcast_parameters(&group, model, identities, 0)?, &group);
        all_or_none(&group, check_untied(OPERATION, &model))?;
        needs.warn(&group, OPERATION, &parameters);
        let unused = Arc::new(Unused::new(&group, parameters.iter().any(|parameter| parameter.trained)));
        let on_devices = u64::from(uses_collective_devices::<B::InnerBackend>());
        let ranks = all_gather_values(&group, [on_devices, process_number()?])?;
        let on_devices = ranks.iter().all(|[on_devices, _]| *on_devices == 1);
        let has_threads =
            (1..ranks.len()).any(|rank| ranks[..rank].iter().any(|[_, process]| *process == ranks[rank][1]));
        let tensors = BurnTensors::of(&parameters);
        let steps = Steps::new(Groups::replicas(group)?, parameters.described(), tensors, Cut::Rows, on_devices);
        let communicate = Arc::default();
        Ok((model, DataParallel { replicas: Replicas { steps, parameters, unused, has_threads, communicate } }))
    }

    /// Returns the group of ranks.
    pub fn group(&self) -> &Group {
        &self.replicas.steps.groups().main
    }

    /// Makes a step with a pass for each batch, and returns the mean gradients. `loss` gets the pass's model and a
    /// batch, and returns the loss, and the weight of the pass: what the loss is a mean over, such as a number of
    /// samples or tokens, or a sum of weights.
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{Optimizer, SgdConfig};
    /// # use burn::tensor::Tensor;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&device);
    /// # let (mut model, ddp) = DataParallel::new(group, linear)?;
    /// # let mut optimizer = SgdConfig::new().init();
    /// let batches = [Tensor::<_, 2>::ones([3, 2], &device), Tensor::ones([1, 2], &device)];
    /// let gradients = ddp.run(&model, batches, |model, input| {
    ///     let samples = input.dims()[0];
    ///     (model.forward(input).mean(), samples)
    /// })?;
    /// model = optimizer.step(0.1, model, gradients);
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// All ranks call it in every step, with any number of batches. One batch is an ordinary step, several accumulate
    /// gradients, and none is [`skip`](Self::skip). A pass of weight 0 counts nothing. The last batch is known once the
    /// iterator has no other, so pass as many as the step has: `batches.by_ref().take(4)` of a longer one.
    ///
    /// # Errors
    /// See [`LastPass::finish`], and [`last_pass`](Self::last_pass).
    #[track_caller]
    pub fn run<M: AutodiffModule<B>, T, W: PassWeight>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        mut loss: impl FnMut(&M, T) -> (Tensor<B, 1>, W),
    ) -> Result<GradientsParams, Error> {
        let _call = self.group().enter("DataParallel::run");
        self.try_run(model, batches, |model, batch| Ok(loss(model, batch)))
    }

    /// As [`run`](Self::run), with a closure that may fail.
    ///
    /// # Errors
    /// With the text of the closure's error, if it fails on one rank, on all of them: [`Error::InvalidArgument`], and
    /// the group remains usable; or, if layers of the model communicate, the error of a failed group. Otherwise those
    /// of `run`.
    #[track_caller]
    pub fn try_run<M: AutodiffModule<B>, T, W: PassWeight>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        loss: impl FnMut(&M, T) -> Result<(Tensor<B, 1>, W), Fault>,
    ) -> Result<GradientsParams, Error> {
        let _call = self.group().enter("DataParallel::try_run");
        Ok(self.gradients(self.replicas.run(model, batches, loss)?))
    }

    /// Begins a pass that is not the last one of its step. `weight` is what its loss will be a mean over. It
    /// communicates nothing: ranks may have different numbers of passes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] while the last pass of a step is open.
    #[track_caller]
    pub fn pass<M: AutodiffModule<B>>(&self, model: &M, weight: impl PassWeight) -> Result<Pass<B, M>, Error> {
        let _call = self.group().enter("DataParallel::pass");
        self.pass_of(model, weight.value())
    }

    pub(super) fn pass_of<M: AutodiffModule<B>>(&self, model: &M, weight: f64) -> Result<Pass<B, M>, Error> {
        self.replicas.begin(model, false)?.weigh(weight).map(Pass)
    }

    /// Begins the last pass of a step, whose gradients are exchanged during the backward pass. All ranks call it in
    /// every step, or [`skip`](Self::skip). The program calls `backward` itself, so one backward pass may end the steps
    /// of several models:
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # use burn::tensor::Tensor;
    /// # type B = Autodiff<Flex>;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init::<B>(&device);
    /// let (encoder, a) = DataParallel::new(group.clone(), linear(4, 2))?;
    /// let (decoder, b) = DataParallel::new(group, linear(2, 4))?;
    /// let input = Tensor::<B, 2>::ones([3, 4], &device);
    /// let (p, q) = (a.last_pass(&encoder, 3)?, b.last_pass(&decoder, 3)?);
    /// let output = q.model().forward(p.model().forward(input.clone()));
    /// let mut gradients = (output - input).powf_scalar(2.0).mean().backward();
    /// let (encoder_gradients, decoder_gradients) = (p.finish(&mut gradients)?, q.finish(&mut gradients)?);
    /// # assert_eq!(encoder_gradients.len() + decoder_gradients.len(), 4);
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] while the last pass of a step is open. The first call makes a subgroup, and returns
    /// the errors of [`Group::subgroup`]; [`Error::Config`] with the transport `mpi-blocking`, with which
    /// [`sync`](Self::sync) works. Errors of the exchange come from [`finish`](LastPass::finish).
    #[track_caller]
    pub fn last_pass<M: AutodiffModule<B>>(
        &self,
        model: &M,
        weight: impl PassWeight,
    ) -> Result<LastPass<B, M, GradientsParams>, Error> {
        let _call = self.group().enter("DataParallel::last_pass");
        self.last_pass_of(model, weight.value())
    }

    #[track_caller]
    pub(super) fn last_pass_of<M: AutodiffModule<B>>(
        &self,
        model: &M,
        weight: f64,
    ) -> Result<LastPass<B, M, GradientsParams>, Error> {
        let parameters = self.replicas.parameters.clone();
        let open = self.replicas.begin(model, true)?.weigh(weight)?;
        Ok(LastPass { open, result: Box::new(move |means| gradients(&parameters, means)) })
    }

    /// Makes a step without a pass of this rank, or ends one whose passes before have all ended. The mean of the others
    /// is its result too.
    ///
    /// # Errors
    /// See [`LastPass::finish`].
    #[track_caller]
    pub fn skip<M: AutodiffModule<B>>(&self, model: &M) -> Result<GradientsParams, Error> {
        let _call = self.group().enter("DataParallel::skip");
        self.join(model)?.ok_or_else(|| Refusal::NoSamples.error("skip", &[]))
    }

    /// Takes part in a step of ranks that still have data, when this rank's has ended. Returns the mean of their
    /// gradients, or `None` on all ranks once no rank has data. Each rank calls it in a loop after its own last step,
    /// so ranks with different numbers of batches make the same number of steps:
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{Optimizer, SgdConfig};
    /// # use burn::tensor::Tensor;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&device);
    /// # let (mut model, ddp) = DataParallel::new(group, linear)?;
    /// # let mut optimizer = SgdConfig::new().init();
    /// # let own_batches = [Tensor::<Autodiff<Flex>, 2>::ones([3, 2], &device)];
    /// for input in own_batches {
    ///     let samples = input.dims()[0];
    ///     let gradients = ddp.run(&model, [input], |model, input| (model.forward(input).mean(), samples))?;
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// while let Some(gradients) = ddp.join(&model)? {
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// The mean is over the samples of the ranks that have some. A model whose layers communicate, such as one with
    /// [`SyncBatchNorm`](crate::SyncBatchNorm), cannot be trained so: its layers wait for all ranks, and the ranks get
    /// [`Error::Mismatch`]. Give every rank as many batches instead, as [`ShardedSampler`](crate::ShardedSampler) does.
    ///
    /// # Errors
    /// See [`LastPass::finish`].
    #[track_caller]
    pub fn join<M: AutodiffModule<B>>(&self, model: &M) -> Result<Option<GradientsParams>, Error> {
        let _call = self.group().enter("DataParallel::join");
        Ok(match self.replicas.skip(model)? {
            Outcome::NoSamples => None,
            Outcome::Gradients(means) => Some(self.gradients(means)),
        })
    }

    /// Averages gradients that are all there, from a program that computes them itself. Prefer passes: they exchange
    /// gradients during the backward pass, add them up over several passes, and lose none.
    ///
    /// The result is the mean over all ranks, weighted by what each rank's loss was a mean over: `sum(weight *
    /// gradient) / sum(weight)`. It is bit-identical on all ranks. Gradients of passes that have ended are added.
    ///
    /// All ranks must call this in every step, even a rank without samples: it passes 0 and any gradients, such as
    /// `GradientsParams::new()`, which are ignored. The call blocks until all gradients are exchanged. A gradient that
    /// is missing on some ranks counts as zero there; one that is missing on all ranks stays missing. Gradients keep
    /// their shapes and element types. If weights differ, f16 gradients are transferred as f32, so that none overflows
    /// or vanishes on the way.
    ///
    /// `model` is the model whose gradients these are. In every step, here as in passes, the ranks compare which
    /// parameters are trained, and in the first two steps and in every 64th also the parameters, those of a small model
    /// more often: of up to 64 KiB in every step, of `n` times that in every `n`th. If they differ, all ranks return an
    /// error: a rank trains another model than the one that [`new`](Self::new) returned, or with another optimizer,
    /// optimizer state or learning rate, or all ranks have left out a step. What happens after the last comparison
    /// remains unseen: [`verify`](Self::verify) compares at any time, and the optimizer too.
    ///
    /// # Ranks as threads
    /// burn-autodiff 0.21 may lose gradients of a backward pass while other threads run theirs
    /// ([burn#5573](https://github.com/tracel-ai/burn/issues/5573)): if leaves of the model are in several forward
    /// passes at a time, as when gradients accumulate. What is lost before this call cannot be noticed, so the first
    /// one logs a warning. Passes are not affected.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples, if the model has no trained parameters, if a
    /// rank has gradients that do not match them, or if the ranks' parameters differ; the group remains usable.
    /// Otherwise the errors of [`Group::all_reduce`], also if a rank cannot read a gradient from its device. The call
    /// may have succeeded on other ranks then, which are one step ahead: continue with [`shrink`](Self::shrink) or from
    /// a checkpoint.
    #[track_caller]
    pub fn sync<M: AutodiffModule<B>>(
        &self,
        model: &M,
        gradients: GradientsParams,
        weight: impl PassWeight,
    ) -> Result<GradientsParams, Error> {
        let _call = self.group().enter("DataParallel::sync");
        let outcome = self.replicas.sync("sync", model, gradients, weight.value())?;
        Ok(self.gradients(means(outcome)?))
    }

    /// Makes gradients travel compressed, and added in f32. All ranks set the same before the next step. See
    /// [`compression`](super::compression) for what it costs; it pays where the network is slower than a pass over the
    /// gradients, a few GB/s. Tensors on collective devices are compressed on the host.
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
    /// [`Error::InvalidArgument`] if the model has trained parameters of f64, which f32 cannot carry, or if there is a
    /// [`ShardedOptimizer`](crate::ShardedOptimizer) for it, which does not compress.
    #[track_caller]
    pub fn set_compression(&mut self, compression: impl Compression) -> Result<(), Error> {
        let _call = self.group().enter("DataParallel::set_compression");
        if self.replicas.steps.has_others() {
            let reason = "a `ShardedOptimizer` trains the model, and its gradients do not travel compressed; drop it, \
                          or leave compression out";
            return Err(Error::argument("set_compression", reason));
        }
        self.replicas.steps.set_compression(compression, &self.replicas.parameters.trained())
    }

    /// Forgets what compression has lost of the gradients so far, and would add to the next ones. `Checkpoints::load`,
    /// [`resume`](Self::resume) and [`shrink`](Self::shrink) do; call it on all ranks where the program itself goes
    /// back to weights that it has kept.
    pub fn forget_compression_errors(&mut self) {
        self.replicas.steps.forget_compression_errors();
    }

    /// Makes gradients travel as they are again, with all their bits. All ranks call it before the next step.
    ///
    /// # Errors
    /// That of the group, if it has failed.
    #[track_caller]
    pub fn unset_compression(&mut self) -> Result<(), Error> {
        let _call = self.group().enter("DataParallel::unset_compression");
        self.replicas.steps.unset_compression()
    }

    /// Sets the most bytes in a bucket. Then the first step measures nothing. All ranks set the same, before the first
    /// step. A tensor of that size or more is a bucket of its own.
    pub fn set_bucket_bytes(&mut self, bytes: usize) {
        self.replicas.steps.set_bucket_bytes(bytes);
    }

    /// Averages metrics over all ranks. `weight` is what this rank's are means over, as that of a pass: samples,
    /// tokens, or a sum of weights. All ranks must call this, with the same number of values; all get the same result.
    /// A rank without samples passes 0, and its values are ignored.
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
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples, or if a weight is negative or not finite; the
    /// group remains usable. Otherwise the errors of [`Group::all_reduce`].
    #[track_caller]
    pub fn mean<const N: usize>(&self, values: &[f64; N], weight: impl PassWeight) -> Result<[f64; N], Error> {
        let _call = self.group().enter("DataParallel::mean");
        self.replicas.unused.end();
        let steps = &self.replicas.steps;
        steps.counted(steps.groups().mean(values, weight.value()), false)
    }

    /// Returns the mean gradients of a step.
    fn gradients(&self, means: Means) -> GradientsParams {
        gradients(&self.replicas.parameters, means)
    }

    /// Takes over the ids of the parameters of a model that has the same ones.
    pub(super) fn describe<M: AutodiffModule<B>>(&mut self, model: &M) {
        self.replicas.parameters = Parameters::of(model).1;
    }
}

fn gradients<B: AutodiffBackend>(parameters: &Parameters<B>, means: Means) -> GradientsParams {
    let gradients = means.gradients.into_iter().enumerate();
    let gradients = gradients.filter_map(|(position, gradient)| Some((position, opened::<B::InnerBackend>(gradient?))));
    parameters.gradients(gradients)
}

impl<B: AutodiffBackend> fmt::Debug for DataParallel<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters = self.replicas.parameters.len();
        f.debug_struct("DataParallel").field("group", self.group()).field("parameters", &parameters).finish()
    }
}
