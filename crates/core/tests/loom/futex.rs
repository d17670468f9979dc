//! In the place of `transport::shm::futex`, the system's: a sleeper that nobody wakes sleeps for ever, which loom reports as a deadlock.
//!
//! The mutex is the system's own lock, so a rank that was woken has seen what came before the ring, whatever orderings the
//! ring has. Where the orderings matter, loom shows it on ranks that come just too late to sleep.

use std::time::Duration;

use crate::sync::{AtomicU32, Condvar, Mutex, Ordering, lock};

#[derive(Default)]
pub(super) struct Futex {
    pub rings: AtomicU32,
    mutex: Mutex<()>,
    changed: Condvar,
}

impl Futex {
    /// Loom's clock stands still: a nap is for ever, or over.
    pub fn wait(&self, heard: u32, nap: Duration) {
        let guard = lock(&self.mutex);
        if !nap.is_zero() && self.rings.load(Ordering::Relaxed) == heard {
            drop(self.changed.wait(guard));
        }
    }

    pub fn wake(&self) {
        drop(lock(&self.mutex));
        self.changed.notify_one();
    }
}
