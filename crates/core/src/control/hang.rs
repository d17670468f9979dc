//! Ranks that are alive and do not call `shrink`: when the other ranks leave them out, and whether they may.

use std::time::Duration;

use crate::sync::ENDLESS;
use crate::types::Error;

/// Without a hang timeout, the part of the deadline that is left to connect the ranks that did call.
const RESERVE: Duration = Duration::from_secs(30);

/// Time for ranks that were waited for long enough: they may just have learned of the failure, or be about to come with
/// others.
const GRACE: Duration = Duration::from_secs(5);

/// How long a rank that is alive may take to call `shrink`, after another one did.
#[derive(Clone, Debug)]
pub struct HangTimeout {
    pub(crate) limit: Duration,
    /// The ranks for which the operation that failed had waited, and for how long.
    waited: (Vec<usize>, Duration),
}

impl HangTimeout {
    /// The timeout that the user set, if any, of a `shrink` with this deadline, after this failure of the group.
    pub(crate) fn new(set: Option<Duration>, deadline: Duration, failure: Option<&Error>) -> HangTimeout {
        let limit = set.unwrap_or_else(|| deadline - RESERVE.min(deadline / 2)).min(ENDLESS);
        let waited = match failure {
            Some(Error::Timeout { missing, elapsed, .. }) => (missing.clone(), *elapsed),
            Some(Error::Stalled { peer, elapsed, .. }) => (vec![*peer], *elapsed),
            _ => Default::default(),
        };
        HangTimeout { limit, waited }
    }

    /// How long `rank` may take.
    pub(crate) fn of(&self, rank: usize) -> Duration {
        let (missing, waited) = &self.waited;
        match missing.contains(&rank) {
            true => self.limit.saturating_sub(*waited).max(self.grace()),
            false => self.limit,
        }
    }

    /// How long any rank may take after another one has come.
    pub(crate) fn grace(&self) -> Duration {
        GRACE.min(self.limit)
    }
}

/// Whether so many ranks may go on although others are alive: no other set of ranks may then. `first`: rank 0 is among
/// them.
pub(crate) fn is_majority(ranks: usize, first: bool, world_size: usize) -> bool {
    2 * ranks > world_size || 2 * ranks == world_size && first
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Call, DType, Operation, Site};

    #[test]
    fn a_rank_that_an_operation_has_waited_for_gets_the_rest_of_its_time() {
        let seconds = Duration::from_secs;
        let failure = |elapsed| {
            let call = Call::new(Operation::Barrier, DType::U8, 0);
            let site = Site { call, sequence: 1 };
            Error::Timeout { site, rank: 0, missing: vec![2], elapsed: seconds(elapsed), whereabouts: Box::default() }
        };
        let of = |set: Option<u64>, deadline, elapsed| {
            let hang = HangTimeout::new(set.map(seconds), seconds(deadline), Some(&failure(elapsed)));
            [hang.of(1), hang.of(2)].map(|time| time.as_secs())
        };
        assert_eq!(of(None, 300, 300), [270, 5]);
        assert_eq!(of(None, 8, 8), [4, 4]);
        assert_eq!(of(Some(60), 300, 20), [60, 40]);
        assert_eq!(of(Some(2), 300, 300), [2, 2]);
        let endless = HangTimeout::new(Some(Duration::MAX), seconds(1), None);
        assert_eq!((endless.of(0), HangTimeout::new(None, Duration::MAX, None).of(0)), (ENDLESS, ENDLESS));
    }
}
