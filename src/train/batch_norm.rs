//! Batch normalisation with the statistics of the global batch.

use std::any::Any;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::config::Config;
use burn::module::{
    AutodiffModule, Content, Devices, DisplaySettings, EmptyRecord, Initializer, Module, ModuleDisplay,
    ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param, RunningState,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor, TensorPrimitive};

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
    pub fn init<B: Backend>(&self, device: &B::Device) -> SyncBatchNorm<B> {
        let features = [self.num_features];
        SyncBatchNorm {
            gamma: Initializer::Ones.init(features, device),
            beta: Initializer::Zeros.init(features, device),
            running_mean: RunningState::new(Tensor::zeros(features, device)),
            running_var: RunningState::new(Tensor::ones(features, device)),
            momentum: self.momentum,
            fixed: Fixed { epsilon: self.epsilon, ranks: None, weight: None, backend: PhantomData },
        }
    }
}

/// Batch normalisation over a global batch that is sharded over the ranks of a group.
///
/// In training, the ranks compute what a single rank computes with burn's `BatchNorm` and the global batch: outputs,
/// gradients of inputs and parameters, and running statistics. The running statistics are bit-identical on all ranks.
/// In inference, on a backend without autodiff, the layer uses the running statistics and does not communicate.
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
/// Ranks that are threads of one process must each build their own model and follow the rules of
/// [`tensor::autodiff`](crate::tensor::autodiff#ranks-as-threads). A clone shares running statistics with its original,
/// as with burn's layer.
///
/// Records have the fields of burn's `BatchNorm` and are interchangeable with its records. As in burn, the running
/// variance is the biased one.
///
/// # Example
/// ```
/// use bonfire::{DataParallel, Group, SyncBatchNorm, SyncBatchNormConfig};
/// use burn::backend::{Autodiff, NdArray};
/// use burn::module::{AutodiffModule, Module};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Distribution, Tensor};
/// use burn::tensor::backend::Backend;
///
/// #[derive(Module, Debug)]
/// struct Model<B: Backend> {
///     linear: Linear<B>,
///     norm: SyncBatchNorm<B>,
/// }
///
/// impl<B: Backend> Model<B> {
///     fn new(device: &B::Device) -> Self {
///         Self { linear: LinearConfig::new(4, 8).init(device), norm: SyncBatchNormConfig::new(8).init(device) }
///     }
///
///     fn forward(&self, batch: Tensor<B, 2>) -> Tensor<B, 2> {
///         self.norm.forward(self.linear.forward(batch))
///     }
/// }
///
/// let device = Default::default();
/// let group = Group::threads(1)?.remove(0);
/// let (model, _ddp) = DataParallel::new(group, Model::<Autodiff<NdArray>>::new(&device))?;
/// let gradients = model.forward(Tensor::random([5, 4], Distribution::Default, &device)).sum().backward();
/// let outputs = model.valid().forward(Tensor::random([5, 4], Distribution::Default, &device));
/// # assert!(model.norm.beta.val().grad(&gradients).is_some());
/// # assert_eq!(outputs.dims(), [5, 8]);
/// # Ok::<(), bonfire::Error>(())
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SyncBatchNorm<B: Backend> {
    /// The trained scale, of shape `[channels]`.
    pub gamma: Param<Tensor<B, 1>>,
    /// The trained offset, of shape `[channels]`.
    pub beta: Param<Tensor<B, 1>>,
    /// The running mean, of shape `[channels]`.
    pub running_mean: RunningState<Tensor<B, 1>>,
    /// The running variance (the biased one), of shape `[channels]`.
    pub running_var: RunningState<Tensor<B, 1>>,
    /// The weight of a batch in the update of the running statistics: they become
    /// `(1 - momentum) * running + momentum * batch`.
    pub momentum: f64,
    fixed: Fixed<B>,
}

impl<B: AutodiffBackend> SyncBatchNorm<B> {
    /// Sets the ranks over which the layer normalises. Those of the model's `DataParallel` do not replace them. It may
    /// be a subgroup.
    pub fn over(self, group: &Group) -> Self {
        let ranks = Some(Ranks { is_fixed: true, ..Ranks::new::<B>(group) });
        SyncBatchNorm { fixed: Fixed { ranks, ..self.fixed }, ..self }
    }
}

impl<B: Backend> SyncBatchNorm<B> {
    /// Applies the layer. In training this is a collective operation: every rank must call it, and it blocks until all
    /// have.
    ///
    /// On a backend with autodiff the layer always trains, even if no backward pass follows: validate with
    /// `model.valid()`. Inputs of f16 and bf16 are normalised in f32.
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
    /// * In training, if the layer has no [ranks](Self#ranks), or was made for another backend.
    /// * If `input` has fewer than two dimensions or another number of channels than the layer.
    #[track_caller]
    pub fn forward<const D: usize>(&self, input: Tensor<B, D>) -> Tensor<B, D> {
        let _call = self.fixed.ranks.as_ref().map(|ranks| ranks.group.enter("SyncBatchNorm::forward"));
        let [features] = self.gamma.lazy_shape().dims();
        assert!(
            D >= 2 && input.dims()[1] == features,
            "batch norm of {features} features cannot take {:?}",
            input.dims()
        );
        let dtype = input.dtype();
        let input = input.cast(if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype });

        let (mean, var) = if B::ad_enabled(&input.device()) {
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
        let per_channel = |tensor: Tensor<B, 1>| tensor.to_device(&device).cast(work).reshape(shape);
        let output = input.sub(per_channel(mean)).div(per_channel(var).add_scalar(self.fixed.epsilon).sqrt());
        output.mul(per_channel(self.gamma.val())).add(per_channel(self.beta.val())).cast(dtype)
    }

    /// Returns mean and biased variance per channel over the shards of all ranks.
    ///
    /// Uses one collective: the ranks gather their shards' means, variances and sizes, and each rank merges them as
    /// Chan, Golub and LeVeque do ("Algorithms for computing the sample variance", 1983). Unlike sums of squares, this
    /// does not subtract large numbers from each other, so f32 keeps a small variance beside a large mean. The gather
    /// is a sum of matrices that are zero except for the rank's own row: it is exact, and differentiable because the
    /// sum is.
    fn batch_statistics<const D: usize>(&self, input: Tensor<B, D>) -> Result<(Tensor<B, 1>, Tensor<B, 1>), Error> {
        let over = self.fixed.ranks.as_ref().ok_or_else(|| Error::argument("batch norm", NO_RANKS))?;
        let [ranks, rank, features] = [over.group.world_size(), over.group.rank(), input.dims()[1]];
        let weight = self.fixed.weight.clone().unwrap_or_else(|| Weight::new(input.dims()[0] as f64));
        let count = input.shape().num_elements() / features;
        // The mean of an empty shard is 0, not NaN: a NaN would survive its weight of 0. It remains part of the graph,
        // because this rank must take part in the backward pass too. `mean_dim` instead of a sum divided by a scalar:
        // burn-autodiff 0.21 rounds the gradient of such a division to f32.
        let mean = |elements: Tensor<B, 2>| if count == 0 { elements.sum_dim(1) } else { elements.mean_dim(1) };
        let channels = input.swap_dims(0, 1).reshape([features, count]);
        let own_mean = mean(channels.clone());
        let own_var = mean(channels.sub(own_mean.clone()).square());

        let options = (&own_mean.device(), own_mean.dtype());
        let own = Tensor::cat(vec![own_mean, own_var, Tensor::full([1, 1], count as f64, options)], 0).transpose();
        let width = 2 * features + 1;
        let rows = Tensor::zeros([ranks, width], options).slice_assign([rank..rank + 1, 0..width], own);
        let rows = over.sum(rows, &weight)?;

        let counts = rows.clone().slice([0..ranks, width - 1..width]).detach();
        let weights = counts.clone().div(counts.sum().unsqueeze());
        let means = rows.clone().slice([0..ranks, 0..features]);
        let vars = rows.slice([0..ranks, features..2 * features]);
        let mean = means.clone().mul(weights.clone()).sum_dim(0);
        let var = vars.add(means.sub(mean.clone()).square()).mul(weights).sum_dim(0);
        Ok((mean.reshape([features]), var.reshape([features])))
    }

    fn update(&self, running: &RunningState<Tensor<B, 1>>, batch: Tensor<B, 1>) {
        let old = running.value_sync();
        let batch = batch.detach().to_device(&old.device()).cast(old.dtype());
        running.update(old.mul_scalar(1.0 - self.momentum).add(batch.mul_scalar(self.momentum)).detach());
    }
}

impl<B: Backend> ModuleDisplay for SyncBatchNorm<B> {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [features] = self.gamma.lazy_shape().dims();
        content
            .add("num_features", &features)
            .add("momentum", &self.momentum)
            .add("epsilon", &self.fixed.epsilon)
            .optional()
    }
}

/// Properties that are neither trained nor saved. They are one field of the layer, because each field takes a position
/// in positional record formats, and burn's layer has the same number of fields.
/// burn's derive macro takes a field for a module, which mappers visit, only if its type has the parameter `B`.
#[derive(Clone, Debug)]
struct Fixed<B> {
    epsilon: f64,
    ranks: Option<Ranks>,
    /// In the model of a pass: what its loss is a mean over.
    weight: Option<Weight>,
    backend: PhantomData<B>,
}

impl<B> Fixed<B> {
    /// Returns the same properties for a layer of another backend.
    fn cast<C>(self) -> Fixed<C> {
        Fixed { epsilon: self.epsilon, ranks: self.ranks, weight: self.weight, backend: PhantomData }
    }
}

/// What mappers are told when they come to a layer, as the type of a container that they enter and leave at once.
const LAYER: &str = "bonfire::SyncBatchNorm";

/// What a mapper has for a layer.
struct Offer {
    ranks: Ranks,
    /// In the model of a pass.
    weight: Option<Weight>,
}

thread_local! {
    /// Mappers have no other way to change what is no parameter.
    static OFFERED: RefCell<Option<Offer>> = const { RefCell::new(None) };
}

/// Tells the layers of a model over which ranks it is trained, for a program that computes gradients itself. A pass
/// does so too.
pub(super) fn give_ranks<B: AutodiffBackend, M: Module<B>>(model: M, group: &Group) -> M {
    let enter = |container: &str| {
        offer::<B>(container, group, None);
    };
    map_lazily(model, enter, |_| None)
}

/// Gives a layer the ranks that train its model, and the weight of the pass whose model is being made. `container` is
/// what the mapper enters. Returns whether it is such a layer.
pub(super) fn offer<B: AutodiffBackend>(container: &str, group: &Group, weight: Option<&Weight>) -> bool {
    let is_layer = container == LAYER;
    if is_layer {
        OFFERED.set(Some(Offer { ranks: Ranks::new::<B>(group), weight: weight.cloned() }));
    }
    is_layer
}

impl<B: Backend> Module<B> for Fixed<B> {
    type Record = EmptyRecord;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        devices
    }

    fn fork(self, _: &B::Device) -> Self {
        self
    }

    fn to_device(self, _: &B::Device) -> Self {
        self
    }

    fn visit<V: ModuleVisitor<B>>(&self, _: &mut V) {}

    fn map<P: ModuleMapper<B>>(self, mapper: &mut P) -> Self {
        mapper.enter_module("", LAYER);
        mapper.exit_module("", LAYER);
        let Some(Offer { ranks, weight }) = OFFERED.take() else { return self };
        let fixed = self.ranks.filter(|ranks| ranks.is_fixed);
        Fixed {
            ranks: Some(fixed.unwrap_or(ranks)),
            weight: weight.or(self.weight),
            epsilon: self.epsilon,
            backend: PhantomData,
        }
    }

    fn load_record(self, _: Self::Record) -> Self {
        self
    }

    fn into_record(self) -> Self::Record {
        EmptyRecord
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for Fixed<B> {
    type InnerModule = Fixed<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        self.clone().cast()
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        module.cast()
    }
}

impl<B: Backend> ModuleDisplayDefault for Fixed<B> {
    fn content(&self, content: Content) -> Option<Content> {
        content.optional()
    }
}

impl<B: Backend> ModuleDisplay for Fixed<B> {}

/// The group of a layer, and the training backend's differentiable sum over it.
///
/// The layer's type is generic over all backends, but only an autodiff backend can sum, and code with the bound
/// `Backend` cannot recognise one. So the function is stored where the bound is known. It is type-erased, because
/// `valid` and `train` move the field between a layer of the autodiff backend and one of its inner backend.
#[derive(Clone, Debug)]
struct Ranks {
    group: Group,
    sum: Arc<dyn Any + Send + Sync>,
    /// Whether the program itself has set them.
    is_fixed: bool,
}

type SumFn<B> = fn(FloatTensor<B>, &Group, &Weight) -> Result<FloatTensor<B>, Error>;

impl Ranks {
    fn new<B: AutodiffBackend>(group: &Group) -> Self {
        let sum: SumFn<B> = weighted_sum::<B>;
        Ranks { group: group.clone(), sum: Arc::new(sum), is_fixed: false }
    }

    fn sum<B: Backend, const D: usize>(&self, tensor: Tensor<B, D>, weight: &Weight) -> Result<Tensor<B, D>, Error> {
        let sum = self.sum.downcast_ref::<SumFn<B>>().ok_or_else(|| {
            Error::argument("batch norm", "the layer was made for another autodiff backend than it is called on")
        })?;
        Ok(Tensor::from_primitive(TensorPrimitive::Float(sum(tensor.into_primitive().tensor(), &self.group, weight)?)))
    }
}

// burn's feature `distributed` removes the `AutodiffBackend` impl from host backends.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use burn::backend::{Autodiff, Flex, NdArray};

    use super::*;

    type Training = Autodiff<Flex>;

    fn ones<B: Backend>(channels: usize) -> Tensor<B, 3> {
        Tensor::ones([2, channels, 5], &Default::default())
    }

    fn layer() -> SyncBatchNorm<Training> {
        SyncBatchNormConfig::new(3).init(&Default::default()).over(&Group::threads(1).expect("a group")[0])
    }

    #[test]
    #[should_panic(expected = "batch norm of 3 features cannot take [2, 4, 5]")]
    fn another_number_of_channels_is_refused() {
        layer().forward(ones(4));
    }

    #[test]
    fn defaults_are_those_of_burn() {
        let (ours, burns) = (SyncBatchNormConfig::new(3), burn::nn::BatchNormConfig::new(3));
        assert_eq!((ours.epsilon, ours.momentum), (burns.epsilon, burns.momentum));
    }

    #[test]
    fn a_layer_moved_to_a_foreign_backend_does_not_train() {
        let foreign = SyncBatchNorm::<Autodiff<NdArray<f64>>> {
            fixed: layer().fixed.cast(),
            ..SyncBatchNormConfig::new(3).init(&Default::default())
        };
        assert!(matches!(foreign.batch_statistics(ones(3)), Err(Error::InvalidArgument { .. })));
    }

    #[test]
    fn one_value_per_channel_gives_beta() {
        let input = Tensor::<Training, 2>::full([1, 3], 5.0, &Default::default());
        assert_eq!(layer().forward(input).into_data().iter::<f64>().collect::<Vec<_>>(), [0.0; 3]);
    }
}
