//! Polling of GPUs from the host, with backoff: nothing wakes the host.

use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::{Deadline, Error};

/// How long a wait yields before it sleeps.
const SHORT: Duration = Duration::from_millis(2);
/// The longest time between two questions to the driver.
const SELDOM: Duration = Duration::from_millis(100);

/// The pause between two polls. At first it yields, for about as long as a small call takes, or NCCL to enqueue an
/// operation. Then it sleeps, longer and longer: NCCL may connect ranks for seconds, and polling should cost little.
#[derive(Default)]
pub(crate) struct Backoff {
    began: Option<Instant>,
    /// After how long the driver is asked next.
    next: Duration,
}

impl Backoff {
    /// Whether to ask the driver, which takes microseconds and a lock that threads which enqueue work need: once the
    /// wait is long, then each time it has become twice as long, and at least every [`SELDOM`].
    pub fn asks_driver(&mut self) -> bool {
        self.began.is_some_and(|began| self.is_due(began.elapsed()))
    }

    fn is_due(&mut self, waited: Duration) -> bool {
        let due = waited >= self.next.max(SHORT);
        if due {
            self.next = waited + waited.min(SELDOM);
        }
        due
    }

    pub fn wait(&mut self) {
        let waited = self.began.get_or_insert_with(Instant::now).elapsed();
        if waited < SHORT {
            thread::yield_now();
        } else {
            thread::sleep((waited / 10).min(Duration::from_micros(500)));
        }
    }
}

/// Waits, after a failure, until streams are idle. Work on them waits for words that kernels launched earlier write. If
/// such a launch failed, which a server may not report, nothing writes the word; after half the time `release` has to.
pub(crate) fn wait_idle(idle: impl Fn() -> bool, release: impl Fn()) -> Result<(), Error> {
    const GRACE: Duration = Duration::from_secs(10);
    let deadline = Deadline::after(2 * GRACE);
    let mut backoff = Backoff::default();
    while !idle() {
        if deadline.passed() {
            let reason = format!("still running after {:.0?}; its memory is not freed", deadline.elapsed());
            return Err(Error::broken("waiting for failed work on the GPU", reason));
        }
        if deadline.elapsed() > GRACE {
            // Repeated, because a late kernel may overwrite the word.
            release();
        }
        backoff.wait();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_asked_seldom() {
        let mut backoff = Backoff::default();
        assert!(!backoff.asks_driver(), "the first poll");
        let asked: Vec<u64> = (0..500).filter(|waited| backoff.is_due(Duration::from_millis(*waited))).collect();
        assert_eq!(asked, [2, 4, 8, 16, 32, 64, 128, 228, 328, 428]);
    }
}
