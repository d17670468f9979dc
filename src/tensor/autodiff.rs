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
//! use [`operation`](super::operation).
//!
//! # Errors
//! Each function returns the errors of its counterpart in [`operation`](super::operation#errors), and
//! [`Error::InvalidArgument`] for an `Autodiff` of an `Autodiff`, whose outer graph would lose the gradient, and for an
//! autodiff backend that is not burn's.
//!
//! # Panics
//! The backward pass panics with the text of the error if its collective fails, because burn's backward passes return
//! no `Result`. It panics in the thread that called `backward` and releases burn's locks. [`attempt`] turns the panic
//! into an error.
//!
//! # Ranks as threads
//!
//! burn-autodiff 0.21 holds the lock of a graph during a whole backward pass. At the end of every backward pass it
//! visits all graphs of the process and takes their locks one by one. A collective inside a backward pass waits for
//! other ranks while its graph is locked. Ranks in processes of their own are not affected. Ranks that are threads of
//! one process must follow two rules:
//!
//! - Ranks must not share tracked tensors. Each rank builds its own model, or forks a clone of one
//!   ([`Module::fork`](burn::module::Module::fork)). Tensors that depend on a shared leaf live in one graph, and the
//!   first rank to run its backward pass would lock out the ranks that it waits for.
//! - A collective outside of any backward pass must separate each backward pass that contains a collective from the
//!   previous backward pass of the same thread, and of every thread that it waits for. [`all_reduce_sum`] in the
//!   forward pass or the all-reduce of gradients is such a collective. A rank that has reached it has finished its
//!   visit, so no rank that others wait for later blocks in one. A loop of forward pass, one backward pass and update
//!   satisfies this rule. Two forward passes followed by two backward passes do not: add the losses and run one
//!   backward pass, or call an all-reduce between the two. Backward passes of threads that no rank waits for are
//!   harmless.
//!
//! A violation shows as a timeout of the collective, not as a wrong result.

pub(crate) mod hook;
mod linear;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Float, Tensor, TensorMetadata, TensorPrimitive};

use self::hook::{Tracked, check_backend, with_tracked};
use self::linear::Linear;
pub use super::attempt::attempt;
use super::operation::carry;
use bonfire_core::internal::{CallSite, call_site, go_on};
use bonfire_core::{Error, Group, ReduceOp};
use bonfire_tensor::{Axis, PairSizes, Sizes, split_sizes};
use bonfire_train::step::layers::{Weight, begin_collective, fail};

/// Returns the element-wise sum of the ranks' tensors, on every rank. For other reductions, without gradients, use
/// [`operation::all_reduce`](super::operation::all_reduce).
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
/// use burn::backend::{Autodiff, NdArray};
/// use burn::tensor::Tensor;
///
/// type Training = Autodiff<NdArray<f64>>;
///
/// let ranks = Group::threads(2)?.into_iter().map(|group| {
///     std::thread::spawn(move || {
///         let x = Tensor::<Training, 1>::full([1], 5.0, &Default::default()).require_grad();
///         let sum = all_reduce_sum(x.clone(), &group)?;
///         let gradients = (sum.clone() * (group.rank() + 1) as f64).backward();
///         Ok::<_, bonfire::Error>([Some(sum.into_scalar()), x.grad(&gradients).map(Tensor::into_scalar)])
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     // The losses of ranks 0 and 1 multiply the sum by 1 and 2.
///     assert_eq!(rank.join().expect("no panic")?, [Some(10.0), Some(3.0)]);
/// }
/// # Ok::<(), bonfire::Error>(())
/// ```
#[track_caller]
pub fn all_reduce_sum<B: AutodiffBackend, const D: usize>(
    tensor: Tensor<B, D>,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let sum = weighted_sum::<B>(tensor.into_primitive().tensor(), group, &Weight::new(1.0))?;
    Ok(Tensor::from_primitive(TensorPrimitive::Float(sum)))
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
pub fn broadcast<B: AutodiffBackend, const D: usize>(
    tensor: Tensor<B, D>,
    root: usize,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
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
pub fn all_gather<B: AutodiffBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let sizes = Sizes::Even.resolve(group, OPERATION, &Axis::new(OPERATION, &tensor.shape(), dim)?)?;
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
pub fn all_gather_v<B: AutodiffBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    sizes: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
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
pub fn reduce_scatter<B: AutodiffBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let sizes = split_sizes(group, OPERATION, &Axis::new(OPERATION, &tensor.shape(), dim)?, None)?;
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
pub fn reduce_scatter_v<B: AutodiffBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    sizes: &[usize],
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
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
pub fn all_to_all<B: AutodiffBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
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
pub fn all_to_all_v<B: AutodiffBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    send: &[usize],
    recv: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
    let send = split_sizes(group, OPERATION, &axis, Some(send))?;
    let recv = PairSizes { send: Some(&send), recv }.received(group, OPERATION, &axis, &send)?;
    linear(tensor, group, Linear::AllToAll { dim, sizes: Some([send, recv]) })
}

#[track_caller]
fn linear<B: AutodiffBackend, const D: usize>(
    tensor: Tensor<B, D>,
    group: &Group,
    linear: Linear,
) -> Result<Tensor<B, D>, Error> {
    check_backend::<B>(OPERATION)?;
    begin_collective();
    // A closure's caller is not the program.
    let _call = go_on(call_site());
    let tensor = tensor.into_primitive().tensor();
    let result = with_tracked::<B, _>(tensor, |tensor| linear::tracked(tensor, group, linear))?;
    Ok(Tensor::from_primitive(TensorPrimitive::Float(result)))
}

const OPERATION: &str = "differentiable collective";

/// Returns [`all_reduce_sum`] of a primitive tensor, with gradients for a global loss that is a weighted sum: the sum
/// over the ranks of each rank's weight times its loss. The weight does not change the result.
///
/// A rank's gradient is that of the global loss divided by the rank's own weight, because the exchange of gradients
/// multiplies by that weight. It is zero where the weight is 0.
#[track_caller]
pub(crate) fn weighted_sum<B: AutodiffBackend>(
    tensor: FloatTensor<B>,
    group: &Group,
    weight: &Weight,
) -> Result<FloatTensor<B>, Error> {
    check_backend::<B>(OPERATION)?;
    begin_collective();
    let _call = go_on(call_site());
    with_tracked::<B, _>(tensor, |tensor| tracked_sum(tensor, group, weight))
}

/// The backward step of [`weighted_sum`].
#[derive(Debug)]
struct SumOverRanks;

impl<B: Backend> Backward<B, 1> for SumOverRanks {
    type State = (Group, Weight, CallSite);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            let (group, weight) = (ops.state.0, ops.state.1.get());
            let _call = go_on(ops.state.2);
            let scaled = |gradient, factor: f64| match factor {
                1.0 => gradient,
                _ => B::float_mul_scalar(gradient, factor.into()),
            };
            // Gradients of no samples are NaN, also times 0.
            let zeros = |gradient: FloatTensor<B>| {
                let (device, dtype) = (B::float_device(&gradient), gradient.dtype());
                B::float_zeros(gradient.shape(), &device, dtype.into())
            };
            let own = if weight == 0.0 { zeros(gradient) } else { scaled(gradient, weight) };
            let sum = sum::<B>(own, &group).unwrap_or_else(|error| fail(error));
            if weight == 0.0 { zeros(sum) } else { scaled(sum, weight.recip()) }
        });
    }
}

#[track_caller]
fn tracked_sum<I: Backend>(tensor: Tracked<I>, group: &Group, weight: &Weight) -> Result<Tracked<I>, Error> {
    refuse_nested::<I>(&tensor.primitive)?;
    let result = sum::<I>(tensor.primitive, group)?;
    // Declared compute bound, so that no checkpointing strategy repeats the communication.
    Ok(match SumOverRanks.prepare::<NoCheckpointing>([tensor.node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish((group.clone(), weight.clone(), call_site()), result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    })
}

fn refuse_nested<B: Backend>(tensor: &FloatTensor<B>) -> Result<(), Error> {
    if B::ad_enabled(&B::float_device(tensor)) {
        return Err(Error::argument(OPERATION, "the backend inside `Autodiff` must not be an autodiff backend itself"));
    }
    Ok(())
}

#[track_caller]
fn sum<B: Backend>(tensor: FloatTensor<B>, group: &Group) -> Result<FloatTensor<B>, Error> {
    let sum = carry::all_reduce::<B, Float>(group.into(), TensorPrimitive::Float(tensor), ReduceOp::Sum)?;
    Ok(sum.tensor())
}

// burn's feature `distributed` removes the `AutodiffBackend` impl from host backends.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
    use burn::backend::{Autodiff, Flex};

    use super::*;

    fn leaf<B: Backend>(values: [f64; 2]) -> Tensor<B, 1> {
        Tensor::from_floats(values, &Default::default())
    }

    fn on_ranks<T: Send>(ranks: usize, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads = Group::threads(ranks).expect("a group").into_iter().map(|group| scope.spawn(|| body(group)));
            threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().expect("no panic")).collect()
        })
    }

    /// The loss of rank `r` is `(r + 1) * sum(s^2)` with the ranks' sum `s`, so the gradient is `2 * s * (1 + 2 + 3)`.
    #[test]
    fn checkpointing_gets_the_gradient_of_all_losses() {
        let gradients = on_ranks(3, |group| {
            let x = leaf::<Autodiff<Flex, BalancedCheckpointing>>([group.rank() as f64, 1.0]).require_grad();
            let sum = all_reduce_sum(x.clone(), &group).expect("all ranks are here");
            let gradients = sum.powf_scalar(2.0).mul_scalar((group.rank() + 1) as f64).sum().backward();
            x.grad(&gradients).expect("tracked").into_data().iter::<f64>().collect::<Vec<_>>()
        });
        assert_eq!(gradients, vec![vec![36.0, 36.0]; 3]);
    }

    #[test]
    fn autodiff_of_autodiff_is_refused() {
        let x = leaf::<Autodiff<Autodiff<Flex>>>([1.0, 2.0]);
        let outcome = all_reduce_sum(x, &Group::threads(1).expect("a group")[0]);
        assert!(matches!(outcome, Err(Error::InvalidArgument { .. })));
    }
}
