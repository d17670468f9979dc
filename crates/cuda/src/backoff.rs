//! Polling of GPUs from the host, with backoff: nothing wakes the host.

use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::{Deadline, Error};

/// How long a wait yields before it sleeps.
const SHORT: Duration = Duration::from_millis(2);

/// The pause between two polls. At first it yields, for about as long as a small call takes, or NCCL to enqueue an
/// operation. Then it sleeps, longer and longer: NCCL may connect ranks for seconds, and polling should cost little.
#[derive(Default)]
pub(crate) struct Backoff(Option<Instant>);

impl Backoff {
    /// Whether the wait has become long, so that what costs microseconds may be polled too.
    pub fn is_long(&self) -> bool {
        self.0.is_some_and(|begin| begin.elapsed() >= SHORT)
    }

    pub fn wait(&mut self) {
        let waited = self.0.get_or_insert_with(Instant::now).elapsed();
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
