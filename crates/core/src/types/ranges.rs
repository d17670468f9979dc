//! Where tensors lie in the whole of an operation, and in their memory.

use std::ops::Range;

/// The bytes of an operation's whole that some memory holds: those of several ranges, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// Returns the number of bytes of all ranges.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(ExactSizeIterator::len).sum()
    }

    /// Returns the range, if it is one.
    pub fn single(&self) -> Option<Range<usize>> {
        match &self.0[..] {
            [range] => Some(range.clone()),
            _ => None,
        }
    }

    /// Returns the ranges, each with the byte of the memory at which it begins.
    pub fn places(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let mut next = 0;
        self.0.iter().map(move |range| {
            let at = next;
            next += range.len();
            (at, range.clone())
        })
    }
}

impl From<Range<usize>> for Ranges {
    fn from(range: Range<usize>) -> Ranges {
        Ranges(vec![range])
    }
}

impl FromIterator<Range<usize>> for Ranges {
    /// Joins ranges of which one ends where the next begins.
    fn from_iter<I: IntoIterator<Item = Range<usize>>>(ranges: I) -> Ranges {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in ranges.into_iter().filter(|range| !range.is_empty()) {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        Ranges(joined)
    }
}

/// Rows of `bytes` bytes each, which start `pitch` bytes apart.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "above")]
pub struct Rows {
    pub count: usize,
    pub bytes: usize,
    pub pitch: usize,
}

impl Rows {
    /// The largest distance of rows that CUDA's driver copies: CU_DEVICE_ATTRIBUTE_MAX_PITCH of all GPUs so far.
    pub const MAX_PITCH: usize = i32::MAX as usize;

    /// Whether CUDA's driver copies all of them in one call. Rows without gaps are one run of bytes to it.
    pub fn can_be_copied(self) -> bool {
        self.pitch == self.bytes || self.pitch <= Rows::MAX_PITCH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_ranges_are_one_and_empty_ones_none() {
        let ranges: Ranges = [4..8, 8..8, 8..10, 2..2, 0..3].into_iter().collect();
        assert_eq!(ranges, Ranges(vec![4..10, 0..3]));
        assert_eq!((ranges.bytes(), ranges.single()), (9, None));
        assert_eq!(ranges.places().collect::<Vec<_>>(), [(0, 4..10), (6, 0..3)]);
        assert_eq!(Ranges::from(5..5).single(), Some(5..5));
    }
}
