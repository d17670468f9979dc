//! Addresses that GPUs use. Functions take these types and no integers, so that they can say what they need.

use std::ops::Add;

use bytemuck::{Pod, Zeroable};

use bonfire_core::internal::Rows;

/// An address of GPU memory, or of host memory that GPUs can access. It promises nothing: functions that access what is
/// there are `unsafe`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Address(u64);

impl Address {
    /// Returns the address as CUDA's driver has it.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl From<u64> for Address {
    fn from(address: u64) -> Address {
        Address(address)
    }
}

/// The address of what lies so many bytes after it.
impl Add<usize> for Address {
    type Output = Address;

    fn add(self, bytes: usize) -> Address {
        Address(self.0 + bytes as u64)
    }
}

/// A word of 8 bytes by which GPUs and the host signal each other. It lives as long as the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(Address);

impl Word {
    /// The word at this address.
    ///
    /// # Safety
    /// A word of 8 bytes must lie there, aligned, in memory that is never freed and that is used for signals only.
    pub(crate) const unsafe fn at(address: Address) -> Word {
        Word(address)
    }

    /// Returns where it is.
    pub const fn address(self) -> Address {
        self.0
    }
}

/// A copy of rows between addresses that a GPU can access.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Copy {
    pub from: Address,
    pub to: Address,
    pub rows: usize,
    /// Of each row.
    pub bytes: usize,
    /// How many bytes apart rows start, where they are read and where they are written.
    pub pitches: (usize, usize),
}

impl Copy {
    /// A copy of contiguous bytes.
    pub fn of(from: Address, to: Address, bytes: usize) -> Copy {
        Copy { from, to, rows: 1, bytes, pitches: (bytes, bytes) }
    }

    /// A copy of rows, which are contiguous at the target.
    pub fn packing(from: Address, to: Address, Rows { count, bytes, pitch }: Rows) -> Copy {
        Copy { from, to, rows: count, bytes, pitches: (pitch, bytes) }
    }
}
