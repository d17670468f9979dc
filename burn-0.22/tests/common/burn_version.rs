//! What tests that both packages share need of burn 0.22: names for its types, models, gradients and optimizers.
//! `tests/common/burn_version.rs` of the root package has the same names for burn 0.21, and says what they are for.
#![allow(dead_code, unused_imports, unused_macros, reason = "each test target uses a part of it")]

pub use bonfire::tensor::autodiff::attempt;
pub use bonfire::train::{LastPass, Pass};
pub use bonfire::{DataParallel, FullyShardedParallel, Parts, ShardedOptimizer, SyncBatchNorm};
pub use burn::module::Module;
pub use burn::nn::attention::MultiHeadAttention;
pub use burn::nn::conv::Conv2d;
pub use burn::nn::transformer::TransformerEncoder;
pub use burn::nn::{BatchNorm, Embedding, LayerNorm, Linear};
pub use burn::tensor::{Device, Gradients, Tensor};

use bonfire::{Error, Sharding};
use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::quantization::{QuantScheme, QuantValue};
use burn::tensor::{Bytes, Int, TensorData};

/// A tensor without autodiff, which its device says.
pub use burn::tensor::Tensor as Inner;

/// The optimizer of a model: one type for all.
pub type AdamOf<M> = <M as OfModel>::Optimizer;
pub type SgdOf<M> = <M as OfModel>::Optimizer;
pub type MuonOf<M> = <M as OfModel>::Optimizer;
pub type ShardedAdam<M> = <M as OfModel>::Sharded;
pub type ShardedSgd<M> = <M as OfModel>::Sharded;

pub trait OfModel {
    type Optimizer;
    type Sharded;
}

impl<M: Module> OfModel for M {
    type Optimizer = ModuleOptimizer;
    type Sharded = ShardedOptimizer;
}

/// What a refused Muon is called: burn 0.22 does not tell an optimizer's name.
pub const MUON: &str = "updates an element by others of its parameter, as Muon";

/// The hooks of a pass are in one graph, which the first backward pass uses up.
pub const TWO_BACKWARD_PASSES: bool = false;

pub struct Unclear {
    pub mapped: bool,
    pub columns: Option<bool>,
    pub needy: Option<bool>,
}

pub const UNCLEAR: Unclear = Unclear { mapped: true, columns: None, needy: Some(false) };

pub trait Model: Module {}

impl<M: Module> Model for M {}

macro_rules! models {
    ($($(#[$attribute:meta])* $visible:vis struct $name:ident $fields:tt)*) => {
        $(#[derive(burn::module::Module, Debug)] $(#[$attribute])* $visible struct $name $fields)*
    };
}
pub(crate) use models;

pub fn device() -> Device {
    Device::flex().autodiff()
}

pub fn inner_device() -> Device {
    Device::flex()
}

fn scheme() -> QuantScheme {
    QuantScheme::default().with_value(QuantValue::Q8S)
}

pub fn quantised<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    tensor.quantize_dynamic(&scheme())
}

pub fn dequantised<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    tensor.dequantize()
}

pub fn embed(table: &Embedding, words: Tensor<2, Int>) -> Tensor<3> {
    table.forward(words)
}

pub fn in_training<M: Module>(model: M) -> M {
    model.train()
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

pub fn saved<M: Module>(model: M) -> Vec<u8> {
    model.into_record().into_bytes().expect("recorded").to_vec()
}

pub fn loaded<M: Module>(model: M, record: &[u8]) -> M {
    model.load_record(ModuleRecord::from_bytes(Bytes::from_bytes_vec(record.to_vec())).expect("a record"))
}

pub fn optimizer_bytes(optimizer: &ModuleOptimizer) -> Vec<u8> {
    optimizer.into_bytes().expect("recorded").to_vec()
}

#[derive(Clone, Debug)]
pub struct FloatParameter {
    pub id: ParamId,
    pub path: String,
    pub data: TensorData,
    pub trained: bool,
}

pub fn floats<M: Module>(model: &M) -> Vec<FloatParameter> {
    struct Floats(Vec<String>, Vec<FloatParameter>);
    impl ModuleVisitor for Floats {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let (path, value) = (self.0.join("."), param.val());
            let trained = value.is_require_grad();
            self.1.push(FloatParameter { id: param.id, path, data: value.into_data(), trained });
        }
    }
    let mut floats = Floats(Vec::new(), Vec::new());
    model.visit(&mut floats);
    floats.1
}

pub fn map_parameters<M, F>(model: M, f: F) -> M
where
    M: Module,
    F: FnMut(ParamId, TensorData, bool) -> (ParamId, TensorData),
{
    struct Mapped<F>(F);
    impl<F: FnMut(ParamId, TensorData, bool) -> (ParamId, TensorData)> ModuleMapper for Mapped<F> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, value, mapper) = param.consume();
            let (trained, device) = (value.is_require_grad(), value.device());
            let (id, data) = (self.0)(id, value.into_data(), trained);
            let dtype = data.dtype();
            let value = Tensor::from_data(data, (&device, dtype)).set_require_grad(trained);
            Param::from_mapped_value(id, value, mapper)
        }
    }
    model.map(&mut Mapped(f))
}

pub fn gradient<const D: usize>(gradients: &GradientsParams, id: ParamId) -> Option<Inner<D>> {
    gradients.get::<D>(id)
}

pub fn remove_gradient<const D: usize>(gradients: &mut GradientsParams, id: ParamId) -> Option<Inner<D>> {
    gradients.remove::<D>(id)
}

pub trait ElementWise<M>: Sized {
    fn update(&mut self, rate: f64, model: M, gradients: GradientsParams) -> M;

    fn sharded(self, ddp: &DataParallel, sharding: Sharding) -> Result<impl Advance<M>, Error>;
}

impl<M: Module> ElementWise<M> for ModuleOptimizer {
    fn update(&mut self, rate: f64, model: M, gradients: GradientsParams) -> M {
        self.step(rate, model, gradients)
    }

    fn sharded(self, ddp: &DataParallel, sharding: Sharding) -> Result<impl Advance<M>, Error> {
        ShardedOptimizer::new(ddp, self, sharding)
    }
}

pub trait Advance<M> {
    fn advance(&mut self, rate: f64, model: &mut M, gradients: GradientsParams, samples: usize) -> Result<(), Error>;
}

impl<M: Module> Advance<M> for ShardedOptimizer {
    fn advance(&mut self, rate: f64, model: &mut M, gradients: GradientsParams, samples: usize) -> Result<(), Error> {
        let parts = self.sync(model, gradients, samples)?;
        self.step(rate, model, parts)
    }
}
