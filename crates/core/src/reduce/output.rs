//! Destinations of results, written through the cache or past it if they would not fit.

#![allow(missing_docs, reason = "seen only by the other packages of the workspace")]

#[cfg(target_arch = "x86_64")]
use super::level::{Avx2, Avx512};
use super::level::{Level, Portable};

/// The destination of a result.
#[derive(Clone, Copy)]
pub struct Output {
    at: *mut u8,
    streaming: bool,
}

impl Output {
    pub fn cached(at: *mut u8) -> Output {
        Output { at, streaming: false }
    }

    /// Creates the destination of part of a result of `bytes` bytes. It is written with streaming stores, which bypass
    /// the cache, if the result is large and `disjoint` from the input: what has just been read is in the cache.
    pub fn of(at: *mut u8, bytes: usize, disjoint: bool) -> Output {
        Output { at, streaming: disjoint && bytes >= MIN_STREAM_BYTES }
    }

    /// Copies from `source`. [`fence_streams`] makes the copy visible to other threads.
    ///
    /// # Safety
    /// Both are valid for `bytes` bytes and do not overlap. Nothing else accesses the output during the call.
    pub unsafe fn copy(self, source: *const u8, bytes: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if self.streaming {
                stream_copy(std::slice::from_raw_parts(source, bytes), self.at);
            } else {
                std::ptr::copy_nonoverlapping(source, self.at, bytes);
            }
        }
    }

    /// Returns the output without its first `bytes` bytes. Unless that begins at a cache line, it goes through the
    /// cache.
    pub(super) fn after(self, bytes: usize) -> Output {
        let at = self.address(bytes);
        Output { at, streaming: self.streaming && at.addr().is_multiple_of(LINE) }
    }

    /// Returns the address `bytes` bytes behind the beginning.
    pub(super) fn address(self, bytes: usize) -> *mut u8 {
        self.at.wrapping_add(bytes)
    }

    /// Returns the number of bytes before the first whole line that is written with streaming stores.
    pub(super) fn head(self) -> usize {
        if self.streaming { self.at.align_offset(LINE) } else { 0 }
    }

    /// Whether it is written with streaming stores, which [`fence_streams`] must follow.
    pub(super) fn streams(self) -> bool {
        self.streaming
    }
}

/// Outputs of at least this many bytes are written past the cache: they would not fit, and an ordinary store to a line
/// that is not cached reads it first.
const MIN_STREAM_BYTES: usize = 1 << 20;

const LINE: usize = 64;

/// Copies without reading the target's lines into the cache. [`fence_streams`] makes the copy visible to others.
///
/// # Safety
/// The target is valid for as many bytes and does not overlap the source. Nothing else accesses it during the call.
unsafe fn stream_copy(source: &[u8], target: *mut u8) {
    let (head, rest) = source.split_at(target.align_offset(LINE).min(source.len()));
    let (lines, tail) = rest.split_at(rest.len() / LINE * LINE);
    // SAFETY: guaranteed by the caller. Each level is used only if the processor supports it. `middle` is at a cache
    // line.
    unsafe {
        let middle = target.add(head.len());
        std::ptr::copy_nonoverlapping(head.as_ptr(), target, head.len());
        std::ptr::copy_nonoverlapping(tail.as_ptr(), middle.add(lines.len()), tail.len());
        #[cfg(target_arch = "x86_64")]
        {
            if Avx512::is_supported() {
                return Avx512::run(|| Avx512::stream(lines, middle));
            }
            if Avx2::is_supported() {
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
