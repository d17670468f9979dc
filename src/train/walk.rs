//! Visits and maps a model's parameters of every kind in one way.

use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Parameter};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Bool, Float, Int, Shape, Tensor, TensorPrimitive};

use crate::tensor::host::{Kind, float};
use bonfire_train::gather::marks::BlockPath;

/// Where a parameter is in a model.
#[derive(Default)]
pub(super) struct Place {
    /// The names of the modules that contain it, outermost first, and its own.
    names: Vec<String>,
    /// The [blocks](super::ShardedBlock) that contain it.
    pub blocks: BlockPath,
}

impl Place {
    pub fn path(&self) -> String {
        self.names.join(".")
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.names.push(name.into());
        self.blocks.enter(container);
    }
}

/// What is done with each parameter of a model.
pub(super) trait Visit<B: Backend> {
    fn parameter<const D: usize, K: Kind<B> + 'static>(&mut self, place: &Place, param: &Param<Tensor<B, D, K>>)
    where
        Tensor<B, D, K>: Parameter;
}

/// What each parameter of a model becomes.
pub(super) trait Map<B: Backend> {
    fn parameter<const D: usize, K: Kind<B> + 'static>(
        &mut self,
        place: &Place,
        param: Param<Tensor<B, D, K>>,
    ) -> Param<Tensor<B, D, K>>
    where
        Tensor<B, D, K>: Parameter;
}

/// Visits all parameters. Returns the visitor.
pub(super) fn visit<B: Backend, M: Module<B>, V: Visit<B>>(model: &M, visitor: V) -> V {
    let mut walk = Walk(Place::default(), visitor);
    model.visit(&mut walk);
    walk.1
}

/// Maps all parameters.
pub(super) fn map<B: Backend, M: Module<B>>(model: M, map: &mut impl Map<B>) -> M {
    model.map(&mut Walk(Place::default(), map))
}

struct Walk<W>(Place, W);

impl<B: Backend, V: Visit<B>> ModuleVisitor<B> for Walk<V> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.0.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.0.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.1.parameter::<D, Float>(&self.0, param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.1.parameter::<D, Int>(&self.0, param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.1.parameter::<D, Bool>(&self.0, param);
    }
}

impl<B: Backend, W: Map<B>> ModuleMapper<B> for Walk<&mut W> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.0.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.0.names.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.1.parameter::<D, Float>(&self.0, param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        self.1.parameter::<D, Int>(&self.0, param)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        self.1.parameter::<D, Bool>(&self.0, param)
    }
}

/// A parameter of floats that is not quantised.
pub(super) struct FloatParameter<B: Backend> {
    pub id: ParamId,
    pub value: FloatTensor<B>,
    /// Whether it needs a gradient.
    pub trained: bool,
}

impl<B: Backend> FloatParameter<B> {
    fn of<const D: usize>(param: &Param<Tensor<B, D>>) -> Option<Self> {
        let value = param.val();
        float(value.dtype())?;
        let trained = value.is_require_grad();
        Some(FloatParameter { id: param.id, value: value.into_primitive().tensor(), trained })
    }
}

/// Visits the parameters of floats.
pub(super) fn visit_floats<B: Backend, M: Module<B>>(model: &M, f: impl FnMut(FloatParameter<B>)) {
    model.visit(&mut Floats(f));
}

/// Replaces the values of parameters of floats for which `f` returns one. They need a gradient as before.
pub(super) fn map_floats<B: AutodiffBackend, M: Module<B>>(
    model: M,
    f: impl FnMut(FloatParameter<B>) -> Option<FloatTensor<B::InnerBackend>>,
) -> M {
    model.map(&mut Floats(f))
}

struct Floats<F>(F);

impl<B: Backend, F: FnMut(FloatParameter<B>)> ModuleVisitor<B> for Floats<F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(parameter) = FloatParameter::of(param) {
            (self.0)(parameter);
        }
    }
}

impl<B, F> ModuleMapper<B> for Floats<F>
where
    B: AutodiffBackend,
    F: FnMut(FloatParameter<B>) -> Option<FloatTensor<B::InnerBackend>>,
{
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(value) = FloatParameter::of(&param).and_then(&mut self.0) else { return param };
        let (id, old, mapper) = param.consume();
        let value = Tensor::<B, D>::from_inner(Tensor::from_primitive(TensorPrimitive::Float(value)));
        Param::from_mapped_value(id, value.set_require_grad(old.is_require_grad()), mapper)
    }
}

/// A parameter whose value is made at its first use.
pub(super) struct Lazy<B: Backend> {
    pub shape: Shape,
    pub value: Arc<dyn Fn() -> FloatTensor<B> + Send + Sync>,
}

/// Makes the values of parameters of floats, for which `f` returns how, at their first use. `enter` gets the type of
/// each container that the mapper enters.
pub(super) fn map_lazily<B: Backend, M: Module<B>>(
    model: M,
    enter: impl FnMut(&str),
    f: impl FnMut(FloatParameter<B>) -> Option<Lazy<B>>,
) -> M {
    model.map(&mut Lazily(enter, f))
}

struct Lazily<E, F>(E, F);

impl<B: Backend, E: FnMut(&str), F: FnMut(FloatParameter<B>) -> Option<Lazy<B>>> ModuleMapper<B> for Lazily<E, F> {
    fn enter_module(&mut self, _name: &str, container: &str) {
        (self.0)(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(parameter) = FloatParameter::of(&param) else { return param };
        let (device, trained) = (B::float_device(&parameter.value), parameter.trained);
        let Some(Lazy { shape, value }) = (self.1)(parameter) else { return param };
        let init = move |_: &B::Device, _| Tensor::from_primitive(TensorPrimitive::Float(value()));
        Param::uninitialized(param.id, init, device, trained, shape)
    }
}
