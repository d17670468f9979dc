//! Which elements of which parameter a rank keeps the optimizer's state for.

use std::ops::Range;

use burn::tensor::backend::AutodiffBackend;

use crate::train::agree::Parameter;
use crate::train::bucket::buckets;
use bonfire_core::{DType, partition};

/// Parameters of one element type, one after the other, as they travel together. They are the same in every step,
/// whatever gradients exist, because a rank keeps its part of them.
pub(super) struct Shared {
    pub dtype: DType,
    /// The number of elements.
    pub len: usize,
    /// This rank's part of them.
    pub own: Range<usize>,
    pub places: Vec<Place>,
}

/// Where a parameter is in its bucket.
pub(super) struct Place {
    pub position: usize,
    /// Its elements, in the bucket.
    pub range: Range<usize>,
    /// Those of them that are this rank's, in the bucket; none where the part begins behind or ends before.
    own: Range<usize>,
}

impl Place {
    /// Where this rank's elements are in the parameter.
    pub fn slice(&self) -> Range<usize> {
        self.own.start - self.range.start..self.own.end - self.range.start
    }

    /// Where they are in the bucket.
    pub fn own(&self) -> Range<usize> {
        self.own.clone()
    }
}

/// Deals the parameters out to `ranks`. Every bucket is cut into parts that differ by one element at most, wherever
/// one parameter ends and the next begins.
pub(super) fn layout<B: AutodiffBackend>(parameters: &[Parameter<B>], ranks: usize, rank: usize) -> Vec<Shared> {
    // As for gradients: the last layers' come first out of the backward pass.
    let items = parameters.iter().enumerate().rev().map(|(position, parameter)| parameter.item(position));
    let shared = buckets(items).into_iter().map(|positions| {
        let mut len = 0;
        let ranges: Vec<_> = positions
            .into_iter()
            .map(|position| {
                let start = len;
                len += parameters[position].shape.num_elements();
                (position, start..len)
            })
            .collect();
        let own = partition(len, ranks, rank);
        let dtype = parameters[ranges[0].0].element;
        let within = |at: usize, range: &Range<usize>| at.clamp(range.start, range.end);
        let places = ranges.into_iter().map(|(position, range)| {
            let own = within(own.start, &range)..within(own.end, &range);
            Place { position, range, own }
        });
        Shared { dtype, len, places: places.collect(), own }
    });
    shared.collect()
}

/// The same elements, as bytes.
pub(super) fn bytes(range: Range<usize>, dtype: DType) -> Range<usize> {
    range.start * dtype.size()..range.end * dtype.size()
}
