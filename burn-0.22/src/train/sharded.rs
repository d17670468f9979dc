//! An optimizer whose state is partitioned over the ranks (ZeRO-1).
//!
//! All forms of [`Sharding`] are the same code, with blocks of all ranks, of some, or of one. Replicas of the state
//! stay equal because they compute the same from the same bits. The ranks compare their parameters, not their state.
//!
//! A parameter without a gradient is left out, as burn's optimizers do, so that counts of steps are right.

mod checkpoint;

use std::fmt;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor, TensorMetadata};
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::store::RecordError;
use burn::tensor::{Shape, Tensor};
use burn_pack::Reader;

use super::adapter::{handle, opened};
use super::data_parallel::DataParallel;
use super::parts::{Parts, Sharded};
use super::pass::{Fault, Form, LastPass, Pass, means};
use super::replicas::Replicas;
use super::slices::{check_elementwise, update};
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
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::optim::AdamConfig;
/// # use burn::tensor::{Device, Tensor};
///
/// fn train(group: Group) -> Result<Linear, bonfire::Error> {
///     let device = Device::flex().autodiff();
///     let (mut model, ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init(&device))?;
///     let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All)?;
///     for shard in ShardedSampler::new(ddp.group(), 100, 16)?.epoch(0)? {
///         let input = Tensor::<2>::ones([shard.len(), 2], &device); // the samples that `shard` lists
///         let parts = optimizer.run(&model, [input], |model, input| (model.forward(input).mean(), shard.len()))?;
///         optimizer.step(0.1, &mut model, parts.clip_norm(1.0)?)?;
///     }
///     Ok(model)
/// }
///
/// let models = bonfire::launch(2, train)?;
/// # Ok::<(), bonfire::launch::Failed>(())
/// ```
///
/// # Supported optimizers
/// Element-wise optimizers, because a rank sees flat slices of parameters: burn's `Sgd`, `Adam`, `AdamW`, `Adan`,
/// `AdaGrad` and `RmsProp`, with weight decay and clipping, also one for each group of parameters. The result is that
/// of the optimizer on a single rank, up to the order in which gradients are summed. [`new`](Self::new) tries the
/// optimizer and refuses others, such as `Muon` and `Lamb`.
///
/// Two optimizers for one model are two of these, of one `DataParallel` and one sharding: [`Parts::split`] splits what
/// the passes of one of them return.
pub struct ShardedOptimizer {
    replicas: Replicas,
    of: Arc<Sharded>,
    /// Its state is that of this rank's slices.
    optimizer: ModuleOptimizer,
}

impl ShardedOptimizer {
    /// Partitions the state of a new optimizer for the model of `ddp`. All ranks must call this with the same
    /// arguments; with several blocks it blocks until they have. The optimizer communicates on the group of `ddp`, and
    /// `ddp` remains usable for [`mean`](DataParallel::mean) and [`average_states`](DataParallel::average_states).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an optimizer that mixes the elements of a parameter, for one that has state
    /// already, and if the sharding does not divide the ranks. Otherwise the errors of
    /// [`Group::subgroup`](crate::Group::subgroup).
    #[track_caller]
    pub fn new(ddp: &DataParallel, optimizer: ModuleOptimizer, sharding: Sharding) -> Result<Self, Error> {
        let _call = ddp.group().enter("ShardedOptimizer::new");
        // Before the ranks make subgroups.
        check_optimizer(ddp, &optimizer)?;
        Self::on_mesh(ddp, optimizer, &sharding.mesh(OPERATION, ddp.group())?)
    }

    /// As [`new`](Self::new), with the dimensions `shard` and `replicate` of a mesh of the same ranks.
    ///
    /// # Errors
    /// Those of `new`, and [`Error::InvalidArgument`] if the mesh has other dimensions or other ranks.
    #[track_caller]
    pub fn on_mesh(ddp: &DataParallel, optimizer: ModuleOptimizer, mesh: &DeviceMesh) -> Result<Self, Error> {
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
        let steps = Steps::new(groups.clone(), of_all, tensors.clone(), Cut::Slices, false).beside(steps);
        let (layout, tried) = (steps.layout().clone(), Default::default());
        let of = Sharded { groups, parameters: parameters.clone(), tensors, layout, tried };
        let replicas = Replicas { steps, ..ddp.replicas.clone() };
        Ok(ShardedOptimizer { replicas, of: Arc::new(of), optimizer })
    }

    /// As [`DataParallel::run`].
    ///
    /// # Errors
    /// Those of [`DataParallel::run`].
    #[track_caller]
    pub fn run<M: Module, T, W: PassWeight>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        mut loss: impl FnMut(&M, T) -> (Tensor<1>, W),
    ) -> Result<Parts, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::run");
        self.try_run(model, batches, |model, batch| Ok(loss(model, batch)))
    }

    /// As [`DataParallel::try_run`].
    ///
    /// # Errors
    /// Those of [`DataParallel::try_run`].
    #[track_caller]
    pub fn try_run<M: Module, T, W: PassWeight>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        loss: impl FnMut(&M, T) -> Result<(Tensor<1>, W), Fault>,
    ) -> Result<Parts, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::try_run");
        Ok(Parts::new(self.replicas.run(model, batches, loss)?, self.of.clone()))
    }

    /// As [`DataParallel::pass`].
    ///
    /// # Errors
    /// Those of [`DataParallel::pass`].
    #[track_caller]
    pub fn pass<M: Module>(&self, model: &M, weight: impl PassWeight) -> Result<Pass<M>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::pass");
        self.replicas.begin(model, false)?.weigh(weight.value()).map(Pass)
    }

    /// As [`DataParallel::last_pass`].
    ///
    /// # Errors
    /// Those of [`DataParallel::last_pass`].
    #[track_caller]
    pub fn last_pass<M: Module>(&self, model: &M, weight: impl PassWeight) -> Result<LastPass<M, Parts>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::last_pass");
        let of = self.of.clone();
        let open = self.replicas.begin(model, true)?.weigh(weight.value())?;
        Ok(LastPass { open, result: Box::new(|means| Parts::new(means, of)) })
    }

    /// As [`DataParallel::skip`].
    ///
    /// # Errors
    /// Those of [`DataParallel::skip`].
    #[track_caller]
    pub fn skip<M: Module>(&self, model: &M) -> Result<Parts, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::skip");
        self.join(model)?.ok_or_else(|| Refusal::NoSamples.error("skip", &[]))
    }

    /// As [`DataParallel::join`].
    ///
    /// # Errors
    /// Those of [`DataParallel::join`].
    #[track_caller]
    pub fn join<M: Module>(&self, model: &M) -> Result<Option<Parts>, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::join");
        Ok(match self.replicas.skip(model)? {
            Outcome::NoSamples => None,
            Outcome::Gradients(means) => Some(Parts::new(means, self.of.clone())),
        })
    }

    /// As [`DataParallel::sync`].
    ///
    /// # Errors
    /// Those of [`DataParallel::sync`].
    #[track_caller]
    pub fn sync<M: Module>(
        &self,
        model: &M,
        gradients: GradientsParams,
        weight: impl PassWeight,
    ) -> Result<Parts, Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::sync");
        let outcome = self.replicas.sync("sync", model, gradients, weight.value())?;
        Ok(Parts::new(means(Some(outcome))?, self.of.clone()))
    }

    /// Updates the model: this rank's part of each parameter that has a gradient, and then all ranks gather the other
    /// parts. All ranks must call this with the same learning rate.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if learning rates differ, if the parts are those of another sharding, or
    /// if the model lacks a parameter; nothing is changed then. Otherwise the errors of
    /// [`Group::all_gather`](crate::Group::all_gather), after which the optimizer's state may be ahead of the model.
    #[track_caller]
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: &mut M,
        parts: Parts,
    ) -> Result<(), Error> {
        let _call = self.of.groups.main.enter("ShardedOptimizer::step");
        let (lr, steps, parameters) = (lr.into(), &self.replicas.steps, &self.replicas.parameters);
        let is_own = Arc::ptr_eq(&parts.of.layout, steps.layout()) || self.is_of_same_sharding(&parts);
        let values = self.replicas.in_model(model).values;
        let lacks = |position: &usize| parts.exists[*position] && values[*position].is_none();
        let problem = match is_own {
            false => Some(Problem::OtherParts),
            true => (0..values.len()).find(lacks).map(Problem::Changed),
        };
        steps.begin_update("step", lr.base(), problem)?;
        let mut parts = parts.clipped_for(&self.optimizer)?;
        let optimizer = &mut self.optimizer;
        let update = |position: usize| {
            let own = steps.layout().range(position);
            let value = flat(Dispatch::inner(values[position].clone()?)).slice([own]);
            let gradient = flat(parts.gradients[position].take()?);
            let updated = update(optimizer, lr.clone(), &parameters[position], value, gradient);
            Some(handle(updated.into_dispatch()))
        };
        let mut updated = steps.update(&parts.exists, update)?;
        *model = map_floats(model.clone(), |parameter| updated[parameters.position(parameter.id)?].take().map(opened));
        Ok(())
    }

    /// Returns the size of this rank's state in bytes: of its tensors. It records the whole state to count them, so do
    /// not call it in every step.
    ///
    /// # Errors
    /// [`Error::Io`] if the state cannot be recorded.
    pub fn state_bytes(&self) -> Result<usize, Error> {
        let tensors = || -> Result<_, RecordError> {
            Ok(Reader::from_bytes(self.optimizer.to_record().into_bytes()?)?.into_tensors()?)
        };
        let tensors = tensors().map_err(|error| Error::io("counting the optimizer's state", error))?;
        Ok(tensors.iter().map(burn_pack::Tensor::byte_len).sum())
    }

    /// Whether gradients are parts of this model, cut in this way: those of another optimizer for it.
    fn is_of_same_sharding(&self, parts: &Parts) -> bool {
        let (own, other) = (&self.of, &parts.of);
        let ids = |of: &Sharded| of.parameters.iter().map(|parameter| parameter.id).collect::<Vec<_>>();
        own.layout == other.layout && ids(own) == ids(other)
    }
}

/// Returns a tensor of one dimension.
fn flat(tensor: DispatchTensor) -> Tensor<1> {
    let elements = tensor.shape().num_elements();
    Tensor::from_dispatch(Dispatch::float_reshape(tensor, Shape::new([elements])))
}

fn check_optimizer(ddp: &DataParallel, optimizer: &ModuleOptimizer) -> Result<(), Error> {
    if ddp.replicas.steps.is_compressed() {
        let reason = "the gradients of the `DataParallel` travel compressed, and those of a sharded optimizer do not; \
                      call `unset_compression` before";
        return Err(Error::argument(OPERATION, reason));
    }
    if !optimizer.to_record().is_empty() {
        let reason = "the optimizer has state of whole parameters already; give a new one";
        return Err(Error::argument(OPERATION, reason));
    }
    let mut trained = ddp.replicas.parameters.iter().filter(|parameter| parameter.trained);
    trained.try_for_each(|parameter| check_elementwise(OPERATION, optimizer, parameter))
}

impl fmt::Debug for ShardedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedOptimizer").field("groups", self.replicas.steps.groups()).finish()
    }
}
