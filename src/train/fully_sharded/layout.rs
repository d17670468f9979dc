//! Where the parts of parameters are: on the ranks, in what is gathered, and in what is reduced.
//!
//! A parameter is cut along its first dimension into as many equal parts as there are ranks. Where it does not divide,
//! the last parts are padded with zeros, so all ranks' parts have one shape. What a block gathers is, rank by rank, the
//! parts of its parameters one after the other.

use std::ops::Range;

use burn::tensor::Shape;
use burn::tensor::backend::AutodiffBackend;

use crate::train::agree::Parameter;
use bonfire_core::internal::Ranges;

/// Parts begin at multiples of so many bytes in what is gathered, so that elements of every type are aligned, and GPUs
/// copy them in their widest units.
const ALIGNMENT: usize = 16;

/// The block of the parameters that are in no block.
pub(super) const ROOT: usize = 0;

/// Returns the name of a block in errors.
pub(super) fn block_name(block: usize) -> String {
    if block == ROOT { "root block".into() } else { format!("block {block}") }
}

pub(super) struct Layout {
    pub ranks: usize,
    pub rank: usize,
    /// By position of the parameter.
    pub parts: Vec<Part>,
    pub blocks: Vec<Block>,
    /// What is reduced as one operation.
    pub buckets: Vec<BucketLayout>,
}

/// A rank's part of a parameter.
pub(super) struct Part {
    pub block: usize,
    /// Its index among the parameters of its block.
    pub index: usize,
    pub shape: Shape,
    /// The number of bytes, padding included.
    pub bytes: usize,
    /// Where it begins among a rank's parts of the block, in bytes.
    offset: usize,
    /// The bucket of its gradient, if it needs one.
    pub bucket: usize,
    /// Where it begins among a rank's parts of the bucket, in elements.
    start: usize,
}

/// The parameters that are gathered as one operation.
pub(super) struct Block {
    /// The positions of its parameters.
    pub positions: Vec<usize>,
    /// Bytes of a rank's parts.
    bytes: usize,
}

/// The gradients of a block that have one element type.
pub(super) struct BucketLayout {
    pub block: usize,
    /// The positions of its parameters.
    pub positions: Vec<usize>,
    /// Elements of a rank's parts.
    pub elements: usize,
}

impl Layout {
    /// Returns the layout of these parameters for a rank of `ranks`. `blocks` has the block of each parameter.
    pub fn new<B: AutodiffBackend>(parameters: &[Parameter<B>], blocks: &[usize], ranks: usize, rank: usize) -> Layout {
        let mut layout = Layout { ranks, rank, parts: Vec::new(), blocks: Vec::new(), buckets: Vec::new() };
        let count = blocks.iter().max().map_or(1, |last| last + 1);
        layout.blocks.extend((0..count).map(|_| Block { positions: Vec::new(), bytes: 0 }));
        for (position, (parameter, &block)) in parameters.iter().zip(blocks).enumerate() {
            let mut dims = parameter.shape.to_vec();
            if let Some(first) = dims.first_mut() {
                *first = first.div_ceil(ranks);
            }
            let shape = Shape::from(dims);
            let bytes = shape.num_elements() * parameter.element.size();
            let Block { positions, bytes: offset } = &mut layout.blocks[block];
            let index = positions.len();
            layout.parts.push(Part { block, index, shape, bytes, offset: *offset, bucket: 0, start: 0 });
            positions.push(position);
            *offset = (*offset + bytes).next_multiple_of(ALIGNMENT);
        }
        for (block, Block { positions, .. }) in layout.blocks.iter().enumerate() {
            let first = layout.buckets.len();
            for &position in positions.iter().filter(|position| parameters[**position].trained) {
                let dtype = parameters[position].element;
                let of_type = |bucket: &BucketLayout| parameters[bucket.positions[0]].element == dtype;
                let number =
                    layout.buckets[first..].iter().position(of_type).map_or(layout.buckets.len(), |i| first + i);
                if number == layout.buckets.len() {
                    layout.buckets.push(BucketLayout { block, positions: Vec::new(), elements: 0 });
                }
                let (bucket, part) = (&mut layout.buckets[number], &mut layout.parts[position]);
                (part.bucket, part.start) = (number, bucket.elements);
                bucket.positions.push(position);
                bucket.elements += part.shape.num_elements();
            }
        }
        layout
    }

    /// Returns the bytes of a block when it is gathered.
    pub fn gathered_bytes(&self, block: usize) -> usize {
        self.blocks[block].bytes * self.ranks
    }

    /// Returns where this rank's part of the parameter at `position` is in what its block gathers.
    pub fn own(&self, position: usize) -> Range<usize> {
        let Part { block, offset, bytes, .. } = self.parts[position];
        let start = self.rank * self.blocks[block].bytes + offset;
        start..start + bytes
    }

    /// Returns where the parameter at `position`, of so many bytes, is in what its block gathers.
    pub fn gathered(&self, position: usize, whole: usize) -> Ranges {
        let Part { block, offset, bytes, .. } = self.parts[position];
        self.ranges(whole, bytes, offset, self.blocks[block].bytes).0
    }

    /// Returns the bytes of a bucket's gradients, of elements of this size, on all ranks.
    pub fn reduced_bytes(&self, bucket: usize, element: usize) -> usize {
        self.buckets[bucket].elements * self.ranks * element
    }

    /// Returns where the gradient of the parameter at `position`, of so many bytes, is in its bucket of elements of
    /// this size, and where the zeros that pad it are.
    pub fn reduced(&self, position: usize, whole: usize, element: usize) -> (Ranges, Ranges) {
        let Part { bucket, start, ref shape, .. } = self.parts[position];
        let stride = self.buckets[bucket].elements * element;
        self.ranges(whole, shape.num_elements() * element, start * element, stride)
    }

    /// Returns where this rank's part of the gradient of the parameter at `position` is in its bucket.
    pub fn own_reduced(&self, position: usize, element: usize) -> Range<usize> {
        let Part { bucket, start, ref shape, .. } = self.parts[position];
        let start = (self.rank * self.buckets[bucket].elements + start) * element;
        start..start + shape.num_elements() * element
    }

    /// Returns where the parts of a whole are, and their padding. All numbers are bytes: of the whole, of a part, of
    /// what lies before the part of rank 0, and from one part to the next.
    fn ranges(&self, whole: usize, part: usize, start: usize, stride: usize) -> (Ranges, Ranges) {
        let places = (0..self.ranks).map(|rank| {
            let (begin, end) = ((rank * part).min(whole), ((rank + 1) * part).min(whole));
            let at = start + rank * stride;
            (at..at + (end - begin), at + (end - begin)..at + part)
        });
        let (values, padding): (Vec<_>, Vec<_>) = places.unzip();
        (values.into_iter().collect(), padding.into_iter().collect())
    }
}

/// Copies to `part` the part of `whole` that belongs to a rank, and pads it with zeros. All ranks' parts are as long.
pub(super) fn cut(whole: &[u8], rank: usize, part: &mut [u8]) {
    let start = (rank * part.len()).min(whole.len());
    let end = (start + part.len()).min(whole.len());
    let (rows, padding) = part.split_at_mut(end - start);
    rows.copy_from_slice(&whole[start..end]);
    padding.fill(0);
}

// burn's feature `distributed` removes the `AutodiffBackend` impl from host backends.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use bonfire_core::DType;
    use burn::backend::{Autodiff, Flex};
    use burn::module::ParamId;

    use super::*;

    fn parameter(shape: &[usize], element: DType) -> Parameter<Autodiff<Flex>> {
        let dtype = if element == DType::F64 { burn::tensor::DType::F64 } else { burn::tensor::DType::BF16 };
        let shape = Shape::from(shape.to_vec());
        Parameter {
            id: ParamId::new(),
            path: String::new(),
            shape,
            dtype,
            element,
            device: Default::default(),
            trained: true,
        }
    }

    #[test]
    fn what_all_ranks_cut_is_joined_again() {
        let parameters = [
            parameter(&[7, 3], DType::BF16),
            parameter(&[1], DType::F64),
            parameter(&[5], DType::BF16),
            parameter(&[2, 2, 2], DType::BF16),
        ];
        let blocks = [1, 1, 0, 1];
        for ranks in 1..9 {
            let layouts: Vec<_> = (0..ranks).map(|rank| Layout::new(&parameters, &blocks, ranks, rank)).collect();
            let wholes: Vec<Vec<u8>> = parameters
                .iter()
                .map(|parameter| (1..=(parameter.shape.num_elements() * parameter.element.size()) as u8).collect())
                .collect();
            for block in 0..2 {
                let mut gathered = vec![255; layouts[0].gathered_bytes(block)];
                for layout in &layouts {
                    for &position in &layout.blocks[block].positions {
                        let own = layout.own(position);
                        assert_eq!(own.start % 16, 0);
                        cut(&wholes[position], layout.rank, &mut gathered[own]);
                    }
                }
                for &position in &layouts[0].blocks[block].positions {
                    let places = layouts[0].gathered(position, wholes[position].len());
                    let whole: Vec<u8> = places.places().flat_map(|(_, range)| &gathered[range]).copied().collect();
                    assert_eq!(whole, wholes[position], "{ranks} ranks, parameter {position}");
                }
            }
            let buckets: Vec<_> =
                layouts[0].buckets.iter().map(|bucket| (bucket.block, &bucket.positions[..])).collect();
            assert_eq!(buckets, [(0, &[2][..]), (1, &[0, 3][..]), (1, &[1][..])]);
            for number in 0..3 {
                // Each byte once, on the ranks whose parts they are.
                let mut reduced = vec![255; layouts[0].reduced_bytes(number, 4)];
                for &position in &layouts[0].buckets[number].positions {
                    let whole = vec![position as u8; parameters[position].shape.num_elements() * 4];
                    let (values, padding) = layouts[0].reduced(position, whole.len(), 4);
                    assert_eq!(values.bytes(), whole.len());
                    for (_, range) in values.places().chain(padding.places()) {
                        assert!(reduced[range.clone()].iter().all(|byte| *byte == 255));
                        reduced[range].fill(position as u8);
                    }
                }
                let own = |layout: &Layout| {
                    let parts = layout.buckets[number].positions.iter().map(|&position| {
                        let own = layout.own_reduced(position, 4);
                        assert!(reduced[own.clone()].iter().all(|byte| *byte == position as u8));
                        own.len()
                    });
                    parts.sum::<usize>()
                };
                assert_eq!(layouts.iter().map(own).sum::<usize>(), reduced.len());
            }
        }
    }

    #[test]
    fn a_part_is_padded_with_zeros() {
        let mut part = [9; 3];
        cut(&[1, 2, 3, 4, 5], 1, &mut part);
        assert_eq!(part, [4, 5, 0]);
        cut(&[1, 2, 3, 4, 5], 2, &mut part);
        assert_eq!(part, [0; 3]);
    }
}
