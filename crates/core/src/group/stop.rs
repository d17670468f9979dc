//! What a process knows of requests to stop, between the signal, the trainings of its ranks, and its launcher.
//!
//! A signal reaches one process, at any moment, and all ranks must stop after the same step. So the signal only sets a
//! word here. Each rank sends the word with its next step, the ranks evaluate the words of all, and after this step the
//! program of each rank hears the same answer when it asks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[cfg(unix)]
use super::interrupt;
#[cfg(unix)]
use crate::report;

/// Whether this process was asked to stop, and its program can hear of it.
static REQUESTED: AtomicBool = AtomicBool::new(false);
/// Whether the program has heard that the ranks have agreed to stop.
static HEARD: AtomicBool = AtomicBool::new(false);
/// The steps that a rank of the program had made when it asked last.
static STEPS: AtomicU64 = AtomicU64::new(0);

// Relaxed everywhere: each of the three is a fact by itself, and publishes nothing else.

/// Whether this process was asked to stop. A rank says so in its next step.
pub fn stop_is_requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Says that the program of a rank, after so many steps, asks whether it should stop, and what it hears. From the first
/// call on, the stop signal waits for the next step.
pub fn answer_stop(steps: u64, stop: bool) {
    STEPS.store(steps, Ordering::Relaxed);
    #[cfg(unix)]
    interrupt::wait_for_steps();
    // Once in a process.
    if stop && !HEARD.swap(true, Ordering::Relaxed) {
        #[cfg(unix)]
        report::stops(steps);
    }
}

/// Asks this process to stop.
#[cfg(unix)]
pub(super) fn request() {
    REQUESTED.store(true, Ordering::Relaxed);
}

/// Whether the program has heard that the ranks have agreed to stop.
#[cfg(unix)]
pub(super) fn is_heard() -> bool {
    HEARD.load(Ordering::Relaxed)
}

/// Returns the number of the step whose end the program waits for.
#[cfg(unix)]
pub(super) fn next_step() -> u64 {
    STEPS.load(Ordering::Relaxed) + 1
}
