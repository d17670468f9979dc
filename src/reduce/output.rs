//! Where results go: through the cache, or past it where they would not fit.

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
        self.write(target, source);
    }

    /// The place `at` so many bytes further on.
    pub(super) fn place(self, bytes: usize) -> *mut u8 {
        self.at.wrapping_add(bytes)
    }

    /// Whether [`fence_streams`] must follow what is written.
    pub(super) fn streams(self) -> bool {
        self.past_cache
    }

    /// Copies to `target`, which is a part of this output.
    pub(super) fn write(self, target: &mut [u8], source: &[u8]) {
        if self.past_cache { copy_past_cache(target, source) } else { target.copy_from_slice(source) }
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
