//! Operations on tensors in host memory, which have parts along any dimension.
//!
//! A [`Group`] knows elements in a row. [`Axis`] is the dimension along which a tensor has parts, [`Sizes`] and
//! [`PairSizes`] are their lengths, and [`HostMemory`] runs the operations. [`Routes`] are ways of tokens to experts.

#![warn(missing_docs)]

mod axis;
mod linear;
mod routes;
mod sizes;

use std::ops::DerefMut;

use bytemuck::cast_slice_mut;

pub use self::axis::Axis;
pub use self::linear::Linear;
pub use self::routes::{Order, Routes};
pub use self::sizes::{PairSizes, Sizes, all_equal, check_count, exchange_recv_sizes, split_sizes};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation, ReduceOp};

/// A group, and memory for the results of operations on it.
///
/// Elements are contiguous bytes, aligned for their type. The operations are those of the [`Group`], with their errors.
/// Those that need no memory are the group's own.
pub struct HostMemory<'a, M> {
    /// The group.
    pub group: &'a Group,
    /// Returns initialised memory of unspecified contents, aligned for so many elements of a type. Errors name the
    /// operation.
    pub allocate: &'a dyn Fn(&str, DType, usize) -> Result<M, Error>,
}

/// Elements of one of several tensors.
pub struct Part<'a> {
    /// The elements.
    pub bytes: &'a [u8],
    /// Their type.
    pub dtype: DType,
    /// The tensor's shape, and the dimension along which it is a part.
    pub axis: &'a Axis,
}

const ALL_GATHER: &str = "all_gather";

impl<M: DerefMut<Target = [u8]>> HostMemory<'_, M> {
    /// Reduces to the root, which gets the result.
    #[track_caller]
    pub fn reduce(
        &self,
        (dtype, shape): (DType, &[usize]),
        op: ReduceOp,
        input: &[u8],
        root: usize,
    ) -> Result<Option<M>, Error> {
        let is_root = self.group.rank() == root;
        let mut output = (self.allocate)("reduce", dtype, if is_root { shape.iter().product() } else { 0 })?;
        let request = Request::new(Operation::Reduce, dtype).reduction(op).root(root).shape(shape);
        self.group.operate(request, Some(input), &mut output)?;
        Ok(is_root.then_some(output))
    }

    /// Broadcasts from the root, the only rank with an input.
    #[track_caller]
    pub fn broadcast(&self, (dtype, shape): (DType, &[usize]), input: Option<&[u8]>, root: usize) -> Result<M, Error> {
        let mut output = (self.allocate)("broadcast", dtype, shape.iter().product())?;
        let request = Request::new(Operation::Broadcast, dtype).root(root).shape(shape);
        self.group.operate(request, input, &mut output)?;
        Ok(output)
    }

    /// Gathers the whole of all ranks' parts, of these sizes along the axis.
    #[track_caller]
    pub fn all_gather(&self, dtype: DType, input: &[u8], axis: &Axis, sizes: &[usize]) -> Result<M, Error> {
        let (counts, total) = axis.counts(ALL_GATHER, sizes)?;
        let mut parts = (self.allocate)(ALL_GATHER, dtype, total)?;
        let request = Request::new(Operation::AllGather, dtype).shape(&axis.common());
        self.group.operate(with_counts(request, sizes, &counts), Some(input), &mut parts)?;
        self.join(ALL_GATHER, (axis, sizes), dtype, parts)
    }

    /// Gathers several tensors of any shapes and element types in one operation. On rank `r`, all have length
    /// `sizes[r]` along their axes.
    #[track_caller]
    pub fn all_gather_together(&self, inputs: &[Part<'_>], sizes: &[usize]) -> Result<Vec<M>, Error> {
        let (mut common, mut bytes, mut offsets) = (Vec::new(), vec![0usize; sizes.len()], Vec::new());
        let overflow = || Error::argument(ALL_GATHER, "no memory holds all of these tensors");
        for Part { axis, dtype, .. } in inputs {
            Sizes::Given(sizes).resolve(self.group, ALL_GATHER, axis)?;
            let (counts, _) = axis.counts(ALL_GATHER, sizes)?;
            common.extend(axis.common().into_iter().chain([*dtype as usize]));
            offsets.push(bytes.clone());
            for (sum, count) in bytes.iter_mut().zip(&counts) {
                let more = count.checked_mul(dtype.size()).and_then(|more| sum.checked_add(more));
                *sum = more.ok_or_else(overflow)?;
            }
        }
        let total = bytes.iter().try_fold(0usize, |sum, bytes| sum.checked_add(*bytes)).ok_or_else(overflow)?;
        let mut own = (self.allocate)(ALL_GATHER, DType::U8, bytes[self.group.rank()])?;
        let mut at = 0;
        for Part { bytes, .. } in inputs {
            own[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        }
        let mut all = (self.allocate)(ALL_GATHER, DType::U8, total)?;
        let request = Request::new(Operation::AllGather, DType::U8).shape(&common).sizes(&bytes);
        self.group.operate(request, Some(&own), &mut all)?;
        let begins: Vec<usize> = (0..bytes.len()).map(|rank| bytes[..rank].iter().sum()).collect();
        let gathered = inputs.iter().zip(offsets).map(|(Part { axis, dtype, .. }, offsets)| {
            let (counts, total) = axis.counts(ALL_GATHER, sizes)?;
            let mut whole = (self.allocate)(ALL_GATHER, *dtype, total)?;
            for (rank, count) in counts.iter().enumerate() {
                let begin = begins[rank] + offsets[rank];
                let part = &all[begin..begin + count * dtype.size()];
                axis.join_part(sizes, rank, dtype.size(), part, &mut whole);
            }
            Ok(whole)
        });
        gathered.collect()
    }

    /// Reduces wholes, and returns this rank's part of the result. Parts have these sizes along the axis.
    #[track_caller]
    pub fn reduce_scatter(
        &self,
        dtype: DType,
        op: ReduceOp,
        input: &[u8],
        axis: &Axis,
        sizes: &[usize],
    ) -> Result<M, Error> {
        const OPERATION: &str = "reduce_scatter";
        let (counts, _) = axis.counts(OPERATION, sizes)?;
        let packed = self.packed(OPERATION, (axis, sizes), dtype, input)?;
        let mut output = (self.allocate)(OPERATION, dtype, counts[self.group.rank()])?;
        let request = Request::new(Operation::ReduceScatter, dtype).reduction(op).shape(&axis.common());
        let input = packed.as_deref().unwrap_or(input);
        self.group.operate(with_counts(request, sizes, &counts), Some(input), &mut output)?;
        Ok(output)
    }

    /// Gathers the whole of all ranks' parts, of these sizes along the axis, on the root.
    #[track_caller]
    pub fn gather(
        &self,
        dtype: DType,
        input: &[u8],
        root: usize,
        axis: &Axis,
        sizes: &[usize],
    ) -> Result<Option<M>, Error> {
        const OPERATION: &str = "gather";
        let (is_root, (counts, total)) = (self.group.rank() == root, axis.counts(OPERATION, sizes)?);
        let mut parts = (self.allocate)(OPERATION, dtype, if is_root { total } else { 0 })?;
        let request = Request::new(Operation::Gather, dtype).root(root).shape(&axis.common());
        self.group.operate(with_counts(request, sizes, &counts), Some(input), &mut parts)?;
        if !is_root {
            return Ok(None);
        }
        self.join(OPERATION, (axis, sizes), dtype, parts).map(Some)
    }

    /// Splits the whole of the root, the only rank with an input, into parts of these sizes along the axis.
    #[track_caller]
    pub fn scatter(
        &self,
        dtype: DType,
        input: Option<&[u8]>,
        root: usize,
        axis: &Axis,
        sizes: &[usize],
    ) -> Result<M, Error> {
        const OPERATION: &str = "scatter";
        let (counts, _) = axis.counts(OPERATION, sizes)?;
        let mut output = (self.allocate)(OPERATION, dtype, counts[self.group.rank()])?;
        let packed = input.map(|input| self.packed(OPERATION, (axis, sizes), dtype, input)).transpose()?.flatten();
        let input = packed.as_deref().or(input).unwrap_or(&[]);
        let request = Request::new(Operation::Scatter, dtype).root(root).shape(&axis.common());
        self.group.operate(with_counts(request, sizes, &counts), Some(input), &mut output)?;
        Ok(output)
    }

    /// Sends each rank a part of these sizes along the axis, and joins what comes. Where parts are `even`, all ranks
    /// have equal parts.
    #[track_caller]
    pub fn all_to_all(
        &self,
        dtype: DType,
        input: &[u8],
        axis: &Axis,
        (send, recv): (&[usize], &[usize]),
        even: bool,
    ) -> Result<M, Error> {
        const OPERATION: &str = "all_to_all";
        let ((outgoing, _), (incoming, total)) = (axis.counts(OPERATION, send)?, axis.counts(OPERATION, recv)?);
        let packed = self.packed(OPERATION, (axis, send), dtype, input)?;
        let input = packed.as_deref().unwrap_or(input);
        let mut output = (self.allocate)(OPERATION, dtype, total)?;
        let request = |operation| Request::new(operation, dtype).shape(&axis.common());
        if even {
            self.group.operate(request(Operation::AllToAll), Some(input), &mut output)?;
        } else {
            let (outgoing, incoming) = ((input, &outgoing[..]), (&mut output[..], &incoming[..]));
            self.group.operate_pairs(request(Operation::AllToAllV), outgoing, incoming)?;
        }
        self.join(OPERATION, (axis, recv), dtype, output)
    }

    /// Receives elements of a tensor of this shape.
    #[track_caller]
    pub fn recv(&self, (dtype, shape): (DType, &[usize]), from: usize) -> Result<M, Error> {
        let mut output = (self.allocate)("recv", dtype, element_count("recv", shape)?)?;
        let request = Request::new(Operation::Send, dtype).shape(shape);
        self.group.operate_recv(request, &mut output, from)?;
        Ok(output)
    }

    /// Sends elements, and receives those of a tensor of this shape.
    #[track_caller]
    pub fn exchange(
        &self,
        dtype: DType,
        (input, to): (&[u8], usize),
        (shape, from): (&[usize], usize),
    ) -> Result<M, Error> {
        let mut output = (self.allocate)("exchange", dtype, element_count("exchange", shape)?)?;
        let request = Request::new(Operation::Exchange, dtype);
        self.group.operate_exchange(request, (input, to), (&mut output, from))?;
        Ok(output)
    }

    /// Joins parts that lie one after the other to the whole. Returns them unchanged where that is their layout
    /// already.
    fn join(&self, operation: &str, (axis, sizes): (&Axis, &[usize]), dtype: DType, parts: M) -> Result<M, Error> {
        if axis.is_outermost() {
            return Ok(parts);
        }
        let mut whole = (self.allocate)(operation, dtype, parts.len() / dtype.size())?;
        axis.join(sizes, dtype.size(), &parts, &mut whole);
        Ok(whole)
    }

    /// Returns a copy of the whole in which the parts lie one after the other; `None` where they do so already.
    fn packed(
        &self,
        operation: &str,
        (axis, sizes): (&Axis, &[usize]),
        dtype: DType,
        whole: &[u8],
    ) -> Result<Option<M>, Error> {
        if axis.is_outermost() {
            return Ok(None);
        }
        let mut parts = (self.allocate)(operation, dtype, whole.len() / dtype.size())?;
        axis.split(sizes, dtype.size(), whole, &mut parts);
        Ok(Some(parts))
    }
}

/// Adds `counts` to the request, unless all sizes are equal: the group has more paths for equal parts.
fn with_counts<'a>(request: Request<'static>, sizes: &[usize], counts: &'a [usize]) -> Request<'a> {
    if all_equal(sizes) { request } else { request.sizes(counts) }
}

/// Broadcasts the shape of the whole that the root scatters, and the sizes of its parts along dimension `dim`. Only the
/// root knows them. All ranks know the number of dimensions.
///
/// # Errors
/// [`Error::InvalidArgument`] for a dimension that there is none; [`Error::Broken`] if what comes describes no tensor;
/// those of [`Group::broadcast`].
#[track_caller]
pub fn broadcast_parts(
    group: &Group,
    operation: &str,
    own: Option<(&Axis, &[usize])>,
    (rank, dim): (usize, isize),
    root: usize,
) -> Result<(Axis, Vec<usize>), Error> {
    let mut message = vec![0u64; rank + group.world_size()];
    if let Some((axis, sizes)) = own {
        let known = axis.shape(axis.length());
        message.iter_mut().zip(known.iter().chain(sizes)).for_each(|(word, known)| *word = *known as u64);
    }
    let request = Request::new(Operation::Broadcast, DType::U64).root(root).shape(&[rank]);
    group.operate(request, None, cast_slice_mut(&mut message))?;
    let received: Vec<usize> = message.iter().map(|word| usize::try_from(*word).unwrap_or(usize::MAX)).collect();
    let (shape, sizes) = received.split_at(rank);
    let axis = Axis::new(operation, shape, dim)?;
    // Lengths of 0 count as 1, so that no partial product overflows either.
    let possible = shape.iter().try_fold(1usize, |product, len| product.checked_mul((*len).max(1))).is_some();
    if possible && sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)) == Some(axis.length()) {
        return Ok((axis, sizes.to_vec()));
    }
    Err(Error::broken(operation, format!("the shape and sizes that rank {root} sent describe no tensor")))
}

/// Checks that all tensors have the same length along their axes and returns the axis of the first. Call it before the
/// ranks exchange anything, so that a rank with invalid arguments keeps no peer waiting.
///
/// # Errors
/// [`Error::InvalidArgument`] if lengths differ.
pub fn common_axis<'a>(operation: &str, axes: impl IntoIterator<Item = &'a Axis>) -> Result<Option<&'a Axis>, Error> {
    let mut axes = axes.into_iter();
    let Some(first) = axes.next() else { return Ok(None) };
    match axes.zip(1..).find(|(axis, _)| axis.length() != first.length()) {
        None => Ok(Some(first)),
        Some((other, at)) => {
            let (length, right) = (other.length(), first.length());
            let reason = format!("tensor {at} is {length} long along the dimension and the first one {right}");
            Err(Error::argument(operation, reason))
        }
    }
}

/// Returns the number of elements of a tensor.
///
/// # Errors
/// [`Error::InvalidArgument`] if no tensor has this shape.
pub fn element_count(operation: &str, shape: &[usize]) -> Result<usize, Error> {
    let element_count = shape.iter().try_fold(1usize, |product, len| product.checked_mul(*len));
    element_count.ok_or_else(|| Error::argument(operation, format!("no tensor has the shape {shape:?}")))
}
