//! Models of parts, of whole parameters, and of parameters that are gathered at their first use.

use std::collections::HashSet;
use std::mem::take;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor, TensorMetadata};
use burn::module::{Module, ParamId};
use burn::tensor::{Shape, Tensor, TensorData};

use crate::tensor::hook::{PassStart, Recipe, hook, with_value};
use crate::train::adapter::{handle, opened};
use crate::train::batch_norm;
use crate::train::model::{Parameter, Parameters};
use crate::train::pass::{Node, Nodes};
use crate::train::walk::{FloatParameter, Lazy, Remade, map_floats, map_lazily};
use bonfire_core::Error;
use bonfire_core::internal::lock;
use bonfire_train::gather::marks::at_end_of_run;
use bonfire_train::gather::{GatherSteps, Hooks};
use bonfire_train::lane::Tensor as Handle;
use bonfire_train::shards::{self, Layout};
use bonfire_train::step::layers::Weight;

/// Returns the float parameters whose values a module takes when it is mapped, as running states do. They cannot be
/// gathered at their first use.
pub(super) fn eager<M: Module>(model: &M) -> HashSet<ParamId> {
    let eager = Arc::new(Mutex::new(HashSet::new()));
    let mapped = map_lazily(
        model.clone(),
        |_| {},
        |FloatParameter { id, value, .. }| {
            let (eager, shape): (_, Shape) = (eager.clone(), value.shape());
            let taken = move || {
                lock(&eager).insert(id);
                value.clone()
            };
            Some(Lazy { shape, value: Arc::new(taken) })
        },
    );
    drop(mapped);
    take(&mut lock(&eager))
}

/// Returns the model with this rank's part of each parameter.
pub(super) fn cut<M: Module>(model: M, parameters: &Parameters, layout: &Layout) -> Result<M, Error> {
    let mut failure = None;
    let model = map_floats(model, |parameter| {
        let position = parameters.position(parameter.id)?;
        let part = cut_one(Dispatch::inner(parameter.value), position, &parameters[position], layout);
        part.map_err(|error| failure.get_or_insert(error)).ok()
    });
    failure.map_or(Ok(model), Err)
}

fn cut_one(whole: DispatchTensor, position: usize, of: &Parameter, layout: &Layout) -> Result<DispatchTensor, Error> {
    let (shape, width) = (layout.shape(position), of.spec.carrier.size());
    let data = Tensor::<1>::from_dispatch(whole).try_into_data();
    let data = data.map_err(|error| Error::io("reading a parameter", error))?;
    let mut bytes = vec![0; shape.iter().product::<usize>() * width];
    shards::cut(layout, position, data.as_bytes(), width, &mut bytes);
    let data = TensorData::from_bytes_vec(bytes, shape.to_vec(), of.spec.dtype);
    Ok(Dispatch::float_from_data(data, &of.spec.device))
}

/// Returns the model with whole parameters.
pub(super) fn restored<M: Module>(model: &M, parameters: &Parameters, wholes: Vec<Option<Handle>>) -> M {
    map_floats(model.clone(), |parameter| wholes[parameters.position(parameter.id)?].clone().map(opened))
}

/// Returns the model of a pass, whose parameters are gathered at their first use.
pub(super) fn gathered_at_use<M: Module>(
    model: &M,
    parameters: &Parameters,
    steps: &GatherSteps,
    hooks: &Hooks,
    weight: &Weight,
) -> (M, Nodes) {
    let nodes: Nodes = parameters.iter().map(|_| Arc::default()).collect();
    let start = PassStart::now();
    // Whether the forward pass has come to a parameter that needs a gradient.
    let tracks = Arc::new(AtomicBool::new(false));
    let remade = Remade::default();
    let enter = |container: &str| {
        remade.offer(container);
        batch_norm::offer(container, &steps.groups().main, Some(weight));
    };
    let model = map_lazily(model.clone(), enter, |FloatParameter { id, value: part, trained }| {
        let position = parameters.position(id)?;
        let shape = parameters[position].shape.clone();
        let gathered = Gathered {
            parameter: parameters[position].clone(),
            position,
            part,
            trained,
            stays: steps.stays(position),
            node: nodes[position].clone(),
            tracks: tracks.clone(),
            start: start.clone(),
            hooks: hooks.clone(),
        };
        let lazy = Lazy { shape, value: Arc::new(move || gathered.at_use()) };
        remade.insert(id, lazy.clone(), trained);
        Some(lazy)
    });
    (model, nodes)
}

/// A parameter that is gathered at its first use.
struct Gathered {
    /// What it is as a whole.
    parameter: Parameter,
    position: usize,
    part: DispatchTensor,
    /// Whether it needs a gradient.
    trained: bool,
    /// Whether it stays gathered until the backward pass.
    stays: bool,
    node: Arc<Node>,
    tracks: Arc<AtomicBool>,
    start: PassStart,
    hooks: Hooks,
}

impl Gathered {
    /// Returns the whole parameter, in the graph.
    fn at_use(&self) -> DispatchTensor {
        let value = self.hooks.value(self.position);
        if let Some(block) = value.gathered {
            let hooks = self.hooks.clone();
            at_end_of_run(move || hooks.end_run(block));
        }
        // After a failure, and after the end of the pass, in a clone of its model, nothing can be gathered.
        let whole = value.tensor.map_or_else(|| nothing(&self.parameter), opened);
        // Relaxed: the forward pass runs on one thread.
        let tracks = self.tracks.fetch_or(self.trained, Ordering::Relaxed);
        // burn keeps the value of a tensor that needs no gradient, and no recipe. So a frozen one needs a gradient too,
        // unless burn keeps nothing of it, or it stays anyway.
        if self.trained || tracks && !self.stays {
            let (hooks, parameter, position) = (self.hooks.clone(), self.parameter.clone(), self.position);
            let again = move || hooks.value_again(position).map_or_else(|| nothing(&parameter), opened);
            // Without a recipe burn keeps the value where a backward step needs it.
            let recipe: Option<Recipe> = if self.stays { None } else { Some(Arc::new(again)) };
            with_value(self.node.hooked(|| self.make_node()), whole, recipe)
        } else {
            let mut whole = Dispatch::from_inner(whole);
            whole.autodiff = self.part.autodiff;
            whole
        }
    }

    /// Returns a leaf of the pass's own with the part's value, and its node in the graph.
    fn make_node(&self) -> [DispatchTensor; 2] {
        let (hooks, position, node) = (self.hooks.clone(), self.position, Arc::downgrade(&self.node));
        hooks.expect(position);
        let receive = Arc::new(move |gradient| {
            node.upgrade().iter().for_each(|node| node.use_up());
            hooks.receive(position, handle(gradient));
        });
        let mut leaf = Dispatch::from_inner(Dispatch::inner(self.part.clone()));
        leaf.autodiff = self.part.autodiff;
        let leaf = Dispatch::float_set_require_grad(leaf, true);
        [leaf.clone(), hook(leaf, &self.start, receive)]
    }
}

/// Returns what takes the place of a parameter that could not be gathered: a tensor of its shape that takes no memory,
/// of elements that no result hides.
fn nothing(parameter: &Parameter) -> DispatchTensor {
    let one = Shape::from(vec![1; parameter.shape.num_dims()]);
    let data = TensorData::full_dtype(one, f32::NAN, parameter.spec.dtype);
    Dispatch::float_expand(Dispatch::float_from_data(data, &parameter.spec.device), parameter.shape.clone())
}
