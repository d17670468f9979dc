//! Operations on parts of unequal sizes between devices that exchange data without host memory.
//!
//! Their kernels, and NCCL, know equal parts only. So each part travels in a slot, and all slots are as long as the
//! longest part. What is left of a slot travels too, and is in no result. Where that would be much more than the parts,
//! they pass through host memory.

use std::ops::Range;

use burn::tensor::Shape;
use burn::tensor::backend::Backend;

use super::{finish, give};
use crate::tensor::device::{DeviceCall, Target};
use crate::tensor::host::Kind;
use bonfire_core::internal::{Ranges, Request};
use bonfire_core::{Call, DType, Error, Group, Operation, ReduceOp};
use bonfire_tensor::Axis;

/// Slots begin at multiples of so many bytes, so that GPUs copy them in their widest units.
const ALIGNMENT: usize = 16;

/// The whole may be so many times as long as the parts of the rank that has the most: a device copies its own memory
/// more than ten times as fast as it exchanges data with the host.
const MOST: usize = 4;

/// A whole of so many bytes is never too long.
const SHORT: usize = 1 << 20;

/// Where the parts of a tensor along a dimension are in an operation's whole. The dimension is the outermost one there.
pub(in crate::tensor::operation) struct Slots {
    ranks: usize,
    /// Bytes of a slot.
    slot: usize,
    /// Bytes of a part of length 1.
    unit: usize,
    dtype: DType,
    axis: Axis,
}

impl Slots {
    /// Returns slots for parts of `longest` length at most, of which the rank with the most has `most`. `None` if they
    /// would be too long.
    pub fn of(axis: &Axis, dtype: DType, ranks: usize, longest: usize, most: usize) -> Option<Slots> {
        let unit = axis.shape(1).iter().try_fold(dtype.size(), |unit, len| unit.checked_mul(*len))?;
        let slot = longest.checked_mul(unit)?.checked_next_multiple_of(ALIGNMENT)?;
        let limit = most.checked_mul(unit)?.saturating_mul(MOST).max(SHORT);
        (slot.checked_mul(ranks)? <= limit).then(|| Slots { ranks, slot, unit, dtype, axis: axis.clone() })
    }

    fn bytes(&self) -> usize {
        self.ranks * self.slot
    }

    /// Returns a call as it is made on the slots.
    pub fn resized(&self, mut call: Call) -> Call {
        (call.dtype, call.count) = (self.dtype, self.bytes() / self.dtype.size());
        call
    }

    /// Returns the bytes of the part of this length in a rank's slot.
    fn part(&self, rank: usize, len: usize) -> Range<usize> {
        rank * self.slot..rank * self.slot + len * self.unit
    }

    /// Returns the bytes of the ranks' parts of these lengths.
    fn parts(&self, lens: &[usize]) -> Ranges {
        lens.iter().enumerate().map(|(rank, len)| self.part(rank, *len)).collect()
    }

    fn request(&self, operation: Operation, lens: &[usize]) -> Request<'static> {
        Request::new(operation, self.dtype).shape(&[&self.axis.common()[..], lens].concat())
    }

    /// Returns the tensor with the dimension as the outermost one.
    fn outermost<B: Backend, K: Kind<B>>(&self, tensor: K::Primitive) -> K::Primitive {
        K::permute(tensor, &self.axis.front())
    }

    /// The inverse of [`outermost`](Self::outermost).
    fn restored<B: Backend, K: Kind<B>>(&self, tensor: K::Primitive) -> K::Primitive {
        K::permute(tensor, &super::inverse(&self.axis.front()))
    }

    /// A result of this length along the dimension, which is the outermost one.
    fn target<T>(&self, like: T, len: usize, ranges: Ranges) -> Vec<Target<T>> {
        let shape = self.axis.shape(len);
        let shape: Vec<usize> = self.axis.front().into_iter().map(|dim| shape[dim]).collect();
        vec![Target { like, shape: Shape::from(shape), ranges }]
    }

    /// Runs a collective that makes one tensor here.
    fn run<B: Backend, K: Kind<B>>(
        &self,
        group: &Group,
        request: Request<'static>,
        sources: Vec<(K::Primitive, Ranges)>,
        targets: Vec<Target<K::Primitive>>,
    ) -> Result<K::Primitive, Error> {
        let call = DeviceCall::collective(request, self.bytes(), sources, targets);
        finish::<B, K>(group, call).map(|made| self.restored::<B, K>(made))
    }
}

pub(in crate::tensor::operation) fn all_gather<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    sizes: &[usize],
    slots: &Slots,
) -> Result<K::Primitive, Error> {
    let own = slots.part(group.rank(), sizes[group.rank()]);
    let targets = slots.target(tensor.clone(), sizes.iter().sum(), slots.parts(sizes));
    let sources = vec![(slots.outermost::<B, K>(tensor), own.into())];
    slots.run::<B, K>(group, slots.request(Operation::AllGather, sizes), sources, targets)
}

pub(in crate::tensor::operation) fn gather<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    root: usize,
    sizes: &[usize],
    slots: &Slots,
) -> Result<Option<K::Primitive>, Error> {
    let own = slots.part(group.rank(), sizes[group.rank()]);
    let request = slots.request(Operation::Gather, sizes).root(root);
    let source = slots.outermost::<B, K>(tensor.clone());
    if group.rank() != root {
        return give::<B, K>(group, request, slots.bytes(), (source, own)).map(|()| None);
    }
    let targets = slots.target(tensor, sizes.iter().sum(), slots.parts(sizes));
    slots.run::<B, K>(group, request, vec![(source, own.into())], targets).map(Some)
}

/// Scatters the root's tensor. Elsewhere, `tensor` is one of the same device and element type.
pub(in crate::tensor::operation) fn scatter<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    root: usize,
    sizes: &[usize],
    slots: &Slots,
) -> Result<K::Primitive, Error> {
    let rank = group.rank();
    let targets = slots.target(tensor.clone(), sizes[rank], slots.part(rank, sizes[rank]).into());
    let source = (rank == root).then(|| (slots.outermost::<B, K>(tensor), slots.parts(sizes)));
    let request = slots.request(Operation::Scatter, sizes).root(root);
    slots.run::<B, K>(group, request, source.into_iter().collect(), targets)
}

pub(in crate::tensor::operation) fn reduce_scatter<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    op: ReduceOp,
    sizes: &[usize],
    slots: &Slots,
) -> Result<K::Primitive, Error> {
    let rank = group.rank();
    let targets = slots.target(tensor.clone(), sizes[rank], slots.part(rank, sizes[rank]).into());
    let sources = vec![(slots.outermost::<B, K>(tensor), slots.parts(sizes))];
    let request = slots.request(Operation::ReduceScatter, sizes).reduction(op);
    slots.run::<B, K>(group, request, sources, targets)
}

/// Sends length `send[r]` to rank `r` and receives `recv[r]` from it.
pub(in crate::tensor::operation) fn all_to_all<B: Backend, K: Kind<B>>(
    group: &Group,
    tensor: K::Primitive,
    (send, recv): (&[usize], &[usize]),
    slots: &Slots,
) -> Result<K::Primitive, Error> {
    let targets = slots.target(tensor.clone(), recv.iter().sum(), slots.parts(recv));
    let sources = vec![(slots.outermost::<B, K>(tensor), slots.parts(send))];
    slots.run::<B, K>(group, slots.request(Operation::AllToAll, &[]), sources, targets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_in_slots_of_the_longest() {
        let axis = Axis::new("test", &[2, 5, 3], 1).unwrap();
        let slots = Slots::of(&axis, DType::F32, 3, 4, 6).unwrap();
        // 4 times 6 elements of 4 bytes, rounded up.
        assert_eq!((slots.unit, slots.slot, slots.bytes()), (24, 96, 288));
        assert_eq!(slots.part(1, 2), 96..144);
        assert_eq!(slots.parts(&[4, 0, 1]), [0..96, 192..216].into_iter().collect());
        assert_eq!(slots.target((), 5, slots.parts(&[4, 0, 1]))[0].shape, Shape::new([5, 2, 3]));
    }

    #[test]
    fn slots_that_are_much_longer_than_the_parts_are_none() {
        let axis = Axis::new("test", &[8, 1 << 18], 0).unwrap();
        let slots = |ranks, longest, most| Slots::of(&axis, DType::F32, ranks, longest, most).is_some();
        assert!(slots(4, 8, 8));
        assert!(!slots(5, 8, 8));
        assert!(slots(16, 1, 4));
        assert!(!slots(2, usize::MAX, usize::MAX));
        let short = Axis::new("test", &[8, 4], 0).unwrap();
        assert!(Slots::of(&short, DType::F32, 100, 8, 8).is_some());
    }
}
