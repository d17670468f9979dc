//! Arithmetic of single accumulators.

use std::marker::PhantomData;

use bytemuck::Pod;

/// An accumulator's arithmetic.
pub(super) trait Accumulator: Pod + PartialEq {
    const FLOAT: bool;
    /// The NaN that replaces every NaN.
    const NAN: Self;
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn over(self, ranks: usize) -> Self;
    /// Returns the factor to multiply by instead of dividing by `ranks`, if that is bit-identical and faster.
    fn reciprocal(ranks: usize) -> Option<Self>;
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
            /// The reciprocal of a power of two is exact. Either way there is one rounding, of the same number.
            #[inline(always)]
            fn reciprocal(ranks: usize) -> Option<Self> { ranks.is_power_of_two().then_some(1.0 / ranks as $type) }
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
            #[inline(always)]
            fn reciprocal(_ranks: usize) -> Option<Self> { None }
        }
    )*};
}

float_accumulator!(f32, f64);
integer_accumulator!(i8, i16, i32, i64, i128, u8, u16, u32, u64);

/// A reduction of two elements to one.
pub(super) trait Operation {
    /// Whether the result of all ranks is divided by their number.
    const MEAN: bool = false;
    /// Whether the bits of the result depend on the signedness of integers. Sums and products wrap around, so theirs do
    /// not.
    const SIGN: bool = false;
    fn combine<A: Accumulator>(left: A, right: A) -> A;
}

pub(super) struct Sum;
pub(super) struct Mean;
pub(super) struct Product;
pub(super) struct Max;
pub(super) struct Min;
/// The operation with its operands exchanged.
pub(super) struct Under<O>(PhantomData<O>);

impl Operation for Sum {
    #[inline(always)]
    fn combine<A: Accumulator>(left: A, right: A) -> A {
        left.sum(right)
    }
}

impl Operation for Mean {
    const MEAN: bool = true;
    const SIGN: bool = true;
    #[inline(always)]
    fn combine<A: Accumulator>(left: A, right: A) -> A {
        left.sum(right)
    }
}

impl Operation for Product {
    #[inline(always)]
    fn combine<A: Accumulator>(left: A, right: A) -> A {
        left.product(right)
    }
}

impl Operation for Max {
    const SIGN: bool = true;
    #[inline(always)]
    fn combine<A: Accumulator>(left: A, right: A) -> A {
        left.max(right)
    }
}

impl Operation for Min {
    const SIGN: bool = true;
    #[inline(always)]
    fn combine<A: Accumulator>(left: A, right: A) -> A {
        left.min(right)
    }
}

impl<O: Operation> Operation for Under<O> {
    #[inline(always)]
    fn combine<A: Accumulator>(left: A, right: A) -> A {
        O::combine(right, left)
    }
}
