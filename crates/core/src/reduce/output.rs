//! Where results go: through the cache, or past it where they would not fit.

#![allow(missing_docs, reason = "seen by the packages beside this one only")]

#[cfg(target_arch = "x86_64")]
use super::level::{Avx2, Avx512};
use super::level::{Level, Portable};

/// Where a result goes.
#[derive(Clone, Copy)]
pub struct Output {
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
        unsafe {
            if self.past_cache {
                copy_past_cache(std::slice::from_raw_parts(source, bytes), self.at);
            } else {
                std::ptr::copy_nonoverlapping(source, self.at, bytes);
            }
        }
    }

    /// The output without its first so many bytes. What does not begin with a whole line of the cache is not written past
    /// it.
    pub(super) fn after(self, bytes: usize) -> Output {
        let at = self.place(bytes);
        Output { at, past_cache: self.past_cache && at.addr().is_multiple_of(LINE) }
    }

    /// The place so many bytes behind the beginning.
    pub(super) fn place(self, bytes: usize) -> *mut u8 {
        self.at.wrapping_add(bytes)
    }

    /// Bytes before the first whole line that is written past the cache.
    pub(super) fn head(self) -> usize {
        if self.past_cache { self.at.align_offset(LINE) } else { 0 }
    }

    /// Whether [`fence_streams`] must follow what is written.
    pub(super) fn streams(self) -> bool {
        self.past_cache
    }
}

/// Outputs of at least this many bytes are written past the cache: they would not fit, and an ordinary store to a line
/// that is not cached reads it first.
const STREAM: usize = 1 << 20;

const LINE: usize = 64;

/// Copies without reading the target's lines into the cache. Becomes visible to others after [`fence_streams`].
///
/// # Safety
/// The target is valid for as many bytes, overlaps nothing of the source, and nobody else accesses it meanwhile.
unsafe fn copy_past_cache(source: &[u8], target: *mut u8) {
    let (head, rest) = source.split_at(target.align_offset(LINE).min(source.len()));
    let (lines, tail) = rest.split_at(rest.len() / LINE * LINE);
    // SAFETY: as the caller vouches for, and each level is used where the processor has it; the lines begin where the
    // target has one.
    unsafe {
        let middle = target.add(head.len());
        std::ptr::copy_nonoverlapping(head.as_ptr(), target, head.len());
        std::ptr::copy_nonoverlapping(tail.as_ptr(), middle.add(lines.len()), tail.len());
        #[cfg(target_arch = "x86_64")]
        {
            if Avx512::is_here() {
                return Avx512::run(|| Avx512::stream(lines, middle));
            }
            if Avx2::is_here() {
                return Avx2::run(|| Avx2::stream(lines, middle));
            }
        }
        Portable::stream(lines, middle);
    }
}

/// Orders this thread's streaming stores before whatever it publishes next: a release store alone does not.
pub(crate) fn fence_streams() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
