//! Collectives that gradients flow through.
//!
//! | forward | backward |
//! |---|---|
//! | [`all_reduce_sum`] | the sum of the ranks' gradients |
//! | [`broadcast`] | their sum on the root, zeros elsewhere |
//! | [`all_gather`] | the sum, of which each rank gets its part |
//! | [`reduce_scatter`] | all parts on every rank |
//! | [`all_to_all`] | each part back to where it came from |
//!
//! A gradient is that of the sum of all ranks' losses. The backward pass of each is a collective too: every rank must go
//! backward through its result, also one whose part is empty, and tensors must be tracked on all ranks or on none. Several
//! collectives go backward in the same order on all ranks if these build their graphs alike. Sizes along the dimension may
//! differ from rank to rank in the forms with `_v`, as in [`operation`](super::operation), which has the same operations
//! for all kinds of tensors and without gradients.
//!
//! # Ranks as threads
//!
//! burn-autodiff 0.21 holds the lock of a graph during a whole backward pass, and ends every backward pass with a visit
//! to all graphs of the process, whose locks it takes one by one. A collective inside a backward pass waits for other
//! ranks with its graph locked. Ranks that are processes of their own never notice. For ranks that are threads of one
//! process two rules follow:
//!
//! - Ranks share no tracked tensors. Each builds its own model, or forks a clone of one
//!   ([`Module::fork`](burn::module::Module::fork)): tensors that depend on a shared leaf live in one graph, and the
//!   rank that goes backward first locks out those that it waits for.
//! - Between a backward pass that contains a collective and whichever backward pass the same thread, or one that it
//!   waits for, ran before, there is a collective outside of both, such as this sum in the forward pass or the exchange
//!   of gradients. A rank that has arrived there has finished its visit, so nobody that others wait for later is stuck
//!   in one. A loop of forward pass, one backward pass and update satisfies this. Two forward passes followed by two
//!   backward passes do not: add the losses and go backward once, or place an all-reduce between the two. Backward
//!   passes of threads that no rank waits for do no harm.
//!
//! A breach shows as a timeout of the collective, not as a wrong number.

mod linear;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Float, Tensor, TensorPrimitive};

use self::linear::Linear;
pub use super::attempt::attempt;
use super::attempt::fail;
use super::operation::axis::Axis;
use super::operation::carry;
use super::operation::sizes::{self, Sizes, cut};
use bonfire_core::{Error, Group, ReduceOp};

/// An autodiff backend whose tensors can be summed over ranks with the gradient flowing through the sum.
///
/// Every [`Autodiff`] is one. It is the bound for code that builds layers which communicate, in the place where
/// `AutodiffBackend` would stand otherwise.
pub trait CollectiveBackend: AutodiffBackend {
    /// [`all_reduce_sum`] on the backend's own tensors, for ranks whose losses are not simply added: the loss of all is
    /// the sum of the ranks' losses, each times its rank's `weight`. What flows back on a rank is the gradient of that
    /// divided by the rank's own weight, as if it came from this rank's loss alone; nothing flows where the weight is 0.
    ///
    /// # Errors
    /// Those of [`all_reduce_sum`].
    fn float_all_reduce_sum(tensor: FloatTensor<Self>, group: &Group, weight: f64) -> Result<FloatTensor<Self>, Error>;

    /// The other collectives on the backend's own tensors.
    #[doc(hidden)]
    fn float_linear(tensor: FloatTensor<Self>, group: &Group, linear: Linear) -> Result<FloatTensor<Self>, Error>;
}

impl<B: Backend, C: CheckpointStrategy> CollectiveBackend for Autodiff<B, C>
where
    // Not given for every `B`: burn's feature `distributed` asks more of it.
    Self: AutodiffBackend,
{
    fn float_all_reduce_sum(tensor: FloatTensor<Self>, group: &Group, weight: f64) -> Result<FloatTensor<Self>, Error> {
        tracked_sum::<B, C>(tensor, group, weight)
    }

    fn float_linear(tensor: FloatTensor<Self>, group: &Group, linear: Linear) -> Result<FloatTensor<Self>, Error> {
        linear::tracked::<B, C>(tensor, group, linear)
    }
}

/// The element-wise sum of the ranks' tensors, on every rank.
///
/// Every rank calls it with a tensor of the same shape and element type. As each rank's result depends on every rank's
/// tensor, the gradient of a rank's tensor is the sum of the gradients of all ranks' results: the gradient of the sum of
/// the ranks' losses. The backward pass is therefore a collective too. Every rank must go backward through its result,
/// and tensors must be tracked on all ranks or on none. Several sums go backward in the same order on all ranks if
/// these build their graphs alike. For ranks that are threads, see the [module](self).
///
/// Elements travel in their own type; f16 and bf16 are added in f32.
///
/// # Errors
/// Those of [`Group::all_reduce`], a tensor that cannot be read from its device, or one that is not of f64, f32, f16 or
/// bf16. [`Error::InvalidArgument`] also for an `Autodiff` of an `Autodiff`: the gradient would be cut from the outer
/// graph.
///
/// # Panics
/// The backward pass panics with the text of the error if its collective fails: burn's backward passes return no
/// `Result`. The panic is raised in the thread that called `backward` and releases burn's locks; [`attempt`] makes it an
/// error.
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
///     // The losses weigh the sum by 1 and 2.
///     assert_eq!(rank.join().expect("no panic")?, [Some(10.0), Some(3.0)]);
/// }
/// # Ok::<(), bonfire::Error>(())
/// ```
pub fn all_reduce_sum<B: CollectiveBackend, const D: usize>(
    tensor: Tensor<B, D>,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let sum = B::float_all_reduce_sum(tensor.into_primitive().tensor(), group, 1.0)?;
    Ok(Tensor::from_primitive(TensorPrimitive::Float(sum)))
}

/// `root`'s tensor, on every rank. Of the other ranks' tensors shape and element type count only; their gradients are zeros.
///
/// # Errors
/// Those of [`operation::broadcast`](super::operation::broadcast), and as [`all_reduce_sum`] for an `Autodiff` of an
/// `Autodiff`.
///
/// # Panics
/// As [`all_reduce_sum`].
pub fn broadcast<B: CollectiveBackend, const D: usize>(
    tensor: Tensor<B, D>,
    root: usize,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    linear(tensor, group, Linear::Broadcast { root })
}

/// The ranks' tensors along `dim`, in the order of ranks, on every rank. They have one shape.
///
/// # Errors
/// Those of [`operation::all_gather`](super::operation::all_gather), else as [`broadcast`].
///
/// # Panics
/// As [`all_reduce_sum`].
pub fn all_gather<B: CollectiveBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let sizes = Sizes::Even.resolve(group.into(), OPERATION, &Axis::new(OPERATION, tensor.shape(), dim)?)?;
    linear(tensor, group, Linear::AllGather { dim, sizes })
}

/// As [`all_gather`], of tensors as long along `dim` as `sizes` says, by rank; where it says nothing, the ranks tell each
/// other first.
///
/// # Errors
/// Those of [`operation::all_gather_v`](super::operation::all_gather_v), else as [`broadcast`].
///
/// # Panics
/// As [`all_reduce_sum`].
pub fn all_gather_v<B: CollectiveBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    sizes: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let sizes = sizes.map_or(Sizes::Exchanged, Sizes::Given).resolve(group.into(), OPERATION, &axis)?;
    linear(tensor, group, Linear::AllGather { dim, sizes })
}

/// The element-wise sum of the ranks' tensors, cut along `dim` into equal parts, of which rank `r` gets the `r`-th.
///
/// # Errors
/// Those of [`operation::reduce_scatter`](super::operation::reduce_scatter), else as [`broadcast`].
///
/// # Panics
/// As [`all_reduce_sum`].
pub fn reduce_scatter<B: CollectiveBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let sizes = cut(group.into(), OPERATION, &Axis::new(OPERATION, tensor.shape(), dim)?, None)?;
    linear(tensor, group, Linear::ReduceScatter { dim, sizes })
}

/// As [`reduce_scatter`], with parts as long as `sizes` says, by rank.
///
/// # Errors
/// Those of [`operation::reduce_scatter_v`](super::operation::reduce_scatter_v), else as [`broadcast`].
///
/// # Panics
/// As [`all_reduce_sum`].
pub fn reduce_scatter_v<B: CollectiveBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    sizes: &[usize],
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    linear(tensor, group, Linear::ReduceScatter { dim, sizes: sizes.to_vec() })
}

/// The ranks' parts for this one: each cuts its tensor along `dim` into equal parts and sends part `r` to rank `r`.
///
/// # Errors
/// Those of [`operation::all_to_all`](super::operation::all_to_all), else as [`broadcast`].
///
/// # Panics
/// As [`all_reduce_sum`].
pub fn all_to_all<B: CollectiveBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    linear(tensor, group, Linear::AllToAll { dim, sizes: None })
}

/// As [`all_to_all`], with `send[r]` of the tensor for rank `r`, and `recv[r]` from it; where that is not said, the
/// ranks tell each other first.
///
/// # Errors
/// Those of [`operation::all_to_all_v`](super::operation::all_to_all_v), else as [`broadcast`].
///
/// # Panics
/// As [`all_reduce_sum`].
pub fn all_to_all_v<B: CollectiveBackend, const D: usize>(
    tensor: Tensor<B, D>,
    dim: isize,
    send: &[usize],
    recv: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<B, D>, Error> {
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let send = cut(group.into(), OPERATION, &axis, Some(send))?;
    let recv = match recv {
        Some(recv) => recv.to_vec(),
        None => sizes::awaited(group.into(), &axis, &send)?,
    };
    linear(tensor, group, Linear::AllToAll { dim, sizes: Some([send, recv]) })
}

fn linear<B: CollectiveBackend, const D: usize>(
    tensor: Tensor<B, D>,
    group: &Group,
    linear: Linear,
) -> Result<Tensor<B, D>, Error> {
    let result = B::float_linear(tensor.into_primitive().tensor(), group, linear)?;
    Ok(Tensor::from_primitive(TensorPrimitive::Float(result)))
}

const OPERATION: &str = "differentiable collective";

/// The step of a backward pass: its input is the gradient of the sum, its state the group and the rank's weight.
#[derive(Debug)]
struct SumOverRanks;

impl<B: Backend> Backward<B, 1> for SumOverRanks {
    type State = (Group, f64);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            let (group, weight) = ops.state;
            let scaled = |gradient, factor: f64| match factor {
                1.0 => gradient,
                _ => B::float_mul_scalar(gradient, factor.into()),
            };
            let sum = sum::<B>(scaled(gradient, weight), &group).unwrap_or_else(|error| fail(error));
            scaled(sum, if weight == 0.0 { 0.0 } else { weight.recip() })
        });
    }
}

fn tracked_sum<B: Backend, C: CheckpointStrategy>(
    tensor: FloatTensor<Autodiff<B, C>>,
    group: &Group,
    weight: f64,
) -> Result<FloatTensor<Autodiff<B, C>>, Error> {
    refuse_nested::<B>(&tensor.primitive)?;
    let result = sum::<B>(tensor.primitive, group)?;
    // Compute bound, so that no checkpointing strategy repeats the communication.
    Ok(match SumOverRanks.prepare::<C>([tensor.node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish((group.clone(), weight), result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    })
}

fn refuse_nested<B: Backend>(tensor: &FloatTensor<B>) -> Result<(), Error> {
    if B::ad_enabled(&B::float_device(tensor)) {
        return Err(Error::argument(OPERATION, "the backend inside `Autodiff` must not be an autodiff backend itself"));
    }
    Ok(())
}

fn sum<B: Backend>(tensor: FloatTensor<B>, group: &Group) -> Result<FloatTensor<B>, Error> {
    let sum = carry::all_reduce::<B, Float>(group.into(), TensorPrimitive::Float(tensor), ReduceOp::Sum)?;
    Ok(sum.tensor())
}

// burn's feature `distributed` takes autodiff from the backends on the host.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
    use burn::backend::{Flex, NdArray};
    use burn::tensor::DType;

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
    fn gradients_of_three<B: CollectiveBackend>() {
        let gradients = on_ranks(3, |group| {
            let x = leaf::<B>([group.rank() as f64, 1.0]).require_grad();
            let sum = all_reduce_sum(x.clone(), &group).expect("all ranks are here");
            let gradients = sum.powf_scalar(2.0).mul_scalar((group.rank() + 1) as f64).sum().backward();
            x.grad(&gradients).expect("tracked").into_data().iter::<f64>().collect::<Vec<_>>()
        });
        assert_eq!(gradients, vec![vec![36.0, 36.0]; 3]);
    }

    #[test]
    fn every_rank_gets_the_gradient_of_all_losses() {
        gradients_of_three::<Autodiff<NdArray<f64>>>();
        gradients_of_three::<Autodiff<NdArray<f64>, BalancedCheckpointing>>();
        gradients_of_three::<Autodiff<NdArray<f32>>>();
        gradients_of_three::<Autodiff<Flex>>();
    }

    #[test]
    fn sixteen_bit_tensors_keep_their_type_and_are_added_in_f32() {
        for dtype in [DType::F16, DType::BF16] {
            let sums = on_ranks(3, |group| {
                let x = leaf::<Autodiff<Flex>>([[256.0, 2048.0], [1.0; 2], [1.0; 2]][group.rank()]).cast(dtype);
                all_reduce_sum(x, &group).expect("all ranks are here").into_data()
            });
            assert_eq!(sums[0].dtype, dtype);
            // Rounded after each addition, bf16 would stay at 256 and f16 at 2048.
            let expected = if dtype == DType::F16 { [258.0, 2050.0] } else { [258.0, 2048.0] };
            assert_eq!(sums[0].iter::<f64>().collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn untracked_tensors_need_no_backward_pass_of_other_ranks() {
        on_ranks(2, |group| {
            let x = leaf::<Autodiff<NdArray<f64>>>([1.0, 2.0]);
            let sum = all_reduce_sum(x, &group).expect("all ranks are here");
            if group.rank() == 0 {
                (sum * leaf([1.0, 1.0]).require_grad()).sum().backward();
            }
        });
    }

    #[test]
    fn autodiff_of_autodiff_is_refused() {
        let x = leaf::<Autodiff<Autodiff<NdArray<f64>>>>([1.0, 2.0]);
        let outcome = all_reduce_sum(x, &Group::threads(1).expect("a group")[0]);
        assert!(matches!(outcome, Err(Error::InvalidArgument { .. })));
    }
}
