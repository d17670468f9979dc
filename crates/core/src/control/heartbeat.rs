//! Heartbeats, and the failure detector that declares silent peers lost.
//!
//! # Why not TCP keep-alive
//! The kernel of a stopped process still answers the probes of keep-alive. Only messages of the control thread show
//! that the process runs.

use std::time::{Duration, Instant};

use tokio::time::{Interval, MissedTickBehavior, interval};

use super::status::GroupStatus;

/// Time between two ticks, at which a rank looks who is silent.
const TICK: Duration = Duration::from_millis(250);

/// Ticks between two heartbeats. The same on all ranks, whatever timeout each of them uses.
const TICKS_PER_HEARTBEAT: u64 = 4;

/// The heartbeat timeout: how long a peer may be silent before it is declared lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeartbeatTimeout {
    /// Until its first message: the peer may still be connecting to others.
    pub first: Duration,
    /// After any message.
    pub later: Duration,
}

impl HeartbeatTimeout {
    /// The shortest timeout allowed: a heartbeat may be late.
    pub const MIN: Duration = Duration::from_secs(3);

    /// Converts `limit` to ticks without a message: one less than fit, since the last message may have arrived up to a
    /// tick before the one that noticed it. So a peer is declared lost at most a tick before `limit` has passed.
    fn silent_ticks(limit: Duration) -> u64 {
        let ticks = limit.as_millis() / TICK.as_millis();
        u64::try_from(ticks).unwrap_or(u64::MAX).saturating_sub(1).max(1)
    }
}

/// Ticks once per [`TICK`]. Missed ticks are not replayed: a rank that was stopped, or whose machine was suspended,
/// finds its peers' messages when it resumes, and declares no peer lost.
pub(super) fn ticks() -> Interval {
    ticks_every(TICK)
}

fn ticks_every(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// What a rank does at a tick.
#[derive(Clone, Copy)]
pub(super) struct Tick {
    /// It sends heartbeats.
    pub beats: bool,
    /// It was suspended before, for so long that peers may have declared it lost.
    pub suspended: bool,
}

/// Counts this rank's ticks since each peer's last message. The timeout is counted in ticks, not in time.
pub(super) struct FailureDetector {
    /// By rank: ticks until the peer is declared lost; 0 once it is.
    remaining: Vec<u64>,
    timeout: HeartbeatTimeout,
    last_tick: Option<Instant>,
    /// Ticks so far.
    ticks: u64,
}

impl FailureDetector {
    pub fn new(world_size: usize, timeout: HeartbeatTimeout) -> FailureDetector {
        let first = HeartbeatTimeout::silent_ticks(timeout.first.max(timeout.later));
        FailureDetector { remaining: vec![first; world_size], timeout, last_tick: None, ticks: 0 }
    }

    /// Starts to monitor `peer`, to which a connection was made after the start.
    pub fn reset(&mut self, peer: usize) {
        self.remaining[peer] = self.limit();
    }

    /// Records a tick of this rank.
    pub fn tick(&mut self, now: Instant) -> Tick {
        let last = self.last_tick.replace(now);
        let suspended = last.is_some_and(|last| now.saturating_duration_since(last) > self.timeout.later / 2);
        let beats = self.ticks.is_multiple_of(TICKS_PER_HEARTBEAT) || suspended;
        // A rank that was suspended speaks at once.
        self.ticks = if suspended { 1 } else { self.ticks + 1 };
        Tick { beats, suspended }
    }

    /// Whether `peer` has not been declared lost.
    pub fn is_monitored(&self, peer: usize) -> bool {
        self.remaining[peer] > 0
    }

    /// Updates a monitored peer at a tick of this rank. Returns whether the peer is now declared lost.
    pub fn check(&mut self, peer: usize, status: &GroupStatus) -> bool {
        self.remaining[peer] = if status.take_activity(peer) { self.limit() } else { self.remaining[peer] - 1 };
        self.remaining[peer] == 0
    }

    /// Ticks without a message after which a peer is declared lost.
    fn limit(&self) -> u64 {
        HeartbeatTimeout::silent_ticks(self.timeout.later)
    }

    /// Heartbeats of this rank in which a peer that lives has sent a message.
    pub fn heartbeats(&self) -> u64 {
        ((self.limit() + 1) / TICKS_PER_HEARTBEAT).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: HeartbeatTimeout =
        HeartbeatTimeout { first: Duration::from_secs(10), later: Duration::from_secs(5) };

    /// Returns the tick of this rank at which peer 2 is declared lost, where peer 1 sends a message after every tick
    /// and peer 2 only after the first `messages` of them.
    fn lost_at(messages: usize) -> usize {
        let status = GroupStatus::new(3).unwrap();
        let mut detector = FailureDetector::new(3, TIMEOUT);
        for tick in 0.. {
            assert!(detector.is_monitored(2) && !detector.check(1, &status));
            if detector.check(2, &status) {
                assert!(!detector.is_monitored(2) && detector.is_monitored(1));
                return tick;
            }
            status.record_activity(1);
            if tick < messages {
                status.record_activity(2);
            }
        }
        unreachable!("a silent peer is declared lost some time")
    }

    #[test]
    fn a_silent_peer_is_declared_lost_and_no_other() {
        // Before the first message the longer timeout applies, after the last one the shorter.
        assert_eq!([0, 1, 3].map(lost_at), [38, 20, 22]);
    }

    /// Whether a peer is declared lost that sends a heartbeat every second, is stopped for so long, and goes on. All in
    /// milliseconds; the stop begins just before a heartbeat, which is then the first message after it.
    fn is_lost(stopped: u64, phase: u64) -> bool {
        let status = GroupStatus::new(2).unwrap();
        let mut detector = FailureDetector::new(2, TIMEOUT);
        let (last, resumed) = (2_000 + phase, 3_000 + phase + stopped);
        let mut lost = false;
        let mut heard = 0;
        for tick in 0..60 {
            let now = tick * TICK.as_millis() as u64;
            let spoken = [phase, 1_000 + phase, last, resumed, resumed + 1_000];
            let count = spoken.iter().filter(|at| **at < now).count();
            if count > std::mem::replace(&mut heard, count) {
                status.record_activity(1);
            }
            if now > resumed + 1_000 {
                break;
            }
            lost |= detector.is_monitored(1) && detector.check(1, &status);
        }
        lost
    }

    #[test]
    fn a_peer_is_declared_lost_after_the_timeout_and_not_long_before() {
        for phase in (0..1_000).step_by(10) {
            // A second since its last heartbeat, and the stop.
            assert!(!is_lost(3_000, phase) && !is_lost(3_700, phase), "phase {phase}");
            assert!(is_lost(4_050, phase), "phase {phase}");
        }
    }

    #[test]
    fn every_fourth_tick_is_a_heartbeat_and_so_is_the_one_after_a_suspension() {
        let (mut detector, start) = (FailureDetector::new(2, TIMEOUT), Instant::now());
        let mut beats = |seconds: f64| detector.tick(start + Duration::from_secs_f64(seconds)).beats;
        assert_eq!([0.0, 0.25, 0.5, 0.75, 1.0, 1.25].map(&mut beats), [true, false, false, false, true, false]);
        assert_eq!([5.0, 5.25, 5.5, 5.75, 6.0].map(beats), [true, false, false, false, true]);
    }

    #[test]
    fn missed_ticks_are_not_replayed() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let period = Duration::from_millis(20);
            let mut ticks = ticks_every(period);
            ticks.tick().await;
            // The whole runtime stops for ten periods.
            std::thread::sleep(period * 10);
            ticks.tick().await;
            let next = Instant::now();
            ticks.tick().await;
            assert!(next.elapsed() >= period * 9 / 10, "one tick for the pause, and the next a period later");
        });
    }

    #[test]
    fn a_rank_detects_its_own_suspension() {
        let (mut detector, start) = (FailureDetector::new(2, TIMEOUT), Instant::now());
        let suspended = [0, 1, 3, 7, 8].map(|second| detector.tick(start + Duration::from_secs(second)).suspended);
        assert_eq!(suspended, [false, false, false, true, false]);
    }
}
