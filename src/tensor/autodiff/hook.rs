//! Gradients in the middle of a backward pass. Everything that depends on how burn-autodiff 0.21 runs its graph is
//! here.
//!
//! burn-autodiff has no callback for a gradient. A backward step on the parameter is not enough: steps run by depth,
//! deepest first. The depth of a step is one more than the greatest depth of its parents, so a step on a leaf has
//! depth 1 and runs last. Untracked parents count for the depth too. So the hook gets a second parent: an untracked
//! leaf whose depth is the number of nodes that were made since the forward pass began. That is at least the depth of
//! all that the pass has computed so far. The hook therefore runs right after the steps that use the parameter, and
//! before those of the layers that the pass ran earlier.
//!
//! The number counts the nodes of all threads, which does no harm: only the order within a graph matters.

use std::fmt;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;

/// An autodiff backend that hands over the gradient of a tensor as soon as it is complete.
pub trait GradientHook: AutodiffBackend {
    /// Returns `tensor` with a hook in its graph. In a backward pass, `receiver` gets the gradient once no step adds to
    /// it any more; the tensor itself gets none. A tensor that is not tracked is returned as it is. Call it where the
    /// forward pass first uses the tensor. `start` is the moment at which the pass began.
    ///
    /// The receiver runs on the thread of the backward pass, while burn-autodiff holds the lock of the graph. It must
    /// neither wait nor panic.
    #[doc(hidden)]
    fn hook(
        tensor: FloatTensor<Self>,
        start: PassStart,
        receiver: GradientReceiver<Self::InnerBackend>,
    ) -> FloatTensor<Self>;
}

/// Gets a gradient.
#[doc(hidden)]
pub type GradientReceiver<B> = Arc<dyn Fn(FloatTensor<B>) + Send + Sync>;

/// When a forward pass began, by the number of nodes that were made before.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct PassStart(u64);

impl PassStart {
    pub(crate) fn now() -> PassStart {
        PassStart(NodeId::new().value)
    }
}

impl<B: Backend, C: CheckpointStrategy> GradientHook for Autodiff<B, C>
where
    // Does not hold for every `B`: burn's feature `distributed` adds bounds.
    Self: AutodiffBackend<InnerBackend = B>,
{
    fn hook(tensor: FloatTensor<Self>, start: PassStart, receiver: GradientReceiver<B>) -> FloatTensor<Self> {
        hooked::<B, C>(tensor, start, receiver)
    }
}

/// A tensor of the autodiff backend. burn-autodiff does not export its type.
type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

fn hooked<B: Backend, C: CheckpointStrategy>(
    tensor: Tracked<B, C>,
    start: PassStart,
    receiver: GradientReceiver<B>,
) -> Tracked<B, C> {
    let mut depth = Tracked::<B, C>::new(tensor.primitive.clone());
    let nodes = depth.node.id.value.saturating_sub(start.0);
    match Arc::get_mut(&mut depth.node) {
        Some(node) => node.order = usize::try_from(nodes).unwrap_or(usize::MAX - 1),
        // A node that is shared keeps its depth: then the hook runs last, with the same gradient.
        None => log::debug!("burn-autodiff shares a new node, so a gradient arrives late"),
    }
    // Declared compute bound, so that no checkpointing strategy runs anything again.
    match Hook.prepare::<C>([tensor.node, depth.node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(Receiver(receiver), tensor.primitive),
        OpsKind::UnTracked(prepared) => prepared.finish(tensor.primitive),
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
