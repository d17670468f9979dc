//! Replaces `reduce` for the transports: sums of u64, with their reads and writes reported to loom.

use crate::models::memory;
use crate::types::{DType, ReduceOp};

#[derive(Clone, Copy)]
pub(crate) struct Output(*mut u8);

impl Output {
    pub fn cached(at: *mut u8) -> Output {
        Output(at)
    }

    pub fn of(at: *mut u8, _bytes: usize, _apart: bool) -> Output {
        Output(at)
    }

    /// # Safety
    /// As for the function that it replaces.
    pub unsafe fn copy(self, source: *const u8, bytes: usize) {
        memory::read(source, bytes);
        memory::write(self.0, bytes);
        unsafe { std::ptr::copy_nonoverlapping(source, self.0, bytes) };
    }
}

/// Loom does not model streaming stores.
pub(crate) fn fence_streams() {}

/// # Safety
/// As for the function that it replaces.
pub(crate) unsafe fn reduce_to_all(
    dtype: DType,
    op: ReduceOp,
    elements: usize,
    inputs: impl Iterator<Item = *const u8> + Clone,
    outputs: impl Iterator<Item = Output> + Clone,
) {
    assert_eq!((dtype, op), (DType::U64, ReduceOp::Sum));
    let bytes = elements * size_of::<u64>();
    // Every input is read, and each overwritten one makes the sum wrong.
    let overwritten = inputs.clone().filter(|input| memory::read(*input, bytes)).count() as u64;
    let element =
        |i| inputs.clone().map(|input| unsafe { input.cast::<u64>().add(i).read() }).sum::<u64>() + overwritten;
    let sums: Vec<u64> = (0..elements).map(element).collect();
    for Output(output) in outputs {
        memory::write(output, bytes);
        unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), output.cast(), elements) };
    }
}
