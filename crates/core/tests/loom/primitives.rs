//! Replaces `sync::primitives` with loom's atomics, locks and cells.

use std::time::Duration;

pub(crate) use loom::sync::atomic::*;
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

/// A cell that is written once. loom has none, and does not see the order that that of `std` gives.
pub(crate) struct OnceLock<T> {
    value: std::sync::OnceLock<T>,
    is_set: AtomicBool,
    making: Mutex<()>,
}

impl<T> OnceLock<T> {
    pub fn new() -> OnceLock<T> {
        OnceLock { value: std::sync::OnceLock::new(), is_set: AtomicBool::new(false), making: Mutex::new(()) }
    }

    pub fn get(&self) -> Option<&T> {
        if self.is_set.load(Ordering::Acquire) { self.value.get() } else { None }
    }

    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        if let Some(value) = self.get() {
            return value;
        }
        let making = self.making.lock();
        let value = self.value.get_or_init(make);
        self.is_set.store(true, Ordering::Release);
        drop(making);
        value
    }
}

/// A loom cell: an access that is not ordered after an earlier access of another thread fails the model. Only the
/// beginning of an access is reported to loom. A thread that begins to read in its turn and reads for too long is
/// therefore detected where the next writer begins.
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

/// Checking again finds nothing that loom does not try anyway.
pub(crate) const SPIN_POLLS: usize = 1;
pub(crate) const MAX_READ_RETRIES: usize = 1;
pub(crate) const YIELD_TIME: Duration = Duration::ZERO;

/// The clock stands still while a model runs, so that it takes the same steps in every run. A thread looks for more
/// than its peer only if its deadline has passed from the start.
pub(crate) const STALL_TIMEOUT: Duration = Duration::MAX;
pub(crate) const MIN_SLEEP: Duration = Duration::ZERO;
