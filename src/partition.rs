//! The one function that splits a buffer among ranks.

use std::ops::Range;

/// Part `index` of `len` elements split into `parts`: as even as can be, the first `len % parts` parts one longer.
/// Parts are contiguous, in order, and cover `0..len`; where `len < parts` the last ones are empty.
///
/// ```
/// let parts: Vec<_> = (0..4).map(|i| bonfire::partition(5, 4, i)).collect();
/// assert_eq!(parts, [0..2, 2..3, 3..4, 4..5]);
/// ```
///
/// # Panics
/// If `index` is not below `parts`.
pub fn partition(len: usize, parts: usize, index: usize) -> Range<usize> {
    assert!(index < parts, "part {index} of {parts}");
    start(len, parts, index)..start(len, parts, index + 1)
}

/// Where part `index` starts; for the number of parts, the end.
pub(crate) fn start(len: usize, parts: usize, index: usize) -> usize {
    index * (len / parts) + index.min(len % parts)
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
            prop_assert_eq!(start(len, parts, parts), len);
            let (shortest, longest) = (all[parts - 1].len(), all[0].len());
            prop_assert!(longest - shortest <= 1);
            prop_assert!(all.windows(2).all(|w| w[0].len() >= w[1].len()));
            for (first, part) in all.iter().enumerate() {
                prop_assert_eq!(start(len, parts, first), part.start);
            }
        }
    }
}
