//! Sleeping in shared memory until a peer, or the rank's own control thread, rings.

use std::time::Duration;

use super::futex::Futex;
use crate::sync::{AtomicU32, Ordering, fence};

/// The place where one rank sleeps. Only that rank writes `waits_for`; a thread that wakes it increments `bell`.
#[derive(Default)]
#[repr(C)]
pub(super) struct Sleeper {
    /// The rank for whose next step this rank sleeps, plus one; 0 while it is awake.
    waits_for: AtomicU32,
    bell: Futex,
}

impl Sleeper {
    /// Wakes the rank whose sleeper this is, whatever it waits for.
    pub fn ring(&self) {
        // Release: a thread that sees the new count sees what was done before. The count wraps around after four
        // billion rings; a sleeper would have to miss all of them in one sleep.
        self.bell.rings.fetch_add(1, Ordering::Release);
        self.bell.wake();
    }

    /// Wakes the rank if it waits for `rank`, the caller, which has passed a SeqCst fence since it stored its step.
    pub fn ring_for(&self, rank: usize) {
        if self.waits_for.load(Ordering::Relaxed) == rank as u32 + 1 {
            self.ring();
        }
    }

    /// Sleeps until `rank` makes a step, another event rings, or `nap` is over. Returns at once if `awake`, which is
    /// called after this rank has announced that it sleeps, finds that there is nothing to wait for.
    pub fn sleep_for(&self, rank: usize, nap: Duration, awake: impl FnOnce() -> bool) {
        // Acquire: `awake` sees what happened before a ring that is counted already.
        let heard = self.bell.rings.load(Ordering::Acquire);
        self.waits_for.store(rank as u32 + 1, Ordering::Relaxed);
        // The peer stores its step, passes its fence and checks for sleepers. This rank announces that it sleeps,
        // passes its fence and checks for the step. So one of the two sees the other (the store-buffer pattern, which
        // needs SeqCst fences on both sides). A ring from here on changes the word, so the futex does not sleep.
        fence(Ordering::SeqCst);
        if !awake() {
            self.bell.wait(heard, nap);
        }
        self.waits_for.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    /// Longer than a test may take: a lost wake-up makes it fail.
    const MIN_SLEEP: Duration = Duration::from_secs(60);

    #[test]
    fn no_wake_up_is_lost() {
        const TURNS: u64 = 10_000;
        let (sleepers, step, start) = ([Sleeper::default(), Sleeper::default()], AtomicU64::new(0), Instant::now());
        std::thread::scope(|scope| {
            for me in 0..2usize {
                let (sleepers, step) = (&sleepers, &step);
                scope.spawn(move || {
                    for mine in (0..TURNS).map(|turn| 2 * turn + me as u64) {
                        let ready = || step.load(Ordering::Acquire) >= mine;
                        while !ready() {
                            sleepers[me].sleep_for(1 - me, MIN_SLEEP, ready);
                        }
                        step.store(mine + 1, Ordering::Release);
                        fence(Ordering::SeqCst);
                        sleepers[1 - me].ring_for(me);
                    }
                });
            }
        });
        assert!(start.elapsed() < MIN_SLEEP, "{:?}", start.elapsed());
    }

    #[test]
    fn a_ring_between_the_last_check_and_the_sleep_is_not_lost() {
        let (sleeper, start) = (Sleeper::default(), Instant::now());
        sleeper.sleep_for(1, MIN_SLEEP, || {
            sleeper.ring();
            false
        });
        sleeper.sleep_for(1, MIN_SLEEP, || {
            sleeper.ring_for(1);
            false
        });
        assert!(start.elapsed() < MIN_SLEEP, "{:?}", start.elapsed());
    }

    #[test]
    fn a_ring_wakes_a_rank_that_waits_for_another_one() {
        let (sleeper, failed, start) = (Sleeper::default(), AtomicU64::new(0), Instant::now());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while failed.load(Ordering::Acquire) == 0 {
                    sleeper.sleep_for(1, MIN_SLEEP, || failed.load(Ordering::Acquire) == 1);
                }
            });
            // The other thread sleeps already, or it does not yet.
            failed.store(1, Ordering::Release);
            sleeper.ring();
        });
        assert!(start.elapsed() < MIN_SLEEP, "{:?}", start.elapsed());
    }
}
