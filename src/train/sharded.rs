//! An optimizer of whose state every rank keeps a part.

mod checkpoint;
mod exchange;
mod layout;
mod state;

use std::any::TypeId;
use std::collections::{HashMap, VecDeque};
use std::fmt;

use burn::grad_clipping::GradientClipping;
use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, LearningRate, Muon, Optimizer, SimpleOptimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorData};

use self::exchange::{Numbered, Shards};
use self::layout::{bytes, layout};
use super::agree::Parameter;
use super::announce::{Announced, Announcement};
use super::bucket::{Exchange, due};
use super::data_parallel::DataParallel;
use bonfire_core::internal::Agreement;
use bonfire_core::{Error, Group};

/// Among which ranks an optimizer's state is dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sharding {
    /// Among all ranks: each keeps one part of as many as there are ranks.
    All,
    /// Among the ranks of a block of so many consecutive ones, and every block keeps all of it (hybrid sharding). What
    /// is large then stays within a block: with the number of ranks on a host, gradients and parameters go between the
    /// ranks of a host, and only a part of the gradients goes from host to host. The number divides the number of
    /// ranks.
    Blocks(usize),
    /// Not at all: each rank keeps all of it.
    None,
}

/// An optimizer of whose state every rank keeps a part, beside a [`DataParallel`].
///
/// It takes the place of [`DataParallel::sync`] and of the optimizer's own step: gradients are averaged and handed out
/// in parts (a reduce-scatter within each block of ranks, and an all-reduce of the parts across the blocks), each rank
/// updates its part of the parameters, and collects the other parts (an all-gather within each block). What moves
/// between the ranks of a block is as much as an all-reduce moves. Parameters and gradients stay whole on every rank;
/// the optimizer's state shrinks by the number of ranks in a block.
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
/// # Which optimizers
/// Those that treat each element of a parameter by itself, since a rank sees slices of parameters, flat: burn's `Sgd`,
/// `Adam`, `AdamW`, `Adan`, `AdaGrad` and `RmsProp`, with weight decay and with clipping by value. The result is that
/// of the optimizer on one rank, up to the order in which gradients are added up. `Muon`, which needs whole matrices,
/// and clipping by norm in the optimizer itself, which would take the norm of a slice, are refused;
/// [`clip_norm`](Self::clip_norm) clips by the norm over all parameters. Of other optimizers nobody can tell: give none
/// that mixes the elements of a parameter.
///
/// # Without ranks that were lost
/// A lost rank takes its part of the state along. [`Group::shrink`] makes the group of those that are left; go on there
/// with a new [`DataParallel`] and a new optimizer, from the last checkpoint, which any number of ranks can
/// [`load`](Self::load).
pub struct ShardedOptimizer<O, M, B>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    group: Group,
    shards: Shards<B>,
    optimizer: OptimizerAdaptor<O, M, B>,
    /// The state of this rank's slice of each parameter, by position. There is none before the first gradient.
    states: Vec<Option<O::State<1>>>,
    max_norm: Option<f64>,
    steps: u64,
    /// Why a step failed on the way.
    failure: Option<Error>,
}

impl<O, M, B> ShardedOptimizer<O, M, B>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    /// Deals out the state of a new optimizer for the model of `ddp`. All ranks call this alike.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for blocks whose length does not divide the number of ranks, and for an optimizer
    /// that needs whole parameters or has state of them: before anything is sent. Else the errors of [`Group::split`].
    pub fn new(ddp: &DataParallel<B>, optimizer: OptimizerAdaptor<O, M, B>, sharding: Sharding) -> Result<Self, Error> {
        let group = ddp.group.clone();
        let ranks = match sharding {
            Sharding::All => group.world_size(),
            Sharding::Blocks(ranks) => ranks,
            Sharding::None => 1,
        };
        if ranks == 0 || !group.world_size().is_multiple_of(ranks) {
            let world_size = group.world_size();
            let reason = format!("{world_size} ranks are not blocks of {ranks}; give a divisor of {world_size}");
            return Err(refused(reason));
        }
        if TypeId::of::<O>() == TypeId::of::<Muon<B::InnerBackend>>() {
            return Err(refused("Muon needs whole matrices, and a rank has slices only; use `DataParallel::sync`"));
        }
        if let Some(GradientClipping::Norm(_)) = optimizer.grad_clipping() {
            let reason = "the optimizer itself would clip by the norm of a slice; leave that out there, and use \
                          `ShardedOptimizer::clip_norm`";
            return Err(refused(reason));
        }
        if !optimizer.to_record().is_empty() {
            let reason = "the optimizer has state of whole parameters already; give a new one, and load what a sharded \
                          one saved";
            return Err(refused(reason));
        }
        let (block, place) = (group.rank() / ranks, group.rank() % ranks);
        let alone = Group::threads(1)?.remove(0);
        let inside = part(&group, &alone, ranks, block)?;
        let across = part(&group, &alone, group.world_size() / ranks, place)?;
        let parameters: Vec<_> = ddp.parameters.iter().filter(|parameter| parameter.trained).cloned().collect();
        let layout = layout(&parameters, ranks, place);
        let states = parameters.iter().map(|_| None).collect();
        let shards = Shards { inside, across, parameters, layout, wholes: Vec::new(), parts: Vec::new() };
        let (max_norm, steps, failure) = (None, 0, None);
        Ok(ShardedOptimizer { group, shards, optimizer, states, max_norm, steps, failure })
    }

    /// Scales the gradients of a step down where their norm, over all parameters, is above `max`: to that norm. It is
    /// computed in f64 from the mean gradients. Where the optimizer clips by value, that comes after.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where `max` is not a number above 0.
    pub fn clip_norm(mut self, max: f64) -> Result<Self, Error> {
        if !(max > 0.0 && max.is_finite()) {
            return Err(Error::argument("clip_norm", format!("a norm of {max} cannot be kept; give a number above 0")));
        }
        self.max_norm = Some(max);
        Ok(self)
    }

    /// Averages the gradients over all ranks and updates the model, which is then the same on all ranks. The mean is
    /// weighted by the ranks' numbers of samples, and gradients may be missing, as in [`DataParallel::sync`]: all ranks
    /// call this in every step, and a parameter for which no rank has a gradient stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks where no rank has samples, or where a rank has gradients or a model that
    /// do not belong to the parameters at the start; nothing was changed. Else the errors of [`Group::all_reduce`],
    /// whose ranks may be those of a subgroup: of a block, or of the ranks that keep the same part. The model stays as
    /// it was, but the optimizer's state may be a step further on some ranks. The groups that carried the step end with
    /// it, so that nobody waits for this rank, and it gives the same error from then on. Go on from a checkpoint.
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
        let parameters = &self.shards.parameters;
        let places = parameters.iter().zip(0..).map(|(parameter, position)| (parameter.id, position)).collect();
        let mut values = Values { parameters, places: &places, values: vec![None; parameters.len()] };
        model.visit(&mut values);
        let values = values.values;
        let lost = values.iter().position(Option::is_none);
        let announcement = Announcement { operation: "step", parameters, grads, samples, lost };
        let announced = announcement.make(&self.group)?;
        match self.exchange(lr, values, announced) {
            Ok(gathered) => {
                *model = model.clone().map(&mut Put { places: &places, values: gathered });
                self.steps += 1;
                Ok(())
            }
            Err(error) => {
                // So that nobody there waits for this rank.
                self.shards.inside.abandon(error.clone());
                self.shards.across.abandon(error.clone());
                self.failure = Some(error.clone());
                Err(error)
            }
        }
    }

    /// The new values of the parameters for which a gradient exists, by position.
    #[track_caller]
    fn exchange(
        &mut self,
        lr: LearningRate,
        values: Vec<Option<Tensor<B::InnerBackend, 1>>>,
        Announced { grads, factor, exists }: Announced,
    ) -> Result<Vec<Option<TensorData>>, Error> {
        let mut parts = self.shards.reduce(&exists, grads, factor)?;
        if let Some(max) = self.max_norm {
            self.shards.clip(&mut parts, max)?;
        }
        self.update(lr, &exists, &values, parts)
    }

    /// Updates this rank's slices of the parameters, and collects the others.
    #[track_caller]
    fn update(
        &mut self,
        lr: LearningRate,
        exists: &[bool],
        values: &[Option<Tensor<B::InnerBackend, 1>>],
        parts: Vec<Numbered>,
    ) -> Result<Vec<Option<TensorData>>, Error> {
        let mut gathered = vec![None; values.len()];
        let mut started = VecDeque::new();
        for (number, mut part) in parts {
            if let Some((number, oldest)) = due(&mut started) {
                self.shards.finish_gather(number, oldest, exists, &mut gathered)?;
            }
            let mut whole = self.shards.whole(number)?;
            let shared = &self.shards.layout[number];
            for place in shared.places.iter().filter(|place| exists[place.position] && !place.own().is_empty()) {
                let Some(value) = &values[place.position] else { continue };
                let (device, dtype) = (value.device(), value.dtype());
                let own = bytes(place.own(), shared.dtype);
                let from = own.start - bytes(shared.own.clone(), shared.dtype).start;
                let grad = part.bytes()[from..from + own.len()].to_vec();
                let grad = TensorData::from_bytes_vec(grad, [place.own().len()], dtype);
                let mut grad = Tensor::from_data(grad, (&device, dtype));
                if let Some(clipping) = self.optimizer.grad_clipping() {
                    grad = clipping.clip_gradient(grad);
                }
                let state = self.states[place.position].take().map(|state| O::to_device(state, &device));
                let (value, state) = self.optimizer.optim().step(lr, value.clone().slice(place.slice()), grad, state);
                self.states[place.position] = state;
                let data = value.try_into_data().map_err(|e| Error::io("reading a parameter", e))?;
                whole.bytes()[own].copy_from_slice(&data.bytes);
            }
            self.shards.parts.extend(part.into_memory());
            started.push_back((number, whole.start(&self.shards.inside, shared.dtype, Exchange::AllGather)?));
        }
        for (number, oldest) in started {
            self.shards.finish_gather(number, oldest, exists, &mut gathered)?;
        }
        Ok(gathered)
    }
}

/// The group of the `ranks` ranks that say the same number, in their order. All ranks call this alike.
fn part(group: &Group, alone: &Group, ranks: usize, number: usize) -> Result<Group, Error> {
    match ranks {
        1 => Ok(alone.clone()),
        all if all == group.world_size() => Ok(group.clone()),
        _ => {
            let part = group.split(Some(number as u64), group.rank() as i64)?;
            part.ok_or_else(|| refused("this rank came into no part of the group"))
        }
    }
}

fn refused(reason: impl Into<String>) -> Error {
    Error::argument("sharded optimizer", reason)
}

/// Positions of parameters.
type Places = HashMap<ParamId, usize>;

/// The values of a model's parameters, flat, by position: none where a parameter is not as it was at the start.
struct Values<'a, B: AutodiffBackend> {
    parameters: &'a [Parameter<B>],
    places: &'a Places,
    values: Vec<Option<Tensor<B::InnerBackend, 1>>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Values<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(&position) = self.places.get(&param.id) else { return };
        let (parameter, value) = (&self.parameters[position], param.val().inner());
        // As in burn's optimizers, the first of several places with one id counts.
        let fits = value.shape() == parameter.shape && value.dtype() == parameter.dtype;
        if fits && self.values[position].is_none() {
            let elements = parameter.shape.num_elements();
            self.values[position] = Some(value.reshape([elements]));
        }
    }
}

/// Puts new values into a model, by position.
struct Put<'a> {
    places: &'a Places,
    values: Vec<Option<TensorData>>,
}

impl<B: AutodiffBackend> ModuleMapper<B> for Put<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let position = self.places.get(&param.id);
        let Some(data) = position.and_then(|&position| self.values[position].take()) else { return param };
        let (id, old, mapper) = param.consume();
        let value = Tensor::from_data(data, (&old.device(), old.dtype())).set_require_grad(old.is_require_grad());
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
        let (inside, across) = (&self.shards.inside, &self.shards.across);
        f.debug_struct("ShardedOptimizer").field("inside", inside).field("across", across).finish()
    }
}

// burn's feature `distributed` takes autodiff from the backends on the host.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use std::sync::Barrier;

    use burn::backend::{Autodiff, Flex};
    use burn::nn::LinearConfig;
    use burn::optim::SgdConfig;

    use super::*;

    #[test]
    fn who_fails_on_the_way_lets_nobody_wait() {
        for sharding in [Sharding::Blocks(2), Sharding::All] {
            fails_on_the_way(sharding);
        }
    }

    fn fails_on_the_way(sharding: Sharding) {
        let failed = &Barrier::new(4);
        std::thread::scope(|scope| {
            for group in Group::threads(4).unwrap() {
                scope.spawn(move || {
                    let (device, rank) = (Default::default(), group.rank());
                    let linear = LinearConfig::new(2, 3).init::<Autodiff<Flex>>(&device);
                    let (mut model, ddp) = DataParallel::new(group, linear).unwrap();
                    let mut optimizer = ShardedOptimizer::new(&ddp, SgdConfig::new().init(), sharding).unwrap();
                    if rank == 0 {
                        // Its block disagrees on a bucket. Another block does not, and needs the first.
                        optimizer.shards.layout[0].len += 1;
                    }
                    let mut step = || {
                        let mut grads = GradientsParams::new();
                        grads.register(model.weight.id, Tensor::<Flex, 2>::ones([2, 3], &device));
                        optimizer.step(0.5, &mut model, grads, 1).unwrap_err()
                    };
                    let error = step();
                    // All still have their optimizers, and nobody waits for them.
                    failed.wait();
                    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                    assert_eq!(step(), error);
                });
            }
        });
    }
}
