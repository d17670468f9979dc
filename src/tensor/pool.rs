//! Memory for results, kept from one operation to the next.
//!
//! The system gives fresh memory page by page, each at its first touch and zeroed: for large results that takes longer
//! than the operation itself. A training step makes results of the same sizes as the step before, which has dropped its
//! own by then.

use std::mem::MaybeUninit;
use std::sync::Mutex;

use burn::tensor::Bytes;
use cubecl_common::bytes::{AllocationController, AllocationProperty};

use crate::wait::lock;

/// Shorter ones the allocator has at hand.
const SHORTEST: usize = 1 << 20;

/// Bytes that a process keeps at most.
const MOST: usize = 256 << 20;

static KEPT: Mutex<Vec<Vec<u128>>> = Mutex::new(Vec::new());

/// So many initialised bytes, whatever they are.
pub(crate) fn bytes(len: usize) -> Bytes {
    let block = take(len.div_ceil(size_of::<u128>()));
    // SAFETY: the block has as many, and all of it is initialised.
    unsafe { Bytes::from_controller(Box::new(Lent(block)), len) }
}

/// A block of at least so many units, and not of many more.
fn take(units: usize) -> Vec<u128> {
    let mut kept = lock(&KEPT);
    let fits = |block: &Vec<u128>| block.len() >= units && block.len() / 2 <= units;
    let best = (0..kept.len()).filter(|i| fits(&kept[*i])).min_by_key(|i| kept[*i].len());
    best.map(|i| kept.remove(i)).unwrap_or_else(|| {
        drop(kept);
        vec![0; units]
    })
}

fn give(block: Vec<u128>) {
    let mut kept = lock(&KEPT);
    kept.push(block);
    let mut bytes: usize = kept.iter().map(|block| size_of_val(&**block)).sum();
    // The oldest go first: nothing has wanted them for longest.
    while bytes > MOST {
        bytes -= size_of_val(&*kept.remove(0));
    }
}

/// A block that a tensor has.
struct Lent(Vec<u128>);

impl AllocationController for Lent {
    fn alloc_align(&self) -> usize {
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        let memory: *mut [u8] = bytemuck::cast_slice_mut(&mut self.0);
        // SAFETY: the layout is the same, and the caller writes initialised bytes only.
        unsafe { &mut *(memory as *mut [MaybeUninit<u8>]) }
    }

    fn memory(&self) -> &[MaybeUninit<u8>] {
        let memory: *const [u8] = bytemuck::cast_slice(&self.0);
        // SAFETY: the layout is the same, and initialised bytes may be looked at as bytes that may not be.
        unsafe { &*(memory as *const [MaybeUninit<u8>]) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let block = std::mem::take(&mut self.0);
        if size_of_val(&*block) >= SHORTEST {
            give(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, since the pool is one.
    #[test]
    fn blocks_are_used_again_where_they_fit_and_kept_within_bounds() {
        let mut first = bytes(3 * SHORTEST + 5);
        first.fill(7);
        let place = first.as_ptr();
        drop(first);
        assert_ne!(bytes(SHORTEST).as_ptr(), place, "much too long");
        let again = bytes(2 * SHORTEST);
        assert_eq!((again.as_ptr(), again.len()), (place, 2 * SHORTEST));
        assert!(again.iter().all(|byte| *byte == 7));
        drop(again);

        let many: Vec<_> = (0..5).map(|_| bytes(MOST / 4)).collect();
        drop(many);
        assert!(lock(&KEPT).iter().map(|block| size_of_val(&**block)).sum::<usize>() <= MOST);
        drop(bytes(2 * MOST));
        assert!(lock(&KEPT).is_empty(), "one that is too long for the pool");
        drop(bytes(10));
        assert!(lock(&KEPT).is_empty(), "a short one");
    }
}
