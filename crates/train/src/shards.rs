//! Where the parts of parameters are: on the ranks, in what is gathered, and in what is reduced.
//!
//! Each parameter is cut by itself, so what a rank has of it does not depend on which others are trained. Replicas are
//! the case of one part. What an operation runs on is, rank by rank, that rank's parts one after the other:
//!
//! ```text
//! parameter a  aaaaa     rank 0  aaabb     its part of a, its part of b
//! parameter b  bbb       rank 1  aa-b-     - is padding: all ranks' parts take as much room
//! ```

use std::ops::Range;

use crate::parameters::Parameter;
use bonfire_core::internal::Ranges;
use bonfire_core::partition;

/// How parameters are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Along the first dimension, into parts of equal shape. Where it does not divide, the last parts are padded with
    /// zeros.
    Rows,
    /// Into slices of elements whose lengths differ by one at most. No tensor is padded.
    Slices,
}

/// The parts of all parameters.
#[derive(Debug, PartialEq)]
pub struct Layout {
    /// The number of ranks that have a part.
    pub ranks: usize,
    /// This rank.
    pub rank: usize,
    /// How they are cut.
    pub cut: Cut,
    parts: Vec<Part>,
}

/// The parts of a parameter.
#[derive(Debug, PartialEq)]
struct Part {
    /// The shape of this rank's tensor.
    shape: Vec<usize>,
    /// By rank, the elements of the whole that its tensor has, without padding.
    ranges: Vec<Range<usize>>,
    /// The elements for which an operation has room on each rank.
    room: usize,
    /// Whether tensors have as many elements as there is room for.
    padded: bool,
}

impl Layout {
    /// Returns the parts of these parameters on a rank of `ranks`.
    pub fn new(parameters: &[Parameter], cut: Cut, ranks: usize, rank: usize) -> Layout {
        // Elements that do not divide go to the ranks in turn, over all parameters.
        let mut turn = 0;
        let parts = parameters.iter().map(|parameter| {
            let len = parameter.elements();
            let (room, ranges) = match cut {
                Cut::Rows => {
                    let rows = parameter.shape.first().map_or(1, |rows| rows.div_ceil(ranks));
                    let room = rows * parameter.shape.iter().skip(1).product::<usize>();
                    (room, (0..ranks).map(|rank| (rank * room).min(len)..((rank + 1) * room).min(len)).collect())
                }
                Cut::Slices => {
                    let ranges = slices(len, ranks, turn);
                    turn = (turn + len) % ranks;
                    (len.div_ceil(ranks), ranges)
                }
            };
            let mut shape = parameter.shape.clone();
            match (cut, shape.first_mut()) {
                (Cut::Rows, Some(rows)) => *rows = rows.div_ceil(ranks),
                (Cut::Rows, None) => {}
                (Cut::Slices, _) => shape = vec![ExactSizeIterator::len(&ranges[rank])],
            }
            Part { shape, ranges, room, padded: cut == Cut::Rows }
        });
        Layout { ranks, rank, cut, parts: parts.collect() }
    }

    /// Returns the shape of this rank's part of a parameter, padding included.
    pub fn shape(&self, position: usize) -> &[usize] {
        &self.parts[position].shape
    }

    /// Returns the elements of the parameter that this rank's part has, as indices in the whole.
    pub fn range(&self, position: usize) -> Range<usize> {
        self.parts[position].ranges[self.rank].clone()
    }
}

/// Returns slices of `len` elements for so many ranks. Those that are longer by one begin with rank `turn`.
fn slices(len: usize, ranks: usize, turn: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    let of = |rank: usize| {
        // The first of equal parts are the longer ones.
        let len = partition(len, ranks, (rank + ranks - turn) % ranks).len();
        end += len;
        end - len..end
    };
    (0..ranks).map(of).collect()
}

/// Where the parts of some parameters are in what an operation runs on. All numbers are bytes.
pub(crate) struct Placement<'a> {
    layout: &'a Layout,
    /// From the parts of one rank to those of the next.
    stride: usize,
    /// The position of a parameter, where it begins among the parts of a rank, and the bytes of its elements.
    places: Vec<(usize, usize, usize)>,
}

/// Parts that are gathered begin at multiples of so many bytes, so that elements of every type are aligned, and GPUs
/// copy them in their widest units.
pub(crate) const ALIGNED: usize = 16;

impl Layout {
    /// Returns the places of parameters, given as positions and bytes of an element, that begin at multiples of
    /// `alignment`.
    pub(crate) fn place(
        &self,
        parameters: impl IntoIterator<Item = (usize, usize)>,
        alignment: usize,
    ) -> Placement<'_> {
        let (mut places, mut stride) = (Vec::new(), 0usize);
        for (position, width) in parameters {
            stride = stride.next_multiple_of(alignment);
            places.push((position, stride, width));
            stride += self.parts[position].room * width;
        }
        Placement { layout: self, stride: stride.next_multiple_of(alignment), places }
    }
}

impl Placement<'_> {
    /// Returns the bytes of the whole operation.
    pub fn bytes(&self) -> usize {
        self.stride * self.layout.ranks
    }

    /// Returns where the whole parameter at an index is, and the zeros that pad it.
    pub fn whole(&self, index: usize) -> (Ranges, Ranges) {
        let (position, offset, width) = self.places[index];
        let part = &self.layout.parts[position];
        let places = part.ranges.iter().enumerate().map(|(rank, range)| {
            let at = rank * self.stride + offset;
            let end = at + range.len() * width;
            (at..end, end..at + part.room * width)
        });
        let (values, padding): (Vec<_>, Vec<_>) = places.unzip();
        (values.into_iter().collect(), padding.into_iter().collect())
    }

    /// Returns where this rank's tensor of the parameter at an index is.
    pub fn own(&self, index: usize) -> Range<usize> {
        let (position, offset, width) = self.places[index];
        let (layout, part) = (self.layout, &self.layout.parts[position]);
        let at = layout.rank * self.stride + offset;
        let elements = if part.padded { part.room } else { part.ranges[layout.rank].len() };
        at..at + elements * width
    }
}

/// Copies to `part` the elements that are this rank's part of `whole`, and pads it with zeros. Both are bytes of
/// elements of this width.
pub fn cut(layout: &Layout, position: usize, whole: &[u8], width: usize, part: &mut [u8]) {
    let range = layout.range(position);
    let (own, padding) = part.split_at_mut(range.len() * width);
    own.copy_from_slice(&whole[range.start * width..range.end * width]);
    padding.fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use bonfire_core::DType;

    fn parameters() -> Vec<Parameter> {
        let shapes: [(&[usize], DType); 6] = [
            (&[7, 3], DType::BF16),
            (&[1], DType::F64),
            (&[5], DType::BF16),
            (&[2, 2, 2], DType::BF16),
            (&[], DType::F32),
            (&[0, 4], DType::F32),
        ];
        shapes.map(|(shape, dtype)| Parameter { path: String::new(), shape: shape.to_vec(), dtype }).into()
    }

    #[test]
    fn what_all_ranks_cut_is_joined_again_and_no_byte_has_two_owners() {
        let parameters = parameters();
        let wholes: Vec<Vec<u8>> = parameters.iter().map(|parameter| (1..=parameter.bytes() as u8).collect()).collect();
        for (how, ranks) in [Cut::Rows, Cut::Slices].into_iter().flat_map(|cut| (1..9).map(move |n| (cut, n))) {
            let layouts: Vec<_> = (0..ranks).map(|rank| Layout::new(&parameters, how, ranks, rank)).collect();
            for positions in [vec![0, 1, 2, 3, 4, 5], vec![3], vec![4, 0]] {
                let items = || positions.iter().map(|&position| (position, parameters[position].dtype.size()));
                let mut all = vec![255; layouts[0].place(items(), ALIGNED).bytes()];
                let mut owners = vec![0; all.len()];
                for layout in &layouts {
                    let places = layout.place(items(), ALIGNED);
                    for (index, &position) in positions.iter().enumerate() {
                        let (own, width) = (places.own(index), parameters[position].dtype.size());
                        assert_eq!(own.start % width, 0);
                        assert_eq!(own.len(), layout.shape(position).iter().product::<usize>() * width);
                        owners[own.clone()].iter_mut().for_each(|owners| *owners += 1);
                        cut(layout, position, &wholes[position], width, &mut all[own]);
                    }
                }
                assert!(owners.iter().all(|owners| *owners <= 1));
                let places = layouts[0].place(items(), ALIGNED);
                for (index, &position) in positions.iter().enumerate() {
                    let (values, padding) = places.whole(index);
                    let whole: Vec<u8> = values.places().flat_map(|(_, range)| &all[range]).copied().collect();
                    assert_eq!(whole, wholes[position], "{how:?}, {ranks} ranks, parameter {position}");
                    assert!(padding.places().all(|(_, range)| all[range].iter().all(|byte| [0, 255].contains(byte))));
                }
            }
        }
    }

    #[test]
    fn replicas_are_the_case_of_one_part() {
        let parameters = parameters();
        let layout = Layout::new(&parameters, Cut::Rows, 1, 0);
        let places = layout.place([(0, 4), (2, 4)], 1);
        assert_eq!((places.bytes(), places.own(1)), (4 * (21 + 5), 84..104));
        assert_eq!(places.whole(1), ((84..104).into(), [].into_iter().collect()));
        assert_eq!(layout.shape(3), [2, 2, 2]);
    }

    #[test]
    fn slices_are_balanced_over_all_parameters() {
        let parameters =
            [1, 3, 35, 257 * 257, 66].map(|len| Parameter { path: String::new(), shape: vec![len], dtype: DType::F32 });
        for ranks in 1..8 {
            let lens = (0..ranks).map(|rank| {
                let layout = Layout::new(&parameters, Cut::Slices, ranks, rank);
                (0..parameters.len()).map(|position| layout.range(position).len()).sum::<usize>()
            });
            let lens: Vec<_> = lens.collect();
            assert!(lens.iter().max().unwrap() - lens.iter().min().unwrap() <= 1, "{lens:?}");
        }
    }

    #[test]
    fn a_part_is_padded_with_zeros() {
        let parameters = [Parameter { path: String::new(), shape: vec![5], dtype: DType::F32 }];
        let layout = Layout::new(&parameters, Cut::Rows, 3, 2);
        let mut part = [9; 2];
        cut(&layout, 0, &[1, 2, 3, 4, 5], 1, &mut part);
        assert_eq!(part, [5, 0]);
    }
}
