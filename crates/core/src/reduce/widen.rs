//! Conversion of elements to accumulators and back.

use bytemuck::Pod;
use half::{bf16, f16};

use super::arithmetic::Accumulator;
use super::level::{LANES, Level};

/// Elements converted at a time if the accumulator is wider and is kept in memory.
pub(super) const CHUNK: usize = 256;

/// An element, or an accumulator, that can be accumulated as `A`. All of this runs within [`Level::run`].
pub(super) trait Widen<A: Accumulator>: Pod {
    /// # Safety
    /// The processor supports the instructions of `L`.
    unsafe fn widen<L: Level>(line: [Self; LANES]) -> [A; LANES];

    /// # Safety
    /// As `widen`.
    unsafe fn narrow<L: Level>(line: [A; LANES]) -> [Self; LANES];

    /// Calls `f` with chunks of `source` as accumulators, in order.
    ///
    /// # Safety
    /// As `widen`.
    #[inline(always)]
    unsafe fn for_chunks<L: Level>(source: &[Self], mut f: impl FnMut(&[A])) {
        let mut chunk = [A::zeroed(); CHUNK];
        for source in source.chunks(CHUNK) {
            for (wide, narrow) in chunk.chunks_exact_mut(LANES).zip(source.chunks(LANES)) {
                // SAFETY: guaranteed by the caller.
                wide.copy_from_slice(&unsafe { Self::widen::<L>(line(narrow)) });
            }
            f(&chunk[..source.len()]);
        }
    }

    /// As `for_chunks`, for two sources side by side.
    ///
    /// # Safety
    /// As `widen`.
    #[inline(always)]
    unsafe fn for_chunk_pairs<L: Level>(left: &[Self], right: &[Self], mut f: impl FnMut(&[A], &[A])) {
        for (left, right) in left.chunks(CHUNK).zip(right.chunks(CHUNK)) {
            // SAFETY: guaranteed by the caller.
            unsafe { Self::for_chunks::<L>(left, |left| Self::for_chunks::<L>(right, |right| f(left, right))) };
        }
    }
}

/// Returns the elements, followed by zeros if they are fewer than a line.
#[inline(always)]
pub(super) fn line<T: Pod>(elements: &[T]) -> [T; LANES] {
    match elements.try_into() {
        Ok(line) => line,
        Err(_) => {
            let mut line = [T::zeroed(); LANES];
            line[..elements.len()].copy_from_slice(elements);
            line
        }
    }
}

/// As `map` of arrays, which the compiler does not turn into vector instructions.
#[inline(always)]
pub(super) fn each<T: Copy, U: Pod>(line: [T; LANES], f: impl Fn(T) -> U) -> [U; LANES] {
    let mut result = [U::zeroed(); LANES];
    for (result, element) in result.iter_mut().zip(line) {
        *result = f(element);
    }
    result
}

macro_rules! same {
    ($($type:ty),*) => {$(
        impl Widen<$type> for $type {
            #[inline(always)]
            unsafe fn widen<L: Level>(line: [Self; LANES]) -> [$type; LANES] { line }
            #[inline(always)]
            unsafe fn narrow<L: Level>(line: [$type; LANES]) -> [Self; LANES] { line }
            #[inline(always)]
            unsafe fn for_chunks<L: Level>(source: &[Self], mut f: impl FnMut(&[$type])) { f(source) }
            #[inline(always)]
            unsafe fn for_chunk_pairs<L: Level>(left: &[Self], right: &[Self], mut f: impl FnMut(&[$type], &[$type])) {
                f(left, right)
            }
        }
    )*};
}

macro_rules! integer {
    ($($type:ty => $wide:ty),*) => {$(
        impl Widen<$wide> for $type {
            #[inline(always)]
            unsafe fn widen<L: Level>(line: [Self; LANES]) -> [$wide; LANES] { each(line, <$wide>::from) }
            // Only the mean is accumulated wide, and it lies between the elements that it is computed from.
            #[inline(always)]
            unsafe fn narrow<L: Level>(line: [$wide; LANES]) -> [Self; LANES] { each(line, |wide| wide as $type) }
        }
    )*};
}

same!(f32, f64, i8, i16, i32, i64, i128, u8, u16, u32, u64);
integer!(i8 => i64, i16 => i64, i32 => i64, i64 => i128, u8 => i64, u16 => i64, u32 => i64, u64 => i128);

impl Widen<f32> for f16 {
    #[inline(always)]
    unsafe fn widen<L: Level>(line: [Self; LANES]) -> [f32; LANES] {
        // SAFETY: guaranteed by the caller.
        unsafe { L::widen(line) }
    }

    #[inline(always)]
    unsafe fn narrow<L: Level>(line: [f32; LANES]) -> [Self; LANES] {
        // SAFETY: guaranteed by the caller.
        unsafe { L::narrow(line) }
    }
}

impl Widen<f32> for bf16 {
    #[inline(always)]
    unsafe fn widen<L: Level>(line: [Self; LANES]) -> [f32; LANES] {
        each(line, from_bf16)
    }

    #[inline(always)]
    unsafe fn narrow<L: Level>(line: [f32; LANES]) -> [Self; LANES] {
        each(line, to_bf16)
    }
}

/// Converts to the upper half of an f32; a NaN becomes quiet. As `half` does it, but without a branch, so that a loop
/// of it is vectorised. (Comparisons are signed because AVX2 has no others.)
#[inline(always)]
pub(super) fn from_bf16(narrow: bf16) -> f32 {
    let bits = i32::from(narrow.to_bits());
    let quiet = i32::from(bits & 0x7fff > 0x7f80) << 6;
    f32::from_bits(((bits | quiet) << 16) as u32)
}

/// Rounds to nearest, ties to even, without a branch.
#[inline(always)]
pub(super) fn to_bf16(wide: f32) -> bf16 {
    let bits = wide.to_bits() as i32;
    let nan = -i32::from(bits & 0x7fff_ffff > 0x7f80_0000);
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    bf16::from_bits((((bits | 0x40_0000) & nan) | (rounded & !nan)).cast_unsigned().wrapping_shr(16) as u16)
}
