//! Every operation of a group on tensors of any backend, kind and rank.
//!
//! Kinds are float, int and bool (which is not reduced). A tensor keeps its backend, device and element type; inputs are
//! never altered. The ranks' results are those of the slice operations of [`Group`], with parts along a dimension:
//!
//! | | rank `r` gives | rank `r` gets, along `dim` |
//! |---|---|---|
//! | [`all_gather`] | a part | all parts, in the order of ranks |
//! | [`reduce_scatter`] | a whole | part `r` of the reduction |
//! | [`gather`] | a part | all parts on the root, else nothing |
//! | [`scatter`] | a whole on the root | part `r` of the root's |
//! | [`all_to_all`] | a whole | part `r` of each rank's, in the order of ranks |
//!
//! Parts are equal; in the forms with `_v`, each has a size of its own, which may be 0. A negative dimension counts from
//! the end. All ranks call an operation with the same dimension and, apart from sizes along it, the same shape: that is
//! compared between the ranks as their calls are, and where they differ all get the same error.
//!
//! Tensors of Flex are read where they are. Those of other backends travel through the host's memory, but for float
//! all-reduces on collective devices. No gradient flows through these operations: for that see
//! [`autodiff`](super::autodiff).
//!
//! ```
//! use bonfire::tensor::operation::{all_gather, reduce_scatter};
//! use bonfire::{Group, ReduceOp};
//! use burn::backend::Flex;
//! use burn::tensor::{Int, Tensor};
//!
//! let ranks = Group::threads(2)?.into_iter().map(|group| {
//!     std::thread::spawn(move || {
//!         let first = 2 * group.rank() as i64;
//!         let columns = Tensor::<Flex, 1, Int>::arange(first..first + 2, &Default::default()).reshape([2, 1]);
//!         let table = all_gather(columns, -1, &group)?;
//!         let own = reduce_scatter(table.clone(), ReduceOp::Sum, 0, &group)?;
//!         Ok::<_, bonfire::Error>([table, own].map(|tensor| tensor.into_data().iter::<i64>().collect::<Vec<_>>()))
//!     })
//! });
//! let results: Vec<_> = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().expect("no panic")).collect();
//! assert_eq!(results[0], Ok([vec![0, 2, 1, 3], vec![0, 4]]));
//! assert_eq!(results[1], Ok([vec![0, 2, 1, 3], vec![2, 6]]));
//! # Ok::<(), bonfire::Error>(())
//! ```

pub(crate) mod axis;
pub(crate) mod carry;
pub(crate) mod fused;
pub(crate) mod sizes;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Numeric, Shape, Tensor, TensorCreationOptions};

use self::carry::Swap;
use self::sizes::Sizes;
pub use super::host::Kind;
use bonfire_core::{Error, Group, ReduceOp};

/// The element-wise reduction of the ranks' tensors, on every rank.
///
/// # Errors
/// [`Error::InvalidArgument`] for a quantized tensor, else those of [`Group::all_reduce`].
pub fn all_reduce<B: Backend, const D: usize, K: Kind<B> + Numeric<B>>(
    tensor: Tensor<B, D, K>,
    op: ReduceOp,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    carry::all_reduce::<B, K>(group.into(), tensor.into_primitive(), op).map(Tensor::from_primitive)
}

/// The element-wise reduction of the ranks' tensors on `root`; `None` on the others.
///
/// # Errors
/// As [`all_reduce`]; [`Error::InvalidArgument`] also for a root that is no rank.
pub fn reduce<B: Backend, const D: usize, K: Kind<B> + Numeric<B>>(
    tensor: Tensor<B, D, K>,
    op: ReduceOp,
    root: usize,
    group: &Group,
) -> Result<Option<Tensor<B, D, K>>, Error> {
    let reduced = carry::reduce::<B, K>(group.into(), tensor.into_primitive(), op, root)?;
    Ok(reduced.map(Tensor::from_primitive))
}

/// `root`'s tensor, on every rank. Of the other ranks' tensors shape, element type and device count only.
///
/// # Errors
/// As [`all_reduce`]; [`Error::InvalidArgument`] also for a root that is no rank.
pub fn broadcast<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    root: usize,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    carry::broadcast::<B, K>(group.into(), tensor.into_primitive(), root).map(Tensor::from_primitive)
}

/// The ranks' tensors along `dim`, in the order of ranks, on every rank. They have one shape.
///
/// # Errors
/// As [`all_reduce`]; [`Error::InvalidArgument`] also for a dimension that the tensor does not have.
pub fn all_gather<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    carry::all_gather::<B, K>(group.into(), tensor.into_primitive(), dim, Sizes::Even).map(Tensor::from_primitive)
}

/// As [`all_gather`], of tensors as long along `dim` as `sizes` says, by rank; where it says nothing, the ranks tell each
/// other first.
///
/// # Errors
/// As [`all_gather`]; [`Error::InvalidArgument`] also for sizes that are not one for each rank, or are not this tensor's.
pub fn all_gather_v<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    dim: isize,
    sizes: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let sizes = sizes.map_or(Sizes::Exchanged, Sizes::Given);
    carry::all_gather::<B, K>(group.into(), tensor.into_primitive(), dim, sizes).map(Tensor::from_primitive)
}

/// The element-wise reduction of the ranks' tensors, cut along `dim` into equal parts, of which rank `r` gets the `r`-th.
///
/// # Errors
/// As [`all_gather`]; [`Error::InvalidArgument`] also where the tensor cannot be cut so.
pub fn reduce_scatter<B: Backend, const D: usize, K: Kind<B> + Numeric<B>>(
    tensor: Tensor<B, D, K>,
    op: ReduceOp,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    carry::reduce_scatter::<B, K>(group.into(), tensor.into_primitive(), op, dim, None).map(Tensor::from_primitive)
}

/// As [`reduce_scatter`], with parts as long as `sizes` says, by rank.
///
/// # Errors
/// As [`all_gather`]; [`Error::InvalidArgument`] also for sizes that are not one for each rank, or do not add up to the
/// tensor's.
pub fn reduce_scatter_v<B: Backend, const D: usize, K: Kind<B> + Numeric<B>>(
    tensor: Tensor<B, D, K>,
    op: ReduceOp,
    dim: isize,
    sizes: &[usize],
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let part = carry::reduce_scatter::<B, K>(group.into(), tensor.into_primitive(), op, dim, Some(sizes));
    part.map(Tensor::from_primitive)
}

/// The ranks' tensors along `dim`, in the order of ranks, on `root`; `None` on the others. They have one shape.
///
/// # Errors
/// As [`all_gather`]; [`Error::InvalidArgument`] also for a root that is no rank.
pub fn gather<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    root: usize,
    dim: isize,
    group: &Group,
) -> Result<Option<Tensor<B, D, K>>, Error> {
    let whole = carry::gather::<B, K>(group.into(), tensor.into_primitive(), root, dim, Sizes::Even)?;
    Ok(whole.map(Tensor::from_primitive))
}

/// As [`gather`], of tensors as long along `dim` as `sizes` says, by rank; where it says nothing, the ranks tell each
/// other first.
///
/// # Errors
/// As [`all_gather_v`]; [`Error::InvalidArgument`] also for a root that is no rank.
pub fn gather_v<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    root: usize,
    dim: isize,
    sizes: Option<&[usize]>,
    group: &Group,
) -> Result<Option<Tensor<B, D, K>>, Error> {
    let sizes = sizes.map_or(Sizes::Exchanged, Sizes::Given);
    let whole = carry::gather::<B, K>(group.into(), tensor.into_primitive(), root, dim, sizes)?;
    Ok(whole.map(Tensor::from_primitive))
}

/// Equal parts, along `dim`, of the tensor that `root` gives, of which rank `r` gets the `r`-th; the others give `None`.
/// A part is on `root` where and of what type its tensor is, and elsewhere as `options` say, a device or a device and an
/// element type. The root tells the others the shape first.
///
/// # Errors
/// As [`reduce_scatter`]; [`Error::InvalidArgument`] also for a root that is no rank or gives no tensor, or for a tensor
/// elsewhere.
pub fn scatter<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Option<Tensor<B, D, K>>,
    root: usize,
    dim: isize,
    options: impl Into<TensorCreationOptions<B>>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    scattered(tensor, None, root, dim, options, group)
}

/// As [`scatter`], with parts as long as the sizes that the root gives with its tensor, by rank.
///
/// # Errors
/// As [`scatter`]; [`Error::InvalidArgument`] also for sizes that are not one for each rank, or do not add up to the
/// tensor's.
pub fn scatter_v<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Option<(Tensor<B, D, K>, &[usize])>,
    root: usize,
    dim: isize,
    options: impl Into<TensorCreationOptions<B>>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let (tensor, sizes) = tensor.unzip();
    scattered(tensor, sizes, root, dim, options, group)
}

fn scattered<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Option<Tensor<B, D, K>>,
    sizes: Option<&[usize]>,
    root: usize,
    dim: isize,
    options: impl Into<TensorCreationOptions<B>>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let (dtype, device) = place::<B, D, K>(options);
    let tensor = tensor.map(Tensor::into_primitive);
    let part = carry::scatter::<B, K>(group.into(), tensor, sizes, (root, D, dim), (dtype, &device));
    part.map(Tensor::from_primitive)
}

/// The ranks' parts for this one: each cuts its tensor along `dim` into equal parts and sends part `r` to rank `r`.
///
/// # Errors
/// As [`reduce_scatter`].
pub fn all_to_all<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let swap = Swap { send: None, recv: None };
    carry::all_to_all::<B, K>(group.into(), tensor.into_primitive(), dim, swap).map(Tensor::from_primitive)
}

/// As [`all_to_all`], with `send[r]` of the tensor for rank `r`, and `recv[r]` from it; where that is not said, the
/// ranks tell each other first.
///
/// # Errors
/// As [`all_to_all`]; [`Error::InvalidArgument`] also for sizes that are not one for each rank, or do not add up to the
/// tensor's.
pub fn all_to_all_v<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    dim: isize,
    send: &[usize],
    recv: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let swap = Swap { send: Some(send), recv };
    carry::all_to_all::<B, K>(group.into(), tensor.into_primitive(), dim, swap).map(Tensor::from_primitive)
}

/// Sends the tensor to rank `to`, which gets it with [`recv`].
///
/// # Errors
/// [`Error::InvalidArgument`] for a quantized tensor, else those of [`Group::send`].
pub fn send<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    to: usize,
    group: &Group,
) -> Result<(), Error> {
    carry::send::<B, K>(group.into(), tensor.into_primitive(), to)
}

/// The tensor of this shape that rank `from` sends with [`send`], on the device, and of the element type, that `options`
/// say.
///
/// # Errors
/// Those of [`Group::recv`]: the sender's tensor must have this shape and type.
pub fn recv<B: Backend, const D: usize, K: Kind<B>>(
    shape: [usize; D],
    from: usize,
    options: impl Into<TensorCreationOptions<B>>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let (dtype, device) = place::<B, D, K>(options);
    carry::recv::<B, K>(group.into(), Shape::from(shape), (dtype, &device), from).map(Tensor::from_primitive)
}

/// Sends a tensor to rank `to` and gives the one, of this shape and the same element type, that rank `from` sends at the
/// same time. So ranks that pass tensors around a ring do not wait for each other in a circle.
///
/// # Errors
/// [`Error::InvalidArgument`] for a quantized tensor, else those of [`Group::exchange`].
pub fn exchange<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    to: usize,
    shape: [usize; D],
    from: usize,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let incoming = carry::exchange::<B, K>(group.into(), tensor.into_primitive(), to, Shape::from(shape), from);
    incoming.map(Tensor::from_primitive)
}

/// The device and the element type that options stand for.
pub(crate) fn place<B: Backend, const D: usize, K: Kind<B>>(
    options: impl Into<TensorCreationOptions<B>>,
) -> (DType, B::Device) {
    let like = Tensor::<B, D, K>::empty([0; D], options);
    (like.dtype(), like.device())
}
