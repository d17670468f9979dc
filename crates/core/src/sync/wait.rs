//! How a thread waits: deadlines, polling, and a bell that wakes it.

use std::cell::{Cell, RefCell};
use std::env::VarError;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::{AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, SPIN_POLLS, YIELD_TIME, fence};
use crate::types::{Error, warn};

/// The longest time limit, ten years: a longer one may exceed the range of the clock.
pub const ENDLESS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The start of an operation and its time limit.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    /// Creates a deadline that starts now and passes after `limit`, or after ten years if `limit` is longer.
    pub fn after(limit: Duration) -> Self {
        Deadline { start: Instant::now(), limit: limit.min(ENDLESS) }
    }

    /// When the operation began.
    #[doc(hidden)]
    pub fn start(&self) -> Instant {
        self.start
    }

    /// Returns the time since the operation began.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns the time left: zero once the deadline has passed.
    pub fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.elapsed())
    }

    /// Whether the deadline has passed.
    pub fn passed(&self) -> bool {
        self.elapsed() >= self.limit
    }

    /// The whole time limit.
    #[doc(hidden)]
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// A tenth of the limit: a wait of this length is logged.
    #[doc(hidden)]
    pub fn tenth(&self) -> Duration {
        self.limit / 10
    }
}

/// Logs one warning when a wait has lasted a tenth of its time limit.
pub struct SlowWaitWarning<'a> {
    deadline: &'a Deadline,
    warned: bool,
}

impl<'a> SlowWaitWarning<'a> {
    /// Creates the warning of a wait until this deadline. Nothing is logged yet.
    pub fn until(deadline: &'a Deadline) -> Self {
        SlowWaitWarning { deadline, warned: false }
    }

    /// Time until the warning is due; after it, time until the deadline.
    pub fn pause(&self) -> Duration {
        if self.warned {
            self.deadline.remaining()
        } else {
            self.deadline.tenth().saturating_sub(self.deadline.elapsed())
        }
    }

    /// Whether the wait has lasted so long that the warning is due, or was.
    pub fn is_due(&self) -> bool {
        self.is_overdue(Duration::ZERO)
    }

    /// Whether the warning is due for this time already, or for a tenth of the limit.
    pub(crate) fn is_overdue(&self, time: Duration) -> bool {
        self.deadline.elapsed() >= self.deadline.tenth() + time.min(self.deadline.tenth())
    }

    /// Says that a rank has waited for long, if it is due and not done yet. `waiting` says in which operation and for
    /// which ranks, which all ranks that wait say alike; and where ranks are, if that is known.
    pub fn warn(&mut self, rank: usize, waiting: impl FnOnce() -> (String, String)) {
        let elapsed = self.deadline.elapsed();
        if !self.warned && elapsed >= self.deadline.tenth() {
            self.warned = true;
            let (what, places) = waiting();
            let places = if places.is_empty() { places } else { format!(": {places}") };
            warn_of_wait(rank, elapsed, what, places);
        }
    }
}

/// Says that a rank has waited for long: in the log, and to the launcher, which prints it. Without a launcher and a
/// logger it goes to standard error.
pub(crate) fn warn_of_wait(rank: usize, elapsed: Duration, what: String, places: String) {
    let text = format!("rank {rank} has waited {elapsed:.1?} {what}{places}");
    #[cfg(unix)]
    if crate::report::waits(elapsed, what, places) {
        return log::warn!("{text}");
    }
    warn(format_args!("{text}"));
}

/// The environment variable with the deadline of operations, in seconds.
pub(crate) const DEADLINE_VARIABLE: &str = "BONFIRE_DEADLINE";

/// Returns the deadline that the environment sets, if it sets one.
pub fn deadline_from_env() -> Result<Option<Duration>, Error> {
    from_env(|variable| seconds_from_env(variable, DEADLINE_VARIABLE))
}

/// Calls `read` with a function that looks up environment variables. One that is set to something other than UTF-8 is
/// an error: it would otherwise count as not set, and a default as what was asked for.
pub(crate) fn from_env<T>(read: impl FnOnce(&dyn Fn(&str) -> Option<String>) -> Result<T, Error>) -> Result<T, Error> {
    let malformed = RefCell::new(None);
    let variable = |name: &str| match std::env::var(name) {
        Ok(text) => Some(text),
        Err(VarError::NotPresent) => None,
        Err(VarError::NotUnicode(text)) => {
            malformed.borrow_mut().get_or_insert(Error::Config(format!("{name} is {text:?}, which is not UTF-8")));
            None
        }
    };
    let result = read(&variable);
    malformed.into_inner().map_or(result, Err)
}

/// Parses the environment variable `name` as a time in seconds. `variable` looks it up.
pub(crate) fn seconds_from_env(
    variable: impl Fn(&str) -> Option<String>,
    name: &str,
) -> Result<Option<Duration>, Error> {
    let Some(text) = variable(name) else { return Ok(None) };
    let seconds = text.trim().parse::<f64>().ok().filter(|seconds| *seconds > 0.0);
    match seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
        Some(seconds) => Ok(Some(seconds)),
        None => Err(Error::Config(format!("{name} is '{text}': give a positive number of seconds"))),
    }
}

/// Locks a mutex even if a thread panicked while holding it: only for data that are consistent after every statement.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes threads that wait for a change of atomic or shared state.
#[derive(Default)]
pub struct Bell {
    sleepers: AtomicUsize,
    mutex: Mutex<()>,
    changed: Condvar,
}

impl Bell {
    /// Wakes all sleepers. Call it after the change.
    pub fn ring(&self) {
        // The change comes before this fence and the load after it; a sleeper counts itself, passes its own fence, and
        // looks for the change. So either we see the sleeper or it sees the change (the store-buffer pattern, which
        // needs SeqCst fences on both sides).
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            drop(lock(&self.mutex));
            self.changed.notify_all();
        }
    }

    /// Sleeps until `ready` returns true or the time is `until`. Returns the last result of `ready`.
    pub fn sleep(&self, until: Instant, mut ready: impl FnMut() -> bool) -> bool {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Holding the mutex from the check to the wait keeps a ring between the two from being lost.
        let mut guard = lock(&self.mutex);
        let answer = loop {
            if ready() {
                break true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            guard = self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        answer
    }
}

/// Whether `ranks` ranks on one machine have to share processors.
pub fn oversubscribed(ranks: usize) -> bool {
    ranks > std::thread::available_parallelism().map_or(1, usize::from)
}

/// Polls `ready` for a moment without sleeping; returns whether it became true. Spins only if every rank can have a
/// core of its own (not `oversubscribed`), then yields, which lets a peer on the same core run.
pub fn spin(oversubscribed: bool, mut ready: impl FnMut() -> bool) -> bool {
    for _ in 0..if oversubscribed { 1 } else { SPIN_POLLS } {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    while start.elapsed() < YIELD_TIME && yield_now() {
        if ready() {
            return true;
        }
    }
    false
}

/// A yield that takes longer has given another thread its time slice, of some milliseconds. A peer that answers, even
/// one that first reduces a large part, takes less.
const LONG_YIELD: Duration = Duration::from_micros(500);

/// How long a thread sleeps instead of yielding after one such yield, and at most, after several in a row. Between two
/// hosts whose cores all compute, a training step exposes 0.04 of its exchange so, and 0.34 if threads always yield.
const WITHOUT_YIELDS: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(200)];

/// Lets another thread run. Returns false, and does nothing, if the caller should sleep instead: this thread's yields
/// have lately let a thread compute for its whole time slice. The scheduler lets a thread that yields wait for its
/// turn, and one that sleeps run soon after it is woken.
pub fn yield_now() -> bool {
    thread_local! {
        /// Until when this thread does not yield, and for how long since the last long yield.
        static BUSY: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
    }
    let (before, busy) = (Instant::now(), BUSY.get());
    if busy.is_some_and(|(until, _)| before < until) {
        return false;
    }
    std::thread::yield_now();
    let after = Instant::now();
    BUSY.set(without_yields(after - before, busy.map(|(_, pause)| pause)).map(|pause| (after + pause, pause)));
    true
}

/// How long a thread does not yield after a yield that took this time. `before` is the pause that ended with that
/// yield, if there was one.
fn without_yields(took: Duration, before: Option<Duration>) -> Option<Duration> {
    let [least, most] = WITHOUT_YIELDS;
    (took > LONG_YIELD).then(|| before.map_or(least, |before| (2 * before).min(most)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_yields_in_a_row_are_tried_ever_more_rarely() {
        let millis = |count| Some(Duration::from_millis(count));
        assert_eq!(without_yields(LONG_YIELD, None), None);
        assert_eq!(without_yields(LONG_YIELD, millis(160)), None);
        let pauses = std::iter::successors(without_yields(Duration::from_millis(3), None), |pause| {
            without_yields(Duration::from_millis(3), Some(*pause))
        });
        assert_eq!(pauses.take(7).map(Some).collect::<Vec<_>>(), [10, 20, 40, 80, 160, 200, 200].map(millis));
    }
}
