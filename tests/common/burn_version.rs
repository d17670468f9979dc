//! What tests that both packages share need of burn 0.21: names for its types, models, gradients and optimizers.
//! `burn-0.22/tests/common/burn_version.rs` has the same names for burn 0.22.
//!
//! Shared tests train on Flex. burn 0.21 names the backend in each type, and 0.22 in none.
#![allow(dead_code, unused_imports, reason = "each test target uses a part of it")]

pub use bonfire::{ShardedOptimizer, tensor::autodiff::attempt};
pub use burn::lr_scheduler::LrScheduler;
pub use burn::module::{AutodiffModule, Module};
pub use burn::optim::Optimizer;

use bonfire::{Error, Sharding};
use burn::backend::{Autodiff, Flex};
use burn::module::{HasAutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, GradientsParams, Muon, Sgd, SimpleOptimizer};
use burn::record::{DoublePrecisionSettings, NamedMpkBytesRecorder, Record, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend, BackendTypes};
use burn::tensor::quantization::{QuantLevel, QuantParam, QuantScheme, QuantValue};
use burn::tensor::{DType, Float, Int, Shape, TensorData};

pub type Training = Autodiff<Flex>;
pub type Device = <Training as BackendTypes>::Device;
pub type Gradients = <Training as AutodiffBackend>::Gradients;
pub type Tensor<const D: usize, K = Float> = burn::tensor::Tensor<Training, D, K>;
/// A tensor without autodiff.
pub type Inner<const D: usize, K = Float> = burn::tensor::Tensor<Flex, D, K>;

pub type BatchNorm<B = Training> = burn::nn::BatchNorm<B>;
pub type Conv2d<B = Training> = burn::nn::conv::Conv2d<B>;
pub type Embedding<B = Training> = burn::nn::Embedding<B>;
pub type LayerNorm<B = Training> = burn::nn::LayerNorm<B>;
pub type Linear<B = Training> = burn::nn::Linear<B>;
pub type MultiHeadAttention<B = Training> = burn::nn::attention::MultiHeadAttention<B>;
pub type SyncBatchNorm<B = Training> = bonfire::SyncBatchNorm<B>;
pub type TransformerEncoder<B = Training> = burn::nn::transformer::TransformerEncoder<B>;

pub type DataParallel = bonfire::DataParallel<Training>;
pub type FullyShardedParallel = bonfire::FullyShardedParallel<Training>;
pub type Parts = bonfire::Parts<Training>;
pub type Pass<M> = bonfire::train::Pass<Training, M>;
pub type LastPass<M, G = GradientsParams> = bonfire::train::LastPass<Training, M, G>;
pub type AdamOf<M> = OptimizerAdaptor<Adam, M, Training>;
pub type SgdOf<M> = OptimizerAdaptor<Sgd<Flex>, M, Training>;
pub type MuonOf<M> = OptimizerAdaptor<Muon<Flex>, M, Training>;
pub type ShardedAdam<M> = bonfire::ShardedOptimizer<Adam, M, Training>;
pub type ShardedSgd<M> = bonfire::ShardedOptimizer<Sgd<Flex>, M, Training>;

/// What a refused Muon is called.
pub const MUON: &str = "`Muon` updates an element by others of its parameter";

/// Whether a model takes two backward passes: burn 0.22 panics in the second.
pub const TWO_BACKWARD_PASSES: bool = true;

/// Parameters of which it is not clear whether they are trained. `None` if it is clear.
pub struct Unclear {
    /// Whether one is trained whose tensor is the result of an operation.
    pub mapped: bool,
    /// The weight of a layer whose columns are contiguous, which burn 0.21 transposes after it has made a leaf of it.
    pub columns: Option<bool>,
    /// One whose tensor needs a gradient, and which was made of one that does not.
    pub needy: Option<bool>,
}

pub const UNCLEAR: Unclear = Unclear { mapped: false, columns: Some(true), needy: None };

/// A model in training.
pub trait Model: AutodiffModule<Training> {}

impl<M: AutodiffModule<Training>> Model for M {}

/// Declares models. Their fields are parameters, modules that this module names, other such models, and `Vec`s,
/// `Option`s and `ShardedBlock`s of these, without a backend: burn 0.21 derives `Module` for types with the parameter
/// `B: Backend` only.
macro_rules! models {
    ($($(#[$attribute:meta])* $visible:vis struct $name:ident { $($fields:tt)* })*) => {
        $(crate::burn_version::with_backend! { [$(#[$attribute])* $visible struct $name] [] $($fields)* })*
    };
}

/// Gives the types of fields their backend, one token after the other.
macro_rules! with_backend {
    ([$($head:tt)*] [$($done:tt)*]) => {
        #[derive(burn::module::Module, Debug)]
        $($head)*<B: burn::tensor::backend::Backend = crate::burn_version::Training> { $($done)* }
    };
    ($head:tt [$($done:tt)*] $field:ident : $($rest:tt)*) => {
        crate::burn_version::with_backend! { $head [$($done)* $field:] $($rest)* }
    };
    ($head:tt [$($done:tt)*] pub $($rest:tt)*) => {
        crate::burn_version::with_backend! { $head [$($done)* pub] $($rest)* }
    };
    ($head:tt [$($done:tt)*] Tensor < $dimensions:literal, $kind:ident $($rest:tt)*) => {
        crate::burn_version::with_backend! { $head [$($done)* burn::tensor::Tensor<B, $dimensions, $kind] $($rest)* }
    };
    ($head:tt [$($done:tt)*] Tensor < $($rest:tt)*) => {
        crate::burn_version::with_backend! { $head [$($done)* burn::tensor::Tensor<B,] $($rest)* }
    };
    // A type that contains one with a backend.
    ($head:tt [$($done:tt)*] $outer:ident < $($rest:tt)*) => {
        crate::burn_version::with_backend! { $head [$($done)* $outer<] $($rest)* }
    };
    // A module.
    ($head:tt [$($done:tt)*] $module:ident $($rest:tt)*) => {
        crate::burn_version::with_backend! { $head [$($done)* $module<B>] $($rest)* }
    };
    ($head:tt [$($done:tt)*] $other:tt $($rest:tt)*) => {
        crate::burn_version::with_backend! { $head [$($done)* $other] $($rest)* }
    };
}
pub(crate) use {models, with_backend};

/// The device of models in training.
pub fn device() -> Device {
    Device::default()
}

/// The device of tensors without autodiff.
pub fn inner_device() -> Device {
    Device::default()
}

/// What burn 0.22 has of tensor data in place of public fields.
pub trait Described {
    fn dtype(&self) -> DType;
    fn shape(&self) -> &Shape;
}

impl Described for TensorData {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> &Shape {
        &self.shape
    }
}

fn scheme() -> QuantScheme {
    QuantScheme::default().with_value(QuantValue::Q8S).with_level(QuantLevel::Tensor).with_param(QuantParam::F32)
}

/// Returns a tensor of eight bits for each element. burn 0.21 quantises, and computes with what is quantised, without
/// autodiff only.
pub fn quantised<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    Tensor::from_inner(tensor.inner().quantize_dynamic(&scheme()))
}

pub fn dequantised<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    Tensor::from_inner(tensor.inner().dequantize())
}

/// Looks words up so that a block frees its table.
pub fn embed(table: &Embedding, words: Tensor<2, Int>) -> Tensor<3> {
    bonfire::train::embedding(table.weight.val(), words)
}

fn record<B: Backend>(record: impl Record<B>) -> Vec<u8> {
    let recorder = NamedMpkBytesRecorder::<DoublePrecisionSettings>::default();
    Recorder::<B>::record(&recorder, record, ()).expect("recorded")
}

/// Returns an inference copy of a model as one in training again.
pub fn in_training<M: Module<Flex> + HasAutodiffModule<Training>>(model: M) -> M::TrainModule {
    model.train::<Training>()
}

pub fn values<B: Backend, const D: usize>(tensor: burn::tensor::Tensor<B, D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Returns the record of a model.
pub fn saved<B: Backend, M: Module<B>>(model: M) -> Vec<u8> {
    record(model.into_record())
}

/// Returns a model with the values of a record.
pub fn loaded<B: Backend, M: Module<B>>(model: M, record: &[u8]) -> M {
    let recorder = NamedMpkBytesRecorder::<DoublePrecisionSettings>::default();
    model.load_record(Recorder::<B>::load(&recorder, record.to_vec(), &Default::default()).expect("loaded"))
}

/// Returns the record of an optimizer's state.
pub fn optimizer_bytes<M: Model>(optimizer: &AdamOf<M>) -> Vec<u8> {
    record::<Training>(optimizer.to_record())
}

/// A parameter of floats, or a state.
#[derive(Clone, Debug)]
pub struct FloatParameter {
    pub id: ParamId,
    /// The names of its module and of those that contain it, and its own.
    pub path: String,
    pub data: TensorData,
    pub trained: bool,
}

/// Returns the parameters and states of floats, in visiting order.
pub fn floats<B: Backend, M: Module<B>>(model: &M) -> Vec<FloatParameter> {
    struct Floats(Vec<String>, Vec<FloatParameter>);
    impl<B: Backend> ModuleVisitor<B> for Floats {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<burn::tensor::Tensor<B, D>>) {
            let (path, value) = (self.0.join("."), param.val());
            let trained = value.is_require_grad();
            self.1.push(FloatParameter { id: param.id, path, data: value.into_data(), trained });
        }
    }
    let mut floats = Floats(Vec::new(), Vec::new());
    model.visit(&mut floats);
    floats.1
}

/// Replaces ids and values of parameters and states of floats. `f` also gets whether each is trained.
pub fn map_parameters<M, F>(model: M, f: F) -> M
where
    M: Module<Training>,
    F: FnMut(ParamId, TensorData, bool) -> (ParamId, TensorData),
{
    struct Mapped<F>(F);
    impl<F: FnMut(ParamId, TensorData, bool) -> (ParamId, TensorData)> ModuleMapper<Training> for Mapped<F> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, value, mapper) = param.consume();
            let trained = value.is_require_grad();
            let (id, data) = (self.0)(id, value.into_data(), trained);
            let dtype = data.dtype();
            let value = Tensor::from_data(data, (&device(), dtype)).set_require_grad(trained);
            Param::from_mapped_value(id, value, mapper)
        }
    }
    model.map(&mut Mapped(f))
}

pub fn gradient<const D: usize>(gradients: &GradientsParams, id: ParamId) -> Option<Inner<D>> {
    gradients.get::<Flex, D>(id)
}

pub fn remove_gradient<const D: usize>(gradients: &mut GradientsParams, id: ParamId) -> Option<Inner<D>> {
    gradients.remove::<Flex, D>(id)
}

/// An optimizer of any type that treats each element by itself.
pub trait ElementWise<M>: Sized {
    fn update(&mut self, rate: f64, model: M, gradients: GradientsParams) -> M;

    fn sharded(self, ddp: &DataParallel, sharding: Sharding) -> Result<impl Advance<M>, Error>;
}

impl<O: SimpleOptimizer<Flex> + 'static, M: Model> ElementWise<M> for OptimizerAdaptor<O, M, Training> {
    fn update(&mut self, rate: f64, model: M, gradients: GradientsParams) -> M {
        self.step(rate, model, gradients)
    }

    fn sharded(self, ddp: &DataParallel, sharding: Sharding) -> Result<impl Advance<M>, Error> {
        ShardedOptimizer::new(ddp, self, sharding)
    }
}

/// A sharded optimizer.
pub trait Advance<M> {
    /// Makes a step with gradients that are all there.
    fn advance(&mut self, rate: f64, model: &mut M, gradients: GradientsParams, samples: usize) -> Result<(), Error>;
}

impl<O: SimpleOptimizer<Flex> + 'static, M: Model> Advance<M> for ShardedOptimizer<O, M, Training> {
    fn advance(&mut self, rate: f64, model: &mut M, gradients: GradientsParams, samples: usize) -> Result<(), Error> {
        let parts = self.sync(model, gradients, samples)?;
        self.step(rate, model, parts)
    }
}
