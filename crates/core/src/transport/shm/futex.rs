//! The system's sleep on a word of memory.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex::{Flags, Timespec, wait, wake};

/// A word that counts rings. Whoever rings counts it up and then wakes.
#[derive(Default)]
#[repr(transparent)]
pub(super) struct Futex {
    pub rings: AtomicU32,
}

impl Futex {
    /// Sleeps for at most `nap`, but not where the word is no longer what was `heard`: the system looks and lies down in
    /// one step. It may also return for nothing.
    pub fn wait(&self, heard: u32, nap: Duration) {
        let nap = Timespec { tv_sec: nap.as_secs() as _, tv_nsec: nap.subsec_nanos() as _ };
        // Whether it was woken, interrupted or too late to sleep: the caller looks again.
        let _ = wait(&self.rings, Flags::empty(), heard, Some(&nap));
    }

    /// Wakes the one that sleeps.
    pub fn wake(&self) {
        // Not private to this process: the sleeper is in another one. It fails for bad addresses only.
        let _ = wake(&self.rings, Flags::empty(), 1);
    }
}
