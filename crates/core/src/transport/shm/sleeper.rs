//! How a rank sleeps in shared memory until a peer, or its own control thread, wakes it.

use std::time::Duration;

use super::futex::Futex;
use crate::sync::{AtomicU32, Ordering, fence};

/// Where one rank sleeps. The rank itself says for whom, and whoever wakes it counts the bell up.
#[derive(Default)]
#[repr(C)]
pub(super) struct Sleeper {
    /// The rank whose next step is waited for, plus one; 0 while awake.
    waits_for: AtomicU32,
    bell: Futex,
}

impl Sleeper {
    /// Wakes the rank whose sleeper this is, whatever it waits for.
    pub fn ring(&self) {
        // Release: who sees the new count sees what was done before. It wraps around after four billion wakes, and a
        // sleeper would have to miss them all at once.
        self.bell.rings.fetch_add(1, Ordering::Release);
        self.bell.wake();
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
        let heard = self.bell.rings.load(Ordering::Acquire);
        self.waits_for.store(rank as u32 + 1, Ordering::Relaxed);
        // The peer stores its step, passes its fence and looks for sleepers; this rank says that it sleeps, passes its
        // fence and looks for the step. So one of the two sees the other (the store-buffer pattern, which needs SeqCst
        // fences on both sides). A ring from here on changes the word, and then the futex does not sleep.
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

    /// Longer than the test may take: a wake that is lost makes it fail.
    const NAP: Duration = Duration::from_secs(60);

    #[test]
    fn no_wake_is_lost() {
        const TURNS: u64 = 10_000;
        let (sleepers, step, start) = ([Sleeper::default(), Sleeper::default()], AtomicU64::new(0), Instant::now());
        std::thread::scope(|scope| {
            for me in 0..2usize {
                let (sleepers, step) = (&sleepers, &step);
                scope.spawn(move || {
                    for mine in (0..TURNS).map(|turn| 2 * turn + me as u64) {
                        let ready = || step.load(Ordering::Acquire) >= mine;
                        while !ready() {
                            sleepers[me].sleep_for(1 - me, NAP, ready);
                        }
                        step.store(mine + 1, Ordering::Release);
                        fence(Ordering::SeqCst);
                        sleepers[1 - me].ring_for(me);
                    }
                });
            }
        });
        assert!(start.elapsed() < NAP, "{:?}", start.elapsed());
    }

    #[test]
    fn a_ring_between_the_last_look_and_the_sleep_is_heard() {
        let (sleeper, start) = (Sleeper::default(), Instant::now());
        sleeper.sleep_for(1, NAP, || {
            sleeper.ring();
            false
        });
        sleeper.sleep_for(1, NAP, || {
            sleeper.ring_for(1);
            false
        });
        assert!(start.elapsed() < NAP, "{:?}", start.elapsed());
    }

    #[test]
    fn an_alarm_wakes_who_waits_for_somebody_else() {
        let (sleeper, failed, start) = (Sleeper::default(), AtomicU64::new(0), Instant::now());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while failed.load(Ordering::Acquire) == 0 {
                    sleeper.sleep_for(1, NAP, || failed.load(Ordering::Acquire) == 1);
                }
            });
            // Whether the other sleeps already or not yet.
            failed.store(1, Ordering::Release);
            sleeper.ring();
        });
        assert!(start.elapsed() < NAP, "{:?}", start.elapsed());
    }
}
