//! Whether the ranks have agreed to stop.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bonfire_core::internal::answer_stop;

/// What the trailers of a model's steps have said of requests to stop. All ranks have the same after the same step.
// Relaxed: a program that makes steps and asks on several threads orders them.
#[derive(Default)]
pub(crate) struct Stopping {
    agreed: AtomicBool,
    /// The steps whose trailers were read.
    steps: AtomicU64,
}

impl Stopping {
    /// Takes note of a step's trailers, while the program waits for the end of the step. `by` is the lowest rank that
    /// was asked to stop, if any was.
    pub fn end_step(&self, by: Option<usize>) {
        let step = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(rank) = by
            && !self.agreed.swap(true, Ordering::Relaxed)
        {
            log::info!("rank {rank} was asked to stop: all ranks hear of it after training step {step}");
        }
    }

    /// Answers the program. From its first question on, a signal waits for the end of a step.
    pub fn answer(&self) -> bool {
        let stop = self.agreed.load(Ordering::Relaxed);
        answer_stop(self.steps.load(Ordering::Relaxed), stop);
        stop
    }
}
