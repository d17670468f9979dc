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

/// Defines operations by the method of [`Accumulator`], and by the constants that are true.
macro_rules! operations {
    ($($name:ident: $method:ident $(, $constant:ident)*;)*) => {$(
        pub(super) struct $name;

        impl Operation for $name {
            $(const $constant: bool = true;)*
            #[inline(always)]
            fn combine<A: Accumulator>(left: A, right: A) -> A { left.$method(right) }
        }
    )*};
}

operations! {
    Sum: sum;
    Mean: sum, MEAN, SIGN;
    Product: product;
    Max: max, SIGN;
    Min: min, SIGN;
}

/// The operation with its operands exchanged.
pub(super) struct Under<O>(PhantomData<O>);

impl<O: Operation> Operation for Under<O> {
    #[inline(always)]
    fn combine<A: Accumulator>(left: A, right: A) -> A {
        O::combine(right, left)
    }
}
