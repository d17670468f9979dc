//! Heartbeats, and the failure detector that declares silent peers lost.
//!
//! # Why not TCP keep-alive
//! The kernel of a stopped process still answers the probes of keep-alive. Only messages of the control thread show
//! that the process runs.

use std::time::{Duration, Instant};

use tokio::time::{Interval, MissedTickBehavior, interval};

use super::board::Board;

/// Time between two heartbeats. The same on all ranks, whatever timeout each of them uses.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

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
    pub const LEAST: Duration = Duration::from_secs(3);

    /// Converts `limit` to heartbeats without a message: one less than fit, since the last message may have arrived up
    /// to an interval before the heartbeat that noticed it. So a peer is declared lost just before `limit` has passed.
    pub(super) fn missed_heartbeats(limit: Duration) -> u64 {
        (limit.as_secs() / INTERVAL.as_secs()).saturating_sub(1).max(1)
    }
}

/// Ticks once per [`INTERVAL`]. Missed ticks are not replayed: a rank that was stopped, or whose machine was suspended,
/// finds its peers' messages when it resumes, and declares no peer lost.
pub(super) fn ticks() -> Interval {
    ticks_every(INTERVAL)
}

fn ticks_every(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Counts this rank's heartbeats since each peer's last message. The timeout is counted in heartbeats, not in time.
pub(super) struct FailureDetector {
    /// By rank: heartbeats until the peer is declared lost; 0 once it is.
    remaining: Vec<u64>,
    timeout: HeartbeatTimeout,
    last_tick: Option<Instant>,
}

impl FailureDetector {
    pub fn new(world_size: usize, timeout: HeartbeatTimeout) -> FailureDetector {
        let first = HeartbeatTimeout::missed_heartbeats(timeout.first.max(timeout.later));
        FailureDetector { remaining: vec![first; world_size], timeout, last_tick: None }
    }

    /// Starts to monitor `peer`, to which a connection was made after the start.
    pub fn reset(&mut self, peer: usize) {
        self.remaining[peer] = self.limit();
    }

    /// Records a heartbeat of this rank. Returns whether it was suspended so long that peers may have declared it lost.
    pub fn tick(&mut self, now: Instant) -> bool {
        let last = self.last_tick.replace(now);
        last.is_some_and(|last| now.saturating_duration_since(last) > self.timeout.later / 2)
    }

    /// Whether `peer` has not been declared lost.
    pub fn is_monitored(&self, peer: usize) -> bool {
        self.remaining[peer] > 0
    }

    /// Updates a monitored peer after a heartbeat of this rank. Returns whether the peer is now declared lost.
    pub fn check(&mut self, peer: usize, board: &Board) -> bool {
        self.remaining[peer] = if board.take_activity(peer) { self.limit() } else { self.remaining[peer] - 1 };
        self.remaining[peer] == 0
    }

    /// Heartbeats without a message after which a peer is declared lost.
    pub fn limit(&self) -> u64 {
        HeartbeatTimeout::missed_heartbeats(self.timeout.later)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the heartbeat of this rank at which peer 2 is declared lost, where peer 1 sends a message after every
    /// heartbeat and peer 2 only after the first `messages` of them.
    fn lost_at(messages: usize) -> usize {
        let board = Board::new(3).unwrap();
        let timeout = HeartbeatTimeout { first: Duration::from_secs(10), later: Duration::from_secs(5) };
        let mut detector = FailureDetector::new(3, timeout);
        for tick in 0.. {
            assert!(detector.is_monitored(2) && !detector.check(1, &board));
            if detector.check(2, &board) {
                assert!(!detector.is_monitored(2) && detector.is_monitored(1));
                return tick;
            }
            board.speaks(1);
            if tick < messages {
                board.speaks(2);
            }
        }
        unreachable!("a silent peer is declared lost some time")
    }

    #[test]
    fn a_silent_peer_is_declared_lost_and_no_other() {
        // Before the first message the longer timeout applies, after the last one the shorter.
        assert_eq!([0, 1, 3].map(lost_at), [8, 5, 7]);
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
        let timeout = HeartbeatTimeout { first: Duration::from_secs(10), later: Duration::from_secs(5) };
        let (mut detector, start) = (FailureDetector::new(2, timeout), Instant::now());
        let suspended = [0, 1, 3, 7, 8].map(|second| detector.tick(start + Duration::from_secs(second)));
        assert_eq!(suspended, [false, false, false, true, false]);
    }
}
