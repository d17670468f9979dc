//! Collectives and point-to-point operations on tensors of any backend, kind and number of dimensions.
//!
//! Kinds are float, int and bool (which is not reduced). A tensor keeps its device and element type. Inputs are never
//! modified. The results are those of the slice operations of [`Group`], with parts along a dimension `dim`:
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
//! Elements pass through host memory.
//!
//! No gradient flows through these operations. So they refuse float tensors on a device with autodiff: use
//! [`autodiff`](super::autodiff) where gradients must flow, and elsewhere [`Tensor::inner`], and [`Tensor::from_inner`]
//! for the result.
//!
//! # Errors
//! Each function returns the errors of the [`Group`] operation with the same name. They poison the group, except for
//! [`Error::InvalidArgument`], which is also returned for
//! * a float tensor on a device with autodiff, or such a device for one that is received;
//! * an element type that the device does not have, for a tensor that is received;
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
//! use burn::tensor::{Device, Int, Tensor};
//!
//! let ranks = Group::threads(2)?.into_iter().map(|group| {
//!     std::thread::spawn(move || {
//!         let first = 2 * group.rank() as i64;
//!         let columns = Tensor::<1, Int>::arange(first..first + 2, &Device::flex()).reshape([2, 1]);
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

pub use burn::tensor::kind::Basic as Kind;
use burn::tensor::kind::Numeric;
use burn::tensor::{Tensor, TensorCreationOptions};

use super::host::{Source, TensorSpec, memory};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Error, Group, Operation, ReduceOp};
use bonfire_tensor::{Axis, PairSizes, Sizes, broadcast_parts, split_sizes};

/// Returns the element-wise reduction of the ranks' tensors, on every rank. All have the same shape and element type.
/// If only one rank needs the result use [`reduce`], if every rank needs a part of it [`reduce_scatter`]; for gradients
/// [`autodiff::all_reduce_sum`](super::autodiff::all_reduce_sum).
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_reduce<const D: usize, K: Numeric>(
    tensor: Tensor<D, K>,
    op: ReduceOp,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    let Source { mut bytes, shape, spec } = Source::read("all_reduce", tensor)?;
    let request = Request::new(Operation::AllReduce, spec.carrier).reduction(op).shape(&shape);
    group.operate(request, None, &mut bytes)?;
    Ok(spec.of_kind(bytes, shape))
}

/// Returns the element-wise reduction of the ranks' tensors on `root`, `None` elsewhere. All have the same shape and
/// element type.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn reduce<const D: usize, K: Numeric>(
    tensor: Tensor<D, K>,
    op: ReduceOp,
    root: usize,
    group: &Group,
) -> Result<Option<Tensor<D, K>>, Error> {
    group.check_rank("reduce", "root", root)?;
    let Source { bytes, shape, spec } = Source::read("reduce", tensor)?;
    let reduced = memory(group).reduce((spec.carrier, &shape), op, &bytes, root)?;
    Ok(reduced.map(|reduced| spec.of_kind(reduced, shape)))
}

/// Returns `root`'s tensor on every rank. Of the other ranks' tensors only shape, element type and device matter; shape
/// and element type are the same on all ranks.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn broadcast<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    root: usize,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    const OPERATION: &str = "broadcast";
    group.check_rank(OPERATION, "root", root)?;
    let shape = tensor.shape();
    let (bytes, spec) = if group.rank() == root {
        let Source { bytes, spec, .. } = Source::read(OPERATION, tensor)?;
        (Some(bytes), spec)
    } else {
        (None, TensorSpec::new::<K>(OPERATION, tensor.dtype(), &tensor.device())?)
    };
    let output = memory(group).broadcast((spec.carrier, &shape), bytes.as_deref(), root)?;
    Ok(spec.of_kind(output, shape))
}

/// Concatenates the ranks' tensors along `dim` in rank order, on every rank. All have the same shape; the result is
/// world size times as long along `dim`.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_gather<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    gather_all(tensor, dim, Sizes::Even, group)
}

/// Variable-size [`all_gather`]: rank `r`'s tensor has length `sizes[r]` along `dim`. With `None`, the ranks exchange
/// their sizes first, which costs a small operation.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_gather_v<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: isize,
    sizes: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    gather_all(tensor, dim, sizes.map_or(Sizes::Exchanged, Sizes::Given), group)
}

#[track_caller]
fn gather_all<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: isize,
    sizes: Sizes<'_>,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    const OPERATION: &str = "all_gather";
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
    let Source { bytes, spec, .. } = Source::read(OPERATION, tensor)?;
    let sizes = sizes.resolve(group, OPERATION, &axis)?;
    let whole = memory(group).all_gather(spec.carrier, &bytes, &axis, &sizes)?;
    Ok(spec.of_kind(whole, axis.shape(sizes.iter().sum())))
}

/// Reduces the ranks' tensors element-wise, splits the result along `dim` into equal parts, and returns part `r` on
/// rank `r`. All tensors have the same shape, with a multiple of the world size along `dim`.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn reduce_scatter<const D: usize, K: Numeric>(
    tensor: Tensor<D, K>,
    op: ReduceOp,
    dim: isize,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    scatter_reduced(tensor, op, dim, None, group)
}

/// Variable-size [`reduce_scatter`]: the part of rank `r` has length `sizes[r]` along `dim`. The sizes are the same on
/// all ranks and add up to the tensor's length.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn reduce_scatter_v<const D: usize, K: Numeric>(
    tensor: Tensor<D, K>,
    op: ReduceOp,
    dim: isize,
    sizes: &[usize],
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    scatter_reduced(tensor, op, dim, Some(sizes), group)
}

#[track_caller]
fn scatter_reduced<const D: usize, K: Numeric>(
    tensor: Tensor<D, K>,
    op: ReduceOp,
    dim: isize,
    sizes: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    const OPERATION: &str = "reduce_scatter";
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
    let sizes = split_sizes(group, OPERATION, &axis, sizes)?;
    let Source { bytes, spec, .. } = Source::read(OPERATION, tensor)?;
    let part = memory(group).reduce_scatter(spec.carrier, op, &bytes, &axis, &sizes)?;
    Ok(spec.of_kind(part, axis.shape(sizes[group.rank()])))
}

/// Concatenates the ranks' tensors along `dim` in rank order on `root`; returns `None` elsewhere. All have the same
/// shape.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn gather<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    root: usize,
    dim: isize,
    group: &Group,
) -> Result<Option<Tensor<D, K>>, Error> {
    gather_parts(tensor, root, dim, Sizes::Even, group)
}

/// Variable-size [`gather`]: rank `r`'s tensor has length `sizes[r]` along `dim`. With `None`, the ranks exchange their
/// sizes first, which costs a small operation.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn gather_v<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    root: usize,
    dim: isize,
    sizes: Option<&[usize]>,
    group: &Group,
) -> Result<Option<Tensor<D, K>>, Error> {
    gather_parts(tensor, root, dim, sizes.map_or(Sizes::Exchanged, Sizes::Given), group)
}

#[track_caller]
fn gather_parts<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    root: usize,
    dim: isize,
    sizes: Sizes<'_>,
    group: &Group,
) -> Result<Option<Tensor<D, K>>, Error> {
    const OPERATION: &str = "gather";
    group.check_rank(OPERATION, "root", root)?;
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
    let Source { bytes, spec, .. } = Source::read(OPERATION, tensor)?;
    let sizes = sizes.resolve(group, OPERATION, &axis)?;
    let whole = memory(group).gather(spec.carrier, &bytes, root, &axis, &sizes)?;
    Ok(whole.map(|whole| spec.of_kind(whole, axis.shape(sizes.iter().sum()))))
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
pub fn scatter<const D: usize, K: Kind>(
    tensor: Option<Tensor<D, K>>,
    root: usize,
    dim: isize,
    options: impl Into<TensorCreationOptions>,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    scatter_parts(tensor, None, root, dim, options, group)
}

/// Variable-size [`scatter`]: the part of rank `r` has length `sizes[r]` along `dim`. The root passes the sizes with
/// its tensor.
///
/// # Errors
/// As [`scatter`].
#[track_caller]
pub fn scatter_v<const D: usize, K: Kind>(
    tensor: Option<(Tensor<D, K>, &[usize])>,
    root: usize,
    dim: isize,
    options: impl Into<TensorCreationOptions>,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    let (tensor, sizes) = tensor.unzip();
    scatter_parts(tensor, sizes, root, dim, options, group)
}

#[track_caller]
fn scatter_parts<const D: usize, K: Kind>(
    tensor: Option<Tensor<D, K>>,
    sizes: Option<&[usize]>,
    root: usize,
    dim: isize,
    options: impl Into<TensorCreationOptions>,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    const OPERATION: &str = "scatter";
    group.check_rank(OPERATION, "root", root)?;
    if tensor.is_some() != (group.rank() == root) {
        return Err(Error::argument(OPERATION, format!("rank {root}, the root, gives the only tensor")));
    }
    // Before the sizes are exchanged, so that a rank that cannot read keeps no peer waiting.
    let own = tensor.map(|tensor| {
        let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
        let sizes = split_sizes(group, OPERATION, &axis, sizes)?;
        Ok::<_, Error>((Source::read(OPERATION, tensor)?, axis, sizes))
    });
    let own = own.transpose()?;
    let spec = match &own {
        Some((source, ..)) => source.spec.clone(),
        None => TensorSpec::of::<K>(OPERATION, options)?,
    };
    let known = own.as_ref().map(|(_, axis, sizes)| (axis, &sizes[..]));
    let (axis, sizes) = broadcast_parts(group, OPERATION, known, (D, dim), root)?;
    let input = own.as_ref().map(|(source, ..)| &source.bytes[..]);
    let part = memory(group).scatter(spec.carrier, input, root, &axis, &sizes)?;
    Ok(spec.of_kind(part, axis.shape(sizes[group.rank()])))
}

/// Splits the tensor along `dim` into equal parts, sends part `r` to rank `r`, and concatenates the received parts
/// along `dim` in rank order. All tensors and the results have the same shape.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_to_all<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: isize,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    exchange_parts(tensor, dim, PairSizes { send: None, recv: None }, group)
}

/// Variable-size [`all_to_all`]: along `dim`, this rank sends length `send[r]` to rank `r` and receives `recv[r]` from
/// it. With `recv` `None`, the ranks exchange their sizes first, which costs a small operation.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn all_to_all_v<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: isize,
    send: &[usize],
    recv: Option<&[usize]>,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    exchange_parts(tensor, dim, PairSizes { send: Some(send), recv }, group)
}

#[track_caller]
fn exchange_parts<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: isize,
    sizes: PairSizes<'_>,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    const OPERATION: &str = "all_to_all";
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
    let send = split_sizes(group, OPERATION, &axis, sizes.send)?;
    let Source { bytes, spec, .. } = Source::read(OPERATION, tensor)?;
    let recv = sizes.received(group, OPERATION, &axis, &send)?;
    let whole = memory(group).all_to_all(spec.carrier, &bytes, &axis, (&send, &recv), sizes.send.is_none())?;
    Ok(spec.of_kind(whole, axis.shape(recv.iter().sum())))
}

/// Sends the tensor to rank `to`, which receives it with [`recv`]. May block until then.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn send<const D: usize, K: Kind>(tensor: Tensor<D, K>, to: usize, group: &Group) -> Result<(), Error> {
    let Source { bytes, shape, spec } = Source::read("send", tensor)?;
    group.operate_send(Request::new(Operation::Send, spec.carrier).shape(&shape), &bytes, to)
}

/// Receives the tensor that rank `from` sends with [`send`]. `options` is a device, or a device and an element type.
/// The sent tensor must have this shape and element type.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn recv<const D: usize, K: Kind>(
    shape: [usize; D],
    from: usize,
    options: impl Into<TensorCreationOptions>,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    let spec = TensorSpec::of::<K>("recv", options)?;
    let output = memory(group).recv((spec.carrier, &shape), from)?;
    Ok(spec.of_kind(output, shape))
}

/// Sends a tensor to rank `to` while receiving one from rank `from`, of the same element type and of shape `shape`.
/// Both ranks call this too. Unlike [`send`] followed by [`recv`], it cannot deadlock when ranks pass tensors around a
/// ring. Of the incoming shape only the number of elements is compared.
///
/// # Errors
/// See [errors](self#errors).
#[track_caller]
pub fn exchange<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    to: usize,
    shape: [usize; D],
    from: usize,
    group: &Group,
) -> Result<Tensor<D, K>, Error> {
    let Source { bytes, spec, .. } = Source::read("exchange", tensor)?;
    let output = memory(group).exchange(spec.carrier, (&bytes, to), (&shape, from))?;
    Ok(spec.of_kind(output, shape))
}
