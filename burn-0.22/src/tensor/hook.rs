//! Gradients in the middle of a backward pass. Everything that depends on how burn-autodiff 0.22 runs its graph is
//! here.
//!
//! burn-autodiff has no callback for a gradient. A backward step on the parameter is not enough: steps run by depth,
//! deepest first. The depth of a step is one more than the greatest depth of its parents, so a step on a leaf has depth
//! 1 and runs last. So the hook gets a parent that is as deep as the number of nodes that were made since the forward
//! pass began. That is at least the depth of all that the pass has computed so far. The hook therefore runs right after
//! the steps that use the parameter, and before those of the layers that the pass ran earlier.
//!
//! burn 0.22 does not let a program set the depth of a node. It follows from the parents, so such a parent is the last
//! rung of a ladder: tensors of which each is made of the one before, and that no gradient flows to. A ladder belongs
//! to a device, and is kept while the process runs. It grows to the depth of the deepest pass.
//!
//! The number counts the nodes of all threads, which does no harm: only the order within a graph matters. But rungs are
//! nodes too. They are not counted: otherwise the ladders of ranks that are threads would drive each other up.
//!
//! The step of a differentiable collective is here too: it makes one gradient of another where burn runs it. The
//! collective itself runs on the value of its tensor, outside of burn's dispatch, so that it can return an error.
//!
//! burn-autodiff keeps a graph for each set of connected nodes, and joins two graphs by moving all nodes of one of
//! them. A hook that joins the graph of the pass where its parameter is used would take time in proportion to the pass
//! so far. So one parent of all hooks of a pass is one leaf, the anchor, and they are in one graph from the start.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

#[cfg(feature = "cubecl")]
use burn::backend::Cube;
#[cfg(feature = "flex")]
use burn::backend::Flex;
#[cfg(feature = "ndarray")]
use burn::backend::NdArray;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchDevice,
    DispatchKindConversion, DispatchTensor, TensorMetadata, backend_extension,
};
use burn::tensor::{FloatDType, Shape};

use bonfire_core::internal::lock;

/// Gets a gradient, without autodiff. It runs on the thread of the backward pass, while burn-autodiff holds the lock of
/// the graph, so it must neither wait nor panic.
pub(crate) type GradientReceiver = Arc<dyn Fn(DispatchTensor) + Send + Sync>;

/// Returns the value of a tensor that was not kept, without autodiff. It runs as a [`GradientReceiver`] does.
pub(crate) type Recipe = Arc<dyn Fn() -> DispatchTensor + Send + Sync>;

/// Returns the gradient of a tensor, of the gradient of what took its place. Both are without autodiff. It runs on the
/// thread of the backward pass. It may wait for other ranks, which share no tensors and so have graphs of their own.
pub(crate) type GradientStep = Arc<dyn Fn(DispatchTensor) -> DispatchTensor + Send + Sync>;

/// Nodes between two rungs that are kept: a hook is too deep by less than this, which changes no order of layers.
const STEP: u64 = 4;

/// The nodes of rungs.
static RUNGS: AtomicU64 = AtomicU64::new(0);

/// Ladders, by device and checkpointing strategy: burn refuses operations on tensors of different strategies.
static LADDERS: Mutex<Vec<Ladder>> = Mutex::new(Vec::new());

struct Ladder {
    device: DispatchDevice,
    context: DispatchAutodiffContext,
    rungs: Vec<DispatchTensor>,
}

/// The operations of this module, which burn's dispatch calls on the backend of a tensor.
#[doc(hidden)]
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cubecl"),
    Autodiff
)]
pub trait HookOps: Backend {
    /// Returns `tensor`, whose gradient goes to `receiver` and no further.
    fn hook(
        tensor: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        rung: FloatTensor<Self>,
        receiver: Opaque<GradientReceiver>,
    ) -> FloatTensor<Self> {
        let _ = (anchor, rung, receiver);
        tensor
    }

    /// Returns `value` in the place of `tensor`, which gets its gradient. If a backward step needs the value, it is
    /// what the recipe returns then; without one it is kept.
    fn with_value(
        tensor: FloatTensor<Self>,
        value: FloatTensor<Self>,
        again: Opaque<Option<Recipe>>,
    ) -> FloatTensor<Self> {
        let _ = (tensor, again);
        value
    }

    /// Returns `value` in the place of `tensor`, which gets the gradient that `step` returns.
    fn with_step(tensor: FloatTensor<Self>, value: FloatTensor<Self>, step: Opaque<GradientStep>) -> FloatTensor<Self> {
        let _ = (tensor, step);
        value
    }

    /// Returns `tensor`, one deeper.
    fn rung(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }
}

#[cfg(feature = "flex")]
impl HookOps for Flex {}

#[cfg(feature = "ndarray")]
impl HookOps for NdArray {}

#[cfg(feature = "cubecl")]
impl HookOps for Cube {}

impl<B: HookOps, C: CheckpointStrategy> HookOps for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn hook(
        tensor: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        rung: FloatTensor<Self>,
        receiver: Opaque<GradientReceiver>,
    ) -> FloatTensor<Self> {
        let (primitive, node) = tensor.into_parts();
        // Declared compute bound, so that no checkpointing strategy runs anything again.
        let prepared = Hook.prepare::<NoCheckpointing>([node, anchor.node(), rung.node()]).compute_bound();
        match prepared.stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(receiver, primitive),
            OpsKind::UnTracked(prepared) => prepared.finish(primitive),
        }
    }

    fn with_value(
        tensor: FloatTensor<Self>,
        value: FloatTensor<Self>,
        again: Opaque<Option<Recipe>>,
    ) -> FloatTensor<Self> {
        // The strategy that keeps recipes: it is a type of the operation, not of the graph.
        let prepared = WithValue.prepare::<BalancedCheckpointing>([tensor.node()]);
        let prepared = match again.0 {
            Some(recipe) => prepared.memory_bound().retro_forward(Repeat::<B>(recipe, PhantomData)).parents([&tensor]),
            // Declared compute bound, so that no checkpointing strategy runs anything again.
            None => prepared.compute_bound(),
        };
        let value = value.into_primitive();
        match prepared.stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((), value),
            OpsKind::UnTracked(prepared) => prepared.finish(value),
        }
    }

    fn with_step(tensor: FloatTensor<Self>, value: FloatTensor<Self>, step: Opaque<GradientStep>) -> FloatTensor<Self> {
        let value = value.into_primitive();
        // Declared compute bound, so that no checkpointing strategy repeats what made the value.
        match WithStep.prepare::<NoCheckpointing>([tensor.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(step, value),
            OpsKind::UnTracked(prepared) => prepared.finish(value),
        }
    }

    fn rung(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let (primitive, node) = tensor.into_parts();
        Rung.prepare::<NoCheckpointing>([node]).compute_bound().stateless(primitive)
    }
}

/// The backward step of a hook.
#[derive(Debug)]
struct Hook;

impl<B: Backend> Backward<B, 3> for Hook
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Opaque<GradientReceiver>;

    fn backward(self, ops: Ops<Self::State, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = BackendTensor::Float(gradients.consume::<B>(&ops.node));
        (ops.state.0)(<DispatchTensor as DispatchKindConversion<B>>::from_backend(gradient));
    }
}

/// The backward step of a tensor with another value: the gradient goes on.
#[derive(Debug)]
struct WithValue;

impl<B: Backend> Backward<B, 1> for WithValue {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| gradient);
    }
}

/// The backward step of a tensor with another value and a step of its own.
#[derive(Debug)]
struct WithStep;

impl<B: Backend> Backward<B, 1> for WithStep
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Opaque<GradientStep>;

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            let gradient = <DispatchTensor as DispatchKindConversion<B>>::from_backend(BackendTensor::Float(gradient));
            let made = <DispatchTensor as DispatchKindConversion<B>>::try_into_backend((ops.state.0)(gradient));
            made.unwrap_or_else(|reason| unreachable!("a step keeps the backend: {reason}")).float()
        });
    }
}

/// A function, as an argument of an operation and as the state of a backward step.
#[doc(hidden)]
#[derive(Clone)]
pub struct Opaque<T>(T);

impl<T> fmt::Debug for Opaque<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opaque")
    }
}

/// Runs a recipe.
struct Repeat<B>(Recipe, PhantomData<fn() -> B>);

impl<B: Backend> RetroForward for Repeat<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn forward(&self, states: &mut BackwardStates, node: NodeId) {
        if let Ok(value) = <DispatchTensor as DispatchKindConversion<B>>::try_into_backend((self.0)()) {
            states.save(node, value.float());
        }
    }
}

impl<B> fmt::Debug for Repeat<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Repeat")
    }
}

/// The backward step of a rung, which never runs.
#[derive(Debug)]
struct Rung;

impl<B: Backend> Backward<B, 1> for Rung {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {}
}

/// Returns a rung on a tensor's device that is at least so deep.
fn rung(tensor: &DispatchTensor, depth: u64) -> DispatchTensor {
    let (device, context) = (tensor.device(), tensor.autodiff);
    let mut ladders = lock(&LADDERS);
    let known = ladders.iter().position(|ladder| ladder.device == device && ladder.context == context);
    let at = known.unwrap_or_else(|| {
        let first = Dispatch::float_zeros(Shape::new([1]), &device, FloatDType::F32);
        ladders.push(Ladder { device, context, rungs: vec![first] });
        ladders.len() - 1
    });
    let rungs = &mut ladders[at].rungs;
    let wanted = depth.div_ceil(STEP) as usize;
    while rungs.len() <= wanted {
        let mut next = rungs[rungs.len() - 1].clone();
        for _ in 0..STEP {
            next = <Dispatch as HookOps>::rung(next);
            // Relaxed: `time` is compared with a number of the same thread, and too great a depth does no harm.
            RUNGS.fetch_add(1, Ordering::Relaxed);
        }
        rungs.push(next);
    }
    rungs[wanted].clone()
}

/// Returns the number of nodes that were made, apart from rungs.
fn time() -> u64 {
    NodeId::new().value.saturating_sub(RUNGS.load(Ordering::Relaxed))
}

/// The start of a forward pass. Dropping the last clone frees the anchor of its hooks.
#[derive(Clone)]
pub(crate) struct PassStart {
    /// The nodes that were made before.
    nodes: u64,
    /// Made by the first hook.
    anchor: Arc<OnceLock<DispatchTensor>>,
}

impl PassStart {
    pub fn now() -> PassStart {
        PassStart { nodes: time(), anchor: Arc::default() }
    }
}

/// Returns `tensor` with a hook in its graph. In a backward pass, `receiver` gets the gradient once no step adds to it
/// any more; the tensor itself gets none. Call it where the forward pass first uses the tensor. `start` is that of the
/// pass.
pub(crate) fn hook(tensor: DispatchTensor, start: &PassStart, receiver: GradientReceiver) -> DispatchTensor {
    let anchor = start.anchor.get_or_init(|| {
        let zeros = Dispatch::float_zeros(Shape::new([1]), &tensor.device(), FloatDType::F32);
        Dispatch::float_set_require_grad(zeros, true)
    });
    let rung = rung(&tensor, time().saturating_sub(start.nodes));
    <Dispatch as HookOps>::hook(tensor, anchor.clone(), rung, Opaque(receiver))
}

/// Returns `value`, which has no autodiff, in the place of a tensor with a hook: a parameter of which a rank has a
/// part, and its whole. A recipe makes the value again if a step of the backward pass needs it; without one it is kept.
pub(crate) fn with_value(tensor: DispatchTensor, value: DispatchTensor, recipe: Option<Recipe>) -> DispatchTensor {
    let value = beside(&tensor, value);
    <Dispatch as HookOps>::with_value(tensor, value, Opaque(recipe))
}

/// Returns `value`, which has no autodiff, in the place of a tensor with autodiff. In a backward pass the tensor gets
/// the gradient that `step` makes of the value's.
pub(crate) fn with_step(tensor: DispatchTensor, value: DispatchTensor, step: GradientStep) -> DispatchTensor {
    let value = beside(&tensor, value);
    <Dispatch as HookOps>::with_step(tensor, value, Opaque(step))
}

/// Returns a tensor without autodiff as an argument beside one with autodiff.
fn beside(tensor: &DispatchTensor, value: DispatchTensor) -> DispatchTensor {
    let mut value = Dispatch::from_inner(value);
    value.autodiff = tensor.autodiff;
    value
}
