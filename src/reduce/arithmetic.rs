//! What accumulators can do, element by element.

use bytemuck::Pod;

/// An accumulator's arithmetic.
pub(super) trait Accumulator: Pod + PartialEq {
    const FLOAT: bool;
    /// What every NaN becomes.
    const NAN: Self;
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn over(self, ranks: usize) -> Self;
}

macro_rules! float_accumulator {
    ($($type:ty),*) => {$(
        impl Accumulator for $type {
            const FLOAT: bool = true;
            const NAN: Self = Self::NAN;
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn product(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn max(self, other: Self) -> Self { if self.is_nan() || self >= other { self } else { other } }
            #[inline(always)]
            fn min(self, other: Self) -> Self { if self.is_nan() || self <= other { self } else { other } }
            #[inline(always)]
            fn over(self, ranks: usize) -> Self { self / ranks as $type }
        }
    )*};
}

macro_rules! integer_accumulator {
    ($($type:ty),*) => {$(
        impl Accumulator for $type {
            const FLOAT: bool = false;
            const NAN: Self = 0;
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn product(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn max(self, other: Self) -> Self { Ord::max(self, other) }
            #[inline(always)]
            fn min(self, other: Self) -> Self { Ord::min(self, other) }
            #[inline(always)]
            fn over(self, ranks: usize) -> Self { self / ranks as $type }
        }
    )*};
}

float_accumulator!(f32, f64);
integer_accumulator!(i8, i16, i32, i64, i128, u8, u16, u32, u64);
