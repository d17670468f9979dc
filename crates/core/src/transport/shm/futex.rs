//! A futex: sleeping on a word of shared memory.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex::{Flags, Timespec, wait, wake};

/// A word that counts rings. A rank that rings first increments it and then calls [`wake`](Futex::wake).
#[derive(Default)]
#[repr(transparent)]
pub(super) struct Futex {
    pub rings: AtomicU32,
}

impl Futex {
    /// Sleeps for at most `nap`. Returns at once if the word is not `heard` any more: the system compares and sleeps
    /// atomically. May wake spuriously.
    pub fn wait(&self, heard: u32, nap: Duration) {
        let nap = Timespec { tv_sec: nap.as_secs() as _, tv_nsec: nap.subsec_nanos() as _ };
        // Woken, interrupted or too late to sleep: the caller checks its condition again in any case.
        let _ = wait(&self.rings, Flags::empty(), heard, Some(&nap));
    }

    /// Wakes the sleeping rank, if it sleeps.
    pub fn wake(&self) {
        // Not process-private: the sleeper is in another process. Fails only for invalid addresses.
        let _ = wake(&self.rings, Flags::empty(), 1);
    }
}
