//! A differentiable sum over the ranks of a group.

#[cfg(feature = "cubecl")]
use burn::backend::Cube;
#[cfg(feature = "flex")]
use burn::backend::Flex;
#[cfg(feature = "ndarray")]
use burn::backend::NdArray;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchKindConversion, DispatchTensor, TensorMetadata, backend_extension,
};
use burn::tensor::{Tensor, TensorData, try_read_sync};

use super::host::{align, float};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Error, Group, Operation, ReduceOp};
use bonfire_train::step::layers::{Weight, begin_collective, fail};

const OPERATION: &str = "differentiable collective";

/// The group of a sum, and the weight of this rank's loss.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Sum {
    group: Group,
    weight: Weight,
}

/// The operation of this module, which burn's dispatch calls on the backend of a tensor.
#[doc(hidden)]
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cubecl"),
    Autodiff
)]
pub trait SumOps: Backend {
    /// Returns the sum over the ranks of a group.
    fn sum_over_ranks(tensor: FloatTensor<Self>, sum: Sum) -> FloatTensor<Self> {
        all_reduce::<Self>(tensor, &sum.group).unwrap_or_else(|error| fail(error))
    }
}

#[cfg(feature = "flex")]
impl SumOps for Flex {}

#[cfg(feature = "ndarray")]
impl SumOps for NdArray {}

#[cfg(feature = "cubecl")]
impl SumOps for Cube {}

impl<B: SumOps, C: CheckpointStrategy> SumOps for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn sum_over_ranks(tensor: FloatTensor<Self>, sum: Sum) -> FloatTensor<Self> {
        let (primitive, node) = tensor.into_parts();
        let result = B::sum_over_ranks(primitive, sum.clone());
        // Declared compute bound, so that no checkpointing strategy repeats the communication.
        match SumOverRanks.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(sum, result),
            OpsKind::UnTracked(prepared) => prepared.finish(result),
        }
    }
}

/// The backward step of [`weighted_sum`].
#[derive(Debug)]
struct SumOverRanks;

impl<B: SumOps> Backward<B, 1> for SumOverRanks {
    type State = Sum;

    fn backward(self, ops: Ops<Sum, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            let weight = ops.state.weight.get();
            let scaled = |gradient, factor: f64| match factor {
                1.0 => gradient,
                _ => B::float_mul_scalar(gradient, factor.into()),
            };
            // Gradients of no samples are NaN, also times 0.
            let zeros = |gradient: FloatTensor<B>| {
                B::float_zeros(gradient.shape(), &gradient.device(), gradient.dtype().into())
            };
            let own = if weight == 0.0 { zeros(gradient) } else { scaled(gradient, weight) };
            let sum = B::sum_over_ranks(own, ops.state);
            if weight == 0.0 { zeros(sum) } else { scaled(sum, weight.recip()) }
        });
    }
}

/// Returns the sum of a tensor over the ranks of a group, with gradients for a global loss that is a weighted sum: the
/// sum over the ranks of each rank's weight times its loss. The weight does not change the result.
///
/// A rank's gradient is that of the global loss divided by the rank's own weight, because the exchange of gradients
/// multiplies by that weight. It is zero where the weight is 0.
///
/// # Panics
/// If the collective fails, here or in the backward pass.
pub(crate) fn weighted_sum<const D: usize>(tensor: Tensor<D>, group: &Group, weight: &Weight) -> Tensor<D> {
    begin_collective();
    let sum = Sum { group: group.clone(), weight: weight.clone() };
    Tensor::from_dispatch(<Dispatch as SumOps>::sum_over_ranks(tensor.into_dispatch(), sum))
}

fn all_reduce<B: Backend>(tensor: FloatTensor<B>, group: &Group) -> Result<FloatTensor<B>, Error> {
    let (device, dtype) = (tensor.device(), tensor.dtype());
    let carrier = float(dtype).ok_or_else(|| Error::argument(OPERATION, format!("{dtype:?} cannot be added")))?;
    let read = try_read_sync(B::float_into_data(tensor));
    let data = read.ok_or_else(|| Error::broken(OPERATION, "the backend reads tensors only asynchronously"))?;
    let (bytes, shape, dtype) = data.map_err(|error| Error::io(OPERATION, error))?.into_parts();
    let mut bytes = align(bytes, carrier);
    let request = Request::new(Operation::AllReduce, carrier).reduction(ReduceOp::Sum).shape(&shape);
    group.operate(request, None, &mut bytes)?;
    Ok(B::float_from_data(TensorData::from_bytes(bytes, shape, dtype), &device))
}
