//! What threads hand each other things with, and how they wait. Under `cfg(bonfire_loom)` the models in `tests/loom/` put
//! loom's in their place, which tries the orders in which threads can see each other's steps.

mod wait;

use std::cell::UnsafeCell;
use std::time::Duration;

pub(crate) use std::sync::atomic::*;
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

pub use self::wait::Deadline;
pub(crate) use self::wait::seconds_from_env;
pub use self::wait::{Bell, ENDLESS, Patience, crowded, deadline_from_env, lock, spin};

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
