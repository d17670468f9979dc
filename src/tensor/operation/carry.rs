//! Runs operations on tensors of any kind: reads and checks the input, runs the group's operation on the bytes, and
//! makes the result a tensor.

use burn::tensor::backend::Backend;
use burn::tensor::{DType as BurnDType, Shape, TensorMetadata};

use super::on_device::unequal::{self, Slots};
use super::on_device::{self, Path};
use super::sizes::PairSums;
use crate::tensor::device::{connect, passes_messages, supports};
use crate::tensor::host::{Context, Kind, Source, TensorSpec, refuse_autodiff};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Call, DType, Error, Operation, ReduceOp};
use bonfire_tensor::{Axis, HostMemory, PairSizes, Sizes, broadcast_parts, check_count, element_count, split_sizes};

/// The group of a context, and memory for results of a backend.
macro_rules! in_memory {
    ($ctx:ident, $B:ty) => {
        HostMemory {
            group: $ctx.group,
            allocate: &|operation, dtype, count| $ctx.buffer::<$B>(operation, dtype, count),
        }
    };
}
pub(super) use in_memory;

/// A call of this operation, for [`Path::of`].
fn on_parts(operation: Operation, reduction: Option<ReduceOp>, root: Option<usize>) -> Call {
    let mut call = Call::new(operation, DType::U8, 0);
    (call.reduction, call.root) = (reduction, root);
    call
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
    let shape = tensor.shape();
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let reduced = in_memory!(ctx, B).reduce((spec.carrier, &shape), op, source.bytes(), root)?;
    Ok(reduced.map(|reduced| spec.tensor::<B, K>(reduced, shape)))
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
    let output = in_memory!(ctx, B).broadcast((spec.carrier, &shape), source.as_ref().map(Source::bytes), root)?;
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
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
    let sizes = sizes.resolve(ctx.group, OPERATION, &axis)?;
    axis.counts(OPERATION, &sizes)?;
    match Path::of::<B, K>(ctx.group, on_parts(Operation::AllGather, None, None), &tensor, &axis, &sizes)? {
        Path::Equal(dtype) => return on_device::all_gather::<B, K>(ctx.group, tensor, dtype, &axis),
        Path::Unequal(slots) => return unequal::all_gather::<B, K>(ctx.group, tensor, &sizes, &slots),
        Path::Host => {}
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let whole = in_memory!(ctx, B).all_gather(spec.carrier, source.bytes(), &axis, &sizes)?;
    Ok(spec.tensor::<B, K>(whole, axis.shape(sizes.iter().sum()).into()))
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
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
    let sizes = split_sizes(ctx.group, OPERATION, &axis, sizes)?;
    match Path::of::<B, K>(ctx.group, on_parts(Operation::ReduceScatter, Some(op), None), &tensor, &axis, &sizes)? {
        Path::Equal(dtype) => return on_device::reduce_scatter::<B, K>(ctx.group, tensor, dtype, op, &axis),
        Path::Unequal(slots) => return unequal::reduce_scatter::<B, K>(ctx.group, tensor, op, &sizes, &slots),
        Path::Host => {}
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let part = in_memory!(ctx, B).reduce_scatter(spec.carrier, op, source.bytes(), &axis, &sizes)?;
    Ok(spec.tensor::<B, K>(part, axis.shape(sizes[ctx.group.rank()]).into()))
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
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
    let sizes = sizes.resolve(ctx.group, OPERATION, &axis)?;
    axis.counts(OPERATION, &sizes)?;
    match Path::of::<B, K>(ctx.group, on_parts(Operation::Gather, None, Some(root)), &tensor, &axis, &sizes)? {
        Path::Equal(dtype) => return on_device::gather::<B, K>(ctx.group, tensor, dtype, root, &axis),
        Path::Unequal(slots) => return unequal::gather::<B, K>(ctx.group, tensor, root, &sizes, &slots),
        Path::Host => {}
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let whole = in_memory!(ctx, B).gather(spec.carrier, source.bytes(), root, &axis, &sizes)?;
    Ok(whole.map(|whole| spec.tensor::<B, K>(whole, axis.shape(sizes.iter().sum()).into())))
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
        let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
        let sizes = split_sizes(group, OPERATION, &axis, sizes)?;
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
    let (axis, sizes) = broadcast_parts(group, OPERATION, known, (rank, dim), root)?;
    match path(&axis, &sizes)? {
        Path::Equal(dtype) => return on_device::scatter::<B, K>(group, like, dtype, root, (&axis, sizes[0])),
        Path::Unequal(slots) => return unequal::scatter::<B, K>(group, like, root, &sizes, &slots),
        Path::Host => {}
    }
    let input = read.as_ref().map(|(source, _)| source.bytes());
    let part = in_memory!(ctx, B).scatter(spec.carrier, input, root, &axis, &sizes)?;
    Ok(spec.tensor::<B, K>(part, axis.shape(sizes[group.rank()]).into()))
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
    let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
    let send = split_sizes(ctx.group, OPERATION, &axis, sizes.send)?;
    let dtype = K::device_dtype(&tensor);
    let (recv, slots) = match (dtype, sizes.send, sizes.recv) {
        (Some(dtype), None, None) => return on_device::all_to_all::<B, K>(ctx.group, tensor, dtype, &axis),
        (Some(dtype), Some(_), recv) if connect::<B>(ctx.group, &K::device(&tensor))? => {
            recv.map_or(Ok(()), |recv| check_count(ctx.group, OPERATION, recv))?;
            let pairs = PairSums::exchange(ctx.group, OPERATION, &axis, (&send, recv))?;
            let slots = Slots::of(&axis, dtype, send.len(), pairs.longest, pairs.most);
            let supported =
                |slots: &Slots| supports::<B>(ctx.group, &slots.resized(on_parts(Operation::AllToAll, None, None)));
            (pairs.recv, slots.filter(supported))
        }
        _ => (sizes.received(ctx.group, OPERATION, &axis, &send)?, None),
    };
    if let Some(slots) = slots {
        return unequal::all_to_all::<B, K>(ctx.group, tensor, (&send, &recv), &slots);
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let (even, sizes) = (sizes.send.is_none(), (&send[..], &recv[..]));
    let whole = in_memory!(ctx, B).all_to_all(spec.carrier, source.bytes(), &axis, sizes, even)?;
    Ok(spec.tensor::<B, K>(whole, axis.shape(recv.iter().sum()).into()))
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
    element_count(OPERATION, &shape)?;
    if passes_messages::<B>(ctx.group) {
        // One that says where the tensor is made, and in which element type.
        let like = K::empty(Shape::from(vec![0; shape.len()]), device, dtype);
        if let Some(dtype) = K::device_dtype(&like) {
            return on_device::recv::<B, K>(ctx.group, (like, shape), dtype, from);
        }
    }
    let spec = TensorSpec::new::<B, K>(OPERATION, dtype, device.clone())?;
    let output = in_memory!(ctx, B).recv((spec.carrier, &shape), from)?;
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
    element_count(OPERATION, &shape)?;
    if let Some(dtype) = K::device_dtype(&tensor).filter(|_| passes_messages::<B>(ctx.group)) {
        return on_device::exchange::<B, K>(ctx.group, tensor, dtype, (to, from), shape);
    }
    let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
    let output = in_memory!(ctx, B).exchange(spec.carrier, (source.bytes(), to), (&shape, from))?;
    Ok(spec.tensor::<B, K>(output, shape))
}
