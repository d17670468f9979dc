//! Visits and maps a model's parameters of every kind in one way.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Parameter};
use burn::tensor::kind::Autodiff;
use burn::tensor::{Bool, Device, Float, Int, Shape, Tensor};

use crate::tensor::host::float;
use bonfire_core::internal::lock;
use bonfire_train::gather::marks::{BlockPath, gather_at_use};

/// A kind of tensors.
pub(super) trait Kind: Autodiff + 'static {
    /// Its name in errors.
    const NAME: &str;
}

impl Kind for Float {
    const NAME: &str = "float";
}

impl Kind for Int {
    const NAME: &str = "int";
}

impl Kind for Bool {
    const NAME: &str = "bool";
}

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
}

/// What is done with each parameter of a model.
pub(super) trait Visit {
    fn parameter<const D: usize, K: Kind>(&mut self, place: &Place, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter;
}

/// What each parameter of a model becomes.
pub(super) trait Map {
    fn parameter<const D: usize, K: Kind>(&mut self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter;
}

/// Visits all parameters. Returns the visitor.
pub(super) fn visit<M: Module, V: Visit>(model: &M, visitor: V) -> V {
    let mut walk = Visitor(Place::default(), visitor);
    model.visit(&mut walk);
    walk.1
}

/// Maps all parameters.
pub(super) fn map<M: Module>(model: M, map: &mut impl Map) -> M {
    model.map(&mut Mapper(map))
}

struct Visitor<V>(Place, V);

impl<V: Visit> ModuleVisitor for Visitor<V> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.0.names.push(name.into());
        self.0.blocks.enter(container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.0.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.1.parameter::<D, Float>(&self.0, param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.1.parameter::<D, Int>(&self.0, param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.1.parameter::<D, Bool>(&self.0, param);
    }
}

struct Mapper<W>(W);

impl<W: Map> ModuleMapper for Mapper<&mut W> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0.parameter::<D, Float>(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.0.parameter::<D, Int>(param)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        self.0.parameter::<D, Bool>(param)
    }
}

/// A parameter of floats that is not quantised.
pub(super) struct FloatParameter {
    pub id: ParamId,
    pub value: DispatchTensor,
    /// Whether it needs a gradient.
    pub trained: bool,
}

impl FloatParameter {
    fn of<const D: usize>(param: &Param<Tensor<D>>) -> Option<Self> {
        let value = param.val();
        float(value.dtype())?;
        Some(FloatParameter { id: param.id, trained: value.is_require_grad(), value: value.into_dispatch() })
    }
}

/// Visits the parameters of floats.
pub(super) fn visit_floats<M: Module>(model: &M, f: impl FnMut(FloatParameter)) {
    model.visit(&mut Floats(f));
}

/// Replaces the values of parameters of floats for which `f` returns one, without autodiff. They need a gradient as
/// before.
pub(super) fn map_floats<M: Module>(model: M, f: impl FnMut(FloatParameter) -> Option<DispatchTensor>) -> M {
    model.map(&mut Floats(f))
}

struct Floats<F>(F);

impl<F: FnMut(FloatParameter) -> Option<DispatchTensor>> ModuleMapper for Floats<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = FloatParameter::of(&param).and_then(&mut self.0) else {
            return param;
        };
        param.map(|old| {
            let value = like(Tensor::from_dispatch(value).to_device(&old.device().inner()), &old);
            value.set_require_grad(old.is_require_grad())
        })
    }
}

/// Returns a tensor without autodiff with that of another one, and its checkpointing strategy.
pub(super) fn like<const D: usize, K: Kind>(tensor: Tensor<D, K>, other: &Tensor<D, K>) -> Tensor<D, K> {
    match other.gradient_checkpointing_strategy() {
        Some(strategy) => Tensor::from_inner(tensor).with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}

impl<F: FnMut(FloatParameter)> ModuleVisitor for Floats<F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(parameter) = FloatParameter::of(param) {
            (self.0)(parameter);
        }
    }
}

/// A parameter whose value is made at its first use.
pub(super) struct Lazy {
    pub shape: Shape,
    pub value: Arc<dyn Fn() -> DispatchTensor + Send + Sync>,
}

/// Makes the values of parameters of floats, for which `f` returns how, at their first use. `enter` gets the type of
/// each container that the mapper enters.
pub(super) fn map_lazily<M: Module>(
    model: M,
    enter: impl FnMut(&str),
    f: impl FnMut(FloatParameter) -> Option<Lazy>,
) -> M {
    let recipes = Recipes::default();
    recipes.clone().offered(|| model.map(&mut Lazily(enter, f, recipes)))
}

struct Lazily<E, F>(E, F, Recipes);

impl<E: FnMut(&str), F: FnMut(FloatParameter) -> Option<Lazy>> ModuleMapper for Lazily<E, F> {
    fn enter_module(&mut self, _name: &str, container: &str) {
        (self.0)(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(parameter) = FloatParameter::of(&param) else {
            return param;
        };
        let (id, trained, device) = (param.id, parameter.trained, param.lazy_device());
        let Some(lazy) = (self.1)(parameter) else {
            return param;
        };
        let recipe = Arc::new(LazyOn { lazy, device, trained });
        lock(&self.2.0).insert(id, recipe.clone());
        recipe.parameter(id)
    }
}

struct LazyOn {
    lazy: Lazy,
    device: Device,
    trained: bool,
}

impl LazyOn {
    fn parameter<const D: usize>(self: Arc<Self>, id: ParamId) -> Param<Tensor<D>> {
        let (device, trained, shape) = (self.device.clone(), self.trained, self.lazy.shape.clone());
        Param::uninitialized(id, move |_, _| Tensor::from_dispatch((self.lazy.value)()), device, trained, shape)
    }
}

thread_local! {
    /// The recipes of the mapper that is at work. Mappers have no other way to give a block what is no parameter.
    static OFFERED: RefCell<Option<Recipes>> = const { RefCell::new(None) };
}

/// How the parameters of a model are made at their first use. burn 0.22 makes a value once for all clones of a
/// parameter, and keeps it while one of them is left. A block needs parameters whose values are made once for each run.
#[derive(Clone, Default)]
pub(super) struct Recipes(Arc<Mutex<HashMap<ParamId, Arc<LazyOn>>>>);

impl Recipes {
    /// Returns the recipes for a block that is being mapped.
    pub fn of_mapper() -> Option<Recipes> {
        OFFERED.with_borrow(Clone::clone)
    }

    /// Returns a module whose parameters have no values yet.
    pub fn anew<M: Module>(&self, module: M) -> M {
        self.clone().offered(|| module.map(&mut Anew(self)))
    }

    fn offered<R>(self, map: impl FnOnce() -> R) -> R {
        let before = OFFERED.replace(Some(self));
        let mapped = map();
        OFFERED.set(before);
        mapped
    }
}

impl fmt::Debug for Recipes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recipes")
    }
}

struct Anew<'a>(&'a Recipes);

impl ModuleMapper for Anew<'_> {
    fn enter_module(&mut self, _name: &str, container: &str) {
        gather_at_use(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let recipe = lock(&self.0.0).get(&param.id).cloned();
        match recipe {
            Some(recipe) => recipe.parameter(param.id),
            None => param,
        }
    }
}
