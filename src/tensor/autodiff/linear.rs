//! Collectives that move or sum elements, in the graphs of burn-autodiff.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Float, TensorMetadata, TensorPrimitive};

use super::hook::Tracked;
use super::refuse_nested;
use crate::tensor::operation::carry;
use bonfire_core::internal::{CallSite, call_site, go_on};
use bonfire_core::{Error, Group, ReduceOp};
pub(super) use bonfire_tensor::Linear;
use bonfire_tensor::{PairSizes, Sizes};
use bonfire_train::step::layers::fail;

#[track_caller]
fn apply<B: Backend>(linear: &Linear, tensor: FloatTensor<B>, group: &Group) -> Result<FloatTensor<B>, Error> {
    let (ctx, device, shape, dtype) = (group.into(), B::float_device(&tensor), tensor.shape(), tensor.dtype());
    let tensor = TensorPrimitive::Float(tensor);
    let result = match linear {
        Linear::Broadcast { root } => carry::broadcast::<B, Float>(ctx, tensor, *root)?,
        Linear::Reduce { root } => match carry::reduce::<B, Float>(ctx, tensor, ReduceOp::Sum, *root)? {
            Some(sum) => sum,
            None => TensorPrimitive::Float(B::float_zeros(shape, &device, dtype.into())),
        },
        Linear::AllGather { dim, sizes } => carry::all_gather::<B, Float>(ctx, tensor, *dim, Sizes::Given(sizes))?,
        Linear::ReduceScatter { dim, sizes } => {
            carry::reduce_scatter::<B, Float>(ctx, tensor, ReduceOp::Sum, *dim, Some(sizes))?
        }
        Linear::AllToAll { dim, sizes } => {
            let (send, recv) = sizes.as_ref().map(|[send, recv]| (&send[..], &recv[..])).unzip();
            let sizes = PairSizes { send, recv };
            carry::all_to_all::<B, Float>(ctx, tensor, *dim, sizes)?
        }
    };
    Ok(result.tensor())
}

/// The backward step of a linear collective. Its state is the group, the forward collective, and where the program
/// calls it.
#[derive(Debug)]
struct LinearBackward;

impl<B: Backend> Backward<B, 1> for LinearBackward {
    type State = (Group, Linear, CallSite);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            let (group, linear, at) = ops.state;
            let _call = go_on(at);
            apply::<B>(&linear.transposed(), gradient, &group).unwrap_or_else(|error| fail(error))
        });
    }
}

/// Runs the collective on a tensor that may be tracked, and records its backward step.
#[track_caller]
pub(super) fn tracked<I: Backend>(tensor: Tracked<I>, group: &Group, linear: Linear) -> Result<Tracked<I>, Error> {
    refuse_nested::<I>(&tensor.primitive)?;
    let result = apply::<I>(&linear, tensor.primitive, group)?;
    // Declared compute bound, so that no checkpointing strategy repeats the communication.
    Ok(match LinearBackward.prepare::<NoCheckpointing>([tensor.node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish((group.clone(), linear, call_site()), result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    })
}
