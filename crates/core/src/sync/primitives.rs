//! Synchronization primitives, and how long threads poll before they sleep.

use std::cell::UnsafeCell;
use std::time::Duration;

pub(crate) use std::sync::atomic::*;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};

/// Data that threads access in turns; a protocol of the threads' own orders the turns.
#[repr(transparent)]
pub(crate) struct Cell<T>(UnsafeCell<T>);

impl<T> Cell<T> {
    pub fn new(data: T) -> Cell<T> {
        Cell(UnsafeCell::new(data))
    }

    /// Returns a pointer for a thread whose turn it is to read.
    pub fn reading(&self) -> *const T {
        self.0.get()
    }

    /// Returns a pointer for a thread whose turn it is to write.
    pub fn writing(&self) -> *mut T {
        self.0.get()
    }
}

/// How many times a thread polls before it yields: about two microseconds. With a spin of 50 µs an all-reduce of 8
/// bytes took 50 instead of 0.5 µs as soon as something else wanted one of the two cores.
pub(crate) const SPIN_POLLS: usize = 40;

/// How many times a reader that a writer overtakes retries before it gives up.
pub(crate) const MAX_READ_RETRIES: usize = 1000;

/// How long a thread yields before it sleeps. A peer at the same point answers within a few microseconds; a sleep and a
/// wakeup cost more. Measured in time, not in yields: on a busy machine one yield can take another thread's whole time
/// slice.
pub(crate) const YIELD_TIME: Duration = Duration::from_micros(50);

/// Time without progress after which ranks compare their calls: ranks that disagree may wait for each other.
#[cfg(unix)]
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_millis(200);

/// The shortest sleep of a thread between two checks for progress.
#[cfg(unix)]
pub(crate) const MIN_SLEEP: Duration = Duration::from_millis(1);
