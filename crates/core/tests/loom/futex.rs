//! Replaces `transport::shm::futex`, the system's futex. A sleeper that no thread wakes sleeps forever, which loom
//! reports as a deadlock.
//!
//! The mutex stands for the kernel's own lock. A rank that was woken has therefore seen what came before the ring,
//! whatever memory ordering the ring has. Where the orderings matter, loom shows it on ranks that arrive just too late
//! to sleep.

use std::time::Duration;

use crate::sync::{AtomicU32, Condvar, Mutex, Ordering, lock};

#[derive(Default)]
pub(super) struct Futex {
    pub rings: AtomicU32,
    mutex: Mutex<()>,
    changed: Condvar,
}

impl Futex {
    /// Loom's clock stands still: a nap lasts forever or is already over.
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
