//! In the place of `sync::primitives`: loom's atomics, locks and cells.

use std::time::Duration;

pub(crate) use loom::sync::atomic::*;
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

/// A loom cell: an access that is not ordered after an earlier one of another thread fails the model. What is told to loom
/// is the beginning of an access; so a thread that begins to read in its turn and goes on for too long is found where the
/// next writer begins.
pub(crate) struct Cell<T>(loom::cell::UnsafeCell<T>);

impl<T> Cell<T> {
    pub fn new(data: T) -> Cell<T> {
        Cell(loom::cell::UnsafeCell::new(data))
    }

    pub fn reading(&self) -> *const T {
        self.0.with(|data| data)
    }

    pub fn writing(&self) -> *mut T {
        self.0.with_mut(|data| data)
    }
}

/// A thread that looks again learns nothing that loom does not try anyway.
pub(crate) const SPINS: usize = 1;
pub(crate) const TRIES: usize = 1;
pub(crate) const YIELDING: Duration = Duration::ZERO;

/// The clock stands still as long as a model runs, so that it takes the same steps in every run: a thread looks further
/// than for its peer when its deadline has passed from the start, or never.
pub(crate) const STALL: Duration = Duration::MAX;
pub(crate) const NAP: Duration = Duration::ZERO;
