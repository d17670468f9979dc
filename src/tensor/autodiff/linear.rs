//! Collectives that move or sum elements.
//!
//! Each is a linear map on the concatenation of all ranks' elements, so its backward pass is the collective of the
//! transposed matrix.

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
use bonfire_core::{Error, Group, ReduceOp};
use bonfire_tensor::{PairSizes, Sizes};
use bonfire_train::step::layers::fail;

/// A linear collective and its arguments. Sizes are lengths along `dim`, one per rank.
#[derive(Clone, Debug)]
pub(super) enum Linear {
    Broadcast {
        root: usize,
    },
    /// Returns the sum on the root, zeros elsewhere.
    Reduce {
        root: usize,
    },
    AllGather {
        dim: isize,
        sizes: Vec<usize>,
    },
    /// Returns this rank's part of the sum.
    ReduceScatter {
        dim: isize,
        sizes: Vec<usize>,
    },
    /// `None` for equal parts, otherwise the sizes to send and to receive.
    AllToAll {
        dim: isize,
        sizes: Option<[Vec<usize>; 2]>,
    },
}

impl Linear {
    /// The collective of the backward pass: that of the transposed matrix.
    fn transposed(self) -> Linear {
        match self {
            Linear::Broadcast { root } => Linear::Reduce { root },
            Linear::Reduce { root } => Linear::Broadcast { root },
            Linear::AllGather { dim, sizes } => Linear::ReduceScatter { dim, sizes },
            Linear::ReduceScatter { dim, sizes } => Linear::AllGather { dim, sizes },
            Linear::AllToAll { dim, sizes } => Linear::AllToAll { dim, sizes: sizes.map(|[send, recv]| [recv, send]) },
        }
    }

    #[track_caller]
    fn apply<B: Backend>(&self, tensor: FloatTensor<B>, group: &Group) -> Result<FloatTensor<B>, Error> {
        let (ctx, device, shape, dtype) = (group.into(), B::float_device(&tensor), tensor.shape(), tensor.dtype());
        let tensor = TensorPrimitive::Float(tensor);
        let result = match self {
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
}

/// The backward step of a linear collective. Its state is the group and the forward collective.
#[derive(Debug)]
struct LinearBackward;

impl<B: Backend> Backward<B, 1> for LinearBackward {
    type State = (Group, Linear);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            let (group, linear) = ops.state;
            linear.transposed().apply::<B>(gradient, &group).unwrap_or_else(|error| fail(error))
        });
    }
}

/// Runs the collective on a tensor that may be tracked, and records its backward step.
#[track_caller]
pub(super) fn tracked<I: Backend>(tensor: Tracked<I>, group: &Group, linear: Linear) -> Result<Tracked<I>, Error> {
    refuse_nested::<I>(&tensor.primitive)?;
    let result = linear.apply::<I>(tensor.primitive, group)?;
    // Declared compute bound, so that no checkpointing strategy repeats the communication.
    Ok(match LinearBackward.prepare::<NoCheckpointing>([tensor.node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish((group.clone(), linear), result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    })
}
