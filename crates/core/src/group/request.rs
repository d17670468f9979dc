//! What a rank calls, and what every operation asks of its buffers: the one description by which all forms of an operation
//! check their arguments.

use super::check;
use crate::transport::Buffers;
use crate::types::{Call, DType, Element, Error, Fingerprint, Operation, Parts, ReduceOp};

/// What a rank calls, before it is known on how many elements.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    operation: Operation,
    dtype: DType,
    reduction: Option<ReduceOp>,
    root: Option<usize>,
    /// Elements of each rank's part; even parts where nothing is said.
    sizes: Option<&'a [usize]>,
    /// What the shape of the tensors comes to, where there are some.
    shape: Option<u16>,
}

/// How much of the whole a buffer holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    Whole,
    Part,
    /// The whole on the root; elsewhere the buffer is not used.
    OnRoot,
}

/// What input and output hold where they are two buffers. Where there is one, it holds the whole.
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
    /// An operation on elements of one type, in even parts.
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
    /// Combines elements so.
    #[inline]
    pub fn reduction(self, op: ReduceOp) -> Self {
        Request { reduction: Some(op), ..self }
    }

    /// With this root.
    #[inline]
    pub fn root(self, root: usize) -> Self {
        Request { root: Some(root), ..self }
    }

    /// With so many elements in each rank's part.
    #[inline]
    pub fn sizes<'b>(self, sizes: &'b [usize]) -> Request<'b>
    where
        'a: 'b,
    {
        Request { sizes: Some(sizes), ..self }
    }

    /// On tensors of this shape, in which the ranks must agree too.
    pub fn shape(self, shape: &[usize]) -> Self {
        Request { shape: Some(Fingerprint::of(shape.iter().copied())), ..self }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether the root is a rank, if there is one.
    #[inline]
    pub(super) fn check_root(&self, ranks: usize) -> Result<(), Error> {
        self.root.map_or(Ok(()), |root| check::rank(self.name(), "root", root, ranks))
    }

    /// The call on one buffer of `len` elements, which holds the whole.
    #[inline]
    pub fn in_place(&self, ranks: usize, len: usize) -> Result<Call, Error> {
        self.check_root(ranks)?;
        if self.operation == Operation::AllToAll {
            check::parts(len, ranks)?;
        }
        Ok(self.call(len))
    }

    /// The call on these buffers, and what of them it uses. Without an input the operation is in place.
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
        let right = |extent| match extent {
            Extent::Part => parts.part(count, ranks, rank).len(),
            Extent::OnRoot if !here => 0,
            _ => count,
        };
        let used = |extent| here || extent != Extent::OnRoot;
        let (input, len_in) = if used(extent_in) { (input, len_in) } else { (&[][..], 0) };
        let (output, len_out) = if used(extent_out) { (output, len_out) } else { (&mut [][..], 0) };
        check::len(name, "input", len_in, right(extent_in))?;
        check::len(name, "output", len_out, right(extent_out))?;
        // Elsewhere than on the root a broadcast is one in place.
        let input = Some(input).filter(|_| here || self.operation != Operation::Broadcast);
        Ok((self.call(count), Buffers { input, output, parts }))
    }

    /// The number of elements in these bytes.
    #[inline]
    pub(super) fn len(&self, bytes: &[u8]) -> Result<usize, Error> {
        // Sizes are powers of two, and divisions would be felt in the smallest operations.
        let (size, shift) = (self.dtype.size(), self.dtype.size().trailing_zeros());
        if bytes.is_empty() || (bytes.as_ptr().addr() | bytes.len()) & (size - 1) == 0 {
            return Ok(bytes.len() >> shift);
        }
        Err(Error::argument(self.name(), format!("the bytes are no elements of type {}, or not aligned", self.dtype)))
    }

    /// The call on so many elements.
    #[inline]
    pub fn call(&self, count: usize) -> Call {
        let Request { operation, dtype, reduction, root, sizes, shape } = *self;
        let call = Call { operation, dtype, count, reduction, root, sizes: None };
        let call = sizes.map_or(call, |sizes| call.sized(sizes));
        shape.map_or(call, |shape| call.shaped(shape))
    }

    /// What errors about arguments call it.
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
    /// What was called, in even parts. Its count is that of the bytes.
    fn from(call: Call) -> Self {
        let Call { operation, dtype, reduction, root, sizes, .. } = call;
        let shape = sizes.map(|_| Fingerprint::to_word(sizes));
        Request { operation, dtype, reduction, root, sizes: None, shape }
    }
}
