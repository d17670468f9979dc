//! Heartbeats, and the failure detector that declares silent peers lost.
//!
//! # Why not TCP keep-alive
//! The kernel of a stopped process still answers the probes of keep-alive. Only messages of the control thread show
//! that the process runs.
//!
//! # Ranks that share too few processors
//! With hundreds of ranks on a few processors, each message that a rank sends may wake a process which then runs before
//! it, and a round of heartbeats to all takes as many turns of the processors. A thousand ranks on two cores took 25 ms
//! for a turn. So a rank waits longer for its peers, by a turn for each rank of the group: as long as its own ticks are
//! late, or if that is more, as long as so many processes on so few processors may take. This time is not counted in
//! ticks: they are late for the same reason, and a stopped rank would be noticed later by the square of it.

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

/// How long a turn of one process may take longer for each further one that shares the processor.
const TURN: Duration = Duration::from_micros(50);

/// Returns how long one turn of the processors may take if so many ranks share them.
pub(crate) fn turn(ranks: usize) -> Duration {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    TURN * u32::try_from((ranks / processors).saturating_sub(1)).unwrap_or(u32::MAX)
}

impl HeartbeatTimeout {
    /// The shortest timeout allowed: a heartbeat may be late.
    pub const MIN: Duration = Duration::from_secs(3);

    /// Converts `limit` to ticks without a message: one less than fit, since the last message may have arrived up to a
    /// tick before the one that noticed it. So a peer is declared lost at most a tick before `limit` has passed.
    fn silent_ticks(limit: Duration) -> u64 {
        ticks_in(limit).saturating_sub(1).max(1)
    }
}

/// Ticks once per [`TICK`]. Missed ticks are not replayed: a rank that was stopped, or whose machine was suspended,
/// finds its peers' messages when it resumes, and declares no peer lost.
pub(super) fn ticks() -> Interval {
    ticks_every(TICK)
}

/// Returns the number of ticks in `limit`, at least one.
pub(super) fn ticks_in(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis() / TICK.as_millis()).unwrap_or(u64::MAX).max(1)
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

/// Counts this rank's ticks since each peer's last message. The timeout is counted in ticks, not in time; what a busy
/// machine adds to it is time.
pub(super) struct FailureDetector {
    /// By rank.
    peers: Vec<LastSeen>,
    timeout: HeartbeatTimeout,
    last_tick: Option<Instant>,
    /// How late the last ticks were, on average.
    late: Duration,
    /// The least that a turn of the processors is expected to take.
    turn: Duration,
    /// Ticks so far.
    ticks: u64,
    /// The time between its ticks, without suspensions.
    awake: Duration,
}

/// What this rank knows of a peer.
#[derive(Clone, Default)]
struct LastSeen {
    /// Ticks since its last message, or since it was known to have begun the group.
    ticks: u64,
    /// How long this rank was awake until then.
    since: Duration,
    /// Whether a message of it has arrived.
    heard: bool,
    /// Whether it is known to have begun the group.
    begun: bool,
    lost: bool,
}

impl FailureDetector {
    /// `turn`: how long one turn of the processors takes at least.
    pub fn new(world_size: usize, timeout: HeartbeatTimeout, turn: Duration) -> FailureDetector {
        let peers = vec![LastSeen::default(); world_size];
        FailureDetector { peers, timeout, last_tick: None, late: Duration::ZERO, turn, ticks: 0, awake: Duration::ZERO }
    }

    /// Starts to monitor `peer`, to which a connection was made after the start.
    pub fn reset(&mut self, peer: usize) {
        self.peers[peer] = LastSeen { since: self.awake, heard: true, begun: true, ..LastSeen::default() };
    }

    /// Records a tick of this rank.
    pub fn tick(&mut self, now: Instant) -> Tick {
        let since = self.last_tick.replace(now).map(|last| now.saturating_duration_since(last));
        let suspended = since.is_some_and(|since| since > self.timeout.later / 2);
        // A suspension says nothing about how busy the machine is.
        if let Some(since) = since.filter(|_| !suspended) {
            self.late = (3 * self.late + since.saturating_sub(TICK)) / 4;
            self.awake += since;
        }
        let beats = self.ticks.is_multiple_of(TICKS_PER_HEARTBEAT) || suspended;
        // A rank that was suspended sends one at once.
        self.ticks = if suspended { 1 } else { self.ticks + 1 };
        Tick { beats, suspended }
    }

    /// Whether `peer` has not been declared lost.
    pub fn is_monitored(&self, peer: usize) -> bool {
        !self.peers[peer].lost
    }

    /// Updates a monitored peer at a tick of this rank. `begun`: all ranks are known to have begun the group; before, a
    /// peer that has sent its first message may still be sending others theirs. From then on it sends heartbeats, and
    /// has the shorter timeout even if it sends nothing more. Returns whether the peer is now declared lost.
    pub fn check(&mut self, peer: usize, status: &GroupStatus, begun: bool) -> bool {
        let turns = self.turns();
        let HeartbeatTimeout { first, later } = self.timeout;
        let seen = &mut self.peers[peer];
        let sent = status.take_activity(peer);
        let begins = begun && !seen.begun && (sent || seen.heard);
        if sent || begins {
            let begun = seen.begun || begins;
            *seen = LastSeen { since: self.awake, heard: true, begun, ..LastSeen::default() };
            return false;
        }
        seen.ticks += 1;
        let limit = if seen.begun { later } else { first.max(later) };
        // A tick less than the limit, as in `silent_ticks`.
        let waited = (self.awake - seen.since).saturating_add(TICK);
        seen.lost = seen.ticks >= HeartbeatTimeout::silent_ticks(limit)
            && (turns.is_zero() || waited >= limit.saturating_add(turns));
        seen.lost
    }

    /// Returns how long a message to each rank may take longer than it should, because others run between two of them.
    pub fn turns(&self) -> Duration {
        self.late.max(self.turn).saturating_mul(self.peers.len() as u32)
    }

    /// Heartbeats of this rank in which a peer that lives has sent a message.
    pub fn heartbeats(&self) -> u64 {
        ((HeartbeatTimeout::silent_ticks(self.timeout.later) + 1) / TICKS_PER_HEARTBEAT).saturating_sub(1)
    }
}

/// Waits for `work`, for at most `limit` as this rank's ticks count it: on a busy machine a rank may get its turn only
/// after all of that time, and must then still do what needs no more than a moment.
pub(super) async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    const PARTS: u32 = 20;
    let mut ticks = ticks_every(limit / PARTS);
    let passed = async {
        // The first tick is immediate.
        for _ in 0..=PARTS {
            ticks.tick().await;
        }
    };
    tokio::select! {
        biased;
        done = work => Some(done),
        () = passed => None,
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
        let mut detector = FailureDetector::new(3, TIMEOUT, Duration::ZERO);
        for tick in 0.. {
            assert!(detector.is_monitored(2) && !detector.check(1, &status, true));
            if detector.check(2, &status, true) {
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
        let mut detector = FailureDetector::new(2, TIMEOUT, Duration::ZERO);
        let (last, resumed) = (2_000 + phase, 3_000 + phase + stopped);
        let mut lost = false;
        let mut taken = 0;
        for tick in 0..60 {
            let now = tick * TICK.as_millis() as u64;
            let heard = [phase, 1_000 + phase, last, resumed, resumed + 1_000];
            let count = heard.iter().filter(|at| **at < now).count();
            if count > std::mem::replace(&mut taken, count) {
                status.record_activity(1);
            }
            if now > resumed + 1_000 {
                break;
            }
            lost |= detector.is_monitored(1) && detector.check(1, &status, true);
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
        let (mut detector, start) = (FailureDetector::new(2, TIMEOUT, Duration::ZERO), Instant::now());
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

    /// Returns the number of ticks of this rank, each so late, after which a silent peer is declared lost. `begun`: all
    /// ranks had begun the group at the peer's first message. `turn` as in [`FailureDetector::new`].
    fn silent_until_lost(world_size: usize, (late, turn): (Duration, Duration), begun: bool) -> u32 {
        let (status, start) = (GroupStatus::new(world_size).unwrap(), Instant::now());
        let mut detector = FailureDetector::new(world_size, TIMEOUT, turn);
        status.record_activity(1);
        (0..)
            .find(|tick| {
                detector.tick(start + (TICK + late) * *tick);
                detector.check(1, &status, begun)
            })
            .unwrap()
    }

    #[test]
    fn a_peer_that_shares_few_processors_with_many_ranks_has_a_turn_for_each_of_them() {
        let (none, long) = (Duration::ZERO, Duration::from_millis(25));
        assert_eq!(silent_until_lost(1000, (none, none), true), 19);
        assert_eq!(silent_until_lost(2, (long, long), true), 19);
        // 25 s more, as in the next line, in ticks that are late.
        assert!((105..=109).contains(&silent_until_lost(1000, (long, none), true)));
        assert_eq!(silent_until_lost(1000, (none, long), true), 119);
        // A rank whose ticks come every half a second: twice the timeout, and not twice 8 s more as well.
        let rank = silent_until_lost(32, (TICK, none), true);
        assert!((24..=27).contains(&rank), "{rank}");
        assert_eq!(turn(1), none);
        assert!(turn(1_000_000) > none);
    }

    #[test]
    fn a_peer_has_time_to_send_all_ranks_their_first_message() {
        assert_eq!(silent_until_lost(3, (Duration::ZERO, Duration::ZERO), false), 39);
    }

    /// It is stopped after its only message, which arrived before the last rank had begun.
    #[test]
    fn a_peer_that_is_silent_from_the_beginning_of_the_group_is_declared_lost_after_the_shorter_timeout() {
        let status = GroupStatus::new(2).unwrap();
        let mut detector = FailureDetector::new(2, TIMEOUT, Duration::ZERO);
        status.record_activity(1);
        let (begins, long) = (12, 10_000);
        let lost = (0..long).find(|tick| detector.check(1, &status, *tick >= begins));
        assert_eq!(lost, Some(begins + 19), "as if its last message had arrived when all had begun");
        // One that has sent nothing may still be connecting: that all others have begun says nothing of it.
        let mut detector = FailureDetector::new(2, TIMEOUT, Duration::ZERO);
        assert_eq!((0..long).find(|_| detector.check(1, &status, true)), Some(38));
    }

    #[test]
    fn what_a_starved_rank_can_do_at_once_is_done_after_its_limit() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let limit = Duration::from_millis(40);
            let mut turns = 0;
            let work = std::future::poll_fn(|context| {
                // Each turn comes after the whole limit.
                std::thread::sleep(limit);
                turns += 1;
                context.waker().wake_by_ref();
                if turns == 10 { std::task::Poll::Ready(turns) } else { std::task::Poll::Pending }
            });
            assert_eq!(within(limit, work).await, Some(10));
            assert_eq!(within(limit, std::future::pending::<()>()).await, None);
        });
    }

    #[test]
    fn a_rank_detects_its_own_suspension() {
        let (mut detector, start) = (FailureDetector::new(2, TIMEOUT, Duration::ZERO), Instant::now());
        let suspended = [0, 1, 3, 7, 8].map(|second| detector.tick(start + Duration::from_secs(second)).suspended);
        assert_eq!(suspended, [false, false, false, true, false]);
    }
}
