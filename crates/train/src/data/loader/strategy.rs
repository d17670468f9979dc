//! What a training loop that a library owns tells a loader, which that library's interface has no words for.
//!
//! Such a loop has a loader for all ranks, and asks it for slices of the samples: a loader that is made for ranks must
//! not slice again. It asks for one iterator after the other: a training that resumes goes on with a later epoch than
//! the first.

use std::cell::RefCell;

use bonfire_core::Group;
use bonfire_core::internal::with_local;

thread_local! {
    /// The rank for which this thread slices a loader.
    static GROUP: RefCell<Option<Group>> = const { RefCell::new(None) };
    /// The epoch for which this thread makes an iterator.
    static EPOCH: RefCell<Option<usize>> = const { RefCell::new(None) };
}

/// Runs `slice`, which asks a loader of all ranks for the part of this rank of `group`. A loader that is sharded
/// already returns one for that rank, whatever the slice.
pub fn for_rank<T>(group: &Group, slice: impl FnOnce() -> T) -> T {
    with_local(&GROUP, group.clone(), slice)
}

/// Runs `iterate`, which asks a loader for an iterator of this epoch, counted from 0.
pub fn at_epoch<T>(epoch: usize, iterate: impl FnOnce() -> T) -> T {
    with_local(&EPOCH, epoch, iterate)
}

pub(super) fn group() -> Option<Group> {
    GROUP.with_borrow(Clone::clone)
}

pub(super) fn epoch() -> Option<usize> {
    EPOCH.with_borrow(|epoch| *epoch)
}
