//! Expected results of operations: elements are small whole numbers, on which all arithmetic is exact.

use bonfire_core::ReduceOp;
use bonfire_core::internal::oracle::reduce;

pub use bonfire_core::internal::oracle::Sample;

/// Returns the input of rank `rank` at `i`: 1 to 3, different from the neighbours', and without a period in `i`.
pub fn value(rank: usize, i: usize) -> i128 {
    let mixed = (i as u32).wrapping_mul(0x9e37_79b9) >> 8;
    ((rank * 7 + mixed as usize) % 3 + 1) as i128
}

/// Returns the reduction of all ranks' values at `i`.
pub fn reduced<T: Sample>(op: ReduceOp, ranks: usize, i: usize) -> T {
    reduce(op, (0..ranks).map(|rank| value(rank, i)))
}

/// Returns the input of rank `rank`, of `len` elements.
pub fn input<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::of(value(rank, i))).collect()
}

/// Returns what rank `from` sends to rank `to` at `i` in an all_to_all: all pairs of 9 ranks differ, in every type.
pub fn parcel<T: Sample>(from: usize, to: usize, i: usize) -> T {
    T::of(((from * 9 + to + i * 83) % 127) as i128)
}
