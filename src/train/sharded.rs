//! An optimizer whose state is partitioned over the ranks (ZeRO-1).
//!
//! All forms of [`Sharding`] are the same code, with blocks of all ranks, of some, or of one. Replicas of the state
//! stay equal because they compute the same from the same bits. The ranks compare their parameters, not their state.
//!
//! # Why the optimizer runs on slices
//! A rank's slice of a parameter goes through burn's `SimpleOptimizer::step` as a tensor of one dimension, with a state
//! of its own. The adaptor around the optimizer is taken apart: keeping it would need a module of slices, with ids.
//! A parameter without a gradient is left out, as burn's adaptor does, so that counts of steps are right.
//!
//! # Limits
//! Beside `DataParallel::sync`, each step packs, gathers and unpacks the parameters. Only the exchange itself overlaps
//! with the update of other buckets' slices. On collective devices gradients, slices and parameters stay there, except
//! where the ranks compare parameters.

mod checkpoint;
mod exchange;
mod layout;
mod on_device;
// burn's feature `distributed` removes the `AutodiffBackend` impl from host backends.
#[cfg(all(test, not(feature = "ddp")))]
mod tests;

use std::any::TypeId;
use std::collections::VecDeque;
use std::fmt;

use burn::grad_clipping::GradientClipping;
use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, LearningRate, Muon, Optimizer, SimpleOptimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

use self::exchange::{NumberedPart, Shards};
use self::layout::layout;
use super::bucket::{Limits, pop_if_full};
use super::data_parallel::DataParallel;
use super::in_flight::Unconfirmed;
use super::mesh::{DeviceMesh, REPLICATE, SHARD};
use super::step_header::{AgreedStep, StepHeader};
use super::values::{Positions, Values, comparison_is_due, digests, positions, values};
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};

const OPERATION: &str = "sharded optimizer";

/// Over which ranks the optimizer state is partitioned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sharding {
    /// Over all ranks: of `n` ranks, each keeps `1 / n` of the state.
    All,
    /// Over the ranks of a block of this many consecutive ranks; every block keeps all of the state (hybrid sharding).
    /// The number must divide the world size. Most traffic then stays within a block: with the number of ranks per
    /// host, gradients and parameters are exchanged within a host, and only one part of the gradients crosses hosts.
    Blocks(usize),
    /// Not partitioned: each rank keeps all of the state.
    None,
}

/// An optimizer whose state is partitioned over the ranks of a [`DataParallel`] (ZeRO-1).
///
/// Use it when the optimizer state is too large for every rank. Parameters and gradients stay whole on every rank. The
/// state on a rank shrinks by the number of ranks in a block, see [`Sharding`].
///
/// [`step`](Self::step) replaces [`DataParallel::sync`] and the step of the optimizer itself. It averages the gradients
/// (a reduce-scatter within each block of ranks, then an all-reduce of the parts across the blocks), updates this
/// rank's part of the parameters, and gathers the other parts (an all-gather within each block). The ranks of a block
/// transfer as many bytes as in an all-reduce.
///
/// ```
/// use bonfire::{DataParallel, Group, ShardedOptimizer, ShardedSampler, Sharding};
/// # use burn::backend::{Autodiff, Flex};
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::optim::{AdamConfig, GradientsParams};
/// # use burn::tensor::Tensor;
/// # type B = Autodiff<Flex>;
///
/// fn train(group: Group) -> Result<Linear<B>, bonfire::Error> {
///     let device = Default::default();
///     let (mut model, ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init::<B>(&device))?;
///     let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All)?.clip_norm(1.0)?;
///     for shard in ShardedSampler::new(ddp.group(), 100, 16)?.epoch(0) {
///         let input = Tensor::<B, 2>::ones([shard.len(), 2], &device); // the samples that `shard` lists
///         let loss = model.forward(input).mean();
///         let grads = GradientsParams::from_grads(loss.backward(), &model);
///         optimizer.step(0.1, &mut model, grads, shard.len())?;
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
/// `AdaGrad` and `RmsProp`, with weight decay and with clipping by value. The result is that of the optimizer on a
/// single rank, up to the order in which gradients are summed.
///
/// `Muon` is refused because it needs whole matrices. Clipping by norm in the optimizer itself is refused because it
/// would use the norm of a slice; [`clip_norm`](Self::clip_norm) clips by the norm over all parameters. Other
/// optimizers cannot be checked: do not pass one that mixes the elements of a parameter.
///
/// # Lost ranks
/// The part of the state on a lost rank is lost. [`Group::shrink`] makes a group of the remaining ranks. Continue there
/// with a new [`DataParallel`] and a new optimizer, from the last of the [`Checkpoints`], which any number of ranks can
/// load.
///
/// [`Checkpoints`]: crate::Checkpoints
pub struct ShardedOptimizer<O, M, B>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    group: Group,
    shards: Shards<B>,
    /// Whether the parameters of all ranks are on collective devices.
    on_devices: bool,
    optimizer: OptimizerAdaptor<O, M, B>,
    /// The state of this rank's slice of each parameter, by position. `None` before the parameter's first gradient.
    states: Vec<Option<O::State<1>>>,
    max_norm: Option<f64>,
    steps: u64,
    /// The error of a step that failed with its groups. Every later step returns it.
    failure: Option<Error>,
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
    /// [`Group::split`].
    #[track_caller]
    pub fn new(ddp: &DataParallel<B>, optimizer: OptimizerAdaptor<O, M, B>, sharding: Sharding) -> Result<Self, Error> {
        let group = ddp.group();
        let ranks = match sharding {
            Sharding::All => group.world_size(),
            Sharding::Blocks(ranks) => ranks,
            Sharding::None => 1,
        };
        if ranks == 0 || !group.world_size().is_multiple_of(ranks) {
            let world_size = group.world_size();
            let reason = format!("{world_size} ranks are not blocks of {ranks}; give a divisor of {world_size}");
            return Err(invalid(reason));
        }
        // Before the ranks make subgroups.
        check_optimizer(&optimizer)?;
        let blocks = [(REPLICATE.into(), group.world_size() / ranks), (SHARD.into(), ranks)];
        Self::on_mesh(ddp, optimizer, &DeviceMesh::arrange(group.clone(), blocks.into())?)
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
    pub fn on_mesh(
        ddp: &DataParallel<B>,
        optimizer: OptimizerAdaptor<O, M, B>,
        mesh: &DeviceMesh,
    ) -> Result<Self, Error> {
        ddp.unused.end();
        let group = ddp.group().clone();
        let [shard_group, replica_group] = mesh.shards_and_replicas(OPERATION)?;
        let place = |group: &Group| (group.rank(), group.world_size());
        if place(mesh.whole()) != place(&group) {
            return Err(invalid("the mesh has other ranks than the `DataParallel`; make both of one group"));
        }
        check_optimizer(&optimizer)?;
        let on_devices = ddp.on_devices();
        let parameters: Vec<_> = ddp.parameters().iter().filter(|parameter| parameter.trained).cloned().collect();
        let layout = layout(&parameters, Limits::of(on_devices), place(&shard_group));
        let states = parameters.iter().map(|_| None).collect();
        let shards = Shards {
            shard_group,
            replica_group,
            parameters,
            layout,
            bucket_memory: Vec::new(),
            part_memory: Vec::new(),
            unconfirmed: Unconfirmed::default(),
        };
        let (max_norm, steps, failure) = (None, 0, None);
        Ok(ShardedOptimizer { group, shards, on_devices, optimizer, states, max_norm, steps, failure })
    }

    /// Clips gradients by norm: if the norm of the mean gradients over all parameters exceeds `max`, a step scales them
    /// down to that norm. The norm is computed in f64, but on collective devices the squares of one gradient's part are
    /// added in its own type, or in f32 if that is narrower. If the optimizer clips by value, it does so afterwards.
    /// Without this call gradients are not clipped by norm. All ranks must set the same: nothing compares it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless `max` is finite and greater than 0.
    pub fn clip_norm(mut self, max: f64) -> Result<Self, Error> {
        if !(max > 0.0 && max.is_finite()) {
            return Err(Error::argument("clip_norm", format!("a norm of {max} cannot be kept; give a number above 0")));
        }
        self.max_norm = Some(max);
        Ok(self)
    }

    /// Averages the gradients over all ranks and updates the model, which is then the same on all ranks.
    ///
    /// As in [`DataParallel::sync`], the mean is weighted by the ranks' numbers of samples, gradients may be missing,
    /// and the ranks compare their parameters in the same steps. All ranks must call this in every step, with the same
    /// learning rate; it blocks until the parameters are gathered. A parameter for which no rank has a gradient is not
    /// changed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples, if a rank's gradients or model do not match the
    /// parameters at the start, if learning rates or numbers of steps differ (some ranks loaded state, others did not),
    /// or if parameters differ; nothing is changed, and the group remains usable. Otherwise [`Error::Io`] if a gradient
    /// or a parameter cannot be read from its device, or the errors of [`Group::all_reduce`], whose ranks may
    /// be those of a subgroup: of a block, or of the ranks that keep the same part. After such an error the model is
    /// unchanged, but some ranks may have updated their optimizer state. The optimizer aborts its groups, so that no
    /// rank waits for this one, and returns the same error from then on. Continue from a checkpoint.
    #[track_caller]
    pub fn step(
        &mut self,
        lr: LearningRate,
        model: &mut M,
        grads: GradientsParams,
        samples: usize,
    ) -> Result<(), Error> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let (parameters, steps) = (&self.shards.parameters, self.steps);
        let positions = positions(parameters);
        let values = values(model, parameters, &positions);
        let changed = values.iter().position(Option::is_none);
        let digests =
            comparison_is_due(steps, parameters, self.on_devices).then(|| digests(parameters, &values)).transpose();
        let agreed = digests.map_err(|error| self.group.abandon(error)).and_then(|digests| {
            let operation = "step";
            let header =
                StepHeader { operation, grads, samples, changed, steps, rate: lr, digests, ..Default::default() };
            header.exchange(&self.group, parameters)
        });
        let agreed = match agreed {
            // The exchange may have succeeded on other ranks, which are in the subgroups by now.
            Err(error) if self.group.failure().is_some() => return Err(self.fail(error)),
            agreed => agreed?,
        };
        let gathered = self.exchange(lr, values, agreed).map_err(|error| self.fail(error))?;
        *model = model.clone().map(&mut ValueWriter { positions: &positions, values: gathered });
        self.steps += 1;
        Ok(())
    }

    /// Aborts the subgroups, so that no rank of them waits for this one, and returns the error.
    fn fail(&mut self, error: Error) -> Error {
        self.shards.shard_group.abandon(error.clone());
        self.shards.replica_group.abandon(error.clone());
        self.failure = Some(error.clone());
        error
    }

    /// Returns the new values of the parameters for which a gradient exists, by position.
    #[track_caller]
    fn exchange(
        &mut self,
        lr: LearningRate,
        values: Values<B>,
        AgreedStep { grads, weighting, exists }: AgreedStep,
    ) -> Result<Values<B>, Error> {
        let mut parts = self.shards.reduce(&exists, grads, weighting)?;
        if let Some(max) = self.max_norm {
            self.shards.clip(&mut parts, max)?;
        }
        let gathered = self.update(lr, &exists, &values, parts)?;
        self.shards.unconfirmed.confirm()?;
        Ok(gathered)
    }

    /// Updates this rank's slices of the parameters, and gathers the slices of the other ranks.
    #[track_caller]
    fn update(
        &mut self,
        lr: LearningRate,
        exists: &[bool],
        values: &Values<B>,
        parts: Vec<NumberedPart<B>>,
    ) -> Result<Values<B>, Error> {
        let mut gathered = vec![None; values.len()];
        let mut in_flight = VecDeque::new();
        for (number, part) in parts {
            if let Some((number, oldest)) = pop_if_full(&mut in_flight) {
                self.shards.finish_gather(number, oldest, exists, &mut gathered)?;
            }
            let mut updated = Vec::new();
            for (position, value, mut grad) in self.shards.slices(number, part, exists, values) {
                if let Some(clipping) = self.optimizer.grad_clipping() {
                    grad = clipping.clip_gradient(grad);
                }
                let state = self.states[position].take().map(|state| O::to_device(state, &value.device()));
                let (value, state) = self.optimizer.optim().step(lr, value, grad, state);
                self.states[position] = state;
                updated.push(value);
            }
            in_flight.push_back((number, self.shards.gather(number, exists, updated)?));
        }
        for (number, oldest) in in_flight {
            self.shards.finish_gather(number, oldest, exists, &mut gathered)?;
        }
        Ok(gathered)
    }
}

/// Refuses optimizers that cannot work on slices, as far as that can be known.
fn check_optimizer<O, M, B>(optimizer: &OptimizerAdaptor<O, M, B>) -> Result<(), Error>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    if TypeId::of::<O>() == TypeId::of::<Muon<B::InnerBackend>>() {
        return Err(invalid("Muon needs whole matrices, and a rank has slices only; use `DataParallel::sync`"));
    }
    if let Some(GradientClipping::Norm(_)) = optimizer.grad_clipping() {
        let reason = "the optimizer itself would clip by the norm of a slice; leave that out there, and use \
                      `ShardedOptimizer::clip_norm`";
        return Err(invalid(reason));
    }
    if !optimizer.to_record().is_empty() {
        let reason = "the optimizer has state of whole parameters already; give a new one, and load what a sharded \
                      one saved";
        return Err(invalid(reason));
    }
    Ok(())
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::argument(OPERATION, reason)
}

/// Replaces a model's parameters by new values, by position.
struct ValueWriter<'a, B: AutodiffBackend> {
    positions: &'a Positions,
    values: Values<B>,
}

impl<B: AutodiffBackend> ModuleMapper<B> for ValueWriter<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let position = self.positions.get(&param.id);
        let Some(value) = position.and_then(|&position| self.values[position].take()) else { return param };
        let (id, old, mapper) = param.consume();
        // A program may have moved the model since.
        let value = value.reshape(old.shape()).to_device(&old.device());
        let value = Tensor::from_inner(value).set_require_grad(old.is_require_grad());
        Param::from_mapped_value(id, value, mapper)
    }
}

impl<O, M, B> fmt::Debug for ShardedOptimizer<O, M, B>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shard_group, replica_group) = (&self.shards.shard_group, &self.shards.replica_group);
        f.debug_struct("ShardedOptimizer")
            .field("shard_group", shard_group)
            .field("replica_group", replica_group)
            .finish()
    }
}
