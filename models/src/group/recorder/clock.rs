//! Stands for the system's clock: the one writer of a model says what time it is.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

pub(crate) struct Clock {
    pub start: Instant,
    /// Nanoseconds since then. Loom, which runs all threads on one, hears nothing of it.
    pub now: AtomicU64,
}

impl Clock {
    pub fn new() -> Clock {
        Clock { start: Instant::now(), now: AtomicU64::new(0) }
    }

    pub fn at(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.start).as_nanos() as u64
    }

    pub fn coarse(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }
}
