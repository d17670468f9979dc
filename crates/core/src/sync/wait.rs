//! How a thread waits: deadlines, and a bell that others ring.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::{AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, SPINS, YIELDING, fence};
use crate::types::Error;

/// A limit beyond what the clock can say is none: ten years are as good.
pub const ENDLESS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// When an operation began and how long it may take.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    /// Begins now and ends after `limit`.
    pub fn after(limit: Duration) -> Self {
        Deadline { start: Instant::now(), limit: limit.min(ENDLESS) }
    }

    /// When it began.
    pub(crate) fn start(&self) -> Instant {
        self.start
    }

    /// Time since it began.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Time left; zero once it has passed.
    pub fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.elapsed())
    }

    /// Whether it has passed.
    pub fn passed(&self) -> bool {
        self.elapsed() >= self.limit
    }

    /// The whole limit.
    #[cfg(feature = "mpi")]
    pub(crate) fn nanoseconds(&self) -> u64 {
        u64::try_from(self.limit.as_nanos()).unwrap_or(u64::MAX)
    }

    /// As long a limit once more, from now on.
    #[cfg(feature = "mpi")]
    pub(crate) fn again(&self) -> Self {
        Deadline::after(self.limit)
    }

    /// A tenth of the limit: when a wait is long enough to say so in the log.
    #[doc(hidden)]
    pub fn tenth(&self) -> Duration {
        self.limit / 10
    }
}

/// Says once in the log that a wait has become long: at a tenth of its deadline.
pub struct Patience<'a> {
    deadline: &'a Deadline,
    warned: bool,
}

impl<'a> Patience<'a> {
    /// Has said nothing yet of a wait until this deadline.
    pub fn until(deadline: &'a Deadline) -> Self {
        Patience { deadline, warned: false }
    }

    /// Time until there is something to say, or to give up.
    pub fn pause(&self) -> Duration {
        if self.warned {
            self.deadline.remaining()
        } else {
            self.deadline.tenth().saturating_sub(self.deadline.elapsed())
        }
    }

    /// Says it if it is time and nothing was said yet; `waiting` says where and for whom.
    pub fn warn(&mut self, rank: usize, waiting: impl FnOnce() -> String) {
        let elapsed = self.deadline.elapsed();
        if !self.warned && elapsed >= self.deadline.tenth() {
            self.warned = true;
            log::warn!("rank {rank} has waited {elapsed:.1?} {}", waiting());
        }
    }
}

/// `BONFIRE_DEADLINE`, in seconds, read through `variable`.
pub fn deadline_from_env(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Duration>, Error> {
    seconds_from_env(variable, "BONFIRE_DEADLINE")
}

/// A length of time in seconds, read through `variable`.
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

/// Locks also what a panicking thread left: for mutexes behind which everything is whole after every statement.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes threads that wait for a change of some atomic or shared state.
#[derive(Default)]
pub struct Bell {
    sleepers: AtomicUsize,
    mutex: Mutex<()>,
    changed: Condvar,
}

impl Bell {
    /// Wakes the sleepers. Call it after the change.
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

    /// Sleeps until `ready` or until `until`; returns what `ready` last said.
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

/// Whether so many ranks in one machine have to share processors.
pub fn crowded(ranks: usize) -> bool {
    ranks > std::thread::available_parallelism().map_or(1, usize::from)
}

/// Looks at `ready` for a moment without sleeping. Spins only where every rank can have a core of its own (`crowded` says
/// that it can't), then yields, which lets a peer on the same core run.
pub fn spin(crowded: bool, mut ready: impl FnMut() -> bool) -> bool {
    for _ in 0..if crowded { 1 } else { SPINS } {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    while start.elapsed() < YIELDING {
        std::thread::yield_now();
        if ready() {
            return true;
        }
    }
    false
}
