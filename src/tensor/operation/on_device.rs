//! Operations whose tensors stay on a collective device. Their bytes are those of the operations on host memory, so a
//! group may have ranks of both kinds, but not for parts of unequal sizes.

pub(super) mod unequal;

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{Shape, TensorMetadata};

use self::unequal::Slots;
use crate::tensor::device::{DeviceCall, Target, connect, supports};
use crate::tensor::host::Kind;
use bonfire_core::internal::{ByteOperations, Peers, Ranges, Request};
use bonfire_core::{Call, DType, Error, Group, Operation, ReduceOp};
use bonfire_tensor::{Axis, all_equal};

/// How tensors are exchanged in parts.
pub(super) enum Path {
    /// Through host memory.
    Host,
    /// On their devices, in parts of equal sizes and of this element type.
    Equal(DType),
    Unequal(Slots),
}

impl Path {
    /// Returns the path of a call on parts of these sizes along the axis, whatever its element type and count. All
    /// ranks call it, with the same sizes.
    pub fn of<B: Backend, K: Kind<B>>(
        group: &Group,
        call: Call,
        tensor: &K::Primitive,
        axis: &Axis,
        sizes: &[usize],
    ) -> Result<Path, Error> {
        let Some(dtype) = K::device_dtype(tensor) else { return Ok(Path::Host) };
        if all_equal(sizes) {
            return Ok(Path::Equal(dtype));
        }
        connect::<B>(group, &K::device(tensor))?;
        let longest = sizes.iter().max().copied().unwrap_or_default();
        let slots = Slots::of(axis, dtype, sizes.len(), longest, sizes.iter().sum());
        let slots = slots.filter(|slots| supports::<B>(group, &slots.resized(call)));
        Ok(slots.map_or(Path::Host, Path::Unequal))
    }
}

/// Runs an operation of this request and of so many bytes from `source` to a new tensor.
fn run<B: Backend, K: Kind<B>>(
    group: &Group,
    request: Request<'static>,
    bytes: usize,
    (source, read): (K::Primitive, Range<usize>),
    (shape, written): (Shape, Range<usize>),
) -> Result<K::Primitive, Error> {
    let target = Target { like: source.clone(), shape, ranges: written.into() };
    let call = DeviceCall::collective(request, bytes, vec![(source, read.into())], vec![target]);
    finish::<B, K>(group, call)
}

/// Runs an operation of this request and of so many bytes that makes no tensor here.
fn give<B: Backend, K: Kind<B>>(
    group: &Group,
    request: Request<'static>,
    bytes: usize,
    (source, read): (K::Primitive, Range<usize>),
) -> Result<(), Error> {
    let sources = vec![(source, read.into())];
    K::start_on_device(group, DeviceCall::collective(request, bytes, sources, Vec::new()))?.wait().map(drop)
}

fn finish<B: Backend, K: Kind<B>>(group: &Group, call: DeviceCall<K::Primitive>) -> Result<K::Primitive, Error> {
    let missing = || Error::broken("an operation on a device", "the device returned no result");
    K::start_on_device(group, call)?.wait()?.pop().ok_or_else(missing)
}

pub(super) fn all_reduce<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    op: ReduceOp,
) -> Result<K::Primitive, Error> {
    let shape = tensor.shape();
    let bytes = shape.num_elements() * dtype.size();
    let request = Request::new(Operation::AllReduce, dtype).reduction(op).shape(&shape);
    run::<B, K>(group, request, bytes, (tensor, 0..bytes), (shape, 0..bytes))
}

pub(super) fn broadcast<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    root: usize,
) -> Result<K::Primitive, Error> {
    let shape = tensor.shape();
    let bytes = shape.num_elements() * dtype.size();
    let request = Request::new(Operation::Broadcast, dtype).root(root).shape(&shape);
    if group.rank() != root {
        let targets = vec![Target { like: tensor, shape, ranges: (0..bytes).into() }];
        return finish::<B, K>(group, DeviceCall::collective(request, bytes, Vec::new(), targets));
    }
    give::<B, K>(group, request, bytes, (tensor.clone(), 0..bytes))?;
    Ok(tensor)
}

pub(super) fn reduce<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    op: ReduceOp,
    root: usize,
) -> Result<Option<K::Primitive>, Error> {
    let shape = tensor.shape();
    let bytes = shape.num_elements() * dtype.size();
    let request = Request::new(Operation::Reduce, dtype).reduction(op).root(root).shape(&shape);
    if group.rank() == root {
        return run::<B, K>(group, request, bytes, (tensor, 0..bytes), (shape, 0..bytes)).map(Some);
    }
    give::<B, K>(group, request, bytes, (tensor, 0..bytes)).map(|()| None)
}

pub(super) fn all_gather<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    axis: &Axis,
) -> Result<K::Primitive, Error> {
    let (n, own) = (group.world_size(), tensor.shape().num_elements() * dtype.size());
    let start = group.rank() * own;
    let request = Request::new(Operation::AllGather, dtype).shape(&axis.common());
    let whole = (several(n, &tensor.shape()), 0..n * own);
    let parts = run::<B, K>(group, request, n * own, (tensor, start..start + own), whole)?;
    Ok(join::<B, K>(parts, axis, n, axis.length()))
}

/// Gathers equal parts.
pub(super) fn gather<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    root: usize,
    axis: &Axis,
) -> Result<Option<K::Primitive>, Error> {
    let (n, own) = (group.world_size(), tensor.shape().num_elements() * dtype.size());
    let start = group.rank() * own;
    let request = Request::new(Operation::Gather, dtype).root(root).shape(&axis.common());
    let source = (tensor.clone(), start..start + own);
    if group.rank() != root {
        return give::<B, K>(group, request, n * own, source).map(|()| None);
    }
    let parts = run::<B, K>(group, request, n * own, source, (several(n, &tensor.shape()), 0..n * own))?;
    Ok(Some(join::<B, K>(parts, axis, n, axis.length())))
}

/// Scatters equal parts of the root's tensor, each `len` long. Elsewhere, `tensor` is one of the same device and
/// element type.
pub(super) fn scatter<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    root: usize,
    (axis, len): (&Axis, usize),
) -> Result<K::Primitive, Error> {
    let (n, shape) = (group.world_size(), Shape::from(axis.shape(len)));
    let own = shape.num_elements() * dtype.size();
    let start = group.rank() * own;
    let request = Request::new(Operation::Scatter, dtype).root(root).shape(&axis.common());
    let sources = match group.rank() == root {
        true => vec![(split::<B, K>(tensor.clone(), axis, n), Ranges::from(0..n * own))],
        false => Vec::new(),
    };
    let targets = vec![Target { like: tensor, shape, ranges: (start..start + own).into() }];
    finish::<B, K>(group, DeviceCall::collective(request, n * own, sources, targets))
}

pub(super) fn reduce_scatter<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    op: ReduceOp,
    axis: &Axis,
) -> Result<K::Primitive, Error> {
    let (n, bytes) = (group.world_size(), tensor.shape().num_elements() * dtype.size());
    let (part, start) = (Shape::from(axis.shape(axis.length() / n)), group.rank() * (bytes / n));
    let request = Request::new(Operation::ReduceScatter, dtype).reduction(op).shape(&axis.common());
    let parts = split::<B, K>(tensor, axis, n);
    run::<B, K>(group, request, bytes, (parts, 0..bytes), (part, start..start + bytes / n))
}

pub(super) fn all_to_all<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    axis: &Axis,
) -> Result<K::Primitive, Error> {
    let (n, bytes) = (group.world_size(), tensor.shape().num_elements() * dtype.size());
    let request = Request::new(Operation::AllToAll, dtype).shape(&axis.common());
    let parts = split::<B, K>(tensor, axis, n);
    let shape = parts.shape();
    let parts = run::<B, K>(group, request, bytes, (parts, 0..bytes), (shape, 0..bytes))?;
    Ok(join::<B, K>(parts, axis, n, axis.length() / n))
}

pub(super) fn send<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    to: usize,
) -> Result<(), Error> {
    group.check_rank("send", "peer", to)?;
    let shape = tensor.shape();
    let bytes = shape.num_elements() * dtype.size();
    let request = Request::new(Operation::Send, dtype).shape(&shape);
    let peers = Peers { to: Some(to), from: None };
    let call = DeviceCall { request, bytes, sources: vec![(tensor, (0..bytes).into())], targets: Vec::new(), peers };
    K::start_on_device(group, call)?.wait().map(drop)
}

/// Receives a tensor of this shape, on the device and in the element type of `like`.
pub(super) fn recv<B: Backend, K: Kind<B>>(
    group: &Group,
    (like, shape): (K::Primitive, Shape),
    dtype: DType,
    from: usize,
) -> Result<K::Primitive, Error> {
    group.check_rank("recv", "peer", from)?;
    let bytes = shape.num_elements() * dtype.size();
    let request = Request::new(Operation::Send, dtype).shape(&shape);
    let peers = Peers { to: None, from: Some(from) };
    let targets = vec![Target { like, shape, ranges: (0..bytes).into() }];
    finish::<B, K>(group, DeviceCall { request, bytes, sources: Vec::new(), targets, peers })
}

/// Sends the tensor to one rank, and receives one of this shape from another.
pub(super) fn exchange<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    dtype: DType,
    (to, from): (usize, usize),
    shape: Shape,
) -> Result<K::Primitive, Error> {
    let (sent, received) = (tensor.shape().num_elements(), shape.num_elements());
    if group.exchanges_with_itself(to, from)? {
        if sent != received {
            let reason = format!("the incoming tensor has {received} elements and must have {sent}");
            return Err(Error::argument("exchange", reason));
        }
        return Ok(K::reshape(tensor, shape));
    }
    let (bytes, received) = (sent * dtype.size(), received * dtype.size());
    let request = Request::new(Operation::Exchange, dtype);
    let targets = vec![Target { like: tensor.clone(), shape, ranges: (0..received).into() }];
    let peers = Peers { to: Some(to), from: Some(from) };
    finish::<B, K>(group, DeviceCall { request, bytes, sources: vec![(tensor, (0..bytes).into())], targets, peers })
}

/// Returns the shape of `n` tensors of this shape, one after the other.
fn several(n: usize, shape: &Shape) -> Shape {
    Shape::from([&[n], shape.as_slice()].concat())
}

/// Returns the `n` equal parts of a whole, with a first dimension for the part.
fn split<B: Backend, K: Kind<B>>(whole: K::Primitive, axis: &Axis, n: usize) -> K::Primitive {
    let (shape, order) = axis.parts(n, axis.length() / n);
    K::permute(K::reshape(whole, Shape::from(shape)), &order)
}

/// Returns the whole of `n` parts, each `len` long along the axis.
fn join<B: Backend, K: Kind<B>>(parts: K::Primitive, axis: &Axis, n: usize, len: usize) -> K::Primitive {
    let (_, order) = axis.parts(n, len);
    K::reshape(K::permute(parts, &inverse(&order)), Shape::from(axis.shape(n * len)))
}

/// Returns the order of dimensions that takes back this one.
fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    order.iter().enumerate().for_each(|(to, from)| inverse[*from] = to);
    inverse
}
