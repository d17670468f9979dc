//! Fully sharded data parallelism (ZeRO-3, and ZeRO-2 by option): every rank keeps a part of each parameter, of its
//! gradient, and of its optimizer state.

mod backward;
mod checkpoint;
mod cut;
mod gather;
mod layout;
mod on_device;
mod order;
mod pass;
mod scatter;
mod step;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::Float;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;

use self::cut::{Blocks, PartCutter, WholeWriter, eager};
use self::gather::Gatherer;
use self::layout::Layout;
use self::order::History;
use self::pass::Engine;
pub use self::pass::GatherCounts;
use self::scatter::Scatterer;
pub use self::step::ShardedStep;
use super::agree::{
    Parameter, all_gather_values, all_or_none, broadcast_parameters, check_same_model, lane, ranks_are_processes,
    rebuild,
};
use super::bucket::{scale_tensor, sum_of_squares, sum_of_squares_on_device};
use super::data_parallel::describe_parameters;
use super::mean::mean;
use super::mesh::DeviceMesh;
use super::states;
use super::values::{Positions, Values, positions, values_of};
use crate::tensor::device::{connect, uses_collective_devices};
use crate::tensor::host::Source;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};

const OPERATION: &str = "full sharding";

/// Trains a model of which every rank keeps a part (ZeRO-3, known as FSDP). Each rank has one.
///
/// Use it when model, gradients and optimizer state are too large for every rank. Of `n` ranks each keeps `1 / n` of
/// every parameter: a part along its first dimension, padded with zeros where that does not divide. [`new`](Self::new)
/// returns the model with these parts. burn's optimizers work on it as on any model, so their state has the size of the
/// parts too. In a [`step`](Self::step), the parameters of a [`ShardedBlock`](crate::ShardedBlock) are gathered as one
/// operation when the forward pass comes to it, freed after it, and gathered again in the backward pass, while the
/// block before computes. Its gradients leave as soon as they are complete, and each rank gets the mean of its part.
///
/// ```
/// use bonfire::{FullyShardedParallel, Group, ShardedBlock};
/// use burn::backend::{Autodiff, Flex};
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{AdamConfig, Optimizer};
/// use burn::tensor::{Tensor, backend::Backend};
///
/// type B = Autodiff<Flex>;
///
/// #[derive(Module, Debug)]
/// struct Model<B: Backend> {
///     layers: Vec<ShardedBlock<Linear<B>>>,
///     head: Linear<B>,
/// }
///
/// impl<B: Backend> Model<B> {
///     fn forward(&self, input: Tensor<B, 2>) -> Tensor<B, 2> {
///         let hidden = self.layers.iter().fold(input, |x, layer| layer.run(|linear| linear.forward(x).tanh()));
///         self.head.forward(hidden)
///     }
/// }
///
/// fn train(group: Group) -> Result<Model<B>, bonfire::Error> {
///     let device = Default::default();
///     let linear = |outputs| LinearConfig::new(8, outputs).init(&device);
///     let layers = (0..4).map(|_| ShardedBlock::new(linear(8))).collect();
///     let (mut model, mut fsdp) = FullyShardedParallel::new(group, Model::<B> { layers, head: linear(1) })?;
///     let mut optimizer = AdamConfig::new().init();
///     for _ in 0..3 {
///         let input = Tensor::<B, 2>::ones([5, 8], &device); // this rank's samples
///         let step = fsdp.step(&model, 5)?;
///         let loss = step.model().forward(input).mean();
///         let grads = step.finish(loss.backward())?;
///         model = optimizer.step(1e-3, model, grads);
///     }
///     fsdp.gather(&model)
/// }
///
/// let models = bonfire::launch(2, train)?;
/// assert_eq!(models[0].head.weight.to_data(), models[1].head.weight.to_data());
/// # Ok::<(), bonfire::launch::Failed>(())
/// ```
///
/// The model of parts is for [`step`](Self::step), [`gather`](Self::gather) and the optimizer. Its own forward pass
/// would compute with parts: burn panics where their shapes do not fit, and a step whose backward pass comes to a part
/// returns an error.
///
/// Parameters that are in no block are gathered as one more block when the first of them is used, and stay until the
/// end of the step. A model without marks is that one block.
///
/// Frozen parameters, which need no gradient, are cut and gathered like others. In blocks that are used after the first
/// trained parameter, burn computes their gradients too, which are dropped: it would keep the whole value of what needs
/// no gradient until the backward pass. Running states and parameters of integers and booleans are whole on every rank
/// and treated as by [`DataParallel`](crate::DataParallel).
///
/// The results are those of `DataParallel`, up to the order in which gradients are added. The ranks must use the same
/// blocks in the same order in a step, or all get [`Error::Mismatch`]; it may differ from step to step, but the first
/// gather of a new order is not hidden. A parameter that only some ranks use in a block that all use is right.
///
/// # Hybrid sharding
/// With a [`DeviceMesh`] of the dimensions `shard` and `replicate`, parameters are partitioned over the ranks of
/// `shard`, and the gradients of each part are averaged over the ranks of `replicate`, which keep the same part. So all
/// traffic stays within `shard`, but an all-reduce of the parts' gradients.
///
/// # Optimizers
/// Those that treat each element by itself: burn's `Sgd`, `Adam`, `AdamW`, `Adan`, `AdaGrad` and `RmsProp`, with weight
/// decay and clipping by value. An optimizer sees parts of parameters. One that mixes the elements of a parameter, such
/// as `Muon` or `LBFGS`, or that clips by the norm of a gradient, computes something else, and nothing can detect it.
/// Clip with [`clip_norm`](Self::clip_norm). Nor does anything compare the ranks' optimizers and learning rates.
///
/// # What stays gathered
/// burn keeps what a backward step needs. Of most operations that is a recipe to gather the parameter again. Others
/// keep the whole parameter until the backward pass: burn's `Embedding`, for which [`embedding`](super::embedding) is a
/// substitute, and, unless the backend is `Autodiff<B, BalancedCheckpointing>`, `transpose`, `reshape` and other
/// changes of a parameter's shape.
///
/// # Ranks as threads
/// A rank must not run another backward pass between the forward and the backward pass of a step: burn-autodiff 0.21
/// locks all graphs of the process at its end, among them that of a rank which waits for this one to gather a block.
/// That rank then gets [`Error::Timeout`] at its deadline. Ranks that are processes may. All else in
/// [`autodiff`](crate::tensor::autodiff#ranks-as-threads) applies too.
///
/// # Checkpoints
/// [`Checkpoints`](crate::Checkpoints) save and load a pair: a [`TrainingState`](crate::TrainingState) with the model
/// of parts and its optimizer, and this. Each rank writes and reads its parts; none holds a whole parameter for it.
///
/// # Lost ranks
/// The parts on a lost rank are lost. All others get the error; continue from the last checkpoint.
pub struct FullyShardedParallel<B: AutodiffBackend> {
    /// The group of all ranks.
    main: Group,
    /// Those that keep the parts of one replica.
    shards: Group,
    layout: Arc<Layout>,
    /// The parameters of which each rank keeps a part, whole, in visiting order.
    parameters: Arc<[Parameter<B>]>,
    positions: Arc<Positions>,
    /// `None` while a step has it, and after a step that was dropped.
    engine: Option<Engine<B>>,
    steps: u64,
    counts: GatherCounts,
}

impl<B: AutodiffBackend> FullyShardedParallel<B> {
    /// Gives all ranks the parameters of rank 0 and returns the model with this rank's parts of them.
    ///
    /// All ranks must call this, each with a model of its own; it blocks until they have. Until then each rank holds
    /// a whole model. Load pretrained weights before, and create the optimizer afterwards. `mesh` is a group, all of
    /// whose ranks keep a part, or a [`DeviceMesh`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if the models differ, or the blocks that are marked in them, or if the
    /// mesh has other dimensions than `shard` and `replicate`; the group remains usable. [`Error::Config`] with the
    /// transport `mpi-blocking`. Otherwise [`Error::Io`] if a parameter cannot be read from its device, or the errors
    /// of [`Group::subgroup`].
    #[track_caller]
    pub fn new<M: AutodiffModule<B>>(mesh: impl Into<DeviceMesh>, model: M) -> Result<(M, Self), Error> {
        let mesh = mesh.into();
        let main = mesh.whole().clone();
        main.check_concurrent(OPERATION)?;
        let [shards, replicas] = mesh.shards_and_replicas(OPERATION)?;
        let (model, identities) = rebuild(model);
        let (mut described, parameters) = describe_parameters(&model);
        let blocks = Blocks::of(&model);
        for (description, block) in described.iter_mut().zip(&blocks.all) {
            if *block > 0 {
                description.what += &format!(" in block {block}");
            }
        }
        check_same_model(&main, OPERATION, &described)?;
        let model = broadcast_parameters(&main, model, identities, 0)?;
        let eager = eager(&model);
        let is_cut = |parameter: &Parameter<B>| parameter.trained || !eager.contains(&parameter.id);
        let parameters: Arc<[_]> = parameters.into_iter().filter(is_cut).collect();
        let blocks: Vec<usize> = parameters.iter().map(|parameter| blocks.floats[&parameter.id]).collect();
        let layout = Arc::new(Layout::new(&parameters, &blocks, shards.world_size(), shards.rank()));
        let positions = Arc::new(positions(&parameters));
        let mut cutter = PartCutter { layout: &layout, positions: &positions, failure: None };
        let model = model.map(&mut cutter);
        all_or_none(&main, cutter.failure.map_or(Ok(()), Err))?;
        let gathers = lane(&shards)?;
        let lanes = [lane(&shards)?, lane(&replicas)?];
        // Now, since blocks are gathered and gradients are sent in the backward pass: burn-autodiff holds a lock there
        // that other ranks of this process may need before they do the same.
        if let Some(parameter) = parameters.first() {
            let all = [&gathers, &lanes[0], &lanes[1]].into_iter().filter(|lane| lane.world_size() > 1);
            for lane in all {
                connect::<B::InnerBackend>(lane, &parameter.device)?;
            }
        }
        let gatherer = Gatherer::new(gathers, layout.clone(), parameters.clone());
        let scatterer = Scatterer::new(lanes, layout.clone(), parameters.clone(), ranks_are_processes(&main)?);
        let engine = Some(Engine { gatherer, scatterer, history: History::default(), keep: false });
        let counts = GatherCounts::default();
        Ok((model, FullyShardedParallel { main, shards, layout, parameters, positions, engine, steps: 0, counts }))
    }

    /// Keeps the parameters gathered from the forward pass to the backward pass (ZeRO-2): each block is gathered once
    /// in a step instead of twice, and the ranks need memory for all parameters. Gradients and optimizer state stay
    /// partitioned. All ranks set it.
    pub fn keep_gathered(mut self) -> Self {
        if let Some(engine) = &mut self.engine {
            engine.keep = true;
        }
        self
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> &Group {
        &self.main
    }

    /// Returns how often blocks were gathered in the last step. From the second step on, each is gathered once in each
    /// pass, and at most two are there at a time. Blocks in blocks, and steps that use blocks in another order than the
    /// step before, need more.
    pub fn gather_counts(&self) -> GatherCounts {
        self.counts
    }

    /// Returns the whole model, for evaluation or for saving it as one file. All ranks must call this; it blocks until
    /// all blocks are gathered.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if the model is not the one in training; the group remains usable.
    /// Otherwise the errors of [`Group::all_gather`].
    #[track_caller]
    pub fn gather<M: AutodiffModule<B>>(&mut self, model: &M) -> Result<M, Error> {
        let parts = all_or_none(&self.main, self.part_values("gather", model))?;
        let Some(engine) = &mut self.engine else { return Err(self.failure()) };
        let part = |position: usize| parts[position].clone().map(|part| part.into_primitive().tensor());
        let gatherer = &mut engine.gatherer;
        let mut wholes: HashMap<usize, FloatTensor<B::InnerBackend>> = HashMap::new();
        for block in 0..self.layout.blocks.len() {
            let gathered = gatherer.start(block, part).and_then(|gathering| gatherer.finish(block, gathering, false));
            let gathered = gathered.map_err(|error| self.main.abandon(gatherer.lane.abandon(error)))?;
            wholes.extend(self.layout.blocks[block].positions.iter().copied().zip(gathered));
        }
        Ok(model.clone().map(&mut WholeWriter { positions: &self.positions, wholes }))
    }

    /// Scales the gradients that a step has returned, or their accumulated sum, down to norm `max`, if their norm over
    /// all parameters and all ranks exceeds it. The norm is computed in f64, but on collective devices the squares of
    /// one gradient's part are added in its own type, or in f32 if that is narrower. All ranks must call this, with the
    /// same `max`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks unless `max` is greater than 0, finite, and the same on all; the group
    /// remains usable. Otherwise [`Error::Io`] if a gradient cannot be read, or the errors of [`Group::all_gather`].
    #[track_caller]
    pub fn clip_norm(&self, grads: GradientsParams, max: f64) -> Result<GradientsParams, Error> {
        let operation = "clip_norm";
        let own = self.sum_of_squares(&grads).map_err(|error| self.main.abandon(error))?;
        // Added in rank order on every rank, so the norms are bit-identical.
        let all = all_gather_values(&self.main, [own, max])?;
        if let Some(rank) = all.iter().position(|[_, other]| other.to_bits() != all[0][1].to_bits()) {
            let reason = format!(
                "rank 0 clips to {} and rank {rank} to {}; pass the same norm on all ranks",
                all[0][1], all[rank][1]
            );
            return Err(Error::argument(operation, reason));
        }
        if !(max > 0.0 && max.is_finite()) {
            return Err(Error::argument(operation, format!("a norm of {max} cannot be kept; give a number above 0")));
        }
        let replicas = (self.main.world_size() / self.shards.world_size()) as f64;
        let norm = (all.iter().map(|[squares, _]| squares).sum::<f64>() / replicas).sqrt();
        Ok(if norm > max { self.scaled(grads, max / norm) } else { grads })
    }

    /// Averages metrics over all ranks: see [`DataParallel::mean`](crate::DataParallel::mean).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples; the group remains usable. Otherwise the errors
    /// of [`Group::all_reduce`].
    #[track_caller]
    pub fn mean<const N: usize>(&self, values: &[f64; N], samples: usize) -> Result<[f64; N], Error> {
        mean(&self.main, values, samples)
    }

    /// Averages the states that differ between the ranks, such as running statistics: see
    /// [`DataParallel::average_states`](crate::DataParallel::average_states). It does not compare trained parameters.
    ///
    /// # Errors
    /// Those of [`Group::all_reduce`]. The model is lost then: pass a clone if you need it.
    ///
    /// # Panics
    /// If a state cannot be read from its device.
    #[track_caller]
    pub fn average_states<M: AutodiffModule<B>>(&self, model: M) -> Result<M, Error> {
        states::average(&self.main, model, |id| !self.positions.contains_key(&id))
    }

    /// Returns this rank's parts in a model, flat and by position. Fails if the model is not the one in training.
    fn part_values<M: AutodiffModule<B>>(&self, operation: &'static str, model: &M) -> Result<Values<B>, Error> {
        let parts = values_of(model, &self.positions, |position| {
            let (parameter, part) = (&self.parameters[position], &self.layout.parts[position]);
            (&part.shape, parameter.dtype)
        });
        match parts.iter().position(Option::is_none) {
            None => Ok(parts),
            Some(position) => {
                let path = &self.parameters[position].path;
                let reason = format!("the model has no part of `{path}`; pass the model in training");
                Err(Error::argument(operation, reason))
            }
        }
    }

    fn sum_of_squares(&self, grads: &GradientsParams) -> Result<f64, Error> {
        if uses_collective_devices::<B::InnerBackend>() {
            let of = |parameter: &Parameter<B>| {
                grads.get::<B::InnerBackend, 1>(parameter.id).map(|grad| grad.into_primitive().tensor())
            };
            let grads = self.parameters.iter().filter_map(of).collect();
            return sum_of_squares_on_device::<B::InnerBackend>(grads);
        }
        let mut sum = 0.0;
        for parameter in self.parameters.iter() {
            if let Some(grad) = grads.get::<B::InnerBackend, 1>(parameter.id) {
                let (source, spec) =
                    Source::read::<B::InnerBackend, Float>("reading a gradient", grad.into_primitive())?;
                sum += sum_of_squares(source.bytes(), spec.carrier);
            }
        }
        Ok(sum)
    }

    fn scaled(&self, mut grads: GradientsParams, factor: f64) -> GradientsParams {
        for parameter in self.parameters.iter() {
            if let Some(grad) = grads.remove::<B::InnerBackend, 1>(parameter.id) {
                let grad = grad.into_primitive().tensor();
                let scaled = scale_tensor::<B::InnerBackend>(grad, parameter.element, factor);
                parameter.register(scaled, &mut grads);
            }
        }
        grads
    }

    /// Why there can be no more steps.
    fn failure(&self) -> Error {
        self.main.failure().unwrap_or_else(|| Error::broken(OPERATION, "a step was dropped before its end"))
    }
}

impl<B: AutodiffBackend> fmt::Debug for FullyShardedParallel<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullyShardedParallel")
            .field("group", &self.main)
            .field("shards", &self.shards)
            .field("parameters", &self.parameters.len())
            .field("blocks", &(self.layout.blocks.len() - 1))
            .finish()
    }
}
