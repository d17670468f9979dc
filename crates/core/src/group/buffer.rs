//! Buffers in memory that suits a group.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::{fmt, io};

use crate::transport::Storage;
use crate::types::{Element, Error};

/// Elements in memory that suits a group; [`Group::allocate`](crate::Group::allocate) makes it.
///
/// Where ranks are processes of one host, it is memory that they share. An operation on more than 1 KiB then runs
/// straight between the buffers if every rank's buffers are of this kind, those that the other ranks have to reach. Else
/// it runs as on any other memory. An output may be a part of a buffer, if it begins at a multiple of 64 KiB and ends at
/// one or with the buffer: after a failure its pages are taken back from the others, with nothing else on them.
///
/// A buffer works with every group and outlives the one that it is from. Dropped, its memory is kept for the next
/// buffers, up to 256 MiB on each rank: a program may make its buffers anew in every step.
///
/// The other processes of the group could write to a buffer at any time, as threads could. Sound ones do it in an
/// operation on it only.
pub struct Buffer<T> {
    memory: Memory<T>,
    len: usize,
}

enum Memory<T> {
    Ordinary(Box<[T]>),
    Suited(Box<dyn Storage>, PhantomData<T>),
}

impl<T: Element> Buffer<T> {
    pub(super) fn new(
        len: usize,
        suited: impl FnOnce(usize) -> Option<io::Result<Box<dyn Storage>>>,
    ) -> Result<Self, Error> {
        let failed = |bytes: usize, reason: &dyn fmt::Display| {
            let text = format!("a buffer of {} MiB is not to be had: {reason}", bytes.div_ceil(1 << 20));
            Error::io("allocate", io::Error::new(io::ErrorKind::OutOfMemory, text))
        };
        let none = "there is not so much memory";
        // No object is larger, whatever the machine.
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or_else(|| failed(usize::MAX, &none))?;
        let memory = match suited(bytes) {
            Some(storage) => Memory::Suited(storage.map_err(|e| failed(bytes, &e))?, PhantomData),
            None => {
                Memory::Ordinary(bytemuck::allocation::try_zeroed_slice_box(len).map_err(|()| failed(bytes, &none))?)
            }
        };
        Ok(Buffer { memory, len })
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Ordinary(elements) => elements,
            // SAFETY: as `Storage` promises, the memory is valid for the bytes that were asked for, which `len` elements
            // have, and aligned; it began as zeros, and any bytes are elements. The borrow is of this buffer, which
            // alone has it.
            Memory::Suited(storage, _) => unsafe {
                std::slice::from_raw_parts(storage.start().cast().as_ptr(), self.len)
            },
        }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Ordinary(elements) => elements,
            // SAFETY: as above, and the borrow is exclusive.
            Memory::Suited(storage, _) => unsafe {
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

/// Zeros in ordinary memory, of a length that other ranks may have named.
pub fn zeroed<T: Element>(operation: &str, len: usize) -> Result<Vec<T>, Error> {
    let short = |()| {
        let text = format!("there is no memory for {len} elements of {}", T::DTYPE);
        Error::io(operation, io::Error::new(io::ErrorKind::OutOfMemory, text))
    };
    bytemuck::allocation::try_zeroed_vec(len).map_err(short)
}
