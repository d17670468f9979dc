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

use std::fmt;
use std::sync::{Arc, OnceLock};

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, TensorMetadata};

/// An autodiff backend that hands over the gradient of a tensor as soon as it is complete.
pub trait GradientHook: AutodiffBackend {
    /// Returns `tensor` with a hook in its graph. In a backward pass, `receiver` gets the gradient once no step adds to
    /// it any more; the tensor itself gets none. A tensor that is not tracked is returned as it is. Call it where the
    /// forward pass first uses the tensor. `start` is that of the pass.
    ///
    /// The receiver runs on the thread of the backward pass, while burn-autodiff holds the lock of the graph. It must
    /// neither wait nor panic.
    #[doc(hidden)]
    fn hook(
        tensor: FloatTensor<Self>,
        start: &PassStart<Self>,
        receiver: GradientReceiver<Self::InnerBackend>,
    ) -> FloatTensor<Self>;

    /// As [`hook`](Self::hook), for a tensor whose [value](Self::with_value) will be another one. If a step of the
    /// backward pass needs that value, it is what `recipe` returns then. The recipe runs as the receiver does, at most
    /// once, and must not panic.
    #[doc(hidden)]
    fn hook_with_recipe(
        tensor: FloatTensor<Self>,
        start: &PassStart<Self>,
        receiver: GradientReceiver<Self::InnerBackend>,
        recipe: Recipe<Self::InnerBackend>,
    ) -> FloatTensor<Self>;

    /// Returns the tensor's node with another value.
    #[doc(hidden)]
    fn with_value(tensor: FloatTensor<Self>, value: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self>;
}

/// Gets a gradient.
#[doc(hidden)]
pub type GradientReceiver<B> = Arc<dyn Fn(FloatTensor<B>) + Send + Sync>;

/// Returns the value of a tensor that was not kept.
#[doc(hidden)]
pub type Recipe<B> = Arc<dyn Fn() -> FloatTensor<B> + Send + Sync>;

/// The start of a forward pass. Dropping the last clone frees the anchor of its hooks.
#[doc(hidden)]
pub struct PassStart<B: AutodiffBackend> {
    /// The number of nodes that were made before.
    nodes: u64,
    /// Made by the first hook.
    anchor: Arc<OnceLock<FloatTensor<B>>>,
}

impl<B: AutodiffBackend> PassStart<B> {
    pub(crate) fn now() -> PassStart<B> {
        PassStart { nodes: NodeId::new().value, anchor: Arc::default() }
    }
}

impl<B: AutodiffBackend> Clone for PassStart<B> {
    fn clone(&self) -> Self {
        PassStart { nodes: self.nodes, anchor: self.anchor.clone() }
    }
}

impl<B: Backend, C: CheckpointStrategy> GradientHook for Autodiff<B, C>
where
    // Does not hold for every `B`: burn's feature `distributed` adds bounds.
    Self: AutodiffBackend<InnerBackend = B>,
{
    fn hook(tensor: FloatTensor<Self>, start: &PassStart<Self>, receiver: GradientReceiver<B>) -> FloatTensor<Self> {
        hooked::<B, C>(tensor, (start.nodes, &start.anchor), receiver, None)
    }

    fn hook_with_recipe(
        tensor: FloatTensor<Self>,
        start: &PassStart<Self>,
        receiver: GradientReceiver<B>,
        recipe: Recipe<B>,
    ) -> FloatTensor<Self> {
        hooked::<B, C>(tensor, (start.nodes, &start.anchor), receiver, Some(recipe))
    }

    fn with_value(tensor: FloatTensor<Self>, value: FloatTensor<B>) -> FloatTensor<Self> {
        valued::<B, C>(tensor, value)
    }
}

/// A tensor of the autodiff backend. burn-autodiff does not export its type.
type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

fn hooked<B: Backend, C: CheckpointStrategy>(
    tensor: Tracked<B, C>,
    (start, anchor): (u64, &OnceLock<Tracked<B, C>>),
    receiver: GradientReceiver<B>,
    recipe: Option<Recipe<B>>,
) -> Tracked<B, C> {
    if !tensor.is_tracked() {
        return tensor;
    }
    let anchor = anchor.get_or_init(|| {
        let (device, dtype) = (B::float_device(&tensor.primitive), tensor.primitive.dtype());
        Tracked::<B, C>::new(B::float_zeros(Shape::new([1]), &device, dtype.into())).require_grad()
    });
    // The anchor, at another depth.
    let mut deep = Tracked::<B, C>::new(anchor.primitive.clone());
    let nodes = deep.node.id.value.saturating_sub(start);
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
        Some(recipe) => prepared.memory_bound().retro_forward(Again::<B>(recipe)).parents([&tensor, anchor]),
        // Declared compute bound, so that no checkpointing strategy runs anything again.
        None => prepared.compute_bound(),
    };
    match prepared.stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(Receiver(receiver), tensor.primitive),
        OpsKind::UnTracked(prepared) => prepared.finish(tensor.primitive),
    }
}

fn valued<B: Backend, C: CheckpointStrategy>(mut tensor: Tracked<B, C>, value: FloatTensor<B>) -> Tracked<B, C> {
    tensor.primitive = value;
    tensor
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
