//! What a process knows of requests to stop, between the signal, the trainings of its ranks, and its launcher.
//!
//! A signal reaches one process, at any moment, and all ranks must stop after the same step. So the signal only sets a
//! word here. Each rank sends the word with its next step, the ranks evaluate the words of all, and after this step the
//! program of each rank hears the same answer when it asks.
//!
//! The word is in the trailer of a step, which every form of training exchanges once, whatever passes a rank runs. In
//! the header it would be a step older: a signal that arrives during a long step would have to wait for the end of the
//! next one.

use std::sync::atomic::{AtomicBool, Ordering};

// Relaxed everywhere: each of these is a fact by itself, and publishes nothing else.

/// Whether this process was asked to stop, and its program can hear of it.
static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Asks all ranks to stop in order, as the [stop signal](crate::Builder::stop_signal) of this process does: after the
/// step that they are in, `should_stop` of a training says so on every rank. For programs that handle the signal
/// themselves, or that stop for reasons of their own, such as a limit of hours.
///
/// One rank calls it, or several. It cannot be taken back, nothing limits how long the step may take, and a signal
/// handler may call it.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// # let group = bonfire_core::Group::threads(1)?.remove(0);
/// let end = Instant::now() + Duration::from_secs(47 * 3600);
/// // in the training loop:
/// if group.rank() == 0 && Instant::now() > end {
///     bonfire_core::request_stop();
/// }
/// # Ok::<(), bonfire_core::Error>(())
/// ```
pub fn request_stop() {
    REQUESTED.store(true, Ordering::Relaxed);
}

/// Whether this process was asked to stop. A rank says so in its next step.
pub fn stop_is_requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Where there are no signals, there is nothing to do.
#[cfg(not(unix))]
pub fn answer_stop(_: u64, _: bool) {}

#[cfg(unix)]
pub(super) use self::answers::{answer, is_heard, next_step};

#[cfg(unix)]
mod answers {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// Whether the program has heard that the ranks have agreed to stop.
    static HEARD: AtomicBool = AtomicBool::new(false);
    /// The steps that a rank of the program had made when it asked last.
    static STEPS: AtomicU64 = AtomicU64::new(0);

    /// Takes note of what the program hears after so many steps. Returns whether this is the first time that it is to
    /// stop.
    pub fn answer(steps: u64, stop: bool) -> bool {
        STEPS.store(steps, Ordering::Relaxed);
        stop && !HEARD.swap(true, Ordering::Relaxed)
    }

    /// Whether the program has heard that the ranks have agreed to stop.
    pub fn is_heard() -> bool {
        HEARD.load(Ordering::Relaxed)
    }

    /// Returns the number of the step whose end the program waits for.
    pub fn next_step() -> u64 {
        STEPS.load(Ordering::Relaxed) + 1
    }
}
