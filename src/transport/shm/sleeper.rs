//! How a rank sleeps in shared memory until a peer, or its own control thread, wakes it.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::thread::futex::{self, Flags, Timespec};

/// Where one rank sleeps. The rank itself says for whom, and whoever wakes it counts the bell up.
#[repr(C)]
pub(super) struct Sleeper {
    /// The rank whose next step is waited for, plus one; 0 while awake.
    waits_for: AtomicU32,
    /// The futex.
    bell: AtomicU32,
}

impl Sleeper {
    /// Wakes the rank whose sleeper this is, whatever it waits for.
    pub fn ring(&self) {
        // Release: who sees the new count sees what was done before. It wraps around after four billion wakes, and a
        // sleeper would have to miss them all at once.
        self.bell.fetch_add(1, Ordering::Release);
        // Not private to this process: the sleeper is in another one. It fails for bad addresses only.
        let _ = futex::wake(&self.bell, Flags::empty(), 1);
    }

    /// Wakes the rank if it waits for `rank`, which has just stored a step and passed a SeqCst fence since.
    pub fn ring_for(&self, rank: usize) {
        if self.waits_for.load(Ordering::Relaxed) == rank as u32 + 1 {
            self.ring();
        }
    }

    /// Sleeps until `rank` makes a step, or something else rings, or for `nap`. Returns at once where `awake` finds,
    /// once this rank has said that it sleeps, that there is nothing to sleep for.
    pub fn sleep_for(&self, rank: usize, nap: Duration, awake: impl FnOnce() -> bool) {
        // Acquire: a ring that is counted already has happened before `awake` looks.
        let heard = self.bell.load(Ordering::Acquire);
        self.waits_for.store(rank as u32 + 1, Ordering::Relaxed);
        // The peer stores its step, passes its fence and looks for sleepers; this rank says that it sleeps, passes its
        // fence and looks for the step. So one of the two sees the other (the store-buffer pattern, which needs SeqCst
        // fences on both sides). A ring from here on changes the word, and then the futex does not sleep.
        fence(Ordering::SeqCst);
        if !awake() {
            let nap = Timespec { tv_sec: nap.as_secs() as _, tv_nsec: nap.subsec_nanos() as _ };
            // Whether it was woken, interrupted or too late to sleep: the caller looks again.
            let _ = futex::wait(&self.bell, Flags::empty(), heard, Some(&nap));
        }
        self.waits_for.store(0, Ordering::Relaxed);
    }
}
