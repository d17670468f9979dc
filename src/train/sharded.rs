//! An optimizer whose state is partitioned over the ranks (ZeRO-1).
//!
//! All forms of [`Sharding`] are the same code, with blocks of all ranks, of some, or of one. Replicas of the state
//! stay equal because they compute the same from the same bits. The ranks compare their parameters, not their state.
//!
//! # Why the optimizer runs on slices
//! A rank's slice of a parameter goes through burn's `SimpleOptimizer::step` as a tensor of one dimension, with a state
//! of its own. The adaptor around the optimizer is taken apart: keeping it would need a module of slices, with ids.
//! A parameter without a gradient is left out, as burn's adaptor does, so that counts of steps are right.

mod checkpoint;

use std::fmt;
use std::sync::Arc;

use burn::grad_clipping::GradientClipping;
use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;

use super::adapter::{flat, handle, opened};
use super::data_parallel::DataParallel;
use super::parts::{Parts, Sharded, check_elementwise, primitive};
use super::pass::{Fault, Form, LastPass, Pass, means};
use super::replicas::Replicas;
use super::walk::map_floats;
use bonfire_core::Error;
use bonfire_core::internal::AgreedOperations;
use bonfire_train::protocol::{Problem, Refusal};
use bonfire_train::shards::Cut;
use bonfire_train::step::{Groups, Outcome, PassWeight, Steps};
use bonfire_train::{DeviceMesh, Sharding};

const OPERATION: &str = "sharded optimizer";

/// An optimizer whose state is partitioned over the ranks of a [`DataParallel`] (ZeRO-1).
///
/// Use it when the optimizer state is too large for every rank. Parameters and gradients stay whole on every rank. The
/// state on a rank shrinks by the number of ranks in a block, see [`Sharding`].
///
/// Its passes are those of [`DataParallel`], and return [`Parts`]: the gradients' means, reduced to the rank that keeps
/// the state for them (a reduce-scatter within each block of ranks, then an all-reduce of the parts across the blocks).
/// [`step`](Self::step) updates this rank's part of the parameters and gathers the other parts (an all-gather within
/// each block). The ranks of a block transfer as many bytes as in an all-reduce.
///
/// ```
/// use bonfire::{DataParallel, Group, ShardedOptimizer, ShardedSampler, Sharding};
/// # use burn::backend::{Autodiff, Flex};
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::optim::AdamConfig;
/// # use burn::tensor::Tensor;
/// # type B = Autodiff<Flex>;
///
/// fn train(group: Group) -> Result<Linear<B>, bonfire::Error> {
///     let device = Default::default();
///     let (mut model, ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init::<B>(&device))?;
///     let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All)?;
///     for shard in ShardedSampler::new(ddp.group(), 100, 16)?.epoch(0)? {
///         let input = Tensor::<B, 2>::ones([shard.len(), 2], &device); // the samples that `shard` lists
///         let parts = optimizer.run(&model, [input], |model, input| (model.forward(input).mean(), shard.len()))?;
///         optimizer.step(0.1, &mut model, parts.clip_norm(1.0)?)?;
///     }
///     Ok(model)
/// }
///
/// let ranks: Vec<_> = Group::threads(2)?.into_iter().map(|group| std::thread::spawn(|| train(group))).collect();
/// let mut weights = Vec::new();
/// for rank in ranks {
///     weights.push(rank.join().unwrap()?.weight.to_data());
/// }
/// assert_eq!(weights[0], weights[1]);
/// # Ok::<(), bonfire::Error>(())
/// ```
///
/// # Supported optimizers
/// Element-wise optimizers, because a rank sees flat slices of parameters: burn's `Sgd`, `Adam`, `AdamW`, `Adan`,
/// `AdaGrad` and `RmsProp`, with weight decay and clipping. The result is that of the optimizer on a single rank, up to
/// the order in which gradients are summed. [`new`](Self::new) tries the optimizer and refuses others, such as `Muon`.
///
/// Two optimizers for one model are two of these, of one `DataParallel` and one sharding: [`Parts::split`] splits what
/// the passes of one of them return.
///
/// # Lost ranks
/// The part of the state on a lost rank is lost. [`Group::shrink`](crate::Group::shrink) makes a group of the remaining
/// ranks. Continue there with a new [`DataParallel`] and a new optimizer, from the last of the
/// [`Checkpoints`](crate::Checkpoints), which any number of ranks can load.
pub struct ShardedOptimizer<O, M, B>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    replicas: Replicas<B>,
    of: Arc<Sharded<B>>,
    optimizer: OptimizerAdaptor<O, M, B>,
    /// The state of this rank's slice of each parameter, by position. `None` before the parameter's first gradient.
    states: Vec<Option<O::State<1>>>,
}

impl<O, M, B> ShardedOptimizer<O, M, B>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    /// Partitions the state of a new optimizer for the model of `ddp`. All ranks must call this with the same
    /// arguments; with several blocks it blocks until they have. The optimizer communicates on the group of `ddp`, and
    /// `ddp` remains usable for [`mean`](DataParallel::mean) and [`average_states`](DataParallel::average_states).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], before anything is sent, for blocks whose length does not divide the world size, and
    /// for an optimizer that needs whole parameters or already has state for them. Otherwise the errors of
    /// [`Group::split`](crate::Group::split).
    #[track_caller]
    pub fn new(ddp: &DataParallel<B>, optimizer: OptimizerAdaptor<O, M, B>, sharding: Sharding) -> Result<Self, Error> {
        let _call = ddp.group().enter("ShardedOptimizer::new");
        // Before the ranks make subgroups.
        check_optimizer(ddp, &optimizer)?;
        Self::on_mesh(ddp, optimizer, &sharding.mesh(OPERATION, ddp.group())?)
    }

    /// As [`new`](Self::new), over the dimensions of a mesh of the ranks of `ddp`: the state is partitioned over the
    /// ranks of `shard`, and those of `replicate` keep the same part. Sharding over blocks is a mesh of `replicate` and
    /// `shard`, in this order.
    ///
    /// ```
    /// use bonfire::{DataParallel, DeviceMesh, Group, ShardedOptimizer};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::AdamConfig;
    ///
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&Default::default());
    /// let mesh = DeviceMesh::new(group, [("shard", 1), ("replicate", 1)])?;
    /// let (model, ddp) = DataParallel::new(mesh.whole().clone(), linear)?;
    /// let optimizer = ShardedOptimizer::on_mesh(&ddp, AdamConfig::new().init(), &mesh)?;
    /// # let _: (Linear<_>, ShardedOptimizer<_, Linear<_>, _>) = (model, optimizer);
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], before anything is sent, if the mesh has other dimensions or is not of the ranks of
    /// `ddp`, and for an optimizer that [`new`](Self::new) refuses.
    #[track_caller]
    pub fn on_mesh(
        ddp: &DataParallel<B>,
        optimizer: OptimizerAdaptor<O, M, B>,
        mesh: &DeviceMesh,
    ) -> Result<Self, Error> {
        let _call = ddp.group().enter("ShardedOptimizer::on_mesh");
        check_optimizer(ddp, &optimizer)?;
        let Replicas { steps, parameters, unused, .. } = &ddp.replicas;
        unused.end();
        let mut groups = Groups::sharded(mesh, OPERATION)?;
        let (whole, own) = (mesh.whole(), ddp.group());
        if (whole.rank(), whole.world_size()) != (own.rank(), own.world_size()) {
            let reason = "the mesh has other ranks than the `DataParallel`; make both of one group";
            return Err(Error::argument(OPERATION, reason));
        }
        groups.main = own.clone();
        let (tensors, of_all) = (steps.tensors().clone(), steps.parameters().clone());
        let on_devices = steps.is_on_devices();
        let steps = Steps::new(groups.clone(), of_all, tensors.clone(), Cut::Slices, on_devices).beside(steps);
        let parameters = parameters.clone();
        let of = Sharded { groups, parameters: parameters.clone(), tensors, layout: steps.layout().clone() };
        let states = parameters.iter().map(|_| None).collect();
        let replicas = Replicas { steps, parameters, ..ddp.replicas.clone() };
        Ok(ShardedOptimizer { replicas, of: Arc::new(of), optimizer, states })
    }

    /// Makes a step of passes: see [`DataParallel::run`].
    ///
    /// # Errors
    /// See [`LastPass::finish`].
    #[track_caller]
    pub fn run<T, W: PassWeight>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        mut loss: impl FnMut(&M, T) -> (Tensor<B, 1>, W),
    ) -> Result<Parts<B>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::run");
        self.try_run(model, batches, |model, batch| Ok(loss(model, batch)))
    }

    /// As [`run`](Self::run), with a closure that may fail: see [`DataParallel::try_run`].
    ///
    /// # Errors
    /// See [`LastPass::finish`].
    #[track_caller]
    pub fn try_run<T, W: PassWeight>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        loss: impl FnMut(&M, T) -> Result<(Tensor<B, 1>, W), Fault>,
    ) -> Result<Parts<B>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::try_run");
        Ok(Parts::new(self.replicas.run(model, batches, loss)?, self.of.clone()))
    }

    /// Begins a pass that is not the last one of its step: see [`DataParallel::pass`].
    ///
    /// # Errors
    /// See [`DataParallel::pass`].
    #[track_caller]
    pub fn pass(&self, model: &M, weight: impl PassWeight) -> Result<Pass<B, M>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::pass");
        self.replicas.begin(model, false)?.weigh(weight.value()).map(Pass)
    }

    /// Begins the last pass of a step: see [`DataParallel::last_pass`].
    ///
    /// # Errors
    /// See [`DataParallel::last_pass`].
    #[track_caller]
    pub fn last_pass(&self, model: &M, weight: impl PassWeight) -> Result<LastPass<B, M, Parts<B>>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::last_pass");
        let of = self.of.clone();
        let open = self.replicas.begin(model, true)?.weigh(weight.value())?;
        Ok(LastPass { open, result: Box::new(|means| Parts::new(means, of)) })
    }

    /// Makes a step without a pass of this rank: see [`DataParallel::skip`].
    ///
    /// # Errors
    /// See [`LastPass::finish`].
    #[track_caller]
    pub fn skip(&self, model: &M) -> Result<Parts<B>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::skip");
        self.join(model)?.ok_or_else(|| Refusal::NoSamples.error("skip", &[]))
    }

    /// Takes part in a step of ranks that still have data: see [`DataParallel::join`].
    ///
    /// # Errors
    /// See [`LastPass::finish`].
    #[track_caller]
    pub fn join(&self, model: &M) -> Result<Option<Parts<B>>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::join");
        Ok(match self.replicas.skip(model)? {
            Outcome::NoSamples => None,
            Outcome::Gradients(means) => Some(Parts::new(means, self.of.clone())),
        })
    }

    /// Averages gradients that are all there: see [`DataParallel::sync`].
    ///
    /// # Errors
    /// See [`DataParallel::sync`].
    #[track_caller]
    pub fn sync(&self, model: &M, gradients: GradientsParams, weight: impl PassWeight) -> Result<Parts<B>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::sync");
        let outcome = self.replicas.sync("sync", model, gradients, weight.value())?;
        Ok(Parts::new(means(outcome)?, self.of.clone()))
    }

    /// Updates the model, which is then the same on all ranks. If the optimizer clips gradients, they are clipped
    /// before, each by the norm of the whole gradient. All ranks must call this, with the same learning rate; it blocks
    /// until the parameters are gathered. A parameter for which no rank has a gradient is not changed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if learning rates differ, or if the parts are of another sharding or
    /// another model; the group remains usable. Otherwise the errors of
    /// [`Group::all_reduce`](crate::Group::all_reduce), whose ranks may be those of a subgroup: of a block, or of the
    /// ranks that keep the same part. Some ranks may have updated their optimizer state then, and the optimizer cannot
    /// make another step: continue from a checkpoint. After an error the model is unchanged.
    #[track_caller]
    pub fn step(&mut self, lr: LearningRate, model: &mut M, parts: Parts<B>) -> Result<(), Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::step");
        let steps = &self.replicas.steps;
        let is_own = Arc::ptr_eq(&parts.of.layout, steps.layout()) || self.is_of_same_sharding(&parts);
        let values = self.replicas.in_model(model).values;
        let lacks = |position: &usize| parts.exists[*position] && values[*position].is_none();
        let problem = match is_own {
            false => Some(Problem::OtherParts),
            true => (0..values.len()).find(lacks).map(Problem::Changed),
        };
        steps.begin_update("step", lr, problem)?;
        let mut parts = parts.clipped_for("step", &self.optimizer)?;
        let update = |position: usize| {
            let own = steps.layout().range(position);
            let value = flat::<B::InnerBackend>(B::inner(values[position].clone()?)).slice([own]);
            let mut gradient = flat::<B::InnerBackend>(parts.gradients[position].take()?);
            if let Some(clipping @ GradientClipping::Value(_)) = self.optimizer.grad_clipping() {
                gradient = clipping.clip_gradient(gradient);
            }
            let state = self.states[position].take().map(|state| O::to_device(state, &value.device()));
            let (value, state) = self.optimizer.optim().step(lr, value, gradient, state);
            self.states[position] = state;
            Some(handle::<B::InnerBackend>(primitive(value)))
        };
        let mut updated = steps.update(&parts.exists, update)?;
        let parameters = &self.replicas.parameters;
        *model = map_floats(model.clone(), |parameter| {
            let value = opened::<B::InnerBackend>(updated[parameters.position(parameter.id)?].take()?);
            // A program may have moved the model since.
            Some(B::InnerBackend::float_to_device(value, &B::float_device(&parameter.value)))
        });
        Ok(())
    }

    fn is_of_same_sharding(&self, parts: &Parts<B>) -> bool {
        let (own, other) = (&self.of, &parts.of);
        let ids = |of: &Sharded<B>| of.parameters.iter().map(|parameter| parameter.id).collect::<Vec<_>>();
        own.layout == other.layout && ids(own) == ids(other)
    }
}

/// Refuses optimizers that cannot work on slices.
fn check_optimizer<O, M, B>(ddp: &DataParallel<B>, optimizer: &OptimizerAdaptor<O, M, B>) -> Result<(), Error>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    if ddp.replicas.steps.is_compressed() {
        let reason = "the gradients of the `DataParallel` travel compressed, and those of a sharded optimizer do not; \
                      call `unset_compression` before";
        return Err(Error::argument(OPERATION, reason));
    }
    if !optimizer.to_record().is_empty() {
        let reason = "the optimizer has state of whole parameters already; give a new one, and load what a sharded \
                      one saved";
        return Err(Error::argument(OPERATION, reason));
    }
    ddp.replicas
        .parameters
        .first()
        .map_or(Ok(()), |parameter| check_elementwise(OPERATION, optimizer.optim(), &parameter.device))
}

impl<O, M, B> fmt::Debug for ShardedOptimizer<O, M, B>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedOptimizer").field("groups", self.replicas.steps.groups()).finish()
    }
}
