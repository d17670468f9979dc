//! The layout of parameters in buckets, and the elements whose optimizer state a rank keeps.
//!
//! Buckets are cut, not parameters: messages are few and large, and no size is padded or has to be divisible. A missing
//! gradient is sent as zeros; a bucket without any gradient is not sent.

use std::ops::Range;

use burn::tensor::backend::AutodiffBackend;

use crate::train::agree::Parameter;
use crate::train::bucket::{Limits, buckets};
use bonfire_core::{DType, partition};

/// The layout of a bucket: parameters of one element type, one after the other. It is the same in every step, whichever
/// gradients exist, because a rank keeps the state of its part.
pub(super) struct BucketLayout {
    pub dtype: DType,
    /// The number of elements.
    pub len: usize,
    /// This rank's part of the elements.
    pub own: Range<usize>,
    pub spans: Vec<ParameterSpan>,
}

impl BucketLayout {
    /// The spans with a gradient that have elements in this rank's part.
    pub fn own_spans<'a>(&'a self, exists: &'a [bool]) -> impl Iterator<Item = &'a ParameterSpan> {
        self.spans.iter().filter(|span| exists[span.position] && !span.own.is_empty())
    }
}

/// The range of a parameter in its bucket.
pub(super) struct ParameterSpan {
    /// The parameter's position in the model.
    pub position: usize,
    /// Its elements, as indices in the bucket.
    pub range: Range<usize>,
    /// The elements of `range` in this rank's part. Empty if they do not overlap.
    own: Range<usize>,
}

impl ParameterSpan {
    /// This rank's elements, as indices in the parameter.
    pub fn slice(&self) -> Range<usize> {
        self.own.start - self.range.start..self.own.end - self.range.start
    }

    /// This rank's elements, as indices in the bucket.
    pub fn own(&self) -> Range<usize> {
        self.own.clone()
    }
}

/// Distributes the parameters over `ranks` ranks. Splits every bucket into parts whose lengths differ by at most one
/// element, regardless of the boundaries of parameters.
pub(super) fn layout<B: AutodiffBackend>(
    parameters: &[Parameter<B>],
    limits: Limits,
    (rank, ranks): (usize, usize),
) -> Vec<BucketLayout> {
    // Reverse order, as in `DataParallel::sync`: the backward pass computes the last layers' gradients first.
    let items = parameters.iter().enumerate().rev().map(|(position, parameter)| parameter.item(position));
    let layouts = buckets(items, limits).into_iter().map(|positions| {
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
        let clamp = |at: usize, range: &Range<usize>| at.clamp(range.start, range.end);
        let spans = ranges.into_iter().map(|(position, range)| {
            let own = clamp(own.start, &range)..clamp(own.end, &range);
            ParameterSpan { position, range, own }
        });
        BucketLayout { dtype, len, spans: spans.collect(), own }
    });
    layouts.collect()
}

/// Converts a range of elements to a range of bytes.
pub(super) fn bytes(range: Range<usize>, dtype: DType) -> Range<usize> {
    range.start * dtype.size()..range.end * dtype.size()
}
