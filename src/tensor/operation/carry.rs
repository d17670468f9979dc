//! Runs operations on tensors of any kind: reads and checks the input, runs the group's operation on the bytes, and
//! makes the result a tensor.

use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, DType as BurnDType, Shape, TensorMetadata};

use super::axis::Axis;
use super::on_device::unequal::{self, Slots};
use super::on_device::{self, Path};
use super::sizes::{PairSums, Sizes, all_equal, check_count, exchange_recv_sizes, split_sizes};
use crate::tensor::device::{connect, passes_messages, supports};
use crate::tensor::host::{Context, Kind, Source, TensorSpec, refuse_autodiff};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Call, DType, Error, Operation, ReduceOp};
use bytemuck::cast_slice_mut;

/// Joins parts that lie one after the other to the whole. Returns them unchanged where that is their layout already.
fn join<B: Backend>(
    ctx: Context<'_>,
    operation: &str,
    axis: &Axis,
    sizes: &[usize],
    carrier: DType,
    parts: Bytes,
) -> Result<Bytes, Error> {
    if axis.is_outermost() {
        return Ok(parts);
    }
    let mut whole = ctx.buffer::<B>(operation, carrier, parts.len() / carrier.size())?;
    axis.join(sizes, carrier.size(), &parts, &mut whole);
    Ok(whole)
}

/// The parts of a whole one after the other in memory: a copy, or the whole itself where that is its layout already.
struct PackedParts<'a>(&'a [u8], Option<Bytes>);

impl<'a> PackedParts<'a> {
    fn of<B: Backend>(
        ctx: Context<'_>,
        operation: &str,
        axis: &Axis,
        sizes: &[usize],
        carrier: DType,
        whole: &'a [u8],
    ) -> Result<Self, Error> {
        if axis.is_outermost() {
            return Ok(PackedParts(whole, None));
        }
        let mut parts = ctx.buffer::<B>(operation, carrier, whole.len() / carrier.size())?;
        axis.split(sizes, carrier.size(), whole, &mut parts);
        Ok(PackedParts(whole, Some(parts)))
    }

    fn bytes(&self) -> &[u8] {
        self.1.as_deref().unwrap_or(self.0)
    }
}

/// A call of this operation, for [`Path::of`].
fn on_parts(operation: Operation, reduction: Option<ReduceOp>, root: Option<usize>) -> Call {
    let mut call = Call::new(operation, DType::U8, 0);
    (call.reduction, call.root) = (reduction, root);
    call
}

/// Adds `counts` to the request, unless all sizes are equal: the group has more paths for equal parts.
fn with_counts<'a>(request: Request<'static>, sizes: &[usize], counts: &'a [usize]) -> Request<'a> {
    if all_equal(sizes) { request } else { request.sizes(counts) }
}

#[track_caller]
pub(crate) fn all_reduce<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    tensor: K::Primitive,
    op: ReduceOp,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "all_reduce";
    refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
    let shape = tensor.shape();
    if let Some(dtype) = K::device_dtype(&tensor) {
        return on_device::all_reduce::<B, K>(ctx.group, tensor, dtype, op);
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let request = |carrier| Request::new(Operation::AllReduce, carrier).reduction(op).shape(&shape);
    let reduced = match source.into_owned() {
        Ok(mut own) => {
            ctx.group.operate(request(spec.carrier), None, &mut own)?;
            own
        }
        Err(source) => {
            let mut output = ctx.buffer::<B>(OPERATION, spec.carrier, shape.num_elements())?;
            ctx.group.operate(request(spec.carrier), Some(source.bytes()), &mut output)?;
            output
        }
    };
    Ok(spec.tensor::<B, K>(reduced, shape))
}

#[track_caller]
pub(crate) fn reduce<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    tensor: K::Primitive,
    op: ReduceOp,
    root: usize,
) -> Result<Option<K::Primitive>, Error> {
    const OPERATION: &str = "reduce";
    refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
    ctx.group.check_rank(OPERATION, "root", root)?;
    if let Some(dtype) = K::device_dtype(&tensor) {
        return on_device::reduce::<B, K>(ctx.group, tensor, dtype, op, root);
    }
    let (shape, is_root) = (tensor.shape(), ctx.group.rank() == root);
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let mut output = ctx.buffer::<B>(OPERATION, spec.carrier, if is_root { shape.num_elements() } else { 0 })?;
    let request = Request::new(Operation::Reduce, spec.carrier).reduction(op).root(root).shape(&shape);
    ctx.group.operate(request, Some(source.bytes()), &mut output)?;
    Ok(is_root.then(|| spec.tensor::<B, K>(output, shape)))
}

#[track_caller]
pub(crate) fn broadcast<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    tensor: K::Primitive,
    root: usize,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "broadcast";
    refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
    let shape = tensor.shape();
    ctx.group.check_rank(OPERATION, "root", root)?;
    if let Some(dtype) = K::device_dtype(&tensor) {
        return on_device::broadcast::<B, K>(ctx.group, tensor, dtype, root);
    }
    let (source, spec) = if ctx.group.rank() == root {
        let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
        (Some(source), spec)
    } else {
        (None, TensorSpec::new::<B, K>(OPERATION, tensor.dtype(), K::device(&tensor))?)
    };
    let mut output = ctx.buffer::<B>(OPERATION, spec.carrier, shape.num_elements())?;
    let request = Request::new(Operation::Broadcast, spec.carrier).root(root).shape(&shape);
    ctx.group.operate(request, source.as_ref().map(Source::bytes), &mut output)?;
    Ok(spec.tensor::<B, K>(output, shape))
}

#[track_caller]
pub(crate) fn all_gather<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    tensor: K::Primitive,
    dim: isize,
    sizes: Sizes<'_>,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "all_gather";
    refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let sizes = sizes.resolve(ctx, OPERATION, &axis)?;
    let (counts, total) = axis.counts(OPERATION, &sizes)?;
    match Path::of::<B, K>(ctx.group, on_parts(Operation::AllGather, None, None), &tensor, &axis, &sizes)? {
        Path::Equal(dtype) => return on_device::all_gather::<B, K>(ctx.group, tensor, dtype, &axis),
        Path::Unequal(slots) => return unequal::all_gather::<B, K>(ctx.group, tensor, &sizes, &slots),
        Path::Host => {}
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let mut parts = ctx.buffer::<B>(OPERATION, spec.carrier, total)?;
    let request = Request::new(Operation::AllGather, spec.carrier).shape(&axis.common());
    ctx.group.operate(with_counts(request, &sizes, &counts), Some(source.bytes()), &mut parts)?;
    let whole = join::<B>(ctx, OPERATION, &axis, &sizes, spec.carrier, parts)?;
    Ok(spec.tensor::<B, K>(whole, axis.shape(sizes.iter().sum())))
}

#[track_caller]
pub(crate) fn reduce_scatter<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    tensor: K::Primitive,
    op: ReduceOp,
    dim: isize,
    sizes: Option<&[usize]>,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "reduce_scatter";
    refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let sizes = split_sizes(ctx, OPERATION, &axis, sizes)?;
    let (counts, _) = axis.counts(OPERATION, &sizes)?;
    match Path::of::<B, K>(ctx.group, on_parts(Operation::ReduceScatter, Some(op), None), &tensor, &axis, &sizes)? {
        Path::Equal(dtype) => return on_device::reduce_scatter::<B, K>(ctx.group, tensor, dtype, op, &axis),
        Path::Unequal(slots) => return unequal::reduce_scatter::<B, K>(ctx.group, tensor, op, &sizes, &slots),
        Path::Host => {}
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let parts = PackedParts::of::<B>(ctx, OPERATION, &axis, &sizes, spec.carrier, source.bytes())?;
    let rank = ctx.group.rank();
    let mut output = ctx.buffer::<B>(OPERATION, spec.carrier, counts[rank])?;
    let request = Request::new(Operation::ReduceScatter, spec.carrier).reduction(op).shape(&axis.common());
    ctx.group.operate(with_counts(request, &sizes, &counts), Some(parts.bytes()), &mut output)?;
    Ok(spec.tensor::<B, K>(output, axis.shape(sizes[rank])))
}

#[track_caller]
pub(crate) fn gather<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    tensor: K::Primitive,
    root: usize,
    dim: isize,
    sizes: Sizes<'_>,
) -> Result<Option<K::Primitive>, Error> {
    const OPERATION: &str = "gather";
    refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
    ctx.group.check_rank(OPERATION, "root", root)?;
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let sizes = sizes.resolve(ctx, OPERATION, &axis)?;
    let (counts, total) = axis.counts(OPERATION, &sizes)?;
    match Path::of::<B, K>(ctx.group, on_parts(Operation::Gather, None, Some(root)), &tensor, &axis, &sizes)? {
        Path::Equal(dtype) => return on_device::gather::<B, K>(ctx.group, tensor, dtype, root, &axis),
        Path::Unequal(slots) => return unequal::gather::<B, K>(ctx.group, tensor, root, &sizes, &slots),
        Path::Host => {}
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let is_root = ctx.group.rank() == root;
    let mut parts = ctx.buffer::<B>(OPERATION, spec.carrier, if is_root { total } else { 0 })?;
    let request = Request::new(Operation::Gather, spec.carrier).root(root).shape(&axis.common());
    ctx.group.operate(with_counts(request, &sizes, &counts), Some(source.bytes()), &mut parts)?;
    if !is_root {
        return Ok(None);
    }
    let whole = join::<B>(ctx, OPERATION, &axis, &sizes, spec.carrier, parts)?;
    Ok(Some(spec.tensor::<B, K>(whole, axis.shape(sizes.iter().sum()))))
}

/// Broadcasts the axis and the sizes of the parts of the tensor that the root scatters.
fn broadcast_parts(
    ctx: Context<'_>,
    operation: &str,
    own: Option<(&Axis, &[usize])>,
    (rank, dim): (usize, isize),
    root: usize,
) -> Result<(Axis, Vec<usize>), Error> {
    let mut message = vec![0u64; rank + ctx.group.world_size()];
    if let Some((axis, sizes)) = own {
        let known = axis.shape(axis.len());
        let known = known.iter().chain(sizes);
        message.iter_mut().zip(known).for_each(|(word, known)| *word = *known as u64);
    }
    let request = Request::new(Operation::Broadcast, DType::U64).root(root).shape(&[rank]);
    ctx.group.operate(request, None, cast_slice_mut(&mut message))?;
    let received: Vec<usize> = message.iter().map(|word| usize::try_from(*word).unwrap_or(usize::MAX)).collect();
    let (shape, sizes) = received.split_at(rank);
    let axis = Axis::new(operation, Shape::from(shape.to_vec()), dim)?;
    // Lengths of 0 count as 1, so that no partial product overflows either.
    let possible = shape.iter().try_fold(1usize, |product, len| product.checked_mul((*len).max(1))).is_some();
    if possible && sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)) == Some(axis.len()) {
        return Ok((axis, sizes.to_vec()));
    }
    Err(Error::broken(operation, format!("the shape and sizes that rank {root} sent describe no tensor")))
}

/// Scatters the root's tensor of `rank` dimensions, in parts of the root's `sizes`, or in equal parts.
#[track_caller]
pub(crate) fn scatter<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    tensor: Option<K::Primitive>,
    sizes: Option<&[usize]>,
    (root, rank, dim): (usize, usize, isize),
    (dtype, device): (BurnDType, &B::Device),
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "scatter";
    refuse_autodiff::<B, K>(OPERATION, device)?;
    let group = ctx.group;
    group.check_rank(OPERATION, "root", root)?;
    if tensor.is_some() != (group.rank() == root) {
        return Err(Error::argument(OPERATION, format!("rank {root}, the root, gives the only tensor")));
    }
    let own = tensor.map(|tensor| {
        let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
        let sizes = split_sizes(ctx, OPERATION, &axis, sizes)?;
        Ok::<_, Error>((tensor, axis, sizes))
    });
    let (tensor, known) = own.transpose()?.map(|(tensor, axis, sizes)| (tensor, (axis, sizes))).unzip();
    // One that says where the part is made, and in which element type.
    let like = tensor.unwrap_or_else(|| K::empty(Shape::from(vec![0; rank]), device, dtype));
    // On all ranks, before the root alone knows the sizes and asks for a path.
    if K::device_dtype(&like).is_some() {
        connect::<B>(group, device)?;
    }
    let call = on_parts(Operation::Scatter, None, Some(root));
    let path = |axis: &Axis, sizes: &[usize]| Path::of::<B, K>(group, call, &like, axis, sizes);
    // Before the sizes are exchanged, so that a rank that cannot read keeps no peer waiting.
    let read = match &known {
        Some((axis, sizes)) if matches!(path(axis, sizes)?, Path::Host) => {
            Some(Source::read::<B, K>(OPERATION, like.clone())?)
        }
        _ => None,
    };
    let spec = match &read {
        Some((_, spec)) => spec.clone(),
        None => TensorSpec::new::<B, K>(OPERATION, like.dtype(), K::device(&like))?,
    };
    let known = known.as_ref().map(|(axis, sizes)| (axis, &sizes[..]));
    let (axis, sizes) = broadcast_parts(ctx, OPERATION, known, (rank, dim), root)?;
    match path(&axis, &sizes)? {
        Path::Equal(dtype) => return on_device::scatter::<B, K>(group, like, dtype, root, (&axis, sizes[0])),
        Path::Unequal(slots) => return unequal::scatter::<B, K>(group, like, root, &sizes, &slots),
        Path::Host => {}
    }
    let (counts, _) = axis.counts(OPERATION, &sizes)?;
    let mut output = ctx.buffer::<B>(OPERATION, spec.carrier, counts[group.rank()])?;
    let parts = match &read {
        Some((source, _)) => PackedParts::of::<B>(ctx, OPERATION, &axis, &sizes, spec.carrier, source.bytes())?,
        None => PackedParts(&[], None),
    };
    let request = Request::new(Operation::Scatter, spec.carrier).root(root).shape(&axis.common());
    group.operate(with_counts(request, &sizes, &counts), Some(parts.bytes()), &mut output)?;
    Ok(spec.tensor::<B, K>(output, axis.shape(sizes[group.rank()])))
}

/// Sizes of an all_to_all along the dimension.
pub(crate) struct PairSizes<'a> {
    /// Length to send to each rank; `None` for equal parts.
    pub send: Option<&'a [usize]>,
    /// Length to receive from each rank. With `None`, the ranks exchange it, unless the parts are equal.
    pub recv: Option<&'a [usize]>,
}

#[track_caller]
pub(crate) fn all_to_all<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    tensor: K::Primitive,
    dim: isize,
    sizes: PairSizes<'_>,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "all_to_all";
    refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let send = split_sizes(ctx, OPERATION, &axis, sizes.send)?;
    let dtype = K::device_dtype(&tensor);
    let (recv, slots) = match (dtype, sizes.send, sizes.recv) {
        (Some(dtype), None, None) => return on_device::all_to_all::<B, K>(ctx.group, tensor, dtype, &axis),
        (Some(dtype), Some(_), recv) if connect::<B>(ctx.group, &K::device(&tensor))? => {
            recv.map_or(Ok(()), |recv| check_count(ctx, OPERATION, recv))?;
            let pairs = PairSums::exchange(ctx, OPERATION, &axis, (&send, recv))?;
            let slots = Slots::of(&axis, dtype, send.len(), pairs.longest, pairs.most);
            let supported =
                |slots: &Slots| supports::<B>(ctx.group, &slots.resized(on_parts(Operation::AllToAll, None, None)));
            (pairs.recv, slots.filter(supported))
        }
        (_, _, Some(recv)) => {
            check_count(ctx, OPERATION, recv)?;
            (recv.to_vec(), None)
        }
        (_, None, None) => (send.clone(), None),
        (_, Some(_), None) => (exchange_recv_sizes(ctx, &axis, &send)?, None),
    };
    if let Some(slots) = slots {
        return unequal::all_to_all::<B, K>(ctx.group, tensor, (&send, &recv), &slots);
    }
    let ((outgoing, _), (incoming, total)) = (axis.counts(OPERATION, &send)?, axis.counts(OPERATION, &recv)?);
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let parts = PackedParts::of::<B>(ctx, OPERATION, &axis, &send, spec.carrier, source.bytes())?;
    let mut output = ctx.buffer::<B>(OPERATION, spec.carrier, total)?;
    let request = |operation| Request::new(operation, spec.carrier).shape(&axis.common());
    match sizes.send {
        None => ctx.group.operate(request(Operation::AllToAll), Some(parts.bytes()), &mut output)?,
        Some(_) => {
            let (outgoing, incoming) = ((parts.bytes(), &outgoing[..]), (&mut output[..], &incoming[..]));
            ctx.group.operate_pairs(request(Operation::AllToAllV), outgoing, incoming)?;
        }
    }
    let whole = join::<B>(ctx, OPERATION, &axis, &recv, spec.carrier, output)?;
    Ok(spec.tensor::<B, K>(whole, axis.shape(recv.iter().sum())))
}

#[track_caller]
pub(crate) fn send<B: Backend, K: Kind<B>>(ctx: Context<'_>, tensor: K::Primitive, to: usize) -> Result<(), Error> {
    const OPERATION: &str = "send";
    refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
    let shape = tensor.shape();
    if let Some(dtype) = K::device_dtype(&tensor).filter(|_| passes_messages::<B>(ctx.group)) {
        return on_device::send::<B, K>(ctx.group, tensor, dtype, to);
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let request = Request::new(Operation::Send, spec.carrier).shape(&shape);
    ctx.group.operate_send(request, source.bytes(), to)
}

#[track_caller]
pub(crate) fn recv<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    shape: Shape,
    (dtype, device): (BurnDType, &B::Device),
    from: usize,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "recv";
    refuse_autodiff::<B, K>(OPERATION, device)?;
    let elements = element_count(OPERATION, &shape)?;
    if passes_messages::<B>(ctx.group) {
        // One that says where the tensor is made, and in which element type.
        let like = K::empty(Shape::from(vec![0; shape.len()]), device, dtype);
        if let Some(dtype) = K::device_dtype(&like) {
            return on_device::recv::<B, K>(ctx.group, (like, shape), dtype, from);
        }
    }
    let spec = TensorSpec::new::<B, K>(OPERATION, dtype, device.clone())?;
    let mut output = ctx.buffer::<B>(OPERATION, spec.carrier, elements)?;
    let request = Request::new(Operation::Send, spec.carrier).shape(&shape);
    ctx.group.operate_recv(request, &mut output, from)?;
    Ok(spec.tensor::<B, K>(output, shape))
}

#[track_caller]
pub(crate) fn exchange<B: Backend, K: Kind<B>>(
    ctx: Context<'_>,
    tensor: K::Primitive,
    to: usize,
    shape: Shape,
    from: usize,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "exchange";
    refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
    let elements = element_count(OPERATION, &shape)?;
    if let Some(dtype) = K::device_dtype(&tensor).filter(|_| passes_messages::<B>(ctx.group)) {
        return on_device::exchange::<B, K>(ctx.group, tensor, dtype, (to, from), shape);
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let mut output = ctx.buffer::<B>(OPERATION, spec.carrier, elements)?;
    let request = Request::new(Operation::Exchange, spec.carrier);
    ctx.group.operate_exchange(request, (source.bytes(), to), (&mut output, from))?;
    Ok(spec.tensor::<B, K>(output, shape))
}

fn element_count(operation: &str, shape: &Shape) -> Result<usize, Error> {
    let element_count = shape.iter().try_fold(1usize, |product, len| product.checked_mul(*len));
    element_count.ok_or_else(|| Error::argument(operation, format!("no tensor has the shape {:?}", shape.as_slice())))
}
