//! Requests: what a rank calls, and what the operation requires of its buffers. All forms of an operation check their
//! arguments against this one description.
//!
//! The public functions are written out in a line or two each and not generated, so each has a page and an example.

use super::check;
use crate::transport::Buffers;
use crate::types::{Call, DType, Element, Error, Fingerprint, Operation, Parts, ReduceOp};

/// Describes what a rank calls, before the number of elements is known.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    operation: Operation,
    dtype: DType,
    reduction: Option<ReduceOp>,
    root: Option<usize>,
    /// Elements of each rank's part; `None` for even parts.
    sizes: Option<&'a [usize]>,
    /// Fingerprint of the tensors' shape, if there are tensors, or of a function's name.
    shape: Option<u32>,
}

/// How much of the whole a buffer holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    Whole,
    Part,
    /// The whole on the root; not used on other ranks.
    OnRoot,
}

/// Returns what input and output hold if they are two buffers. A single buffer holds the whole.
fn extents(operation: Operation) -> (Extent, Extent) {
    match operation {
        Operation::Reduce => (Extent::Whole, Extent::OnRoot),
        Operation::Broadcast => (Extent::OnRoot, Extent::Whole),
        Operation::AllGather => (Extent::Part, Extent::Whole),
        Operation::ReduceScatter => (Extent::Whole, Extent::Part),
        Operation::Gather => (Extent::Part, Extent::OnRoot),
        Operation::Scatter => (Extent::OnRoot, Extent::Part),
        _ => (Extent::Whole, Extent::Whole),
    }
}

impl Request<'static> {
    /// Creates a request for an operation on elements of one type, in even parts.
    #[inline]
    pub fn new(operation: Operation, dtype: DType) -> Self {
        Request { operation, dtype, reduction: None, root: None, sizes: None, shape: None }
    }

    /// As [`new`](Self::new), on elements of type `T`.
    #[inline]
    pub(super) fn of<T: Element>(operation: Operation) -> Self {
        Request::new(operation, T::DTYPE)
    }
}

impl<'a> Request<'a> {
    /// Sets the reduction.
    #[inline]
    pub fn reduction(self, op: ReduceOp) -> Self {
        Request { reduction: Some(op), ..self }
    }

    /// Sets the root.
    #[inline]
    pub fn root(self, root: usize) -> Self {
        Request { root: Some(root), ..self }
    }

    /// Sets the number of elements in each rank's part.
    #[inline]
    pub fn sizes<'b>(self, sizes: &'b [usize]) -> Request<'b>
    where
        'a: 'b,
    {
        Request { sizes: Some(sizes), ..self }
    }

    /// Sets the shape of the tensors, on which the ranks must agree too.
    pub fn shape(self, shape: &[usize]) -> Self {
        Request { shape: Some(Fingerprint::of(shape.iter().copied())), ..self }
    }

    /// Makes the operation a part of a function of the layer above, in place of a shape. Errors name the function.
    pub fn part_of(self, function: &str) -> Self {
        Request { shape: Some(Fingerprint::of(Fingerprint::name(function))), ..self }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Checks that the root, if there is one, is a rank.
    #[inline]
    pub(super) fn check_root(&self, ranks: usize) -> Result<(), Error> {
        self.root.map_or(Ok(()), |root| check::rank(self.name(), "root", root, ranks))
    }

    /// Returns the call on one buffer of `len` elements, which holds the whole.
    #[inline]
    pub fn in_place(&self, ranks: usize, len: usize) -> Result<Call, Error> {
        self.check_root(ranks)?;
        if self.operation == Operation::AllToAll {
            check::parts(len, ranks)?;
        }
        Ok(self.call(len))
    }

    /// Returns the call on these buffers, and what it uses of them. Without an input the operation is in place.
    #[inline]
    pub(super) fn buffers<'b>(
        &self,
        (rank, ranks): (usize, usize),
        input: Option<&'b [u8]>,
        output: &'b mut [u8],
    ) -> Result<(Call, Buffers<'b>), Error>
    where
        'a: 'b,
    {
        let Some(input) = input else {
            return Ok((self.in_place(ranks, self.len(output)?)?, Buffers { input, output, parts: Parts::Even }));
        };
        let name = self.name();
        self.check_root(ranks)?;
        let (len_in, len_out) = (self.len(input)?, self.len(output)?);
        let (extent_in, extent_out) = extents(self.operation);
        let parts = self.sizes.map_or(Parts::Even, Parts::Sizes);
        let here = self.root.is_none_or(|root| root == rank);
        let count = match (self.sizes, extent_in, extent_out) {
            (Some(sizes), ..) => check::sizes(name, sizes, ranks)?,
            (None, Extent::Whole, _) => len_in,
            (None, Extent::OnRoot, Extent::Whole) if here => len_in,
            (None, _, Extent::Whole) => len_out,
            (None, Extent::Part, _) => len_in * ranks,
            (None, _, _) => len_out * ranks,
        };
        if self.operation == Operation::AllToAll {
            check::parts(count, ranks)?;
        }
        let expected = |extent| match extent {
            Extent::Part => parts.part(count, ranks, rank).len(),
            Extent::OnRoot if !here => 0,
            _ => count,
        };
        let used = |extent| here || extent != Extent::OnRoot;
        let (input, len_in) = if used(extent_in) { (input, len_in) } else { (&[][..], 0) };
        let (output, len_out) = if used(extent_out) { (output, len_out) } else { (&mut [][..], 0) };
        check::len(name, "input", len_in, expected(extent_in))?;
        check::len(name, "output", len_out, expected(extent_out))?;
        // On other ranks than the root a broadcast is in place.
        let input = Some(input).filter(|_| here || self.operation != Operation::Broadcast);
        Ok((self.call(count), Buffers { input, output, parts }))
    }

    /// Returns the number of elements in these bytes.
    #[inline]
    pub(super) fn len(&self, bytes: &[u8]) -> Result<usize, Error> {
        // Element sizes are powers of two. Divisions would be noticeable in the smallest operations.
        let (size, shift) = (self.dtype.size(), self.dtype.size().trailing_zeros());
        if bytes.is_empty() || (bytes.as_ptr().addr() | bytes.len()) & (size - 1) == 0 {
            return Ok(bytes.len() >> shift);
        }
        Err(Error::argument(self.name(), format!("the bytes are not whole, aligned elements of type {}", self.dtype)))
    }

    /// Returns the call on `count` elements.
    #[inline]
    pub fn call(&self, count: usize) -> Call {
        let Request { operation, dtype, reduction, root, sizes, shape } = *self;
        let call = Call { operation, dtype, count, reduction, root, sizes: None };
        let call = sizes.map_or(call, |sizes| call.sized(sizes));
        shape.map_or(call, |shape| call.shaped(shape))
    }

    /// Returns the name of the operation in errors about its arguments.
    fn name(&self) -> &'static str {
        match (self.operation, self.sizes) {
            (Operation::AllGather, Some(_)) => "all_gather_v",
            (Operation::ReduceScatter, Some(_)) => "reduce_scatter_v",
            (Operation::Gather, Some(_)) => "gather_v",
            (Operation::Scatter, Some(_)) => "scatter_v",
            (operation, _) => operation.into(),
        }
    }
}

impl From<Call> for Request<'static> {
    /// Describes the call in even parts. The bytes will determine the count.
    fn from(call: Call) -> Self {
        let Call { operation, dtype, reduction, root, sizes, .. } = call;
        let shape = sizes.map(|_| Fingerprint::to_word(sizes));
        Request { operation, dtype, reduction, root, sizes: None, shape }
    }
}
