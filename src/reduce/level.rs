//! Sets of instructions that kernels are compiled for.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// A set of instructions.
pub(super) trait Level {
    /// Runs `work`, compiled with these instructions as far as it is inlined.
    ///
    /// # Safety
    /// The processor has them.
    unsafe fn run<R>(work: impl FnOnce() -> R) -> R;

    /// Converts as many elements as both have.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn widen(source: &[f16], target: &mut [f32]);

    /// Converts as many elements as both have, rounding to nearest, ties to even.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn narrow(source: &[f32], target: &mut [f16]);
}

/// What the whole program is compiled for.
pub(super) struct Portable;

impl Level for Portable {
    #[inline(always)]
    unsafe fn run<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    // `half` asks at run time whether the processor converts.
    unsafe fn widen(source: &[f16], target: &mut [f32]) {
        source.convert_to_f32_slice(&mut target[..source.len()]);
    }

    unsafe fn narrow(source: &[f32], target: &mut [f16]) {
        target[..source.len()].convert_from_f32_slice(source);
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use self::x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
        _mm256_loadu_ps, _mm256_storeu_ps,
    };

    use super::Level;
    use half::f16;

    /// 32-byte vectors, and instructions that convert f16: Haswell and Zen, and all that came after.
    pub struct Avx2;

    impl Avx2 {
        pub fn is_here() -> bool {
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
        }
    }

    impl Level for Avx2 {
        #[inline(always)]
        unsafe fn run<R>(work: impl FnOnce() -> R) -> R {
            #[target_feature(enable = "avx2,f16c")]
            fn run<R>(work: impl FnOnce() -> R) -> R {
                work()
            }
            // SAFETY: as the caller vouches for.
            unsafe { run(work) }
        }

        unsafe fn widen(source: &[f16], target: &mut [f32]) {
            // SAFETY: as the caller vouches for.
            unsafe { widen(source, target) }
        }

        unsafe fn narrow(source: &[f32], target: &mut [f16]) {
            // SAFETY: as the caller vouches for.
            unsafe { narrow(source, target) }
        }
    }

    /// 64-byte vectors and comparisons into masks. Its own instructions for bf16 are not used: they take denormal
    /// numbers for zero.
    pub struct Avx512;

    impl Avx512 {
        pub fn is_here() -> bool {
            Avx2::is_here()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        }
    }

    impl Level for Avx512 {
        #[inline(always)]
        unsafe fn run<R>(work: impl FnOnce() -> R) -> R {
            #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            fn run<R>(work: impl FnOnce() -> R) -> R {
                work()
            }
            // SAFETY: as the caller vouches for.
            unsafe { run(work) }
        }

        unsafe fn widen(source: &[f16], target: &mut [f32]) {
            // SAFETY: as the caller vouches for, and `is_here` asks for this too.
            unsafe { widen(source, target) }
        }

        unsafe fn narrow(source: &[f32], target: &mut [f16]) {
            // SAFETY: as above.
            unsafe { narrow(source, target) }
        }
    }

    #[target_feature(enable = "avx,f16c")]
    fn widen(source: &[f16], target: &mut [f32]) {
        let ((eights, rest), (targets, _)) = (source.as_chunks::<8>(), target.as_chunks_mut::<8>());
        for (eight, target) in eights.iter().zip(targets) {
            // SAFETY: both are eight elements long, and neither instruction asks for alignment.
            unsafe { _mm256_storeu_ps(target.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(eight.as_ptr().cast()))) };
        }
        let at = source.len() - rest.len();
        for (narrow, wide) in rest.iter().zip(&mut target[at..]) {
            *wide = narrow.to_f32();
        }
    }

    #[target_feature(enable = "avx,f16c")]
    fn narrow(source: &[f32], target: &mut [f16]) {
        let ((eights, rest), (targets, _)) = (source.as_chunks::<8>(), target.as_chunks_mut::<8>());
        for (eight, target) in eights.iter().zip(targets) {
            // SAFETY: both are eight elements long, and neither instruction asks for alignment.
            unsafe {
                let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(eight.as_ptr()));
                _mm_storeu_si128(target.as_mut_ptr().cast(), halves);
            }
        }
        let at = source.len() - rest.len();
        for (wide, narrow) in rest.iter().zip(&mut target[at..]) {
            *narrow = f16::from_f32(*wide);
        }
    }
}
