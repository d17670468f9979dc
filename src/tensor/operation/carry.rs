//! Operations on tensors of any kind: read, checked, carried by a group, made into tensors again.

use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, DType as BurnDType, Shape, TensorMetadata};

use super::axis::Axis;
use super::sizes::{Sizes, awaited, check, cut, equal};
use crate::tensor::device::Offer;
use crate::tensor::host::{Form, Kind, Source, Via};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Operation, ReduceOp};
use bytemuck::cast_slice_mut;

/// The whole of these parts, which is what they are already where nothing lies between.
fn join<B: Backend>(
    via: Via<'_>,
    operation: &str,
    axis: &Axis,
    sizes: &[usize],
    carrier: DType,
    parts: Bytes,
) -> Result<Bytes, Error> {
    if axis.is_outermost() {
        return Ok(parts);
    }
    let mut whole = via.room::<B>(operation, carrier, parts.len() / carrier.size())?;
    axis.join(sizes, carrier.size(), &parts, &mut whole);
    Ok(whole)
}

/// The parts of a whole one after the other: a copy, or the whole itself where they lie so.
struct Parts<'a>(&'a [u8], Option<Bytes>);

impl<'a> Parts<'a> {
    fn of<B: Backend>(
        via: Via<'_>,
        operation: &str,
        axis: &Axis,
        sizes: &[usize],
        carrier: DType,
        whole: &'a [u8],
    ) -> Result<Self, Error> {
        if axis.is_outermost() {
            return Ok(Parts(whole, None));
        }
        let mut parts = via.room::<B>(operation, carrier, whole.len() / carrier.size())?;
        axis.split(sizes, carrier.size(), whole, &mut parts);
        Ok(Parts(whole, Some(parts)))
    }

    fn bytes(&self) -> &[u8] {
        self.1.as_deref().unwrap_or(self.0)
    }
}

/// Parts of equal sizes are even ones, which more ways of the group know.
fn cut_as<'a>(request: Request<'static>, sizes: &[usize], counts: &'a [usize]) -> Request<'a> {
    if equal(sizes) { request } else { request.sizes(counts) }
}

pub(crate) fn all_reduce<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    tensor: K::Primitive,
    op: ReduceOp,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "all_reduce";
    let shape = tensor.shape();
    let tensor = match K::all_reduce_on_device(via.group, tensor, op) {
        Offer::Taken(reduced) => return reduced,
        Offer::Declined(tensor) => tensor,
    };
    let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
    let request = |carrier| Request::new(Operation::AllReduce, carrier).reduction(op).shape(&shape);
    let reduced = match source.into_own() {
        Ok(mut own) => {
            via.group.operate(request(form.carrier), None, &mut own)?;
            own
        }
        Err(source) => {
            let mut output = via.room::<B>(OPERATION, form.carrier, shape.num_elements())?;
            via.group.operate(request(form.carrier), Some(source.bytes()), &mut output)?;
            output
        }
    };
    Ok(form.tensor::<B, K>(reduced, shape))
}

pub(crate) fn reduce<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    tensor: K::Primitive,
    op: ReduceOp,
    root: usize,
) -> Result<Option<K::Primitive>, Error> {
    const OPERATION: &str = "reduce";
    via.group.check_rank(OPERATION, "root", root)?;
    let (shape, here) = (tensor.shape(), via.group.rank() == root);
    let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
    let mut output = via.room::<B>(OPERATION, form.carrier, if here { shape.num_elements() } else { 0 })?;
    let request = Request::new(Operation::Reduce, form.carrier).reduction(op).root(root).shape(&shape);
    via.group.operate(request, Some(source.bytes()), &mut output)?;
    Ok(here.then(|| form.tensor::<B, K>(output, shape)))
}

pub(crate) fn broadcast<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    tensor: K::Primitive,
    root: usize,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "broadcast";
    let shape = tensor.shape();
    via.group.check_rank(OPERATION, "root", root)?;
    let (source, form) = if via.group.rank() == root {
        let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
        (Some(source), form)
    } else {
        (None, Form::new::<B, K>(OPERATION, tensor.dtype(), K::device(&tensor))?)
    };
    let mut output = via.room::<B>(OPERATION, form.carrier, shape.num_elements())?;
    let request = Request::new(Operation::Broadcast, form.carrier).root(root).shape(&shape);
    via.group.operate(request, source.as_ref().map(Source::bytes), &mut output)?;
    Ok(form.tensor::<B, K>(output, shape))
}

pub(crate) fn all_gather<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    tensor: K::Primitive,
    dim: isize,
    sizes: Sizes<'_>,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "all_gather";
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let sizes = sizes.resolve(via, OPERATION, &axis)?;
    let (counts, total) = axis.counts(OPERATION, &sizes)?;
    let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
    let mut parts = via.room::<B>(OPERATION, form.carrier, total)?;
    let request = Request::new(Operation::AllGather, form.carrier).shape(&axis.agreed());
    via.group.operate(cut_as(request, &sizes, &counts), Some(source.bytes()), &mut parts)?;
    let whole = join::<B>(via, OPERATION, &axis, &sizes, form.carrier, parts)?;
    Ok(form.tensor::<B, K>(whole, axis.shape(sizes.iter().sum())))
}

pub(crate) fn reduce_scatter<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    tensor: K::Primitive,
    op: ReduceOp,
    dim: isize,
    sizes: Option<&[usize]>,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "reduce_scatter";
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let sizes = cut(via, OPERATION, &axis, sizes)?;
    let (counts, _) = axis.counts(OPERATION, &sizes)?;
    let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
    let parts = Parts::of::<B>(via, OPERATION, &axis, &sizes, form.carrier, source.bytes())?;
    let rank = via.group.rank();
    let mut output = via.room::<B>(OPERATION, form.carrier, counts[rank])?;
    let request = Request::new(Operation::ReduceScatter, form.carrier).reduction(op).shape(&axis.agreed());
    via.group.operate(cut_as(request, &sizes, &counts), Some(parts.bytes()), &mut output)?;
    Ok(form.tensor::<B, K>(output, axis.shape(sizes[rank])))
}

pub(crate) fn gather<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    tensor: K::Primitive,
    root: usize,
    dim: isize,
    sizes: Sizes<'_>,
) -> Result<Option<K::Primitive>, Error> {
    const OPERATION: &str = "gather";
    via.group.check_rank(OPERATION, "root", root)?;
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let sizes = sizes.resolve(via, OPERATION, &axis)?;
    let (counts, total) = axis.counts(OPERATION, &sizes)?;
    let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
    let here = via.group.rank() == root;
    let mut parts = via.room::<B>(OPERATION, form.carrier, if here { total } else { 0 })?;
    let request = Request::new(Operation::Gather, form.carrier).root(root).shape(&axis.agreed());
    via.group.operate(cut_as(request, &sizes, &counts), Some(source.bytes()), &mut parts)?;
    if !here {
        return Ok(None);
    }
    let whole = join::<B>(via, OPERATION, &axis, &sizes, form.carrier, parts)?;
    Ok(Some(form.tensor::<B, K>(whole, axis.shape(sizes.iter().sum()))))
}

/// What the root scatters, as it tells the others: its axis and the sizes of the parts.
fn scattered(
    via: Via<'_>,
    operation: &str,
    own: Option<(&Axis, &[usize])>,
    (rank, dim): (usize, isize),
    root: usize,
) -> Result<(Axis, Vec<usize>), Error> {
    let mut words = vec![0u64; rank + via.group.world_size()];
    if let Some((axis, sizes)) = own {
        let known = axis.shape(axis.len());
        let known = known.iter().chain(sizes);
        words.iter_mut().zip(known).for_each(|(word, known)| *word = *known as u64);
    }
    let request = Request::new(Operation::Broadcast, DType::U64).root(root).shape(&[rank]);
    via.group.operate(request, None, cast_slice_mut(&mut words))?;
    let numbers: Vec<usize> = words.iter().map(|word| usize::try_from(*word).unwrap_or(usize::MAX)).collect();
    let (shape, sizes) = numbers.split_at(rank);
    let axis = Axis::new(operation, Shape::from(shape.to_vec()), dim)?;
    // Without the zeros, so that no part of the product is too large either.
    let possible = shape.iter().try_fold(1usize, |product, len| product.checked_mul((*len).max(1))).is_some();
    if possible && sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)) == Some(axis.len()) {
        return Ok((axis, sizes.to_vec()));
    }
    Err(Error::broken(operation, format!("what rank {root} said of its tensor describes none")))
}

/// Scatters the root's tensor of `rank` dimensions, which it cuts as its sizes say, or equally.
pub(crate) fn scatter<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    tensor: Option<K::Primitive>,
    sizes: Option<&[usize]>,
    (root, rank, dim): (usize, usize, isize),
    (dtype, device): (BurnDType, &B::Device),
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "scatter";
    let group = via.group;
    group.check_rank(OPERATION, "root", root)?;
    if tensor.is_some() != (group.rank() == root) {
        return Err(Error::argument(OPERATION, format!("rank {root}, the root, gives the only tensor")));
    }
    let own = tensor.map(|tensor| {
        let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
        let sizes = cut(via, OPERATION, &axis, sizes)?;
        let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
        Ok::<_, Error>((source, form, axis, sizes))
    });
    let own = own.transpose()?;
    let form = match &own {
        Some((_, form, ..)) => form.clone(),
        None => Form::new::<B, K>(OPERATION, dtype, device.clone())?,
    };
    let known = own.as_ref().map(|(_, _, axis, sizes)| (axis, &sizes[..]));
    let (axis, sizes) = scattered(via, OPERATION, known, (rank, dim), root)?;
    let (counts, _) = axis.counts(OPERATION, &sizes)?;
    let mut output = via.room::<B>(OPERATION, form.carrier, counts[group.rank()])?;
    let parts = match &own {
        Some((source, ..)) => Parts::of::<B>(via, OPERATION, &axis, &sizes, form.carrier, source.bytes())?,
        None => Parts(&[], None),
    };
    let request = Request::new(Operation::Scatter, form.carrier).root(root).shape(&axis.agreed());
    group.operate(cut_as(request, &sizes, &counts), Some(parts.bytes()), &mut output)?;
    Ok(form.tensor::<B, K>(output, axis.shape(sizes[group.rank()])))
}

/// How an all_to_all cuts a tensor and what it puts together.
pub(crate) struct Swap<'a> {
    /// How much goes to each rank; equal parts if nothing is said.
    pub send: Option<&'a [usize]>,
    /// How much comes from each rank; what the ranks tell each other if nothing is said, where the parts are not equal.
    pub recv: Option<&'a [usize]>,
}

pub(crate) fn all_to_all<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    tensor: K::Primitive,
    dim: isize,
    swap: Swap<'_>,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "all_to_all";
    let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
    let send = cut(via, OPERATION, &axis, swap.send)?;
    let recv = match (swap.recv, swap.send) {
        (Some(recv), _) => {
            check(via, OPERATION, recv)?;
            recv.to_vec()
        }
        (None, None) => send.clone(),
        (None, Some(_)) => awaited(via, &axis, &send)?,
    };
    let ((outgoing, _), (incoming, total)) = (axis.counts(OPERATION, &send)?, axis.counts(OPERATION, &recv)?);
    let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
    let parts = Parts::of::<B>(via, OPERATION, &axis, &send, form.carrier, source.bytes())?;
    let mut output = via.room::<B>(OPERATION, form.carrier, total)?;
    let request = |operation| Request::new(operation, form.carrier).shape(&axis.agreed());
    match swap.send {
        None => via.group.operate(request(Operation::AllToAll), Some(parts.bytes()), &mut output)?,
        Some(_) => {
            let (outgoing, incoming) = ((parts.bytes(), &outgoing[..]), (&mut output[..], &incoming[..]));
            via.group.operate_pairs(request(Operation::AllToAllV), outgoing, incoming)?;
        }
    }
    let whole = join::<B>(via, OPERATION, &axis, &recv, form.carrier, output)?;
    Ok(form.tensor::<B, K>(whole, axis.shape(recv.iter().sum())))
}

pub(crate) fn send<B: Backend, K: Kind<B>>(via: Via<'_>, tensor: K::Primitive, to: usize) -> Result<(), Error> {
    let shape = tensor.shape();
    let (source, form) = Source::read::<B, K>("send", tensor)?;
    let request = Request::new(Operation::Send, form.carrier).shape(&shape);
    via.group.operate_send(request, source.bytes(), to)
}

pub(crate) fn recv<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    shape: Shape,
    (dtype, device): (BurnDType, &B::Device),
    from: usize,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "recv";
    let form = Form::new::<B, K>(OPERATION, dtype, device.clone())?;
    let mut output = via.room::<B>(OPERATION, form.carrier, volume(OPERATION, &shape)?)?;
    let request = Request::new(Operation::Send, form.carrier).shape(&shape);
    via.group.operate_recv(request, &mut output, from)?;
    Ok(form.tensor::<B, K>(output, shape))
}

pub(crate) fn exchange<B: Backend, K: Kind<B>>(
    via: Via<'_>,
    tensor: K::Primitive,
    to: usize,
    shape: Shape,
    from: usize,
) -> Result<K::Primitive, Error> {
    const OPERATION: &str = "exchange";
    let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
    let mut output = via.room::<B>(OPERATION, form.carrier, volume(OPERATION, &shape)?)?;
    let request = Request::new(Operation::Exchange, form.carrier);
    via.group.operate_exchange(request, (source.bytes(), to), (&mut output, from))?;
    Ok(form.tensor::<B, K>(output, shape))
}

fn volume(operation: &str, shape: &Shape) -> Result<usize, Error> {
    let volume = shape.iter().try_fold(1usize, |product, len| product.checked_mul(*len));
    volume.ok_or_else(|| Error::argument(operation, format!("no tensor has the shape {:?}", shape.as_slice())))
}
