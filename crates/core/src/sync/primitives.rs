//! What threads hand each other things with, and how long they look before they sleep.

use std::cell::UnsafeCell;
use std::time::Duration;

pub(crate) use std::sync::atomic::*;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// Data that threads access in turns of their own making.
#[repr(transparent)]
pub(crate) struct Cell<T>(UnsafeCell<T>);

impl<T> Cell<T> {
    pub fn new(data: T) -> Cell<T> {
        Cell(UnsafeCell::new(data))
    }

    /// For a thread whose turn it is to read.
    pub fn reading(&self) -> *const T {
        self.0.get()
    }

    /// For a thread whose turn it is to write.
    pub fn writing(&self) -> *mut T {
        self.0.get()
    }
}

/// How often a thread looks before it yields.
pub(crate) const SPINS: usize = 40;

/// How often a reader whom a writer overtakes begins again before it gives up.
pub(crate) const TRIES: usize = 1000;

/// How long a thread yields before it sleeps. A peer that is at the same place answers within some microseconds, and a
/// sleep and a wake cost more than that. Measured in time, not in yields: on a busy machine one yield can take a whole
/// time slice of somebody else's.
pub(crate) const YIELDING: Duration = Duration::from_micros(50);

/// Without progress for this long, ranks tell each other what they called: those that disagree may wait for each other.
#[cfg(unix)]
pub(crate) const STALL: Duration = Duration::from_millis(200);

/// The shortest sleep of a thread that looks for progress between two.
#[cfg(unix)]
pub(crate) const NAP: Duration = Duration::from_millis(1);
