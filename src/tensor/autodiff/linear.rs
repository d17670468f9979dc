//! Collectives that move elements or add them up. They are linear, so their gradients are moved and added up by others.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Float, TensorMetadata, TensorPrimitive};

use super::refuse_nested;
use crate::tensor::attempt::fail;
use crate::tensor::operation::carry::{self, Swap};
use crate::tensor::operation::sizes::Sizes;
use bonfire_core::{Error, Group, ReduceOp};

/// One of them, with all that the ranks know of it. Sizes are those of all ranks.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub enum Linear {
    Broadcast {
        root: usize,
    },
    /// The sum on the root; zeros elsewhere.
    Reduce {
        root: usize,
    },
    AllGather {
        dim: isize,
        sizes: Vec<usize>,
    },
    /// The parts of the sum.
    ReduceScatter {
        dim: isize,
        sizes: Vec<usize>,
    },
    /// Of equal parts, or of parts of these sizes.
    AllToAll {
        dim: isize,
        sizes: Option<[Vec<usize>; 2]>,
    },
}

impl Linear {
    /// What gradients go through: the transposed matrix, if the collective is one on all ranks' elements together.
    fn transposed(self) -> Linear {
        match self {
            Linear::Broadcast { root } => Linear::Reduce { root },
            Linear::Reduce { root } => Linear::Broadcast { root },
            Linear::AllGather { dim, sizes } => Linear::ReduceScatter { dim, sizes },
            Linear::ReduceScatter { dim, sizes } => Linear::AllGather { dim, sizes },
            Linear::AllToAll { dim, sizes } => Linear::AllToAll { dim, sizes: sizes.map(|[send, recv]| [recv, send]) },
        }
    }

    fn apply<B: Backend>(&self, tensor: FloatTensor<B>, group: &Group) -> Result<FloatTensor<B>, Error> {
        let (via, device, shape, dtype) = (group.into(), B::float_device(&tensor), tensor.shape(), tensor.dtype());
        let tensor = TensorPrimitive::Float(tensor);
        let result = match self {
            Linear::Broadcast { root } => carry::broadcast::<B, Float>(via, tensor, *root)?,
            Linear::Reduce { root } => match carry::reduce::<B, Float>(via, tensor, ReduceOp::Sum, *root)? {
                Some(sum) => sum,
                None => TensorPrimitive::Float(B::float_zeros(shape, &device, dtype.into())),
            },
            Linear::AllGather { dim, sizes } => carry::all_gather::<B, Float>(via, tensor, *dim, Sizes::Given(sizes))?,
            Linear::ReduceScatter { dim, sizes } => {
                carry::reduce_scatter::<B, Float>(via, tensor, ReduceOp::Sum, *dim, Some(sizes))?
            }
            Linear::AllToAll { dim, sizes } => {
                let (send, recv) = sizes.as_ref().map(|[send, recv]| (&send[..], &recv[..])).unzip();
                let swap = Swap { send, recv };
                carry::all_to_all::<B, Float>(via, tensor, *dim, swap)?
            }
        };
        Ok(result.tensor())
    }
}

/// The step of a backward pass: its input is the gradient of the collective's result.
#[derive(Debug)]
struct Step;

impl<B: Backend> Backward<B, 1> for Step {
    type State = (Group, Linear);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            let (group, linear) = ops.state;
            linear.transposed().apply::<B>(gradient, &group).unwrap_or_else(|error| fail(error))
        });
    }
}

/// Carries out the collective on tracked tensors.
pub(super) fn tracked<B: Backend, C: CheckpointStrategy>(
    tensor: FloatTensor<Autodiff<B, C>>,
    group: &Group,
    linear: Linear,
) -> Result<FloatTensor<Autodiff<B, C>>, Error> {
    refuse_nested::<B>(&tensor.primitive)?;
    let result = linear.apply::<B>(tensor.primitive, group)?;
    // Compute bound, so that no checkpointing strategy repeats the communication.
    Ok(match Step.prepare::<C>([tensor.node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish((group.clone(), linear), result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    })
}
