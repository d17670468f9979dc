//! Several tensors in one operation of the group.

use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, Shape, TensorMetadata};

use super::axis::Axis;
use super::sizes::Sizes;
use crate::tensor::host::{Form, Kind, Source, Via};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Operation};

const OPERATION: &str = "all_gather";

/// A tensor that is gathered with others.
pub(crate) struct Piece<D> {
    source: Source,
    axis: Axis,
    form: Form<D>,
}

impl<D> Piece<D> {
    pub fn read<B: Backend<Device = D>, K: Kind<B>>(tensor: K::Primitive, dim: isize) -> Result<Self, Error> {
        let axis = Axis::new(OPERATION, tensor.shape(), dim)?;
        let (source, form) = Source::read::<B, K>(OPERATION, tensor)?;
        Ok(Piece { source, axis, form })
    }
}

/// The axis of the first, once all are known to be as long along theirs. Before the ranks exchange anything, so that a rank
/// that is refused keeps nobody waiting.
pub(crate) fn axis<D>(pieces: &[Piece<D>]) -> Result<Option<Axis>, Error> {
    let Some(first) = pieces.first() else { return Ok(None) };
    match pieces.iter().position(|piece| piece.axis.len() != first.axis.len()) {
        None => Ok(Some(first.axis.clone())),
        Some(at) => {
            let (len, right) = (pieces[at].axis.len(), first.axis.len());
            let reason = format!("tensor {at} is {len} long along the dimension and the first one {right}");
            Err(Error::argument(OPERATION, reason))
        }
    }
}

/// Gathers several tensors, of any shapes and element types, in one operation of the group: all are as long along their
/// dimension as `sizes` says. What comes of each is for [`Gathered::tensor`] to say.
pub(crate) fn all_gather<B: Backend>(
    via: Via<'_>,
    pieces: Vec<Piece<B::Device>>,
    sizes: &[usize],
) -> Result<Vec<Gathered<B::Device>>, Error> {
    let (mut agreed, mut bytes, mut offsets) = (Vec::new(), vec![0usize; sizes.len()], Vec::new());
    let absurd = || Error::argument(OPERATION, "no memory holds all of these tensors");
    for Piece { axis, form, .. } in &pieces {
        Sizes::Given(sizes).resolve(via, OPERATION, axis)?;
        let (counts, _) = axis.counts(OPERATION, sizes)?;
        agreed.extend(axis.agreed().into_iter().chain([form.carrier as usize]));
        offsets.push(bytes.clone());
        for (sum, count) in bytes.iter_mut().zip(&counts) {
            let more = count.checked_mul(form.carrier.size()).and_then(|more| sum.checked_add(more));
            *sum = more.ok_or_else(absurd)?;
        }
    }
    let total = bytes.iter().try_fold(0usize, |sum, bytes| sum.checked_add(*bytes)).ok_or_else(absurd)?;
    let mut own = via.room::<B>(OPERATION, DType::U8, bytes[via.group.rank()])?;
    let mut at = 0;
    for piece in &pieces {
        let source = piece.source.bytes();
        own[at..at + source.len()].copy_from_slice(source);
        at += source.len();
    }
    let mut all = via.room::<B>(OPERATION, DType::U8, total)?;
    let request = Request::new(Operation::AllGather, DType::U8).shape(&agreed).sizes(&bytes);
    via.group.operate(request, Some(&own), &mut all)?;
    let begins: Vec<usize> = (0..bytes.len()).map(|rank| bytes[..rank].iter().sum()).collect();
    let gathered = pieces.into_iter().zip(offsets).map(|(Piece { axis, form, .. }, offsets)| {
        let (counts, total) = axis.counts(OPERATION, sizes)?;
        let mut whole = via.room::<B>(OPERATION, form.carrier, total)?;
        for (rank, count) in counts.iter().enumerate() {
            let begin = begins[rank] + offsets[rank];
            let part = &all[begin..begin + count * form.carrier.size()];
            axis.put(sizes, rank, form.carrier.size(), part, &mut whole);
        }
        Ok(Gathered { whole, shape: axis.shape(sizes.iter().sum()), form })
    });
    gathered.collect()
}

/// What was gathered of one tensor.
pub(crate) struct Gathered<D> {
    whole: Bytes,
    shape: Shape,
    form: Form<D>,
}

impl<D> Gathered<D> {
    pub fn tensor<B: Backend<Device = D>, K: Kind<B>>(self) -> K::Primitive {
        self.form.tensor::<B, K>(self.whole, self.shape)
    }
}
