//! The instruction sets that kernels are compiled for.
//!
//! On x86-64 there are three: what every processor has, AVX2, and AVX-512. On aarch64 NEON is part of the first. The
//! standard library detects at run time which ones the processor supports. A crate for this would add traits in which
//! to write every loop; here it is one function with an attribute, [`Level::run`].

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Elements that a kernel holds in registers at a time: the widest vector of f32.
pub(super) const LANES: usize = 16;

/// An instruction set.
pub(super) trait Level {
    /// Runs `work`, compiled with these instructions as far as it is inlined.
    ///
    /// # Safety
    /// The processor supports these instructions.
    unsafe fn run<R>(work: impl FnOnce() -> R) -> R;

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn widen(line: [f16; LANES]) -> [f32; LANES];

    /// Rounds to nearest, ties to even.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn narrow(line: [f32; LANES]) -> [f16; LANES];

    /// Stores `bytes`, a multiple of 16, with streaming stores that bypass the cache, if the processor has them.
    ///
    /// # Safety
    /// As [`run`](Self::run). `target` is valid for as many bytes as `bytes` has, and aligned to the largest power of
    /// two up to 64 that divides their number.
    unsafe fn stream(bytes: &[u8], target: *mut u8);
}

/// The instructions that the whole program is compiled for.
pub(super) struct Portable;

impl Level for Portable {
    #[inline(always)]
    unsafe fn run<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    // `half` detects at run time whether the processor converts.
    unsafe fn widen(line: [f16; LANES]) -> [f32; LANES] {
        let mut wide = [0.0; LANES];
        line.convert_to_f32_slice(&mut wide);
        wide
    }

    unsafe fn narrow(line: [f32; LANES]) -> [f16; LANES] {
        let mut narrow = [f16::ZERO; LANES];
        narrow.convert_from_f32_slice(&line);
        narrow
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn stream(bytes: &[u8], target: *mut u8) {
        use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
        for (i, vector) in bytes.as_chunks::<16>().0.iter().enumerate() {
            // SAFETY: guaranteed by the caller, and SSE2 is part of every x86-64.
            unsafe { _mm_stream_si128(target.add(16 * i).cast(), _mm_loadu_si128(vector.as_ptr().cast())) };
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    #[inline(always)]
    unsafe fn stream(bytes: &[u8], target: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use self::x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
        _mm256_loadu_ps, _mm256_loadu_si256, _mm256_storeu_ps, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_stream_si512,
    };

    use half::f16;

    use super::{LANES, Level, Portable};

    /// AVX2 and F16C: 32-byte vectors, and conversion of f16. Haswell and Zen, and everything later.
    pub struct Avx2;

    impl Avx2 {
        pub fn is_supported() -> bool {
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
            // SAFETY: guaranteed by the caller.
            unsafe { run(work) }
        }

        #[inline(always)]
        unsafe fn widen(line: [f16; LANES]) -> [f32; LANES] {
            let mut wide = [0.0; LANES];
            for (eight, wide) in line.as_chunks::<8>().0.iter().zip(wide.as_chunks_mut::<8>().0) {
                // SAFETY: both are eight elements long, neither instruction requires alignment, and the caller
                // guarantees that the processor supports them.
                unsafe { _mm256_storeu_ps(wide.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(eight.as_ptr().cast()))) };
            }
            wide
        }

        #[inline(always)]
        unsafe fn narrow(line: [f32; LANES]) -> [f16; LANES] {
            let mut narrow = [f16::ZERO; LANES];
            for (eight, narrow) in line.as_chunks::<8>().0.iter().zip(narrow.as_chunks_mut::<8>().0) {
                // SAFETY: as above.
                unsafe {
                    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(eight.as_ptr()));
                    _mm_storeu_si128(narrow.as_mut_ptr().cast(), halves);
                }
            }
            narrow
        }

        #[inline(always)]
        unsafe fn stream(bytes: &[u8], target: *mut u8) {
            let (vectors, rest) = bytes.as_chunks::<32>();
            for (i, vector) in vectors.iter().enumerate() {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    _mm256_stream_si256(target.add(32 * i).cast(), _mm256_loadu_si256(vector.as_ptr().cast()));
                }
            }
            // SAFETY: guaranteed by the caller.
            unsafe { Portable::stream(rest, target.add(32 * vectors.len())) };
        }
    }

    /// AVX-512: 64-byte vectors, and comparisons into masks. Its bf16 instructions are not used: they treat denormal
    /// numbers as zero.
    pub struct Avx512;

    impl Avx512 {
        pub fn is_supported() -> bool {
            Avx2::is_supported()
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
            // SAFETY: guaranteed by the caller.
            unsafe { run(work) }
        }

        #[inline(always)]
        unsafe fn widen(line: [f16; LANES]) -> [f32; LANES] {
            // SAFETY: guaranteed by the caller, and `is_supported` asks for these too.
            unsafe { Avx2::widen(line) }
        }

        #[inline(always)]
        unsafe fn narrow(line: [f32; LANES]) -> [f16; LANES] {
            // SAFETY: as above.
            unsafe { Avx2::narrow(line) }
        }

        #[inline(always)]
        unsafe fn stream(bytes: &[u8], target: *mut u8) {
            let (vectors, rest) = bytes.as_chunks::<64>();
            for (i, vector) in vectors.iter().enumerate() {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    _mm512_stream_si512(target.add(64 * i).cast(), _mm512_loadu_si512(vector.as_ptr().cast()));
                }
            }
            // SAFETY: as above.
            unsafe { Avx2::stream(rest, target.add(64 * vectors.len())) };
        }
    }
}
