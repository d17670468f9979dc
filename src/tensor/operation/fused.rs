//! Gathers several tensors in one operation of the group.

use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, Shape, TensorMetadata};

use super::axis::Axis;
use super::sizes::Sizes;
use crate::tensor::host::{Context, Kind, Source, TensorSpec, refuse_autodiff};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Operation};

const OPERATION: &str = "all_gather";

/// One of the tensors that are gathered together.
pub(crate) struct GatherInput<D> {
    source: Source,
    axis: Axis,
    spec: TensorSpec<D>,
}

impl<D> GatherInput<D> {
    pub fn read<B: Backend<Device = D>, K: Kind<B>>(tensor: K::Primitive, dim: isize) -> Result<Self, Error> {
        refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
        let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
        let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
        Ok(GatherInput { source, axis, spec })
    }
}

/// Checks that all tensors have the same length along their axes and returns the axis of the first. Runs before the
/// ranks exchange anything, so that a rank with invalid arguments keeps no peer waiting.
pub(crate) fn axis<D>(inputs: &[GatherInput<D>]) -> Result<Option<Axis>, Error> {
    let Some(first) = inputs.first() else { return Ok(None) };
    match inputs.iter().position(|input| input.axis.len() != first.axis.len()) {
        None => Ok(Some(first.axis.clone())),
        Some(at) => {
            let (len, right) = (inputs[at].axis.len(), first.axis.len());
            let reason = format!("tensor {at} is {len} long along the dimension and the first one {right}");
            Err(Error::argument(OPERATION, reason))
        }
    }
}

/// Gathers several tensors of any shapes and element types in one operation of the group. On rank `r`, all have length
/// `sizes[r]` along their axes.
#[track_caller]
pub(crate) fn all_gather<B: Backend>(
    ctx: Context<'_>,
    inputs: Vec<GatherInput<B::Device>>,
    sizes: &[usize],
) -> Result<Vec<Gathered<B::Device>>, Error> {
    let (mut common, mut bytes, mut offsets) = (Vec::new(), vec![0usize; sizes.len()], Vec::new());
    let overflow = || Error::argument(OPERATION, "no memory holds all of these tensors");
    for GatherInput { axis, spec, .. } in &inputs {
        Sizes::Given(sizes).resolve(ctx, OPERATION, axis)?;
        let (counts, _) = axis.counts(OPERATION, sizes)?;
        common.extend(axis.common().into_iter().chain([spec.carrier as usize]));
        offsets.push(bytes.clone());
        for (sum, count) in bytes.iter_mut().zip(&counts) {
            let more = count.checked_mul(spec.carrier.size()).and_then(|more| sum.checked_add(more));
            *sum = more.ok_or_else(overflow)?;
        }
    }
    let total = bytes.iter().try_fold(0usize, |sum, bytes| sum.checked_add(*bytes)).ok_or_else(overflow)?;
    let mut own = ctx.buffer::<B>(OPERATION, DType::U8, bytes[ctx.group.rank()])?;
    let mut at = 0;
    for input in &inputs {
        let source = input.source.bytes();
        own[at..at + source.len()].copy_from_slice(source);
        at += source.len();
    }
    let mut all = ctx.buffer::<B>(OPERATION, DType::U8, total)?;
    let request = Request::new(Operation::AllGather, DType::U8).shape(&common).sizes(&bytes);
    ctx.group.operate(request, Some(&own), &mut all)?;
    let begins: Vec<usize> = (0..bytes.len()).map(|rank| bytes[..rank].iter().sum()).collect();
    let gathered = inputs.into_iter().zip(offsets).map(|(GatherInput { axis, spec, .. }, offsets)| {
        let (counts, total) = axis.counts(OPERATION, sizes)?;
        let mut whole = ctx.buffer::<B>(OPERATION, spec.carrier, total)?;
        for (rank, count) in counts.iter().enumerate() {
            let begin = begins[rank] + offsets[rank];
            let part = &all[begin..begin + count * spec.carrier.size()];
            axis.join_part(sizes, rank, spec.carrier.size(), part, &mut whole);
        }
        Ok(Gathered { whole, shape: axis.shape(sizes.iter().sum()), spec })
    });
    gathered.collect()
}

/// The result for one tensor.
pub(crate) struct Gathered<D> {
    whole: Bytes,
    shape: Shape,
    spec: TensorSpec<D>,
}

impl<D> Gathered<D> {
    pub fn tensor<B: Backend<Device = D>, K: Kind<B>>(self) -> K::Primitive {
        self.spec.tensor::<B, K>(self.whole, self.shape)
    }
}
