//! Batch normalisation with the statistics of the global batch.

use std::cell::RefCell;

use burn::config::Config;
use burn::module::{
    Content, Devices, DisplaySettings, Flag, Initializer, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, Param, RunningState,
};
use burn::tensor::{DType, Device, Tensor};

use super::walk::map_lazily;
use crate::tensor::autodiff::weighted_sum;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};
use bonfire_train::step::layers::{Weight, fail};

const NO_RANKS: &str = "the layer does not know the ranks over which it normalises; train the model that \
                        `DataParallel::new` returns, or call `SyncBatchNorm::over`";

/// Configuration of a [`SyncBatchNorm`], with the fields and defaults of burn's `BatchNormConfig`.
#[derive(Config, Debug)]
pub struct SyncBatchNormConfig {
    /// The number of features, that is, channels.
    pub num_features: usize,
    /// Added to the variance for numerical stability. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// The weight of a batch in the update of the running statistics. Default: 0.1
    #[config(default = 0.1)]
    pub momentum: f64,
}

impl SyncBatchNormConfig {
    /// Makes a layer with scale 1, offset 0, running mean 0 and running variance 1. Before it trains, it needs
    /// [ranks](SyncBatchNorm#ranks).
    pub fn init(&self, device: &Device) -> SyncBatchNorm {
        let features = [self.num_features];
        SyncBatchNorm {
            gamma: Initializer::Ones.init(features, device),
            beta: Initializer::Zeros.init(features, device),
            training: Param::from_bool(true),
            running_mean: RunningState::new(Tensor::zeros(features, device)),
            running_var: RunningState::new(Tensor::ones(features, device)),
            momentum: self.momentum,
            epsilon: self.epsilon,
            over: OverRanks::default(),
        }
    }
}

/// Batch normalisation over a global batch that is sharded over the ranks of a group.
///
/// In training, the ranks compute what a single rank computes with burn's `BatchNorm` and the global batch: outputs,
/// gradients of inputs and parameters, and running statistics. The running statistics are bit-identical on all ranks.
/// In inference the layer uses the running statistics and does not communicate: on a device without autodiff, and where
/// it is [frozen](burn::module::Module::freeze), which all ranks do alike.
///
/// The global loss is the mean of the ranks' losses, weighted by what each is a mean over. In a pass
/// ([`DataParallel::run`](crate::DataParallel::run)) that is the weight of the pass. Outside of passes it is the number
/// of rows of the layer's input, so a rank's loss must be a mean over these: average the gradients with the same
/// weights, as [`DataParallel::sync`](crate::DataParallel::sync) does.
///
/// # Ranks
/// [`DataParallel`](crate::DataParallel) and [`FullyShardedParallel`](crate::FullyShardedParallel) tell the layers of
/// their model over which ranks it is trained, also after a [`shrink`](crate::DataParallel::shrink). A layer of a model
/// that is trained without them gets its ranks by [`over`](Self::over).
///
/// All ranks must call the forward and backward passes of their layers the same number of times and in the same order.
/// Ranks that are threads of one process must each build their own model. A clone shares running statistics with its
/// original, as with burn's layer.
///
/// Records have the fields of burn's `BatchNorm`. As in burn, the running variance is the biased one.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SyncBatchNorm {
    /// The trained scale, of shape `[channels]`.
    pub gamma: Param<Tensor<1>>,
    /// The trained offset, of shape `[channels]`.
    pub beta: Param<Tensor<1>>,
    /// Whether the layer trains.
    pub training: Param<Flag>,
    /// The running mean, of shape `[channels]`.
    pub running_mean: RunningState<Tensor<1>>,
    /// The running variance (the biased one), of shape `[channels]`.
    pub running_var: RunningState<Tensor<1>>,
    /// The weight of a batch in the update of the running statistics: they become
    /// `(1 - momentum) * running + momentum * batch`.
    pub momentum: f64,
    /// Added to the variance for numerical stability.
    pub epsilon: f64,
    over: OverRanks,
}

impl SyncBatchNorm {
    /// Sets the ranks over which the layer normalises. Those of the model's `DataParallel` do not replace them. It may
    /// be a subgroup.
    pub fn over(self, group: &Group) -> Self {
        let ranks = Some(Ranks { group: group.clone(), is_fixed: true });
        SyncBatchNorm { over: OverRanks { ranks, ..self.over }, ..self }
    }

    /// Applies the layer. In training this is a collective operation: every rank must call it, and it blocks until all
    /// have.
    ///
    /// On a device with autodiff the layer trains, even if no backward pass follows: validate with `model.valid()`.
    /// Inputs of f16 and bf16 are normalised in f32.
    ///
    /// # Shapes
    /// - `input`: `[batch_size, channels, ...]`. `batch_size` and the dimensions after `channels` may differ between
    ///   ranks, and `batch_size` may be 0 on some, but not on all: the statistics would be NaN.
    /// - output: that of `input`
    ///
    /// # Panics
    /// * If the collective fails, here or in the backward pass, with the text of the [`Error`].
    ///   [`attempt`](crate::tensor::autodiff::attempt) turns this panic into an error. After a failure here the running
    ///   statistics are unchanged.
    /// * In training, if the layer has no [ranks](Self#ranks).
    /// * If `input` has fewer than two dimensions or another number of channels than the layer.
    #[track_caller]
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let _call = self.over.ranks.as_ref().map(|ranks| ranks.group.enter("SyncBatchNorm::forward"));
        let [features] = self.gamma.lazy_shape().dims();
        assert!(
            D >= 2 && input.dims()[1] == features,
            "batch norm of {features} features cannot take {:?}",
            input.dims()
        );
        let dtype = input.dtype();
        let input = input.cast(if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype });

        let (mean, var) = if input.device().is_autodiff() && self.training.is_enabled() {
            let (mean, var) = self.batch_statistics(input.clone()).unwrap_or_else(|error| fail(error));
            self.update(&self.running_mean, mean.clone());
            self.update(&self.running_var, var.clone());
            (mean, var)
        } else {
            (self.running_mean.value(), self.running_var.value())
        };

        let (work, device) = (input.dtype(), input.device());
        let mut shape = [1; D];
        shape[1] = features;
        let per_channel = |tensor: Tensor<1>| tensor.to_device(&device).cast(work).reshape(shape);
        let output = input.sub(per_channel(mean)).div(per_channel(var).add_scalar(self.epsilon).sqrt());
        output.mul(per_channel(self.gamma.val())).add(per_channel(self.beta.val())).cast(dtype)
    }

    /// Returns mean and biased variance per channel over the shards of all ranks.
    ///
    /// Uses one collective: the ranks gather their shards' means, variances and sizes, and each rank merges them as
    /// Chan, Golub and LeVeque do ("Algorithms for computing the sample variance", 1983). Unlike sums of squares, this
    /// does not subtract large numbers from each other, so f32 keeps a small variance beside a large mean. The gather
    /// is a sum of matrices that are zero except for the rank's own row: it is exact, and differentiable because the
    /// sum is.
    fn batch_statistics<const D: usize>(&self, input: Tensor<D>) -> Result<(Tensor<1>, Tensor<1>), Error> {
        let OverRanks { ranks, weight } = &self.over;
        let group = match ranks {
            Some(ranks) => &ranks.group,
            None => return Err(Error::argument("batch norm", NO_RANKS)),
        };
        let [ranks, rank, features] = [group.world_size(), group.rank(), input.dims()[1]];
        let weight = weight.clone().unwrap_or_else(|| Weight::new(input.dims()[0] as f64));
        let count = input.shape().num_elements() / features;
        // The mean of an empty shard is 0, not NaN: a NaN would survive its weight of 0. It remains part of the graph,
        // because this rank must take part in the backward pass too.
        let mean = |elements: Tensor<2>| {
            if count == 0 { elements.sum_dim(1) } else { elements.mean_dim(1) }
        };
        let channels = input.swap_dims(0, 1).reshape([features, count]);
        let own_mean = mean(channels.clone());
        let own_var = mean(channels.sub(own_mean.clone()).square());

        let options = (&own_mean.device(), own_mean.dtype());
        let own = Tensor::cat(vec![own_mean, own_var, Tensor::full([1, 1], count as f64, options)], 0).transpose();
        let width = 2 * features + 1;
        let rows = Tensor::zeros([ranks, width], options).slice_assign([rank..rank + 1, 0..width], own);
        let rows = weighted_sum(rows, group, &weight)?;

        let counts = rows.clone().slice([0..ranks, width - 1..width]).detach();
        let weights = counts.clone().div(counts.sum().unsqueeze());
        let means = rows.clone().slice([0..ranks, 0..features]);
        let vars = rows.slice([0..ranks, features..2 * features]);
        let mean = means.clone().mul(weights.clone()).sum_dim(0);
        let var = vars.add(means.sub(mean.clone()).square()).mul(weights).sum_dim(0);
        Ok((mean.reshape([features]), var.reshape([features])))
    }

    fn update(&self, running: &RunningState<Tensor<1>>, batch: Tensor<1>) {
        let old = running.value_sync();
        let batch = batch.detach().to_device(&old.device()).cast(old.dtype());
        running.update(old.mul_scalar(1.0 - self.momentum).add(batch.mul_scalar(self.momentum)).detach());
    }
}

impl ModuleDisplay for SyncBatchNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [features] = self.gamma.lazy_shape().dims();
        let content = content.add("num_features", &features).add("momentum", &self.momentum);
        let content = content.add("epsilon", &self.epsilon);
        // As burn's layer.
        match self.training.is_enabled() {
            true => content.optional(),
            false => content.add("training", &self.training).optional(),
        }
    }
}

/// The ranks of a layer. It is a module without parameters, because only modules are told what a mapper has.
#[derive(Clone, Debug, Default)]
struct OverRanks {
    ranks: Option<Ranks>,
    /// In the model of a pass: what its loss is a mean over.
    weight: Option<Weight>,
}

#[derive(Clone, Debug)]
struct Ranks {
    group: Group,
    /// Whether the program itself has set them.
    is_fixed: bool,
}

/// What mappers are told when they come to a layer, as the type of a container that they enter and leave at once.
const LAYER: &str = "bonfire::SyncBatchNorm";

/// What a mapper has for a layer.
struct Offer {
    ranks: Group,
    /// In the model of a pass.
    weight: Option<Weight>,
}

thread_local! {
    /// Mappers have no other way to change what is no parameter.
    static OFFERED: RefCell<Option<Offer>> = const { RefCell::new(None) };
}

/// Tells the layers of a model over which ranks it is trained, for a program that computes gradients itself. A pass
/// does so too.
pub(super) fn give_ranks<M: Module>(model: M, group: &Group) -> M {
    let enter = |container: &str| {
        offer(container, group, None);
    };
    map_lazily(model, enter, |_| None)
}

/// Gives a layer the ranks that train its model, and the weight of the pass whose model is being made. `container` is
/// what the mapper enters. Returns whether it is such a layer.
pub(super) fn offer(container: &str, group: &Group, weight: Option<&Weight>) -> bool {
    let is_layer = container == LAYER;
    if is_layer {
        OFFERED.set(Some(Offer { ranks: group.clone(), weight: weight.cloned() }));
    }
    is_layer
}

impl Module for OverRanks {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _: &mut V) {}

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        mapper.enter_module("", LAYER);
        mapper.exit_module("", LAYER);
        let Some(Offer { ranks: group, weight }) = OFFERED.take() else { return self };
        let fixed = self.ranks.filter(|ranks| ranks.is_fixed);
        let ranks = fixed.unwrap_or(Ranks { group, is_fixed: false });
        OverRanks { ranks: Some(ranks), weight: weight.or(self.weight) }
    }
}

impl ModuleDisplayDefault for OverRanks {
    fn content(&self, content: Content) -> Option<Content> {
        content.optional()
    }
}

impl ModuleDisplay for OverRanks {}
