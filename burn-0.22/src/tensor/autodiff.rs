//! Differentiable collectives.
//!
//! | forward | backward |
//! |---|---|
//! | [`all_reduce_sum`] | all_reduce: the sum of the ranks' gradients on every rank |
//! | [`broadcast`] | reduce: the sum on the root, zeros elsewhere |
//! | [`all_gather`] | reduce_scatter: each rank gets its part of the sum |
//! | [`reduce_scatter`] | all_gather: all parts on every rank |
//! | [`all_to_all`] | all_to_all: each part returns to the rank that sent it |
//!
//! Gradients are those of the sum of all ranks' losses. Where all ranks compute the same loss, as in tensor
//! parallelism, divide it by the world size, and sum the gradients of replicated parameters over the ranks; otherwise
//! gradients are as many times too large as there are ranks. The backward pass of each operation is a collective too:
//! every rank must run it through its result, even a rank whose part is empty, and tensors must be tracked on all ranks
//! or on none. Ranks that build the same graph run the backward passes of several collectives in the same order. In the
//! `_v` forms, sizes along the dimension may differ between ranks. For other kinds of tensors, or without gradients,
//! use [`operation`].
//!
//! # Errors
//! Each function returns the errors of its counterpart in [`operation`](super::operation#errors), and
//! [`Error::InvalidArgument`] for a tensor on a device without autodiff.
//!
//! # Panics
//! The backward pass panics with the text of the error if its collective fails, because burn's backward passes return
//! no `Result`. It panics in the thread that called `backward` and releases burn's locks. [`attempt`] turns the panic
//! into an error.
//!
//! # Ranks as threads
//!
//! burn-autodiff holds the lock of a graph during a whole backward pass, and a collective inside one waits for other
//! ranks meanwhile. Ranks in processes of their own are not affected. Ranks that are threads of one process must not
//! share tracked tensors: each builds its own model, or forks a clone of one
//! ([`Module::fork`](burn::module::Module::fork)). Tensors that depend on a shared leaf live in one graph, and the
//! first rank to run its backward pass would lock out the ranks that it waits for. A violation shows as a timeout of
//! the collective, not as a wrong result.
//!
//! On burn 0.21 a collective must also lie between two backward passes. On 0.22 it need not: burn-autodiff waits for no
//! other graph at the end of a backward pass.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::hook::with_step;
use super::operation;
use bonfire_core::internal::{call_site, go_on};
use bonfire_core::{Error, Group, ReduceOp};
use bonfire_tensor::{Axis, Linear, PairSizes, Sizes, split_sizes};
pub use bonfire_train::step::layers::attempt;
use bonfire_train::step::layers::{Weight, begin_collective, fail};

/// Returns the element-wise sum of the ranks' tensors, on every rank. For other reductions, without gradients, use
/// [`operation::all_reduce`].
///
/// Every rank passes a tensor of the same shape and element type: f64, f32, f16 or bf16. Elements are transferred in
/// their own type; f16 and bf16 are summed in f32. Each rank's result depends on every rank's tensor, so the gradient
/// of a rank's tensor is the sum of the gradients of all ranks' results. Every rank must run the backward pass; for
/// ranks that are threads, see the [module](self#ranks-as-threads).
///
/// # Errors
/// See [errors](self#errors).
///
/// # Panics
/// In the backward pass; see [panics](self#panics).
///
/// # Example
/// ```
/// use bonfire::Group;
/// use bonfire::tensor::autodiff::all_reduce_sum;
/// use burn::tensor::{DType, Device, Tensor};
///
/// let ranks = Group::threads(2)?.into_iter().map(|group| {
///     std::thread::spawn(move || {
///         let x = Tensor::<1>::full([1], 5.0, (&Device::flex().autodiff(), DType::F64)).require_grad();
///         let sum = all_reduce_sum(x.clone(), &group)?;
///         let gradients = (sum.clone() * (group.rank() + 1) as f64).backward();
///         Ok::<_, bonfire::Error>([Some(sum.into_scalar::<f64>()), x.grad(&gradients).map(Tensor::into_scalar)])
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     // The losses of ranks 0 and 1 multiply the sum by 1 and 2.
///     assert_eq!(rank.join().expect("no panic")?, [Some(10.0), Some(3.0)]);
/// }
/// # Ok::<(), bonfire::Error>(())
/// ```
#[track_caller]
pub fn all_reduce_sum<const D: usize>(tensor: Tensor<D>, group: &Group) -> Result<Tensor<D>, Error> {
    weighted_sum(tensor, group, &Weight::new(1.0))
}

/// Returns `root`'s tensor on every rank. Of the other ranks' tensors only shape, element type and device matter; shape
/// and element type are the same on all ranks. Their gradients are zero.
///
/// # Errors
/// See [errors](self#errors).
///
/// # Panics
/// In the backward pass; see [panics](self#panics).
#[track_caller]
pub fn broadcast<const D: usize>(tensor: Tensor<D>, root: usize, group: &Group) -> Result<Tensor<D>, Error> {
    linear(tensor, group, Linear::Broadcast { root })
}

/// Concatenates the ranks' tensors along `dim` in rank order, on every rank. All have the same shape; the result is
/// world size times as long along `dim`.
///
/// # Errors
/// See [errors](self#errors).
///
/// # Panics
/// In the backward pass; see [panics](self#panics).
#[track_caller]
pub fn all_gather<const D: usize>(tensor: Tensor<D>, dim: isize, group: &Group) -> Result<Tensor<D>, Error> {
    let sizes = Sizes::Even.resolve(group, OPERATION, &axis(&tensor, dim)?)?;
    linear(tensor, group, Linear::AllGather { dim, sizes })
}

/// Variable-size [`all_gather`]: rank `r`'s tensor has length `sizes[r]` along `dim`. With `None`, the ranks exchange
/// their sizes first.
///
/// # Errors
/// See [errors](self#errors).
///
/// # Panics
/// In the backward pass; see [panics](self#panics).
#[track_caller]
pub fn all_gather_v<const D: usize>(
    tensor: Tensor<D>,
    dim: isize,
    sizes: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<D>, Error> {
    let axis = axis(&tensor, dim)?;
    let sizes = sizes.map_or(Sizes::Exchanged, Sizes::Given).resolve(group, OPERATION, &axis)?;
    linear(tensor, group, Linear::AllGather { dim, sizes })
}

/// Sums the ranks' tensors element-wise, splits the sum along `dim` into equal parts, and returns part `r` on rank `r`.
/// All tensors have the same shape, with a multiple of the world size along `dim`.
///
/// # Errors
/// See [errors](self#errors).
///
/// # Panics
/// In the backward pass; see [panics](self#panics).
#[track_caller]
pub fn reduce_scatter<const D: usize>(tensor: Tensor<D>, dim: isize, group: &Group) -> Result<Tensor<D>, Error> {
    let sizes = split_sizes(group, OPERATION, &axis(&tensor, dim)?, None)?;
    linear(tensor, group, Linear::ReduceScatter { dim, sizes })
}

/// Variable-size [`reduce_scatter`]: the part of rank `r` has length `sizes[r]` along `dim`. The sizes are the same on
/// all ranks and add up to the tensor's length.
///
/// # Errors
/// See [errors](self#errors).
///
/// # Panics
/// In the backward pass; see [panics](self#panics).
#[track_caller]
pub fn reduce_scatter_v<const D: usize>(
    tensor: Tensor<D>,
    dim: isize,
    sizes: &[usize],
    group: &Group,
) -> Result<Tensor<D>, Error> {
    linear(tensor, group, Linear::ReduceScatter { dim, sizes: sizes.to_vec() })
}

/// Splits the tensor along `dim` into equal parts, sends part `r` to rank `r`, and concatenates the received parts
/// along `dim` in rank order. All tensors and the results have the same shape.
///
/// # Errors
/// See [errors](self#errors).
///
/// # Panics
/// In the backward pass; see [panics](self#panics).
#[track_caller]
pub fn all_to_all<const D: usize>(tensor: Tensor<D>, dim: isize, group: &Group) -> Result<Tensor<D>, Error> {
    linear(tensor, group, Linear::AllToAll { dim, sizes: None })
}

/// Variable-size [`all_to_all`]: along `dim`, this rank sends length `send[r]` to rank `r` and receives `recv[r]` from
/// it. With `recv` `None`, the ranks exchange their sizes first.
///
/// # Errors
/// See [errors](self#errors).
///
/// # Panics
/// In the backward pass; see [panics](self#panics).
#[track_caller]
pub fn all_to_all_v<const D: usize>(
    tensor: Tensor<D>,
    dim: isize,
    send: &[usize],
    recv: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<D>, Error> {
    let axis = axis(&tensor, dim)?;
    let send = split_sizes(group, OPERATION, &axis, Some(send))?;
    let recv = PairSizes { send: Some(&send), recv }.received(group, OPERATION, &axis, &send)?;
    linear(tensor, group, Linear::AllToAll { dim, sizes: Some([send, recv]) })
}

const OPERATION: &str = "differentiable collective";

#[track_caller]
fn apply<const D: usize>(linear: &Linear, tensor: Tensor<D>, group: &Group) -> Result<Tensor<D>, Error> {
    match linear {
        Linear::Broadcast { root } => operation::broadcast(tensor, *root, group),
        Linear::Reduce { root } => {
            let (shape, device, dtype) = (tensor.shape(), tensor.device(), tensor.dtype());
            let sum = operation::reduce(tensor, ReduceOp::Sum, *root, group)?;
            Ok(sum.unwrap_or_else(|| Tensor::zeros(shape, (&device, dtype))))
        }
        Linear::AllGather { dim, sizes } => operation::all_gather_v(tensor, *dim, Some(sizes), group),
        Linear::ReduceScatter { dim, sizes } => operation::reduce_scatter_v(tensor, ReduceOp::Sum, *dim, sizes, group),
        Linear::AllToAll { dim, sizes: None } => operation::all_to_all(tensor, *dim, group),
        Linear::AllToAll { dim, sizes: Some([send, recv]) } => {
            operation::all_to_all_v(tensor, *dim, send, Some(recv), group)
        }
    }
}

#[track_caller]
fn linear<const D: usize>(tensor: Tensor<D>, group: &Group, linear: Linear) -> Result<Tensor<D>, Error> {
    let value = apply(&linear, inner(&tensor)?, group)?;
    let (transposed, group) = (linear.transposed(), group.clone());
    Ok(with_backward(tensor, value, move |gradient| apply(&transposed, gradient, &group)))
}

/// Returns [`all_reduce_sum`] with gradients for a global loss that is a weighted sum: the sum over the ranks of each
/// rank's weight times its loss. The weight does not change the result.
///
/// A rank's gradient is that of the global loss divided by the rank's own weight, because the exchange of gradients
/// multiplies by that weight. It is zero where the weight is 0.
#[track_caller]
pub(crate) fn weighted_sum<const D: usize>(
    tensor: Tensor<D>,
    group: &Group,
    weight: &Weight,
) -> Result<Tensor<D>, Error> {
    let value = operation::all_reduce(inner(&tensor)?, ReduceOp::Sum, group)?;
    let (weight, group) = (weight.clone(), group.clone());
    let scaled = |gradient: Tensor<D>, factor: f64| if factor == 1.0 { gradient } else { gradient.mul_scalar(factor) };
    Ok(with_backward(tensor, value, move |gradient| {
        let weight = weight.get();
        // Gradients of no samples are NaN, also times 0.
        let own = if weight == 0.0 { gradient.zeros_like() } else { scaled(gradient, weight) };
        let sum = operation::all_reduce(own, ReduceOp::Sum, &group)?;
        Ok(if weight == 0.0 { sum.zeros_like() } else { scaled(sum, weight.recip()) })
    }))
}

/// Returns the axis of a tensor, before the ranks exchange anything.
fn axis<const D: usize>(tensor: &Tensor<D>, dim: isize) -> Result<Axis, Error> {
    check_autodiff(tensor)?;
    Axis::new(OPERATION, &tensor.shape(), dim)
}

/// Returns the value of a tensor that goes into a collective.
fn inner<const D: usize>(tensor: &Tensor<D>) -> Result<Tensor<D>, Error> {
    check_autodiff(tensor)?;
    begin_collective();
    Ok(tensor.clone().inner())
}

fn check_autodiff<const D: usize>(tensor: &Tensor<D>) -> Result<(), Error> {
    if !tensor.is_autodiff() {
        let reason = "the tensor is on a device without autodiff, where no gradient flows: use the operation in \
                      `tensor::operation`, or make the tensor on `device.autodiff()`";
        return Err(Error::argument(OPERATION, reason));
    }
    Ok(())
}

/// Returns `value` in the place of `tensor`, which gets the gradient that `backward` makes of the value's.
#[track_caller]
fn with_backward<const D: usize>(
    tensor: Tensor<D>,
    value: Tensor<D>,
    backward: impl Fn(Tensor<D>) -> Result<Tensor<D>, Error> + Send + Sync + 'static,
) -> Tensor<D> {
    let at = call_site();
    let step = move |gradient| {
        let _call = go_on(at);
        let made = backward(Tensor::from_dispatch(gradient)).unwrap_or_else(|error| fail(error));
        made.into_dispatch()
    };
    Tensor::from_dispatch(with_step(tensor.into_dispatch(), value.into_dispatch(), Arc::new(step)))
}
