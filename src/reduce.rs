//! Element-wise combination on the host.
//!
//! A [`Kernel`] is a reduction of one element type, as functions over bytes. It works on an *accumulator*: the element
//! type itself where that is exact enough, and a wider type where promises need it: f32 for f16 and bf16, so that a sum
//! is rounded once, and i64 or i128 for the mean of integers, so that it is the mean of the exact sum.

use std::mem::MaybeUninit;

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::{DType, Element, ReduceOp};

/// One reduction of one element type. All byte slices are aligned for their element type and hold whole elements;
/// those of one call hold the same number of elements.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    /// Size of one accumulator in bytes. Equal to the element's size where the accumulator is the element itself.
    pub accumulator: usize,
    /// Whether the accumulator is wider than the element.
    pub wide: bool,
    /// `accumulator = element`
    pub load: fn(&mut [u8], &[u8]),
    /// `accumulator = element + element`, where `+` stands for the reduction: two inputs in one pass.
    pub join: fn(&mut [u8], &[u8], &[u8]),
    /// `accumulator = accumulator + element`
    pub fold: fn(&mut [u8], &[u8]),
    /// `accumulator = element + accumulator`. The order shows in which NaN and which zero survives.
    pub fold_under: fn(&mut [u8], &[u8]),
    /// `element = accumulator`, divided by the number of ranks for the mean.
    pub store: fn(&mut [u8], &[u8], usize),
    /// Divides elements by the number of ranks in place; only for the mean and only where the accumulator is not wide.
    pub divide: Option<fn(&mut [u8], usize)>,
    /// Gives every NaN the same bits; only for floats and only where the accumulator is not wide.
    pub unify_nan: Option<fn(&mut [u8])>,
}

/// The kernel for `dtype` and `op`.
pub(crate) fn kernel(dtype: DType, op: ReduceOp) -> Kernel {
    match dtype {
        DType::F32 => functions::<f32, f32>(op),
        DType::F64 => functions::<f64, f64>(op),
        DType::F16 => functions::<f16, f32>(op),
        DType::BF16 => functions::<bf16, f32>(op),
        DType::I8 => integer::<i8, i64>(op),
        DType::I16 => integer::<i16, i64>(op),
        DType::I32 => integer::<i32, i64>(op),
        DType::I64 => integer::<i64, i128>(op),
        DType::U8 => integer::<u8, i64>(op),
        DType::U16 => integer::<u16, i64>(op),
        DType::U32 => integer::<u32, i64>(op),
        DType::U64 => integer::<u64, i128>(op),
    }
}

/// Bytes of accumulators that [`reduce_to_all`] keeps at a time: small enough for the first-level cache beside the
/// inputs' lines.
const BLOCK: usize = 8 << 10;

#[repr(align(64))]
struct Block([u8; BLOCK]);

impl Block {
    /// The first bytes of a block, cleared: clearing all of it costs more than a small reduction.
    fn cleared(block: &mut MaybeUninit<Block>, bytes: usize) -> &mut [u8] {
        assert!(bytes <= BLOCK);
        // SAFETY: so many bytes are within the block, which is borrowed for as long as the slice, and they are
        // initialised before the slice is made.
        unsafe {
            let start = (&raw mut (*block.as_mut_ptr()).0).cast::<u8>();
            start.write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(start, bytes)
        }
    }
}

/// Where a result goes.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    at: *mut u8,
    past_cache: bool,
}

impl Output {
    pub fn cached(at: *mut u8) -> Output {
        Output { at, past_cache: false }
    }

    /// Part of a result of so many bytes, which is written past the cache where it is large and `apart` from the input:
    /// what has just been read is in the cache.
    pub fn of(at: *mut u8, bytes: usize, apart: bool) -> Output {
        Output { at, past_cache: apart && bytes >= STREAM }
    }

    /// Copies what `source` has there; [`fence_streams`] makes it visible to others.
    ///
    /// # Safety
    /// Both are valid for so many bytes, do not overlap, and nobody else accesses the output meanwhile.
    pub unsafe fn copy(self, source: *const u8, bytes: usize) {
        // SAFETY: as the caller vouches for.
        let (target, source) =
            unsafe { (std::slice::from_raw_parts_mut(self.at, bytes), std::slice::from_raw_parts(source, bytes)) };
        if self.past_cache { copy_past_cache(target, source) } else { target.copy_from_slice(source) }
    }
}

/// Reduces `inputs`, in their order, and stores the result to each of the `outputs`. An output may be the same memory
/// as an input: every element is read from all inputs before it is written to any output.
///
/// # Safety
/// Every pointer is valid for `elements` elements of `dtype` and aligned for it; inputs are not written and outputs not
/// accessed by anybody else during the call.
pub(crate) unsafe fn reduce_to_all(
    dtype: DType,
    op: ReduceOp,
    elements: usize,
    inputs: impl Iterator<Item = *const u8> + Clone,
    outputs: impl Iterator<Item = Output> + Clone,
) {
    let kernel = kernel(dtype, op);
    let ranks = inputs.clone().count();
    let step = BLOCK / kernel.accumulator;
    let most = step.min(elements);
    let (mut block, mut result) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    let block = Block::cleared(&mut block, most * kernel.accumulator);
    let rounds = kernel.wide || kernel.divide.is_some();
    let result = Block::cleared(&mut result, if rounds { most * dtype.size() } else { 0 });
    let mut done = 0;
    while done < elements {
        let count = step.min(elements - done);
        let (at, bytes) = (done * dtype.size(), count * dtype.size());
        let accumulator = &mut block[..count * kernel.accumulator];
        let mut inputs = inputs.clone().map(|input| {
            // SAFETY: `at + bytes` is within the `elements` that the caller vouches for, and the slice is gone before
            // anything is written to an output.
            unsafe { std::slice::from_raw_parts(input.add(at), bytes) }
        });
        match (inputs.next(), inputs.next()) {
            (Some(first), Some(second)) => (kernel.join)(accumulator, first, second),
            (Some(only), None) => (kernel.load)(accumulator, only),
            (None, _) => return,
        }
        inputs.for_each(|input| (kernel.fold)(accumulator, input));
        let rounded = if rounds {
            (kernel.store)(&mut result[..bytes], accumulator, ranks);
            &result[..bytes]
        } else {
            &*accumulator
        };
        for output in outputs.clone() {
            // SAFETY: as above; outputs are accessed by this call alone, one at a time.
            let target = unsafe { std::slice::from_raw_parts_mut(output.at.add(at), bytes) };
            if output.past_cache { copy_past_cache(target, rounded) } else { target.copy_from_slice(rounded) }
        }
        done += count;
    }
    if outputs.clone().any(|output| output.past_cache) {
        fence_streams();
    }
}

/// Outputs of at least this many bytes are written past the cache: they would not fit, and an ordinary store to a line
/// that is not cached reads it first.
const STREAM: usize = 1 << 20;

/// Copies without reading the target's lines into the cache. Becomes visible to others after [`fence_streams`].
#[cfg(target_arch = "x86_64")]
fn copy_past_cache(target: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    // SAFETY: every bit pattern is a valid vector, and a vector's bytes are valid bytes.
    let (head, vectors, _) = unsafe { target.align_to_mut::<__m128i>() };
    let (head, vectors) = (head.len(), vectors.len());
    let tail = head + vectors * size_of::<__m128i>();
    target[..head].copy_from_slice(&source[..head]);
    target[tail..].copy_from_slice(&source[tail..]);
    let (from, to) = (source[head..tail].as_ptr(), target[head..tail].as_mut_ptr());
    for i in 0..vectors {
        // SAFETY: `i` is below the number of whole vectors in both ranges, `to` is aligned because `align_to_mut` began
        // the middle there, and SSE2 is part of every x86-64.
        unsafe { _mm_stream_si128(to.cast::<__m128i>().add(i), _mm_loadu_si128(from.cast::<__m128i>().add(i))) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_past_cache(target: &mut [u8], source: &[u8]) {
    target.copy_from_slice(source);
}

/// Orders this thread's streaming stores before whatever it publishes next: a release store alone does not.
pub(crate) fn fence_streams() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// An accumulator's arithmetic.
trait Accumulator: Pod + PartialEq {
    const FLOAT: bool;
    /// What every NaN becomes.
    const NAN: Self;
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn over(self, ranks: usize) -> Self;
}

/// An element that can be accumulated as `A`.
trait Widen<A: Accumulator>: Element {
    /// Calls `f` with pieces of `source` as accumulators, in order.
    fn pieces(source: &[Self], f: impl FnMut(&[A]));
    /// As `pieces`, of two sources side by side.
    fn pairs(left: &[Self], right: &[Self], mut f: impl FnMut(&[A], &[A])) {
        for (left, right) in left.chunks(PIECE).zip(right.chunks(PIECE)) {
            Self::pieces(left, |left| Self::pieces(right, |right| f(left, right)));
        }
    }
    fn narrow(source: &[A], target: &mut [Self]);
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

/// Elements converted at a time where the accumulator is wider.
const PIECE: usize = 256;

macro_rules! same {
    ($($type:ty),*) => {$(
        impl Widen<$type> for $type {
            #[inline(always)]
            fn pieces(source: &[Self], mut f: impl FnMut(&[$type])) { f(source) }
            #[inline(always)]
            fn pairs(left: &[Self], right: &[Self], mut f: impl FnMut(&[$type], &[$type])) { f(left, right) }
            #[inline(always)]
            fn narrow(source: &[$type], target: &mut [Self]) { target.copy_from_slice(source) }
        }
    )*};
}

macro_rules! half {
    ($($type:ty),*) => {$(
        // `half` converts slices with the processor's own instructions where it finds them at run time.
        impl Widen<f32> for $type {
            fn pieces(source: &[Self], mut f: impl FnMut(&[f32])) {
                let mut piece = [0f32; PIECE];
                for source in source.chunks(PIECE) {
                    source.convert_to_f32_slice(&mut piece[..source.len()]);
                    f(&piece[..source.len()]);
                }
            }
            fn narrow(source: &[f32], target: &mut [Self]) { target.convert_from_f32_slice(source) }
        }
    )*};
}

macro_rules! integer {
    ($($type:ty => $wide:ty),*) => {$(
        impl Widen<$wide> for $type {
            fn pieces(source: &[Self], mut f: impl FnMut(&[$wide])) {
                let mut piece = [0; PIECE];
                for source in source.chunks(PIECE) {
                    for (wide, narrow) in piece.iter_mut().zip(source) {
                        *wide = <$wide>::from(*narrow);
                    }
                    f(&piece[..source.len()]);
                }
            }
            fn narrow(source: &[$wide], target: &mut [Self]) {
                for (narrow, wide) in target.iter_mut().zip(source) {
                    // Only the mean is accumulated wide, and a mean lies between the elements that it came from.
                    *narrow = *wide as $type;
                }
            }
        }
    )*};
}

same!(f32, f64, i8, i16, i32, i64, u8, u16, u32, u64);
half!(f16, bf16);
integer!(i8 => i64, i16 => i64, i32 => i64, i64 => i128, u8 => i64, u16 => i64, u32 => i64, u64 => i128);

fn integer<T: Widen<T> + Widen<W> + Accumulator, W: Accumulator>(op: ReduceOp) -> Kernel {
    if op == ReduceOp::Mean { functions::<T, W>(op) } else { functions::<T, T>(op) }
}

fn functions<T: Widen<A>, A: Accumulator>(op: ReduceOp) -> Kernel {
    let wide = size_of::<A>() != size_of::<T>();
    let mean = op == ReduceOp::Mean;
    Kernel {
        accumulator: size_of::<A>(),
        wide,
        load: load::<T, A>,
        join: match op {
            ReduceOp::Sum | ReduceOp::Mean => |a, l, r| join::<T, A>(a, l, r, A::sum),
            ReduceOp::Product => |a, l, r| join::<T, A>(a, l, r, A::product),
            ReduceOp::Max => |a, l, r| join::<T, A>(a, l, r, A::max),
            ReduceOp::Min => |a, l, r| join::<T, A>(a, l, r, A::min),
        },
        fold: match op {
            ReduceOp::Sum | ReduceOp::Mean => |a, s| fold::<T, A>(a, s, A::sum),
            ReduceOp::Product => |a, s| fold::<T, A>(a, s, A::product),
            ReduceOp::Max => |a, s| fold::<T, A>(a, s, A::max),
            ReduceOp::Min => |a, s| fold::<T, A>(a, s, A::min),
        },
        fold_under: match op {
            ReduceOp::Sum | ReduceOp::Mean => |a, s| fold::<T, A>(a, s, |x, y| y.sum(x)),
            ReduceOp::Product => |a, s| fold::<T, A>(a, s, |x, y| y.product(x)),
            ReduceOp::Max => |a, s| fold::<T, A>(a, s, |x, y| y.max(x)),
            ReduceOp::Min => |a, s| fold::<T, A>(a, s, |x, y| y.min(x)),
        },
        store: if mean {
            store_mean::<T, A>
        } else {
            |target, source, _| T::narrow(cast_slice(source), cast_slice_mut(target))
        },
        divide: (mean && !wide).then_some(divide::<A>),
        unify_nan: (A::FLOAT && !wide).then_some(unify_nan::<A>),
    }
}

fn load<T: Widen<A>, A: Accumulator>(accumulator: &mut [u8], source: &[u8]) {
    let mut rest: &mut [A] = cast_slice_mut(accumulator);
    T::pieces(cast_slice(source), |piece| {
        let (now, later) = std::mem::take(&mut rest).split_at_mut(piece.len());
        now.copy_from_slice(piece);
        rest = later;
    });
}

#[inline(always)]
fn join<T: Widen<A>, A: Accumulator>(accumulator: &mut [u8], left: &[u8], right: &[u8], combine: impl Fn(A, A) -> A) {
    let mut rest: &mut [A] = cast_slice_mut(accumulator);
    T::pairs(cast_slice(left), cast_slice(right), |left, right| {
        let (now, later) = std::mem::take(&mut rest).split_at_mut(left.len());
        for ((a, left), right) in now.iter_mut().zip(left).zip(right) {
            *a = combine(*left, *right);
        }
        rest = later;
    });
}

#[inline(always)]
fn fold<T: Widen<A>, A: Accumulator>(accumulator: &mut [u8], source: &[u8], combine: impl Fn(A, A) -> A) {
    let mut rest: &mut [A] = cast_slice_mut(accumulator);
    T::pieces(cast_slice(source), |piece| {
        let (now, later) = std::mem::take(&mut rest).split_at_mut(piece.len());
        for (a, b) in now.iter_mut().zip(piece) {
            *a = combine(*a, *b);
        }
        rest = later;
    });
}

fn store_mean<T: Widen<A>, A: Accumulator>(target: &mut [u8], source: &[u8], ranks: usize) {
    let target: &mut [T] = cast_slice_mut(target);
    let mut piece = [A::zeroed(); PIECE];
    for (target, source) in target.chunks_mut(PIECE).zip(cast_slice::<u8, A>(source).chunks(PIECE)) {
        for (quotient, sum) in piece.iter_mut().zip(source) {
            *quotient = sum.over(ranks);
        }
        T::narrow(&piece[..target.len()], target);
    }
}

fn unify_nan<A: Accumulator>(elements: &mut [u8]) {
    for element in cast_slice_mut::<u8, A>(elements) {
        // Only a NaN differs from itself.
        #[allow(clippy::eq_op)]
        if *element != *element {
            *element = A::NAN;
        }
    }
}

fn divide<A: Accumulator>(elements: &mut [u8], ranks: usize) {
    for element in cast_slice_mut::<u8, A>(elements) {
        *element = element.over(ranks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Element>(op: ReduceOp, inputs: &[&[T]]) -> Vec<T> {
        let mut output = vec![T::zeroed(); inputs[0].len()];
        let pointers = inputs.iter().map(|input| input.as_ptr().cast());
        let outputs = std::iter::once(Output::cached(output.as_mut_ptr().cast()));
        // SAFETY: all slices have the length of the first, which the tests below see to, and nobody else has them.
        unsafe { reduce_to_all(T::DTYPE, op, inputs[0].len(), pointers, outputs) };
        output
    }

    #[test]
    fn sixteen_bit_sums_are_rounded_once() {
        // 2048 + 1 + 1 is 2048 if rounded to f16 after each addition, and 2050 if rounded once.
        let (big, one) = ([f16::from_f32(2048.0)], [f16::ONE]);
        assert_eq!(reduced(ReduceOp::Sum, &[&big, &one, &one]), [f16::from_f32(2050.0)]);
        let (big, one) = ([bf16::from_f32(256.0)], [bf16::ONE]);
        assert_eq!(reduced(ReduceOp::Sum, &[&big, &one, &one]), [bf16::from_f32(258.0)]);
    }

    #[test]
    fn a_sixteen_bit_mean_does_not_overflow() {
        let max = [f16::MAX; 3];
        assert_eq!(reduced(ReduceOp::Mean, &[&max, &max, &max]), max);
    }

    #[test]
    fn integer_means_come_from_the_exact_sum_and_round_toward_zero() {
        assert_eq!(reduced(ReduceOp::Mean, &[&[i8::MAX, -3, 3], &[i8::MAX, -2, 2]]), [i8::MAX, -2, 2]);
        assert_eq!(reduced(ReduceOp::Mean, &[&[i64::MAX, i64::MIN], &[i64::MAX, i64::MIN]]), [i64::MAX, i64::MIN]);
        assert_eq!(reduced(ReduceOp::Mean, &[&[u64::MAX], &[u64::MAX], &[u64::MAX]]), [u64::MAX]);
    }

    #[test]
    fn integer_sums_and_products_wrap() {
        assert_eq!(reduced(ReduceOp::Sum, &[&[200u8], &[100]]), [44]);
        assert_eq!(reduced(ReduceOp::Product, &[&[i32::MAX], &[2]]), [-2]);
    }

    #[test]
    fn extremes_propagate_nan_from_every_side() {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let result = reduced(op, &[&[f32::NAN, 1.0, 3.0], &[1.0, f32::NAN, 2.0]]);
            assert!(result[0].is_nan() && result[1].is_nan() && !result[2].is_nan());
            assert!(reduced(op, &[&[f16::ONE], &[f16::NAN]])[0].is_nan());
        }
    }

    #[test]
    fn every_type_and_reduction_agrees_with_plain_arithmetic_over_several_blocks() {
        fn check<T: Element>(from: fn(f64) -> T, to: fn(T) -> f64) {
            // Small whole numbers: exact in every type, also their products.
            let ranks: Vec<Vec<T>> =
                (0..3).map(|r| (0..9001).map(|i| from(((i + r) % 4 + 1) as f64)).collect()).collect();
            let inputs: Vec<&[T]> = ranks.iter().map(Vec::as_slice).collect();
            for op in ReduceOp::ALL {
                for (i, got) in reduced(op, &inputs).into_iter().enumerate() {
                    let values = inputs.iter().map(|input| to(input[i]));
                    let want = match op {
                        ReduceOp::Sum => values.sum(),
                        ReduceOp::Mean => to(from(values.sum::<f64>() / 3.0)),
                        ReduceOp::Max => values.fold(f64::MIN, f64::max),
                        ReduceOp::Min => values.fold(f64::MAX, f64::min),
                        ReduceOp::Product => values.product(),
                    };
                    assert_eq!(to(got), want, "{op} of {} at {i}", T::DTYPE);
                }
            }
        }
        check::<f32>(|x| x as f32, |x| x.into());
        check::<f64>(|x| x, |x| x);
        check::<f16>(|x| f16::from_f32(x as f32), |x| x.into());
        check::<bf16>(|x| bf16::from_f32(x as f32), |x| x.into());
        check::<i8>(|x| x as i8, |x| x.into());
        check::<i16>(|x| x as i16, |x| x.into());
        check::<i32>(|x| x as i32, |x| x.into());
        check::<i64>(|x| x as i64, |x| x as f64);
        check::<u8>(|x| x as u8, |x| x.into());
        check::<u16>(|x| x as u16, |x| x.into());
        check::<u32>(|x| x as u32, |x| x.into());
        check::<u64>(|x| x as u64, |x| x as f64);
    }
}
