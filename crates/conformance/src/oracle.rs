//! Expected results of operations: elements are small whole numbers, on which all arithmetic is exact.

use std::ops::Range;

use bonfire_core::ReduceOp;
use bonfire_core::internal::oracle::reduce;

pub use bonfire_core::internal::oracle::Sample;

/// Elements with the same class are equal, on every rank. Classes have no period in `i`.
fn class(i: usize) -> usize {
    ((i as u32).wrapping_mul(0x9e37_79b9) >> 8) as usize % CLASSES
}

const CLASSES: usize = 3;

fn of_class(rank: usize, class: usize) -> i128 {
    ((rank + class) % CLASSES + 1) as i128
}

/// Returns the elements of a range. Each class is computed once: with millions of elements on up to nine ranks, the
/// arithmetic in 128 bits would take longer than the operations under test.
fn elements<T: Sample>(range: Range<usize>, value: impl Fn(usize) -> T) -> Vec<T> {
    let values: [T; CLASSES] = std::array::from_fn(value);
    range.map(|i| values[class(i)]).collect()
}

/// Returns the input of rank `rank` at `i`: 1 to 3, different from the neighbours', and without a period in `i`.
pub fn value(rank: usize, i: usize) -> i128 {
    of_class(rank, class(i))
}

/// Returns the reduction of all ranks' values at `i`.
pub fn reduced<T: Sample>(op: ReduceOp, ranks: usize, i: usize) -> T {
    reduce(op, (0..ranks).map(|rank| value(rank, i)))
}

/// Returns the reductions of all ranks' values at each of `range`.
pub fn all_reduced<T: Sample>(op: ReduceOp, ranks: usize, range: Range<usize>) -> Vec<T> {
    elements(range, |class| reduce(op, (0..ranks).map(|rank| of_class(rank, class))))
}

/// Returns the input of rank `rank`, of `len` elements.
pub fn input<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    elements(0..len, |class| T::of(of_class(rank, class)))
}

/// Returns what rank `from` sends to rank `to` at `i` in an all_to_all: all pairs of 9 ranks differ, in every type.
pub fn parcel<T: Sample>(from: usize, to: usize, i: usize) -> T {
    T::of(((from * 9 + to + i * 83) % 127) as i128)
}
