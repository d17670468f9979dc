//! An oracle for reductions: expected results from small integers, on which all arithmetic is exact. For tests, and for
//! programs that check results.

use half::{bf16, f16};

use crate::types::{Element, ReduceOp};

/// Elements constructed from small integers, so that every sum and product is exact or wraps in a known way.
pub trait Sample: Element {
    /// Converts `value`. Integer types keep the low bits.
    fn of(value: i128) -> Self;
    /// Returns `sum / ranks`, rounded to nearest for floats and toward zero for integers.
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

/// Returns the expected result of reducing `values`, one per rank.
pub fn reduce<T: Sample>(op: ReduceOp, values: impl ExactSizeIterator<Item = i128>) -> T {
    let ranks = values.len();
    match op {
        ReduceOp::Sum => T::of(values.sum()),
        ReduceOp::Mean => T::mean(values.sum(), ranks),
        ReduceOp::Max => T::of(values.max().unwrap_or(0)),
        ReduceOp::Min => T::of(values.min().unwrap_or(0)),
        ReduceOp::Product => T::of(values.product()),
    }
}
