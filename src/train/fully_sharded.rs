//! Fully sharded data parallelism (ZeRO-3, and ZeRO-2 by option): every rank keeps a part of each parameter, of its
//! gradient, and of its optimizer state.

mod checkpoint;
mod model;

use std::fmt;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;

use self::model::{cut, eager, gathered_at_use, restored};
use super::adapter::{BurnTensors, handle};
use super::model::{InModel, Needs, Parameters, broadcast_parameters, rebuild};
use super::parts::{Parts, Sharded};
use super::pass::{Fault, Form, LastPass, Open, Pass};
use super::states;
use crate::tensor::autodiff::hook::check_backend;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};
use bonfire_train::DeviceMesh;
use bonfire_train::agree::all_or_none;
pub use bonfire_train::gather::GatherCounts;
use bonfire_train::gather::GatherSteps;
use bonfire_train::lane::Tensor as Handle;
use bonfire_train::parameters::check_same_model;
use bonfire_train::protocol::{Header, Refusal};
use bonfire_train::step::layers::{Layers, Weight};
use bonfire_train::step::{Groups, Outcome, PassWeight};

const OPERATION: &str = "full sharding";

/// Trains a model of which every rank keeps a part (ZeRO-3, known as FSDP). Each rank has one.
///
/// Use it when model, gradients and optimizer state are too large for every rank. Of `n` ranks each keeps `1 / n` of
/// every parameter: a part along its first dimension, padded with zeros where that does not divide. [`new`](Self::new)
/// returns the model with these parts. burn's optimizers work on it as on any model, so their state has the size of the
/// parts too. In a pass, the parameters of a [`ShardedBlock`](crate::ShardedBlock) are gathered as one operation when
/// the forward pass comes to it, freed after it, and gathered again in the backward pass, while the block before
/// computes. Its gradients leave as soon as they are complete, and each rank gets the mean of its part.
///
/// The passes are those of [`DataParallel`](crate::DataParallel), with these differences. They return [`Parts`]. One
/// pass is open at a time, because what it gathers is. Each pass reduces its gradients, so a rank keeps parts of them
/// only. Ranks run their passes together: the first of all ranks, then the second, and so on. A rank that runs fewer
/// passes than others, or none ([`skip`](Self::skip)), takes part in the gathers of theirs.
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
///     let (mut model, fsdp) = FullyShardedParallel::new(group, Model::<B> { layers, head: linear(1) })?;
///     let mut optimizer = AdamConfig::new().init();
///     for _ in 0..3 {
///         let input = Tensor::<B, 2>::ones([5, 8], &device); // this rank's samples
///         let parts = fsdp.run(&model, [input], |model, input| (model.forward(input).mean(), 5))?.clip_norm(1.0)?;
///         model = optimizer.step(1e-3, model, parts.for_optimizer(&optimizer)?);
///     }
///     fsdp.gather(&model)
/// }
///
/// let models = bonfire::launch(2, train)?;
/// assert_eq!(models[0].head.weight.to_data(), models[1].head.weight.to_data());
/// # Ok::<(), bonfire::launch::Failed>(())
/// ```
///
/// The model of parts is for passes, [`gather`](Self::gather) and the optimizer. Its own forward pass would compute
/// with parts: burn panics where their shapes do not fit, and a step whose backward pass comes to a part returns an
/// error. So a penalty on weights uses the pass's model.
///
/// Parameters that are in no block are gathered as one more block when the first of them is used, and stay until the
/// end of the pass. A model without marks is that one block.
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
/// decay and clipping. An optimizer sees parts of parameters, so gradients are [`Parts`], which
/// [`for_optimizer`](Parts::for_optimizer) makes those of one optimizer: it clips as the optimizer is set to, and
/// refuses one that mixes the elements of a parameter, such as `Muon`. No step compares the ranks' optimizers and
/// learning rates; [`Checkpoints::verify`](crate::Checkpoints::verify) and every save do.
///
/// # What stays gathered
/// burn keeps what a backward step needs. Of most operations that is a recipe to gather the parameter again. Others
/// keep the whole parameter until the backward pass: burn's `Embedding`, for which [`embedding`](super::embedding) is a
/// substitute, and, unless the backend is `Autodiff<B, BalancedCheckpointing>`, `transpose`, `reshape` and other
/// changes of a parameter's shape.
///
/// # Ranks as threads
/// A rank must not run another backward pass between the forward and the backward pass of a pass: burn-autodiff 0.21
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
    pub(super) steps: GatherSteps,
    /// Those of which each rank keeps a part, as they are whole.
    parameters: Parameters<B>,
    of: Arc<Sharded<B>>,
}

impl<B: AutodiffBackend> FullyShardedParallel<B> {
    /// Gives all ranks the parameters of rank 0 and returns the model with this rank's parts of them.
    ///
    /// All ranks must call this, each with a model of its own; it blocks until they have. Until then each rank holds
    /// a whole model. Load pretrained weights before, and create the optimizer afterwards. `mesh` is a group, all of
    /// whose ranks keep a part, or a [`DeviceMesh`]. Of what is logged see
    /// [`DataParallel::new`](crate::DataParallel::new).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if the models differ, or the blocks that are marked in them, or if the
    /// mesh has other dimensions than `shard` and `replicate`; the group remains usable. The same for an autodiff
    /// backend that is not burn's. [`Error::Config`] with the transport `mpi-blocking`. Otherwise [`Error::Io`] if a
    /// parameter cannot be read from its device, or the errors of [`Group::subgroup`].
    #[track_caller]
    pub fn new<M: AutodiffModule<B>>(mesh: impl Into<DeviceMesh>, model: M) -> Result<(M, Self), Error> {
        check_backend::<B>(OPERATION)?;
        let mesh = mesh.into();
        let _call = mesh.whole().enter("FullyShardedParallel::new");
        mesh.whole().check_concurrent(OPERATION)?;
        let groups = Groups::sharded(&mesh, OPERATION)?;
        let needs = Needs::of(&model);
        let (model, identities) = rebuild(model);
        let (described, parameters) = Parameters::in_blocks(&model);
        check_same_model(&groups.main, OPERATION, &described)?;
        let model = broadcast_parameters(&groups.main, model, identities, 0)?;
        needs.warn(&groups.main, OPERATION, &parameters);
        let eager = eager(&model);
        let is_cut = |parameter: &&_| {
            let parameter: &super::model::Parameter<B> = parameter;
            parameter.trained || !eager.contains(&parameter.id)
        };
        let parameters: Parameters<B> = parameters.iter().filter(is_cut).cloned().collect();
        let blocks: Vec<usize> = parameters.iter().map(|parameter| parameter.block).collect();
        let tensors = BurnTensors::of(&parameters);
        let steps = GatherSteps::new(groups.clone(), parameters.described(), &blocks, tensors.clone())?;
        let layout = steps.layout().clone();
        let cut = cut(model, &parameters, &layout);
        let model = all_or_none(&groups.main, cut)?;
        let of = Arc::new(Sharded { groups, parameters: parameters.clone(), tensors, layout });
        Ok((model, FullyShardedParallel { steps, parameters, of }))
    }

    /// Keeps the parameters gathered from the forward pass to the backward pass (ZeRO-2): each block is gathered once
    /// in a pass instead of twice, and the ranks need memory for all parameters. Gradients and optimizer state stay
    /// partitioned. All ranks set it.
    pub fn keep_gathered(self) -> Self {
        self.steps.keep_gathered();
        self
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> &Group {
        &self.steps.groups().main
    }

    /// Returns how often blocks were gathered in the last step. From the second step on, each is gathered once in each
    /// pass, forward and backward, and at most two are there at a time. Blocks in blocks, and passes that use blocks in
    /// another order than the pass before, need more.
    pub fn gather_counts(&self) -> GatherCounts {
        self.steps.counts()
    }

    /// Makes a step with a pass for each batch, and returns this rank's parts of the mean gradients: see
    /// [`DataParallel::run`](crate::DataParallel::run).
    ///
    /// # Errors
    /// See [`LastPass::finish`]; [`Error::Mismatch`] on all ranks if they have used different blocks in a pass.
    #[track_caller]
    pub fn run<M: AutodiffModule<B>, T, W: PassWeight>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        mut loss: impl FnMut(&M, T) -> (Tensor<B, 1>, W),
    ) -> Result<Parts<B>, Error> {
        let _call = self.group().enter("FullyShardedParallel::run");
        self.try_run(model, batches, |model, batch| Ok(loss(model, batch)))
    }

    /// As [`run`](Self::run), with a closure that may fail. Then all ranks get an error with its text, and the groups
    /// have failed: other ranks may wait for this one to gather blocks.
    ///
    /// # Errors
    /// That error, and those of `run`.
    #[track_caller]
    pub fn try_run<M: AutodiffModule<B>, T, W: PassWeight>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        loss: impl FnMut(&M, T) -> Result<(Tensor<B, 1>, W), Fault>,
    ) -> Result<Parts<B>, Error> {
        let _call = self.group().enter("FullyShardedParallel::try_run");
        Ok(Parts::new(Form::run(self, model, batches, loss)?, self.of.clone()))
    }

    /// Begins a pass that is not the last one of its step on this rank: see
    /// [`DataParallel::pass`](crate::DataParallel::pass). Its end waits for the other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] while another pass is open. Those of the step before, if that has failed.
    #[track_caller]
    pub fn pass<M: AutodiffModule<B>>(&self, model: &M, weight: impl PassWeight) -> Result<Pass<B, M>, Error> {
        let _call = self.group().enter("FullyShardedParallel::pass");
        self.begin(model, false)?.weigh(weight.value()).map(Pass)
    }

    /// Begins the last pass of a step on this rank: see [`DataParallel::last_pass`](crate::DataParallel::last_pass).
    ///
    /// # Errors
    /// See [`pass`](Self::pass). Errors of the step come from [`finish`](LastPass::finish).
    #[track_caller]
    pub fn last_pass<M: AutodiffModule<B>>(
        &self,
        model: &M,
        weight: impl PassWeight,
    ) -> Result<LastPass<B, M, Parts<B>>, Error> {
        let _call = self.group().enter("FullyShardedParallel::last_pass");
        let of = self.of.clone();
        let open = self.begin(model, true)?.weigh(weight.value())?;
        Ok(LastPass { open, result: Box::new(|means| Parts::new(means, of)) })
    }

    /// Makes a step, or what is left of it, on a rank that has no more data for it. It takes part in the passes of the
    /// others, and its result is its parts of their mean.
    ///
    /// # Errors
    /// See [`LastPass::finish`].
    #[track_caller]
    pub fn skip<M: AutodiffModule<B>>(&self, model: &M) -> Result<Parts<B>, Error> {
        let _call = self.group().enter("FullyShardedParallel::skip");
        self.join(model)?.ok_or_else(|| Refusal::NoSamples.error("skip", &[]))
    }

    /// Takes part in a step of ranks that still have data, when this rank's has ended: see
    /// [`DataParallel::join`](crate::DataParallel::join).
    ///
    /// # Errors
    /// See [`LastPass::finish`].
    #[track_caller]
    pub fn join<M: AutodiffModule<B>>(&self, model: &M) -> Result<Option<Parts<B>>, Error> {
        let _call = self.group().enter("FullyShardedParallel::join");
        Ok(match Form::skip(self, model)? {
            Outcome::NoSamples => None,
            Outcome::Gradients(means) => Some(Parts::new(means, self.of.clone())),
        })
    }

    /// Returns the whole model, for evaluation or for saving it as one file. All ranks must call this; it blocks until
    /// all blocks are gathered.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if the model is not the one in training, if ranks that have the same
    /// parts differ in them, or while a pass is open; the group remains usable. Otherwise the errors of
    /// [`Group::all_gather`].
    #[track_caller]
    pub fn gather<M: AutodiffModule<B>>(&self, model: &M) -> Result<M, Error> {
        let _call = self.group().enter("FullyShardedParallel::gather");
        let own = self.in_model(model);
        let parts = all_or_none(self.group(), self.own_parts("gather", &own))?;
        if self.of.groups.replicas.world_size() > 1 {
            let digests = own.digests().map_err(|error| self.of.groups.abandon(error))?;
            self.steps.compare("gather", &digests)?;
        }
        let wholes = self.steps.gather(&parts)?;
        Ok(restored(model, &self.parameters, wholes))
    }

    /// Whether the program should stop: see [`DataParallel::should_stop`](crate::DataParallel::should_stop).
    pub fn should_stop(&self) -> bool {
        self.steps.should_stop()
    }

    /// Averages metrics over all ranks: see [`DataParallel::mean`](crate::DataParallel::mean).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples, or if a weight is negative or not finite; the
    /// group remains usable. Otherwise the errors of [`Group::all_reduce`].
    #[track_caller]
    pub fn mean<const N: usize>(&self, values: &[f64; N], weight: impl PassWeight) -> Result<[f64; N], Error> {
        let _call = self.group().enter("FullyShardedParallel::mean");
        self.steps.groups().mean(values, weight.value())
    }

    /// Averages the states that differ between the ranks, such as running statistics: see
    /// [`DataParallel::average_states`](crate::DataParallel::average_states). It does not compare trained parameters.
    ///
    /// # Errors
    /// Those of [`Group::all_reduce`], and [`Error::Io`] if a state cannot be read from its device. The model is lost
    /// then: pass a clone if you need it.
    #[track_caller]
    pub fn average_states<M: AutodiffModule<B>>(&self, model: M) -> Result<M, Error> {
        let _call = self.group().enter("FullyShardedParallel::average_states");
        states::average(self.group(), model, |id| self.parameters.position(id).is_none())
    }

    /// Returns this rank's parts in a model.
    fn in_model<M: AutodiffModule<B>>(&self, model: &M) -> InModel<B> {
        self.parameters.in_model(model, |position| self.of.layout.shape(position))
    }

    /// Returns this rank's parts in a model, which must be the one in training.
    fn own_parts(&self, operation: &str, own: &InModel<B>) -> Result<Vec<Option<Handle>>, Error> {
        if let Some(position) = own.values.iter().position(Option::is_none) {
            let path = &self.parameters[position].path;
            let reason = format!("the model has no part of `{path}`; pass the model in training");
            return Err(Error::argument(operation, reason));
        }
        Ok(handles::<B>(&own.values))
    }

    fn header(&self, own: &InModel<B>) -> Result<(Header, Vec<Option<Handle>>), Error> {
        let mut header = own.header(&self.parameters, true);
        if self.steps.comparison_is_due(&header.trained) {
            header.digests = Some(own.digests().map_err(|error| self.of.groups.abandon(error))?);
        }
        Ok((header, handles::<B>(&own.values)))
    }
}

fn handles<B: AutodiffBackend>(parts: &[Option<FloatTensor<B>>]) -> Vec<Option<Handle>> {
    parts.iter().map(|part| part.clone().map(|part| handle::<B::InnerBackend>(B::inner(part)))).collect()
}

impl<B: AutodiffBackend> Form<B> for FullyShardedParallel<B> {
    #[track_caller]
    fn begin<M: AutodiffModule<B>>(&self, model: &M, is_last: bool) -> Result<Open<B, M>, Error> {
        let own = self.in_model(model);
        let (header, parts) = self.header(&own)?;
        let pass = self.steps.pass(header, parts, is_last)?;
        let weight = Weight::default();
        let (model, nodes) = gathered_at_use(model, &self.parameters, &self.steps, &pass.hooks(), &weight);
        let parameters = self.parameters.clone();
        // All ranks wait at the end of a pass anyway.
        Ok(Open {
            model,
            engine: Box::new(pass),
            weight,
            nodes,
            own,
            parameters,
            layers: Layers::new(&Arc::new(true.into())),
            barrier: None,
        })
    }

    #[track_caller]
    fn skip<M: AutodiffModule<B>>(&self, model: &M) -> Result<Outcome, Error> {
        let (header, parts) = self.header(&self.in_model(model))?;
        self.steps.skip(header, parts)
    }
}

impl<B: AutodiffBackend> fmt::Debug for FullyShardedParallel<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullyShardedParallel")
            .field("groups", self.steps.groups())
            .field("parameters", &self.parameters.len())
            .field("blocks", &self.parameters.iter().map(|parameter| parameter.block).max().unwrap_or(0))
            .finish()
    }
}
