//! The clock of the records: nanoseconds, shared by all processes of a running system if it has such a clock.

use std::time::{Duration, Instant};

/// Converts instants, which mean nothing to other processes, to nanoseconds on the shared clock.
pub(crate) struct Clock {
    instant: Instant,
    /// The system's clock at that instant.
    nanoseconds: u64,
}

impl Clock {
    pub fn new() -> Clock {
        Clock { nanoseconds: system::now(), instant: Instant::now() }
    }

    /// Converts an instant. Instants before this clock was made count as that moment.
    #[inline]
    pub fn at(&self, instant: Instant) -> u64 {
        let since = instant.saturating_duration_since(self.instant);
        self.nanoseconds + since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos())
    }

    /// Returns the time since then, in nanoseconds on this clock.
    pub fn since(&self, nanoseconds: u64) -> Duration {
        Duration::from_nanos(self.at(Instant::now()).saturating_sub(nanoseconds))
    }

    /// Returns the current time, which lags by at most [`Clock::resolution`].
    #[inline]
    pub fn coarse(&self) -> u64 {
        system::coarse()
    }

    /// Returns the resolution of [`Clock::coarse`] in nanoseconds.
    pub fn resolution(&self) -> u64 {
        system::resolution()
    }

    /// Names the clock. Times of processes that return the same name can be compared.
    pub fn name(&self) -> String {
        system::name()
    }
}

#[cfg(target_os = "linux")]
mod system {
    use rustix::time::{ClockId, Timespec, clock_getres, clock_gettime};

    fn nanoseconds(time: Timespec) -> u64 {
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }

    /// The clock that `Instant` reads.
    pub fn now() -> u64 {
        nanoseconds(clock_gettime(ClockId::Monotonic))
    }

    #[inline]
    pub fn coarse() -> u64 {
        nanoseconds(clock_gettime(ClockId::MonotonicCoarse))
    }

    pub fn resolution() -> u64 {
        nanoseconds(clock_getres(ClockId::MonotonicCoarse))
    }

    /// The clock counts from boot, and a time namespace may shift it.
    pub fn name() -> String {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
        match boot.trim() {
            "" => format!("process {}", std::process::id()),
            boot => format!("{boot} {}", namespace.display()),
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::sync::OnceLock;
    use std::time::Instant;

    /// One clock per process, so the times of its ranks can be compared.
    pub fn now() -> u64 {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }

    pub fn coarse() -> u64 {
        now()
    }

    pub fn resolution() -> u64 {
        1
    }

    pub fn name() -> String {
        format!("process {}", std::process::id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_of_a_system_agree() {
        let (first, second) = (Clock::new(), Clock::new());
        assert_eq!(first.name(), second.name());
        let (before, now) = (system::now(), Instant::now());
        let after = system::now();
        // The two clocks differ at most by the time between their readings of the system's clock and of `Instant`.
        let (a, b) = (first.at(now), second.at(now));
        assert!(a.abs_diff(b) < 1_000_000_000, "{a} and {b}");
        assert!(a + 1_000_000_000 > before && a < after + 1_000_000_000, "{before}, {a}, {after}");
        let coarse = first.coarse();
        assert!(coarse + first.resolution() + 1_000_000_000 > after, "{coarse}, {after}");
    }
}
