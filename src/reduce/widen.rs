//! Elements as accumulators and back.

use half::{bf16, f16};

use super::arithmetic::Accumulator;
use super::level::Level;
use crate::dtype::Element;

/// Elements converted at a time where the accumulator is wider.
pub(super) const PIECE: usize = 256;

/// An element that can be accumulated as `A`. Everything here runs within [`Level::run`].
pub(super) trait Widen<A: Accumulator>: Element {
    /// Calls `f` with pieces of `source` as accumulators, in order.
    ///
    /// # Safety
    /// The processor has `L`'s instructions.
    unsafe fn pieces<L: Level>(source: &[Self], f: impl FnMut(&[A]));

    /// As `pieces`, of two sources side by side.
    ///
    /// # Safety
    /// As `pieces`.
    #[inline(always)]
    unsafe fn pairs<L: Level>(left: &[Self], right: &[Self], mut f: impl FnMut(&[A], &[A])) {
        for (left, right) in left.chunks(PIECE).zip(right.chunks(PIECE)) {
            // SAFETY: as the caller vouches for.
            unsafe { Self::pieces::<L>(left, |left| Self::pieces::<L>(right, |right| f(left, right))) };
        }
    }

    /// # Safety
    /// As `pieces`.
    unsafe fn narrow<L: Level>(source: &[A], target: &mut [Self]);
}

macro_rules! same {
    ($($type:ty),*) => {$(
        impl Widen<$type> for $type {
            #[inline(always)]
            unsafe fn pieces<L: Level>(source: &[Self], mut f: impl FnMut(&[$type])) { f(source) }
            #[inline(always)]
            unsafe fn pairs<L: Level>(left: &[Self], right: &[Self], mut f: impl FnMut(&[$type], &[$type])) {
                f(left, right)
            }
            #[inline(always)]
            unsafe fn narrow<L: Level>(source: &[$type], target: &mut [Self]) { target.copy_from_slice(source) }
        }
    )*};
}

macro_rules! integer {
    ($($type:ty => $wide:ty),*) => {$(
        impl Widen<$wide> for $type {
            #[inline(always)]
            unsafe fn pieces<L: Level>(source: &[Self], mut f: impl FnMut(&[$wide])) {
                let mut piece = [0; PIECE];
                for source in source.chunks(PIECE) {
                    for (wide, narrow) in piece.iter_mut().zip(source) {
                        *wide = <$wide>::from(*narrow);
                    }
                    f(&piece[..source.len()]);
                }
            }
            #[inline(always)]
            unsafe fn narrow<L: Level>(source: &[$wide], target: &mut [Self]) {
                for (narrow, wide) in target.iter_mut().zip(source) {
                    // Only the mean is accumulated wide, and a mean lies between the elements that it came from.
                    *narrow = *wide as $type;
                }
            }
        }
    )*};
}

same!(f32, f64, i8, i16, i32, i64, u8, u16, u32, u64);
integer!(i8 => i64, i16 => i64, i32 => i64, i64 => i128, u8 => i64, u16 => i64, u32 => i64, u64 => i128);

impl Widen<f32> for f16 {
    #[inline(always)]
    unsafe fn pieces<L: Level>(source: &[Self], mut f: impl FnMut(&[f32])) {
        let mut piece = [0f32; PIECE];
        for source in source.chunks(PIECE) {
            // SAFETY: as the caller vouches for.
            unsafe { L::widen(source, &mut piece) };
            f(&piece[..source.len()]);
        }
    }

    #[inline(always)]
    unsafe fn narrow<L: Level>(source: &[f32], target: &mut [Self]) {
        // SAFETY: as the caller vouches for.
        unsafe { L::narrow(source, target) }
    }
}

impl Widen<f32> for bf16 {
    #[inline(always)]
    unsafe fn pieces<L: Level>(source: &[Self], mut f: impl FnMut(&[f32])) {
        let mut piece = [0f32; PIECE];
        for source in source.chunks(PIECE) {
            for (wide, narrow) in piece.iter_mut().zip(source) {
                *wide = from_bf16(*narrow);
            }
            f(&piece[..source.len()]);
        }
    }

    #[inline(always)]
    unsafe fn narrow<L: Level>(source: &[f32], target: &mut [Self]) {
        for (narrow, wide) in target.iter_mut().zip(source) {
            *narrow = to_bf16(*wide);
        }
    }
}

/// The upper half of an f32; a NaN becomes a quiet one. As `half` does it, but without a branch, so that a loop of it
/// becomes vectors. (Comparisons are signed because AVX2 has no others.)
#[inline(always)]
pub(super) fn from_bf16(narrow: bf16) -> f32 {
    let bits = i32::from(narrow.to_bits());
    let quiet = i32::from(bits & 0x7fff > 0x7f80) << 6;
    f32::from_bits(((bits | quiet) << 16) as u32)
}

/// Rounds to nearest, ties to even; as above.
#[inline(always)]
pub(super) fn to_bf16(wide: f32) -> bf16 {
    let bits = wide.to_bits() as i32;
    let nan = -i32::from(bits & 0x7fff_ffff > 0x7f80_0000);
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    bf16::from_bits((((bits | 0x40_0000) & nan) | (rounded & !nan)).cast_unsigned().wrapping_shr(16) as u16)
}
