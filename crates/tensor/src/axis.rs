//! The dimension along which a tensor is split into parts, and the memory layout of the parts in the whole. Groups know
//! nothing of dimensions.

use bonfire_core::Error;

/// A dimension of a shape.
#[derive(Clone, Debug)]
pub struct Axis {
    shape: Vec<usize>,
    dim: usize,
}

impl Axis {
    /// Returns dimension `dim` of the shape. A negative one counts from the end.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the shape has no such dimension.
    pub fn new(operation: &str, shape: &[usize], dim: isize) -> Result<Axis, Error> {
        let rank = shape.len();
        let counted = if dim < 0 { dim.checked_add_unsigned(rank) } else { Some(dim) };
        match counted.and_then(|dim| usize::try_from(dim).ok()).filter(|dim| *dim < rank) {
            Some(dim) => Ok(Axis { shape: shape.to_vec(), dim }),
            None => {
                let reason = match rank {
                    0 => format!("dimension {dim} of a tensor that has no dimensions"),
                    _ => format!("dimension {dim} is none of {shape:?}: give one from -{rank} to {}", rank - 1),
                };
                Err(Error::argument(operation, reason))
            }
        }
    }

    /// Returns the tensor's length along the dimension.
    pub fn length(&self) -> usize {
        self.shape[self.dim]
    }

    /// Returns the shape with length `len` along the dimension.
    pub fn shape(&self, len: usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        shape[self.dim] = len;
        shape
    }

    /// Returns what ranks must agree on: the number of dimensions, the dimension, and the lengths along all others.
    pub fn common(&self) -> Vec<usize> {
        let others = self.shape.iter().enumerate().filter(|(dim, _)| *dim != self.dim).map(|(_, len)| *len);
        [self.shape.len(), self.dim].into_iter().chain(others).collect()
    }

    /// Returns the products of the lengths before and after the dimension.
    fn outer_and_inner(&self) -> (usize, usize) {
        (self.shape[..self.dim].iter().product(), self.shape[self.dim + 1..].iter().product())
    }

    /// Returns the number of elements of each part of these sizes, and of all parts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no tensor has so many.
    pub fn counts(&self, operation: &str, sizes: &[usize]) -> Result<(Vec<usize>, usize), Error> {
        let (outer, inner) = self.outer_and_inner();
        let unit = outer * inner;
        let overflow = || Error::argument(operation, format!("no tensor is so long: sizes {sizes:?}"));
        let total = sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)).ok_or_else(overflow)?;
        let total = total.checked_mul(unit).ok_or_else(overflow)?;
        Ok((sizes.iter().map(|size| size * unit).collect(), total))
    }

    /// Whether the concatenation of the parts in memory is the whole, so that nothing has to be copied.
    pub fn is_outermost(&self) -> bool {
        self.shape[..self.dim].iter().all(|len| *len == 1)
    }

    /// Returns the shape of a whole of `n` equal parts, each `len` long, with one more dimension that counts the parts.
    /// In the order of dimensions that is returned with it, the parts lie one after the other in memory.
    pub fn parts(&self, n: usize, len: usize) -> (Vec<usize>, Vec<usize>) {
        let mut dims = self.shape.clone();
        dims[self.dim] = len;
        dims.insert(self.dim, n);
        let order = self.before_others(dims.len());
        (dims, order)
    }

    /// Returns the order of dimensions in which this one is the outermost.
    pub fn front(&self) -> Vec<usize> {
        self.before_others(self.shape.len())
    }

    /// Returns the order of so many dimensions in which the one at this place comes first.
    fn before_others(&self, dims: usize) -> Vec<usize> {
        std::iter::once(self.dim).chain((0..dims).filter(|dim| *dim != self.dim)).collect()
    }

    /// Copies the parts of a whole, of these sizes along the dimension, into `parts`, one after the other. `element` is
    /// the size of an element in bytes.
    pub fn split(&self, sizes: &[usize], element: usize, whole: &[u8], mut parts: &mut [u8]) {
        for index in 0..sizes.len() {
            let mut at = 0;
            self.runs(sizes, index, element, |begin, len| {
                parts[at..at + len].copy_from_slice(&whole[begin..begin + len]);
                at += len;
            });
            parts = &mut parts[at..];
        }
    }

    /// The inverse of [`split`](Self::split).
    pub fn join(&self, sizes: &[usize], element: usize, mut parts: &[u8], whole: &mut [u8]) {
        for index in 0..sizes.len() {
            let used = self.join_part(sizes, index, element, parts, whole);
            parts = &parts[used..];
        }
    }

    /// Copies part `index`, the first bytes of `part`, into the whole. Returns its length in bytes.
    pub fn join_part(&self, sizes: &[usize], index: usize, element: usize, part: &[u8], whole: &mut [u8]) -> usize {
        let mut at = 0;
        self.runs(sizes, index, element, |begin, len| {
            whole[begin..begin + len].copy_from_slice(&part[at..at + len]);
            at += len;
        });
        at
    }

    /// Calls `each` with the offset in the whole and the length of each contiguous run of bytes of part `index`.
    fn runs(&self, sizes: &[usize], index: usize, element: usize, mut each: impl FnMut(usize, usize)) {
        let (outer, inner) = self.outer_and_inner();
        let bytes = inner * element;
        let row = sizes.iter().sum::<usize>() * bytes;
        let before = sizes[..index].iter().sum::<usize>() * bytes;
        (0..outer).for_each(|at| each(at * row + before, sizes[index] * bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_dimensions_count_from_the_end_once() {
        let dim = |dim| Axis::new("test", &[2, 3, 4], dim).map(|axis| axis.dim);
        assert_eq!([-3, -2, -1, 0, 1, 2].map(|d| dim(d).unwrap()), [0, 1, 2, 0, 1, 2]);
        for wrong in [-4, 3, isize::MIN, isize::MAX] {
            let error = dim(wrong).unwrap_err().to_string();
            assert!(error.contains("from -3 to 2"), "{error}");
        }
    }

    /// Two rows of 1 + 0 + 2 columns.
    #[test]
    fn split_and_join_are_inverse() {
        let axis = Axis::new("test", &[2, 3], 1).unwrap();
        assert!(!axis.is_outermost());
        let (whole, mut parts, mut joined) = ([1, 2, 3, 4, 5, 6], [0; 6], [0; 6]);
        axis.split(&[1, 0, 2], 1, &whole, &mut parts);
        assert_eq!(parts, [1, 4, 2, 3, 5, 6]);
        axis.join(&[1, 0, 2], 1, &parts, &mut joined);
        assert_eq!(joined, whole);
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let axis = Axis::new("test", &[3, 2], 0).unwrap();
        assert_eq!(axis.counts("test", &[2, 0, 1]).unwrap(), (vec![4, 0, 2], 6));
        assert!(axis.counts("test", &[usize::MAX, 1]).is_err());
        assert!(axis.counts("test", &[usize::MAX / 2, 1]).is_err());
    }
}
