//! Buffers in the memory that suits a group.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::{fmt, io};

use crate::transport::Storage;
use crate::types::{Element, Error};

/// Elements in the memory that suits a group, made by [`Group::allocate`](crate::Group::allocate). It is used as a
/// slice.
///
/// If the ranks are processes of one host, the memory is shared between them. An operation on more than 1 KiB then runs
/// directly between the ranks' buffers, if every buffer that other ranks must access is of this kind; otherwise it runs
/// as on any other memory. An output may be part of a buffer if it begins at a multiple of 64 KiB and ends at one or at
/// the end of the buffer: after a failure its pages are taken back from the peers, so they must hold nothing else.
///
/// A buffer works with every group and may outlive the group that made it. When it is dropped, its memory is kept for
/// later buffers, up to 256 MiB on each rank, so a program may allocate its buffers anew in every step.
///
/// In ordinary memory it begins at a multiple of 128 bytes. Ranks that are threads write their parts of each other's
/// buffers, and where parts share a cache line, small operations take up to 1.5 times as long.
///
/// The other processes of the group could write to a buffer at any time, as threads could. Correct ones do so only
/// during an operation on it.
pub struct Buffer<T> {
    memory: Memory<T>,
    len: usize,
}

/// Two cache lines, because processors fetch lines in pairs.
const ALIGNMENT: usize = 128;

enum Memory<T> {
    /// The elements begin at this index of the bytes.
    Heap(Box<[u8]>, usize),
    Engine(Box<dyn Storage>, PhantomData<T>),
}

impl<T: Element> Buffer<T> {
    pub(super) fn new(
        len: usize,
        from_engine: impl FnOnce(usize) -> Option<io::Result<Box<dyn Storage>>>,
    ) -> Result<Self, Error> {
        let failed = |bytes: usize, reason: &dyn fmt::Display| {
            let text = format!("no buffer of {} MiB: {reason}", bytes.div_ceil(1 << 20));
            Error::io("allocate", io::Error::new(io::ErrorKind::OutOfMemory, text))
        };
        let no_memory = "there is not enough memory";
        // No allocation is larger, on any machine.
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or_else(|| failed(usize::MAX, &no_memory))?;
        let memory = match from_engine(bytes) {
            Some(storage) => Memory::Engine(storage.map_err(|e| failed(bytes, &e))?, PhantomData),
            None => {
                let memory = bytemuck::allocation::try_zeroed_slice_box::<u8>(bytes.saturating_add(ALIGNMENT));
                let memory = memory.map_err(|()| failed(bytes, &no_memory))?;
                // At most `ALIGNMENT` - 1.
                let start = memory.as_ptr().addr().wrapping_neg() % ALIGNMENT;
                Memory::Heap(memory, start)
            }
        };
        Ok(Buffer { memory, len })
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Heap(bytes, start) => bytemuck::cast_slice(&bytes[*start..][..self.len * size_of::<T>()]),
            // SAFETY: `Storage` guarantees that the memory is aligned and valid for the bytes that were requested,
            // which are those of `len` elements. The bytes began as zeros, and any bytes are valid elements. The borrow
            // is of this buffer, the only owner of the storage.
            Memory::Engine(storage, _) => unsafe {
                std::slice::from_raw_parts(storage.start().cast().as_ptr(), self.len)
            },
        }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Heap(bytes, start) => bytemuck::cast_slice_mut(&mut bytes[*start..][..self.len * size_of::<T>()]),
            // SAFETY: as in `deref`, and the borrow is exclusive.
            Memory::Engine(storage, _) => unsafe {
                std::slice::from_raw_parts_mut(storage.start().cast().as_ptr(), self.len)
            },
        }
    }
}

impl<T: Element> AsMut<[T]> for Buffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Returns zeros in ordinary memory. Other ranks may have determined the length, so a failed allocation is an error.
pub fn zeroed<T: Element>(operation: &str, len: usize) -> Result<Vec<T>, Error> {
    let no_memory = |()| {
        let text = format!("not enough memory for {len} elements of type {}", T::DTYPE);
        Error::io(operation, io::Error::new(io::ErrorKind::OutOfMemory, text))
    };
    bytemuck::allocation::try_zeroed_vec(len).map_err(no_memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_memory_begins_at_a_cache_line() {
        for len in [0, 1, 31, 1000, 100_000] {
            let mut buffer = Buffer::<f64>::new(len, |_| None).unwrap();
            assert_eq!((buffer.as_ptr().addr() % ALIGNMENT, &buffer[..]), (0, &vec![0.0; len][..]));
            buffer.fill(1.0);
            assert_eq!(buffer[..], vec![1.0; len]);
        }
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        for len in [usize::MAX, isize::MAX as usize / 2] {
            let Err(Error::Io { operation, .. }) = Buffer::<u16>::new(len, |_| None) else { panic!("{len}") };
            assert_eq!(operation, "allocate");
        }
    }
}
