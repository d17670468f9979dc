//! The partition of a buffer among ranks: one function that all operations use.

use std::ops::Range;

/// Returns part `index` of `len` elements split into `parts`: as even as possible, the first `len % parts` parts one
/// longer. Parts are contiguous, in order, and cover `0..len`. If `len < parts`, the last ones are empty.
///
/// ```
/// let parts: Vec<_> = (0..4).map(|i| bonfire_core::partition(5, 4, i)).collect();
/// assert_eq!(parts, [0..2, 2..3, 3..4, 4..5]);
/// ```
///
/// # Panics
/// If `index` is not below `parts`.
pub fn partition(len: usize, parts: usize, index: usize) -> Range<usize> {
    assert!(index < parts, "part {index} of {parts}");
    part_start(len, parts, index)..part_start(len, parts, index + 1)
}

/// Returns where part `index` starts. `index == parts` returns the end.
pub(crate) fn part_start(len: usize, parts: usize, index: usize) -> usize {
    index * (len / parts) + index.min(len % parts)
}

/// How a buffer is partitioned among ranks, in rank order.
#[derive(Clone, Copy, Debug)]
pub enum Parts<'a> {
    /// Evenly, by [`partition`].
    Even,
    /// The number of elements of each rank. They add up to the length of the buffer.
    Sizes(&'a [usize]),
}

impl Parts<'_> {
    /// Returns where the part of rank `index` starts in a buffer of `len` elements. `index == ranks` returns the end.
    pub fn start(self, len: usize, ranks: usize, index: usize) -> usize {
        match self {
            Parts::Even => part_start(len, ranks, index),
            Parts::Sizes(sizes) => sizes[..index].iter().sum(),
        }
    }

    /// Returns the part of rank `index`.
    pub fn part(self, len: usize, ranks: usize, index: usize) -> Range<usize> {
        self.start(len, ranks, index)..self.start(len, ranks, index + 1)
    }

    /// Returns the length of the longest part.
    #[cfg(any(test, all(feature = "shm", target_os = "linux")))]
    pub fn longest(self, len: usize, ranks: usize) -> usize {
        match self {
            Parts::Even => len.div_ceil(ranks),
            Parts::Sizes(sizes) => sizes.iter().copied().max().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_are_contiguous_even_and_cover_everything(len in 0usize..10_000, parts in 1usize..200) {
            let all: Vec<_> = (0..parts).map(|i| partition(len, parts, i)).collect();
            let mut end = 0;
            for part in &all {
                prop_assert_eq!(part.start, end);
                prop_assert!(part.end >= part.start);
                end = part.end;
            }
            prop_assert_eq!(end, len);
            prop_assert_eq!(part_start(len, parts, parts), len);
            let (shortest, longest) = (all[parts - 1].len(), all[0].len());
            prop_assert!(longest - shortest <= 1);
            prop_assert!(all.windows(2).all(|w| w[0].len() >= w[1].len()));
            for (first, part) in all.iter().enumerate() {
                prop_assert_eq!(part_start(len, parts, first), part.start);
            }
            prop_assert_eq!(Parts::Even.longest(len, parts), longest);
        }

        #[test]
        fn parts_of_given_sizes_are_contiguous(sizes in proptest::collection::vec(0usize..50, 1..20)) {
            let (parts, n, mut end) = (Parts::Sizes(&sizes), sizes.len(), 0);
            let len = sizes.iter().sum();
            for (index, size) in sizes.iter().enumerate() {
                prop_assert_eq!(parts.part(len, n, index), end..end + size);
                end += size;
            }
            prop_assert_eq!(parts.start(len, n, n), len);
            prop_assert_eq!(Some(parts.longest(len, n)), sizes.iter().copied().max());
        }
    }
}
