//! Collectives and point-to-point operations on tensors of any backend, kind and number of dimensions.
//!
//! Kinds are float, int and bool (which is not reduced). A tensor keeps its backend, device and element type. Inputs
//! are never modified. The results are those of the slice operations of [`Group`], with parts along a dimension `dim`:
//!
//! | | input of rank `r` | result on rank `r`, along `dim` |
//! |---|---|---|
//! | [`all_gather`] | a part | all parts, in rank order |
//! | [`reduce_scatter`] | a whole | part `r` of the reduction |
//! | [`gather`] | a part | all parts in rank order on the root, nothing elsewhere |
//! | [`scatter`] | a whole on the root | part `r` of the root's tensor |
//! | [`all_to_all`] | a whole | part `r` of each rank's tensor, in rank order |
//!
//! Parts have equal lengths along `dim`. In the variable-size forms (`_v`) each part has a length of its own, which may
//! be 0. Sizes are lengths along `dim`, one per rank; either all ranks pass them or none does. A negative dimension
//! counts from the end. All ranks must pass the same element type, the same dimension and, except for the length along
//! it, the same shape. The ranks compare these with their calls, shapes by a fingerprint; where they differ, all ranks
//! get the same error.
//!
//! Every function is collective, except for [`send`], [`recv`] and [`exchange`], and blocks until its result is there.
//!
//! Tensors of Flex are read in place. Floats and integers on collective devices stay there where the device can do the
//! operation, in [`all_reduce`], [`reduce`], [`broadcast`], and in [`all_gather`], [`reduce_scatter`], [`gather`],
//! [`scatter`] and [`all_to_all`] of equal parts. On CUDA so do parts of unequal sizes, unless the longest part times
//! the world size is more than 1 MiB and more than four times what the rank with the most has, and those of [`send`],
//! [`recv`] and [`exchange`], once the group's ranks have agreed on a path, in their first collective on devices.
//! Everything else passes through host memory.
//!
//! No gradient flows through these operations. So they refuse float tensors of a backend with autodiff: use
//! [`autodiff`](super::autodiff) where gradients must flow, and elsewhere [`Tensor::inner`], and [`Tensor::from_inner`]
//! for the result.
//!
//! # Errors
//! Each function returns the errors of the [`Group`] operation with the same name. They poison the group, except for
//! [`Error::InvalidArgument`], which is also returned for
//! * a float tensor of a backend with autodiff;
//! * an element type that the kind of tensors or the device does not have, for a tensor that is received;
//! * a quantized tensor: dequantize it first;
//! * a root that is no rank, or a dimension that the tensor does not have;
//! * a tensor whose length along `dim` is not a multiple of the world size, where it is split into equal parts;
//! * sizes that are not one per rank, do not match this rank's tensor, or do not add up to the length of the tensor
//!   that they split.
//!
//! A tensor that cannot be read from its device, or memory that cannot be allocated, is [`Error::Io`] or
//! [`Error::Broken`]. A rank that returns one of these or [`Error::InvalidArgument`] may not have taken part in the
//! operation; the other ranks then wait for it until their deadline.
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

pub(crate) mod carry;
pub(crate) mod fused;
mod on_device;
mod sizes;

use burn::tensor::backend::{Backend, DTypeUsage};
use burn::tensor::{DType, Numeric, Shape, Tensor, TensorCreationOptions};

pub use super::host::Kind;
use super::host::TensorSpec;
use bonfire_core::{Error, Group, ReduceOp};
use bonfire_tensor::{PairSizes, Sizes};

/// Returns the element-wise reduction of the ranks' tensors, on every rank. All have the same shape and element type.
/// If only one rank needs the result use [`reduce`], if every rank needs a part of it [`reduce_scatter`]; for gradients
/// [`autodiff::all_reduce_sum`](super::autodiff::all_reduce_sum).
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_reduce<B: Backend, const D: usize, K: Kind<B> + Numeric<B>>(
    tensor: Tensor<B, D, K>,
    op: ReduceOp,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    carry::all_reduce::<B, K>(group.into(), tensor.into_primitive(), op).map(Tensor::from_primitive)
}

/// Returns the element-wise reduction of the ranks' tensors on `root`, `None` elsewhere. All have the same shape and
/// element type.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn reduce<B: Backend, const D: usize, K: Kind<B> + Numeric<B>>(
    tensor: Tensor<B, D, K>,
    op: ReduceOp,
    root: usize,
    group: &Group,
) -> Result<Option<Tensor<B, D, K>>, Error> {
    let reduced = carry::reduce::<B, K>(group.into(), tensor.into_primitive(), op, root)?;
    Ok(reduced.map(Tensor::from_primitive))
}

/// Returns `root`'s tensor on every rank. Of the other ranks' tensors only shape, element type and device matter; shape
/// and element type are the same on all ranks.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn broadcast<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    root: usize,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    carry::broadcast::<B, K>(group.into(), tensor.into_primitive(), root).map(Tensor::from_primitive)
}

/// Concatenates the ranks' tensors along `dim` in rank order, on every rank. All have the same shape; the result is
/// world size times as long along `dim`.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_gather<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    carry::all_gather::<B, K>(group.into(), tensor.into_primitive(), dim, Sizes::Even).map(Tensor::from_primitive)
}

/// Variable-size [`all_gather`]: rank `r`'s tensor has length `sizes[r]` along `dim`. With `None`, the ranks exchange
/// their sizes first, which costs a small operation.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_gather_v<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    dim: isize,
    sizes: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let sizes = sizes.map_or(Sizes::Exchanged, Sizes::Given);
    carry::all_gather::<B, K>(group.into(), tensor.into_primitive(), dim, sizes).map(Tensor::from_primitive)
}

/// Reduces the ranks' tensors element-wise, splits the result along `dim` into equal parts, and returns part `r` on
/// rank `r`. All tensors have the same shape, with a multiple of the world size along `dim`.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn reduce_scatter<B: Backend, const D: usize, K: Kind<B> + Numeric<B>>(
    tensor: Tensor<B, D, K>,
    op: ReduceOp,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    carry::reduce_scatter::<B, K>(group.into(), tensor.into_primitive(), op, dim, None).map(Tensor::from_primitive)
}

/// Variable-size [`reduce_scatter`]: the part of rank `r` has length `sizes[r]` along `dim`. The sizes are the same on
/// all ranks and add up to the tensor's length.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
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

/// Concatenates the ranks' tensors along `dim` in rank order on `root`; returns `None` elsewhere. All have the same
/// shape.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn gather<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    root: usize,
    dim: isize,
    group: &Group,
) -> Result<Option<Tensor<B, D, K>>, Error> {
    let whole = carry::gather::<B, K>(group.into(), tensor.into_primitive(), root, dim, Sizes::Even)?;
    Ok(whole.map(Tensor::from_primitive))
}

/// Variable-size [`gather`]: rank `r`'s tensor has length `sizes[r]` along `dim`. With `None`, the ranks exchange their
/// sizes first, which costs a small operation.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
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

/// Splits `root`'s tensor along `dim` into equal parts and returns part `r` on rank `r`. The other ranks pass `None`.
///
/// On `root`, the part has the device and the element type of the tensor. On other ranks, `options` gives them: a
/// device, or a device and an element type. The number of dimensions and the element type are the same on all ranks.
/// The root broadcasts the shape first.
///
/// # Errors
/// See [errors](self#errors). [`Error::InvalidArgument`] also where the root passes no tensor, or another rank passes
/// one.
#[track_caller]
pub fn scatter<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Option<Tensor<B, D, K>>,
    root: usize,
    dim: isize,
    options: impl Into<TensorCreationOptions<B>>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    scatter_parts(tensor, None, root, dim, options, group)
}

/// Variable-size [`scatter`]: the part of rank `r` has length `sizes[r]` along `dim`. The root passes the sizes with
/// its tensor.
///
/// # Errors
/// As [`scatter`].
#[track_caller]
pub fn scatter_v<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Option<(Tensor<B, D, K>, &[usize])>,
    root: usize,
    dim: isize,
    options: impl Into<TensorCreationOptions<B>>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let (tensor, sizes) = tensor.unzip();
    scatter_parts(tensor, sizes, root, dim, options, group)
}

#[track_caller]
fn scatter_parts<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Option<Tensor<B, D, K>>,
    sizes: Option<&[usize]>,
    root: usize,
    dim: isize,
    options: impl Into<TensorCreationOptions<B>>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let (dtype, device) = dtype_and_device::<B, D, K>("scatter", options)?;
    let tensor = tensor.map(Tensor::into_primitive);
    let part = carry::scatter::<B, K>(group.into(), tensor, sizes, (root, D, dim), (dtype, &device));
    part.map(Tensor::from_primitive)
}

/// Splits the tensor along `dim` into equal parts, sends part `r` to rank `r`, and concatenates the received parts
/// along `dim` in rank order. All tensors and the results have the same shape.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_to_all<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let sizes = PairSizes { send: None, recv: None };
    carry::all_to_all::<B, K>(group.into(), tensor.into_primitive(), dim, sizes).map(Tensor::from_primitive)
}

/// Variable-size [`all_to_all`]: along `dim`, this rank sends length `send[r]` to rank `r` and receives `recv[r]` from
/// it. With `recv` `None`, the ranks exchange their sizes first, which costs a small operation. On CUDA they exchange
/// and compare them in any case.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_to_all_v<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    dim: isize,
    send: &[usize],
    recv: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let sizes = PairSizes { send: Some(send), recv };
    carry::all_to_all::<B, K>(group.into(), tensor.into_primitive(), dim, sizes).map(Tensor::from_primitive)
}

/// Sends the tensor to rank `to`, which receives it with [`recv`]. May block until then.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn send<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    to: usize,
    group: &Group,
) -> Result<(), Error> {
    carry::send::<B, K>(group.into(), tensor.into_primitive(), to)
}

/// Receives the tensor that rank `from` sends with [`send`]. `options` is a device, or a device and an element type.
/// The sent tensor must have this shape and element type.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn recv<B: Backend, const D: usize, K: Kind<B>>(
    shape: [usize; D],
    from: usize,
    options: impl Into<TensorCreationOptions<B>>,
    group: &Group,
) -> Result<Tensor<B, D, K>, Error> {
    let (dtype, device) = dtype_and_device::<B, D, K>("recv", options)?;
    carry::recv::<B, K>(group.into(), Shape::from(shape), (dtype, &device), from).map(Tensor::from_primitive)
}

/// Sends a tensor to rank `to` while receiving one from rank `from`, of the same element type and of shape `shape`.
/// Both ranks call this too. Unlike [`send`] followed by [`recv`], it cannot deadlock when ranks pass tensors around a
/// ring. Of the incoming shape only the number of elements is compared.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
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

/// Returns the element type and the device that `options` stands for. Fails for elements that tensors of this kind do
/// not have, for which burn panics, that cannot be sent, or that the device does not store.
pub(crate) fn dtype_and_device<B: Backend, const D: usize, K: Kind<B>>(
    operation: &str,
    options: impl Into<TensorCreationOptions<B>>,
) -> Result<(DType, B::Device), Error> {
    let options = options.into();
    if let Some(dtype) = options.dtype {
        TensorSpec::new::<B, K>(operation, dtype, options.device.clone())?;
        // Stores of bools are the backend's own matter. Some devices do not compute in every type that they store.
        if !dtype.is_bool() && !B::dtype_usage(&options.device, dtype).contains(DTypeUsage::Storage) {
            return Err(Error::argument(operation, format!("{:?} has no tensors of {dtype:?}", options.device)));
        }
    }
    let like = Tensor::<B, D, K>::empty([0; D], options);
    Ok((like.dtype(), like.device()))
}
