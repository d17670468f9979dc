//! Words that say nothing but that a rank is there, and what becomes of a rank from which none come.

use std::time::{Duration, Instant};

use tokio::time::{Interval, MissedTickBehavior, interval};

use super::board::Board;

/// Between a rank's words. All ranks say them as often, however long each of them waits for the others'.
pub(super) const BEAT: Duration = Duration::from_secs(1);

/// How long a peer may be silent before it counts as lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silence {
    /// Before its first word: it may still be connecting to others.
    pub first: Duration,
    /// After any word.
    pub later: Duration,
}

impl Silence {
    /// The least that can be asked for: a word may be late.
    pub const LEAST: Duration = Duration::from_secs(3);

    /// Beats without a word after which less than `limit` has passed since the last one, which may have come just after
    /// the beat before.
    pub(super) fn beats(limit: Duration) -> u64 {
        (limit.as_secs() / BEAT.as_secs()).saturating_sub(1).max(1)
    }
}

/// When to say a word. Beats that this rank misses are not made up for: a rank that was stopped itself, or whose machine
/// slept, finds the others' words when it goes on, and takes nobody for lost.
pub(super) fn beats() -> Interval {
    let mut beats = interval(BEAT);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beats
}

/// What is left of this rank's patience with each peer, in beats of its own and not in time.
pub(super) struct Pulse {
    left: Vec<u64>,
    silence: Silence,
    last: Option<Instant>,
}

impl Pulse {
    pub fn new(world_size: usize, silence: Silence) -> Pulse {
        let first = Silence::beats(silence.first.max(silence.later));
        Pulse { left: vec![first; world_size], silence, last: None }
    }

    /// A connection to `peer` was made, after those that were there from the start.
    pub fn begin(&mut self, peer: usize) {
        self.left[peer] = self.limit();
    }

    /// A beat of this rank. Whether it was away for so long before it that others may have given it up.
    pub fn was_away(&mut self, now: Instant) -> bool {
        let last = self.last.replace(now);
        last.is_some_and(|last| now.saturating_duration_since(last) > self.silence.later / 2)
    }

    /// Whether `peer` has not been given up.
    pub fn watches(&self, peer: usize) -> bool {
        self.left[peer] > 0
    }

    /// With a beat, for a peer that is watched: whether it has been silent for too long.
    pub fn misses(&mut self, peer: usize, board: &Board) -> bool {
        self.left[peer] = if board.spoke(peer) { self.limit() } else { self.left[peer] - 1 };
        self.left[peer] == 0
    }

    /// Beats without a word after which a peer is given up.
    pub fn limit(&self) -> u64 {
        Silence::beats(self.silence.later)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pulse of three ranks, and at which of this rank's beats peer 2 is given up if 1 speaks between all of them, and 2
    /// between the first `words`.
    fn given_up(words: usize) -> usize {
        let board = Board::new(3).unwrap();
        let silence = Silence { first: Duration::from_secs(10), later: Duration::from_secs(5) };
        let mut pulse = Pulse::new(3, silence);
        for beat in 0.. {
            assert!(pulse.watches(2) && !pulse.misses(1, &board));
            if pulse.misses(2, &board) {
                assert!(!pulse.watches(2) && pulse.watches(1));
                return beat;
            }
            board.speaks(1);
            if beat < words {
                board.speaks(2);
            }
        }
        unreachable!("a peer is given up some time")
    }

    #[test]
    fn a_peer_is_lost_once_it_has_been_silent_for_too_long_and_no_other_is() {
        // Before its first word the longer limit counts; after the last one, which comes before a beat, the other.
        assert_eq!([0, 1, 3].map(given_up), [8, 5, 7]);
    }

    #[test]
    fn a_rank_that_was_stopped_itself_takes_nobody_for_lost() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut beats = beats();
            beats.tick().await;
            // A minute in which nothing runs here.
            tokio::time::advance(Duration::from_secs(60)).await;
            beats.tick().await;
            let next = tokio::time::Instant::now();
            beats.tick().await;
            assert!(next.elapsed() >= BEAT * 9 / 10, "one beat for the minute, and the next a beat later");
        });
    }

    #[test]
    fn a_rank_knows_that_it_was_away() {
        let silence = Silence { first: Duration::from_secs(10), later: Duration::from_secs(5) };
        let (mut pulse, start) = (Pulse::new(2, silence), Instant::now());
        let away = [0, 1, 3, 7, 8].map(|second| pulse.was_away(start + Duration::from_secs(second)));
        assert_eq!(away, [false, false, false, true, false]);
    }
}
