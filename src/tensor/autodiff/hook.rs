//! Gradients in the middle of a backward pass. Everything that depends on how burn-autodiff 0.21 runs its graph is
//! here.
//!
//! burn-autodiff has no callback for a gradient. A backward step on the parameter is not enough: steps run by depth,
//! deepest first. The depth of a step is one more than the greatest depth of its parents, so a step on a leaf has depth
//! 1 and runs last. So the hook gets a second parent: a leaf whose depth is the number of nodes that were made since
//! the forward pass began. That is at least the depth of all that the pass has computed so far. The hook therefore runs
//! right after the steps that use the parameter, and before those of the layers that the pass ran earlier.
//!
//! The number counts the nodes of all threads, which does no harm: only the order within a graph matters.
//!
//! burn-autodiff keeps a graph for each set of connected nodes, and joins two graphs by moving all nodes of one of
//! them, the smaller or the larger, to the other. A hook that joins the graph of the pass where its parameter is used
//! would thus take time in proportion to the pass so far: 7 % of a step of 161 parameters. So the second parent of all
//! hooks of a pass is one node, the anchor, and they are in one graph from the start. The anchor's own step does
//! nothing.
//!
//! A tensor with a hook may have another value than the tensor that it stands for: the whole of a parameter of which a
//! rank has a part. Then its value need not be kept for the backward pass. burn-autodiff's checkpointing keeps a recipe
//! in place of a tensor, for operations that are declared memory bound, and a matmul that needs the tensor runs the
//! recipe. The strategy that decides so is a type of the operation, not of the graph, so the hook always has the one
//! that keeps recipes.

use std::any::{Any, TypeId};
use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, OnceLock};

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, TensorMetadata};

use bonfire_core::Error;

/// Gets a gradient. It runs on the thread of the backward pass, while burn-autodiff holds the lock of the graph, so it
/// must neither wait nor panic.
pub(crate) type GradientReceiver<I> = Arc<dyn Fn(FloatTensor<I>) + Send + Sync>;

/// Returns the value of a tensor that was not kept. It runs as a [`GradientReceiver`] does, at most once.
pub(crate) type Recipe<I> = Arc<dyn Fn() -> FloatTensor<I> + Send + Sync>;

/// A tensor of burn's `Autodiff` over a backend, whatever its checkpointing strategy. burn-autodiff does not export the
/// type.
pub(super) type Tracked<I> = FloatTensor<Autodiff<I>>;

/// The start of a forward pass. Dropping the last clone frees the anchor of its hooks.
pub(crate) struct PassStart<I: Backend> {
    /// The number of nodes that were made before.
    nodes: u64,
    /// Made by the first hook.
    anchor: Arc<OnceLock<Tracked<I>>>,
}

impl<I: Backend> PassStart<I> {
    pub fn now() -> PassStart<I> {
        PassStart { nodes: NodeId::new().value, anchor: Arc::default() }
    }
}

impl<I: Backend> Clone for PassStart<I> {
    fn clone(&self) -> Self {
        PassStart { nodes: self.nodes, anchor: self.anchor.clone() }
    }
}

/// Fails if an autodiff backend is not burn's `Autodiff`.
pub(crate) fn check_backend<B: AutodiffBackend>(operation: &str) -> Result<(), Error> {
    if TypeId::of::<FloatTensor<B>>() == TypeId::of::<Tracked<B::InnerBackend>>() {
        return Ok(());
    }
    let name = B::name(&B::Device::default());
    Err(Error::argument(operation, format!("the autodiff backend {name} is not burn's; use `burn::backend::Autodiff`")))
}

/// Returns what `f` makes of a tensor. A backend that [`check_backend`] refuses gets the tensor back.
pub(super) fn with_tracked<B: AutodiffBackend, E>(
    tensor: FloatTensor<B>,
    f: impl FnOnce(Tracked<B::InnerBackend>) -> Result<Tracked<B::InnerBackend>, E>,
) -> Result<FloatTensor<B>, E> {
    let mut tensor = Some(tensor);
    // Two names of one type, which the compiler does not know.
    let any: &mut dyn Any = &mut tensor;
    if let Some(tracked) = any.downcast_mut::<Option<Tracked<B::InnerBackend>>>() {
        *tracked = tracked.take().map(f).transpose()?;
    }
    Ok(tensor.expect("it was put back"))
}

/// Whether a tensor is in a graph: as a leaf that needs a gradient, or as the result of an operation on one.
pub(crate) fn is_tracked<B: AutodiffBackend>(tensor: FloatTensor<B>) -> bool {
    let mut is_tracked = false;
    let Ok(_) = with_tracked::<B, Infallible>(tensor, |tensor| {
        is_tracked = tensor.is_tracked();
        Ok(tensor)
    });
    is_tracked
}

/// Returns `tensor` with a hook in its graph. In a backward pass, `receiver` gets the gradient once no step adds to it
/// any more; the tensor itself gets none. A tensor that is not tracked is returned as it is. Call it where the forward
/// pass first uses the tensor. `start` is that of the pass.
///
/// With a recipe the tensor's [value](with_value) will be another one: if a step of the backward pass needs it, it is
/// what the recipe returns then.
pub(crate) fn hook<B: AutodiffBackend>(
    tensor: FloatTensor<B>,
    start: &PassStart<B::InnerBackend>,
    receiver: GradientReceiver<B::InnerBackend>,
    recipe: Option<Recipe<B::InnerBackend>>,
) -> FloatTensor<B> {
    let Ok(hooked) = with_tracked::<B, Infallible>(tensor, |tensor| Ok(hooked(tensor, start, receiver, recipe)));
    hooked
}

/// Returns the tensor's node with another value.
pub(crate) fn with_value<B: AutodiffBackend>(
    tensor: FloatTensor<B>,
    value: FloatTensor<B::InnerBackend>,
) -> FloatTensor<B> {
    let Ok(valued) = with_tracked::<B, Infallible>(tensor, |mut tensor| {
        tensor.primitive = value;
        Ok(tensor)
    });
    valued
}

fn hooked<I: Backend>(
    tensor: Tracked<I>,
    PassStart { nodes: start, anchor }: &PassStart<I>,
    receiver: GradientReceiver<I>,
    recipe: Option<Recipe<I>>,
) -> Tracked<I> {
    if !tensor.is_tracked() {
        return tensor;
    }
    let anchor = anchor.get_or_init(|| {
        let (device, dtype) = (I::float_device(&tensor.primitive), tensor.primitive.dtype());
        Tracked::<I>::new(I::float_zeros(Shape::new([1]), &device, dtype.into())).require_grad()
    });
    // The anchor, at another depth.
    let mut deep = Tracked::<I>::new(anchor.primitive.clone());
    let nodes = deep.node.id.value.saturating_sub(*start);
    match Arc::get_mut(&mut deep.node) {
        Some(node) => {
            node.order = usize::try_from(nodes).unwrap_or(usize::MAX - 1);
            (node.id, node.requirement) = (anchor.node.id, anchor.node.requirement);
        }
        // A node that is shared keeps its depth: then the hook runs last, with the same gradient.
        None => log::debug!("burn-autodiff shares a new node, so a gradient arrives late"),
    }
    let nodes = [tensor.node.clone(), deep.node];
    let prepared = Hook.prepare::<BalancedCheckpointing>(nodes);
    let prepared = match recipe {
        Some(recipe) => prepared.memory_bound().retro_forward(Again::<I>(recipe)).parents([&tensor, anchor]),
        // Declared compute bound, so that no checkpointing strategy runs anything again.
        None => prepared.compute_bound(),
    };
    match prepared.stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(Receiver(receiver), tensor.primitive),
        OpsKind::UnTracked(prepared) => prepared.finish(tensor.primitive),
    }
}

/// Runs a recipe.
struct Again<B: Backend>(Recipe<B>);

impl<B: Backend> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, node: NodeId) {
        states.save(node, (self.0)());
    }
}

impl<B: Backend> fmt::Debug for Again<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Again")
    }
}

/// The backward step of a hook.
#[derive(Debug)]
struct Hook;

impl<B: Backend> Backward<B, 2> for Hook {
    type State = Receiver<B>;

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let Receiver(receiver) = ops.state;
        receiver(gradients.consume::<B>(&ops.node));
    }
}

struct Receiver<B: Backend>(GradientReceiver<B>);

impl<B: Backend> Clone for Receiver<B> {
    fn clone(&self) -> Self {
        Receiver(self.0.clone())
    }
}

impl<B: Backend> fmt::Debug for Receiver<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Receiver")
    }
}
