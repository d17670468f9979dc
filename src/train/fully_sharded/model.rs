//! Models of parts, of whole parameters, and of parameters that are gathered at their first use.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{Float, Shape, TensorData, TensorMetadata, TensorPrimitive};

use crate::tensor::autodiff::hook::{PassStart, Recipe, hook, with_value};
use crate::tensor::device::uses_collective_devices;
use crate::tensor::host::Source;
use crate::train::adapter::{handle, opened};
use crate::train::batch_norm;
use crate::train::model::{Parameter, Parameters};
use crate::train::pass::{Node, Nodes};
use crate::train::walk::{FloatParameter, Lazy, map_floats, map_lazily};
use bonfire_core::Error;
use bonfire_core::internal::lock;
use bonfire_train::gather::marks::{at_end_of_run, gather_at_use};
use bonfire_train::gather::{GatherSteps, Hooks};
use bonfire_train::lane::Tensor as Handle;
use bonfire_train::shards::{self, Layout};
use bonfire_train::step::layers::Weight;

/// Returns the float parameters whose values a module takes when it is mapped, as running states do. They cannot be
/// gathered at their first use.
pub(super) fn eager<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> HashSet<ParamId> {
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
    std::mem::take(&mut lock(&eager))
}

/// Returns the model with this rank's part of each parameter.
pub(super) fn cut<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: M,
    parameters: &Parameters<B>,
    layout: &Layout,
) -> Result<M, Error> {
    let mut failure = None;
    let model = map_floats(model, |parameter| {
        let position = parameters.position(parameter.id)?;
        let (whole, of) = (B::inner(parameter.value), &parameters[position]);
        let on_device = uses_collective_devices::<B::InnerBackend>() && !layout.shape(position).contains(&0);
        let part = match on_device {
            true => Ok(cut_on_device::<B>(whole, of, layout.shape(position), layout.rank)),
            false => cut_on_host::<B>(whole, position, of, layout),
        };
        part.map_err(|error| failure.get_or_insert(error)).ok()
    });
    failure.map_or(Ok(model), Err)
}

/// The part is in memory of its own: a slice alone may keep all of the whole.
fn cut_on_device<B: AutodiffBackend>(
    whole: FloatTensor<B::InnerBackend>,
    of: &Parameter<B>,
    shape: &[usize],
    rank: usize,
) -> FloatTensor<B::InnerBackend> {
    let Some((own, all)) = shape.first().zip(of.shape.as_slice().first()) else { return whole };
    let [start, end] = [rank, rank + 1].map(|rank| (rank * own).min(*all));
    let padded = B::InnerBackend::float_zeros(Shape::from(shape.to_vec()), &of.device, of.dtype.into());
    if start == end {
        return padded;
    }
    let rows = B::InnerBackend::float_slice(whole, &[(start..end).into()]);
    B::InnerBackend::float_slice_assign(padded, &[(0..end - start).into()], rows)
}

fn cut_on_host<B: AutodiffBackend>(
    whole: FloatTensor<B::InnerBackend>,
    position: usize,
    of: &Parameter<B>,
    layout: &Layout,
) -> Result<FloatTensor<B::InnerBackend>, Error> {
    let (shape, width) = (layout.shape(position), of.element.size());
    let (source, _) = Source::read::<B::InnerBackend, Float>("reading a parameter", TensorPrimitive::Float(whole))?;
    let mut bytes = vec![0; shape.iter().product::<usize>() * width];
    shards::cut(layout, position, source.bytes(), width, &mut bytes);
    let data = TensorData::from_bytes_vec(bytes, shape.to_vec(), of.dtype);
    Ok(B::InnerBackend::float_from_data(data, &of.device))
}

/// Returns the model with whole parameters.
pub(super) fn restored<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    parameters: &Parameters<B>,
    wholes: Vec<Option<Handle>>,
) -> M {
    map_floats(model.clone(), |parameter| {
        let whole = &wholes[parameters.position(parameter.id)?];
        whole.clone().map(opened::<B::InnerBackend>)
    })
}

/// Returns the model of a pass, whose parameters are gathered at their first use.
pub(super) fn gathered_at_use<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    parameters: &Parameters<B>,
    steps: &GatherSteps,
    hooks: &Hooks,
    weight: &Weight,
) -> (M, Nodes<B>) {
    let nodes: Nodes<B> = parameters.iter().map(|_| Arc::default()).collect();
    let start = PassStart::now();
    // Whether the forward pass has come to a parameter that needs a gradient.
    let tracks = Arc::new(AtomicBool::new(false));
    let enter = |container: &str| {
        gather_at_use(container);
        batch_norm::offer::<B>(container, &steps.groups().main, Some(weight));
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
        Some(Lazy { shape, value: Arc::new(move || gathered.at_use()) })
    });
    (model, nodes)
}

/// A parameter that is gathered at its first use.
struct Gathered<B: AutodiffBackend> {
    /// What it is as a whole.
    parameter: Parameter<B>,
    position: usize,
    part: FloatTensor<B>,
    /// Whether it needs a gradient.
    trained: bool,
    /// Whether it stays gathered until the backward pass.
    stays: bool,
    node: Arc<Node<B>>,
    tracks: Arc<AtomicBool>,
    start: PassStart<B::InnerBackend>,
    hooks: Hooks,
}

impl<B: AutodiffBackend> Gathered<B> {
    /// Returns the whole parameter, in the graph.
    fn at_use(&self) -> FloatTensor<B> {
        let value = self.hooks.value(self.position);
        if let Some(block) = value.gathered {
            let hooks = self.hooks.clone();
            at_end_of_run(move || hooks.end_run(block));
        }
        // After a failure, and after the end of the pass, in a clone of its model, nothing can be gathered.
        let whole = value.tensor.map_or_else(|| nothing(&self.parameter), opened::<B::InnerBackend>);
        // Relaxed: the forward pass runs on one thread.
        let tracks = self.tracks.fetch_or(self.trained, Ordering::Relaxed);
        // burn keeps the value of a tensor that needs no gradient, and no recipe. So a frozen one needs a gradient too,
        // unless burn keeps nothing of it, or it stays anyway.
        if self.trained || tracks && !self.stays {
            with_value::<B>(self.node.hooked(|| self.make_node()), whole)
        } else {
            B::from_inner(whole)
        }
    }

    /// Returns a leaf of the pass's own with the part's value, and the node of the whole parameter in the graph.
    fn make_node(&self) -> [FloatTensor<B>; 2] {
        let (hooks, position, node) = (self.hooks.clone(), self.position, Arc::downgrade(&self.node));
        hooks.expect(position);
        let receive = Arc::new(move |gradient| {
            node.upgrade().iter().for_each(|node| node.use_up());
            hooks.receive(position, handle::<B::InnerBackend>(gradient));
        });
        let (hooks, parameter) = (self.hooks.clone(), self.parameter.clone());
        let again = move || hooks.value_again(position).map_or_else(|| nothing(&parameter), opened::<B::InnerBackend>);
        // Without a recipe burn keeps the value where a backward step needs it.
        let recipe: Option<Recipe<B::InnerBackend>> = if self.stays { None } else { Some(Arc::new(again)) };
        let leaf = B::float_set_require_grad(B::from_inner(B::inner(self.part.clone())), true);
        [leaf.clone(), hook::<B>(leaf, &self.start, receive, recipe)]
    }
}

/// Returns what takes the place of a parameter that could not be gathered: a tensor of its shape that takes no memory,
/// of elements that no result hides.
fn nothing<B: AutodiffBackend>(parameter: &Parameter<B>) -> FloatTensor<B::InnerBackend> {
    let one = Shape::from(vec![1; parameter.shape.num_dims()]);
    let data = TensorData::full_dtype(one, f32::NAN, parameter.dtype);
    B::InnerBackend::float_expand(B::InnerBackend::float_from_data(data, &parameter.device), parameter.shape.clone())
}
