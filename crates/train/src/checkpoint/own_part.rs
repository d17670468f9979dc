//! What a rank has of a parameter, in a set.
//!
//! Parts are saved under the names and the shapes of whole parameters, so a set says nothing about how it was sharded.

use std::ops::Range;

use super::format::{Dtype, Sink};
use super::parts::Parts;
use super::set::Set;
use bonfire_core::{Error, partition};

/// This rank's part of a parameter: a range of its elements, with zeros behind the last one as padding.
#[derive(Clone, Debug)]
pub struct OwnPart {
    /// The shape of the whole parameter.
    pub whole: Vec<usize>,
    /// The shape of the part, padding included.
    pub shape: Vec<usize>,
    /// The elements of the whole that the part has.
    range: Range<usize>,
    /// Those of them that this rank saves.
    saved: Range<usize>,
    /// Whether other ranks have the same part.
    is_replicated: bool,
}

impl OwnPart {
    /// Returns the part at `index` among parts of this shape, which are rows of the first dimension. Of the `replicas`
    /// ranks that have the same part, each saves a share.
    pub fn new(whole: &[usize], shape: &[usize], index: usize, (replicas, replica): (usize, usize)) -> OwnPart {
        let [len, part_len] = [whole, shape].map(|shape| shape.iter().product::<usize>());
        let start = (index * part_len).min(len);
        OwnPart::of(whole, shape, start..(start + part_len).min(len), (replicas, replica))
    }

    /// Returns a part of one dimension, without padding. Of the `replicas` ranks that have the same part, each saves a
    /// share.
    pub fn slice(whole: &[usize], range: Range<usize>, replicas: (usize, usize)) -> OwnPart {
        OwnPart::of(whole, &[range.len()], range, replicas)
    }

    fn of(whole: &[usize], shape: &[usize], range: Range<usize>, (replicas, replica): (usize, usize)) -> OwnPart {
        let share = partition(range.len(), replicas, replica);
        let saved = range.start + share.start..range.start + share.end;
        OwnPart { whole: whole.to_vec(), shape: shape.to_vec(), range, saved, is_replicated: replicas > 1 }
    }

    /// Whether this rank saves what is not in parts. One of all ranks does.
    pub(super) fn leads(&self) -> bool {
        self.saved.start == 0 && !self.saved.is_empty()
    }

    /// Adds this rank's share of a tensor of the part's shape. `read` passes the bytes of a range of the part on.
    ///
    /// # Errors
    /// Those of [`Parts::add`] and of `read`.
    pub fn add(
        &self,
        parts: &mut Parts,
        name: String,
        dtype: Dtype,
        read: impl Fn(Range<usize>, Sink<'_>) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        if self.is_replicated {
            parts.compare(&name, self.range.start, |sink| read(0..self.range.len(), sink))?;
        }
        let own = self.saved.start - self.range.start..self.saved.end - self.range.start;
        parts.add(name, dtype, &self.whole, self.saved.clone(), Box::new(move |sink| read(own, sink)))
    }

    /// Returns the bytes of the part of a tensor of the whole's shape, padding included. `width` is that of an element.
    pub fn read(&self, set: &Set, name: &str, width: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = set.read(name, self.range.clone())?;
        bytes.resize(self.shape.iter().product::<usize>() * width, 0);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_of_all_ranks_are_the_whole_once() {
        for rows in 0..12usize {
            for (ranks, replicas) in [(1, 1), (1, 3), (2, 2), (3, 1), (4, 3), (8, 2)] {
                let shape = [rows.div_ceil(ranks), 3];
                let parts = (0..ranks).flat_map(|index| {
                    (0..replicas).map(move |replica| OwnPart::new(&[rows, 3], &shape, index, (replicas, replica)))
                });
                let mut next = 0;
                for part in parts {
                    assert!(part.range.len() <= shape.iter().product() && part.range.start.is_multiple_of(3));
                    assert!(part.range.start <= part.saved.start && part.saved.end <= part.range.end);
                    assert_eq!(part.saved.start, next, "{rows} rows, {ranks} ranks, {replicas} replicas");
                    next = part.saved.end;
                }
                assert_eq!(next, 3 * rows);
            }
        }
    }
}
