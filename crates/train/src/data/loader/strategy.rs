//! What a training loop that a library owns tells a loader, which that library's interface has no words for.
//!
//! Such a loop has a loader for all ranks, and asks it for slices of the samples: a loader that is made for ranks must
//! not slice again. It asks for one iterator after the other: a training that resumes goes on with a later epoch than
//! the first.

use std::cell::{Cell, RefCell};

use bonfire_core::Group;

thread_local! {
    /// The rank for which this thread slices a loader.
    static GROUP: RefCell<Option<Group>> = const { RefCell::new(None) };
    /// The epoch for which this thread makes an iterator.
    static EPOCH: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Runs `slice`, which asks a loader of all ranks for the part of this rank of `group`. A loader that is sharded
/// already returns one for that rank, whatever the slice.
pub fn for_rank<T>(group: &Group, slice: impl FnOnce() -> T) -> T {
    struct Reset(Option<Group>);
    impl Drop for Reset {
        fn drop(&mut self) {
            GROUP.replace(self.0.take());
        }
    }
    let _reset = Reset(GROUP.replace(Some(group.clone())));
    slice()
}

/// Runs `iterate`, which asks a loader for an iterator of this epoch, counted from 0.
pub fn at_epoch<T>(epoch: usize, iterate: impl FnOnce() -> T) -> T {
    struct Reset(Option<usize>);
    impl Drop for Reset {
        fn drop(&mut self) {
            EPOCH.set(self.0);
        }
    }
    let _reset = Reset(EPOCH.replace(Some(epoch)));
    iterate()
}

pub(super) fn group() -> Option<Group> {
    GROUP.with_borrow(Clone::clone)
}

pub(super) fn epoch() -> Option<usize> {
    EPOCH.get()
}
