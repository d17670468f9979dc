//! What operations must give: elements from small whole numbers, on which all arithmetic is exact.

use bonfire_core::{Element, ReduceOp};
use half::{bf16, f16};

/// Elements made from small whole numbers, so that every sum and product is exact or wraps in a known way.
pub trait Sample: Element {
    fn of(value: i128) -> Self;
    fn mean(sum: i128, ranks: usize) -> Self;
}

macro_rules! samples {
    (integers $($int:ty),*; floats $($float:ty: $from:expr),*) => {
        $(impl Sample for $int {
            fn of(value: i128) -> Self { value as $int }
            fn mean(sum: i128, ranks: usize) -> Self { (sum / ranks as i128) as $int }
        })*
        $(impl Sample for $float {
            fn of(value: i128) -> Self { $from(value as _) }
            fn mean(sum: i128, ranks: usize) -> Self { $from((sum as f64 / ranks as f64) as _) }
        })*
    };
}

samples!(integers i8, i16, i32, i64, u8, u16, u32, u64;
         floats f32: |x: f32| x, f64: |x: f64| x, f16: |x: f32| f16::from_f32(x), bf16: |x: f32| bf16::from_f32(x));

/// What rank `rank` brings at `i`: 1 to 3, unlike its neighbours, and without a period in `i`.
pub fn value(rank: usize, i: usize) -> i128 {
    let mixed = (i as u32).wrapping_mul(0x9e37_79b9) >> 8;
    ((rank * 7 + mixed as usize) % 3 + 1) as i128
}

/// What a reduction of all ranks' values gives at `i`.
pub fn reduced<T: Sample>(op: ReduceOp, ranks: usize, i: usize) -> T {
    let values = (0..ranks).map(|rank| value(rank, i));
    match op {
        ReduceOp::Sum => T::of(values.sum()),
        ReduceOp::Mean => T::mean(values.sum(), ranks),
        ReduceOp::Max => T::of(values.max().unwrap_or(0)),
        ReduceOp::Min => T::of(values.min().unwrap_or(0)),
        ReduceOp::Product => T::of(values.product()),
        other => panic!("the oracle does not know {other}"),
    }
}

/// What rank `rank` brings, from `0` to `len`.
pub fn input<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::of(value(rank, i))).collect()
}

/// What rank `from` has for rank `to` at `i` in an all_to_all: all pairs of 9 ranks differ, in every type.
pub fn parcel<T: Sample>(from: usize, to: usize, i: usize) -> T {
    T::of(((from * 9 + to + i * 83) % 127) as i128)
}
