//! Events that end a thread's wait for a peer: failures, mismatches, the deadline.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::message::ControlRequest;
use super::status::{GroupStatus, find_mismatch};
use crate::auth::LostPackets;
use crate::sync::{Deadline, MIN_SLEEP, STALL_TIMEOUT, SlowWaitWarning};
use crate::types::{Call, Error, Fault, Places, RankList, Site, asked};

/// Once a mismatch is certain, how long to wait for the calls of the remaining ranks before it is reported.
const GRACE: Duration = Duration::from_secs(2);
/// How long an operation that rank 0 has begun, and then left, may stall before the others connect to each other. Most
/// likely it is the last one, and complete in less time even where many ranks share few processors.
const MOMENT: Duration = Duration::from_secs(2);
/// How long peers may take to say where they are.
const ANSWER: Duration = Duration::from_secs(1);
/// Interval between two checks for answers after a stall.
const POLL: Duration = Duration::from_millis(20);
/// The same for each rank of the group, where that is longer. A check looks at the calls of all ranks, all of which may
/// stall on one machine: together they make at most 2,000 checks a second.
const POLL_OF_EACH: Duration = Duration::from_micros(500);

/// Monitors one operation on behalf of a thread that waits in it.
pub struct Watch<'a> {
    rank: usize,
    status: &'a GroupStatus,
    control: &'a UnboundedSender<ControlRequest>,
    tag: &'a Site,
    deadline: &'a Deadline,
    /// Set once the operation has stalled. In a collective, the peers are asked for their calls then.
    stalled: bool,
    /// Since when it is known, in a stalled operation, that rank 0 has left.
    left: Option<Instant>,
    slow_wait: SlowWaitWarning<'a>,
    /// How often the peers were asked where they are: before the warning, and before the deadline.
    asked: usize,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(
        rank: usize,
        status: &'a GroupStatus,
        control: &'a UnboundedSender<ControlRequest>,
        tag: &'a Site,
        deadline: &'a Deadline,
    ) -> Self {
        Watch {
            rank,
            status,
            control,
            tag,
            deadline,
            stalled: false,
            left: None,
            slow_wait: SlowWaitWarning::until(deadline),
            asked: 0,
        }
    }

    pub(crate) fn status(&self) -> &'a GroupStatus {
        self.status
    }

    /// Returns why `peer` will not answer, if that is known.
    pub(crate) fn absence(&self, peer: usize) -> Option<Fault> {
        self.status.absence(peer, self.tag)
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.deadline.remaining()
    }

    /// Whether the group failed in a later operation. The wake descriptor then stays readable and must be ignored.
    pub(crate) fn deaf(&self) -> bool {
        self.status.failure().is_some() && self.status.failure_in(self.tag).is_none()
    }

    /// Returns how long to wait before the next [`tick`](Watch::tick).
    pub fn pause(&self) -> Duration {
        // Ask well before the deadline, so that the answers have arrived when its error names the missing ranks.
        let next = if self.stalled {
            poll(self.status.world_size(), self.deadline)
        } else {
            STALL_TIMEOUT.min(self.deadline.tenth())
        };
        next.min(self.deadline.remaining()).max(MIN_SLEEP)
    }

    /// Call this while bytes keep moving between this rank and `peer`, so that no pause passes. Meanwhile the group may
    /// fail, or the deadline pass.
    pub(crate) fn check(&self, peer: usize) -> Result<(), Fault> {
        if let Some(fault) = self.status.failure_in(self.tag) {
            return Err(fault);
        }
        if self.deadline.passed() { Err(Fault::Timeout { missing: self.missing(peer) }) } else { Ok(()) }
    }

    /// As [`tick`](Watch::tick), for a thread that waits for connections or for bytes on them: what it waits for may
    /// wait itself until this rank accepts a connection.
    pub(crate) fn tick_connected(&mut self, peer: usize) -> Result<(), Fault> {
        match self.status.shortage() {
            Some(error) => Err(Fault::Failed(error)),
            None => self.tick(peer),
        }
    }

    /// Call this when nothing has moved for a pause while the thread waits for `peer`. Checks for a failure of the
    /// group, asks the peers for their calls, warns about a long wait, and returns an error at the deadline.
    pub fn tick(&mut self, peer: usize) -> Result<(), Fault> {
        if let Some(fault) = self.status.failure_in(self.tag) {
            return Err(fault);
        }
        self.ask_peers();
        if self.status.has_left(0) {
            let left = *self.left.get_or_insert_with(Instant::now);
            if left.elapsed() >= MOMENT.min(self.deadline.tenth()) {
                self.meet();
            }
        }
        if self.is_collective()
            && let Some(error) = find_mismatch(self.tag.sequence, &self.calls())
        {
            return Err(self.mismatch(error));
        }
        let missing = self.missing(peer);
        if self.deadline.passed() {
            return Err(Fault::Timeout { missing });
        }
        self.locate(&missing);
        if self.slow_wait.is_due() && (self.are_located(&missing) || self.slow_wait.is_overdue(ANSWER)) {
            let (tag, status, rank, of) = (self.tag, self.status, self.rank, self.asked_for(&missing));
            self.slow_wait.warn(rank, || {
                let mut known = status.whereabouts(&of);
                known.extend(status.own_whereabouts().map(|own| (rank, own)));
                known.sort_by_key(|(rank, _)| *rank);
                (format!("in {tag} for {}", RankList(&missing)), Places(&known).to_string())
            });
        }
        Ok(())
    }

    /// Asks the peers where they are in their programs, when the warning is due and again before the deadline.
    fn locate(&mut self, missing: &[usize]) {
        let due = [self.slow_wait.is_due(), self.deadline.remaining() <= ANSWER.min(self.deadline.tenth())];
        if due.get(self.asked).is_some_and(|due| *due) {
            self.asked += 1;
            self.ask_where(&self.asked_for(missing));
        }
    }

    /// Whether all ranks that were asked have answered.
    fn are_located(&self, missing: &[usize]) -> bool {
        let asked = self.asked_for(missing);
        self.status.whereabouts(&asked).len() == asked.len()
    }

    /// The ranks that are asked where they are when these are missing.
    fn asked_for(&self, missing: &[usize]) -> Vec<usize> {
        let mut asked = asked(missing, self.status.world_size());
        asked.retain(|peer| *peer != self.rank);
        asked
    }

    /// The ranks for which this operation waits: those that have not begun it, or if all have, `peer`.
    fn missing(&self, peer: usize) -> Vec<usize> {
        let silent = self.silent();
        if silent.is_empty() { vec![peer] } else { silent }
    }

    /// The ranks that have not begun this operation, as far as this rank has asked.
    fn silent(&self) -> Vec<usize> {
        if !self.stalled || !self.is_collective() {
            return Vec::new();
        }
        let calls = self.calls();
        (0..calls.len()).filter(|rank| calls[*rank].is_none()).collect()
    }

    fn calls(&self) -> Vec<Option<Call>> {
        self.status.calls(self.rank, self.tag.sequence, self.tag.call)
    }

    /// Returns the fault after `peer` sent another tag. Collects all ranks' calls, so that all report the same error.
    pub(crate) fn unexpected(&mut self, peer: usize, tag: Site) -> Fault {
        if !self.is_collective() {
            // Only the two ends of a message are compared, and both are known.
            return Fault::Unexpected { peer, site: tag };
        }
        self.disagree(&[(peer, tag.call)])
    }

    /// Returns the fault of a collective in which ranks were seen to make these calls, different from this rank's or
    /// not. Collects all ranks' calls, so that all report the same error.
    pub(crate) fn disagree(&mut self, seen: &[(usize, Call)]) -> Fault {
        self.ask_peers();
        self.meet();
        let until = Instant::now() + GRACE.min(self.deadline.remaining());
        let known = || self.calls().iter().all(Option::is_some);
        self.status.sleep(until, || self.status.failure_in(self.tag).is_some() || known());
        if let Some(fault) = self.status.failure_in(self.tag) {
            return fault;
        }
        let calls = self.calls();
        let error = find_mismatch(self.tag.sequence, &calls).unwrap_or_else(|| {
            let mut calls: Vec<_> = calls.iter().enumerate().filter_map(|(r, call)| Some((r, (*call)?))).collect();
            calls.retain(|(rank, _)| seen.iter().all(|(other, _)| other != rank));
            calls.extend(seen);
            calls.sort_by_key(|(rank, _)| *rank);
            Error::Mismatch { sequence: self.tag.sequence, calls, note: String::new() }
        });
        self.mismatch(error)
    }

    /// Returns the fault of ranks that disagree, once those that called something else have said where they are. They
    /// are still there: they wait for the same answers, or for this rank's error.
    pub(crate) fn mismatch(&self, error: Error) -> Fault {
        let asked = self.asked_for(&error.others(&self.tag.call));
        self.ask_where(&asked);
        let until = Instant::now() + ANSWER.min(self.deadline.remaining());
        let answered = || self.status.whereabouts(&asked).len() == asked.len();
        self.status.sleep(until, || self.status.failure_in(self.tag).is_some() || answered());
        self.status.failure_in(self.tag).unwrap_or(Fault::Failed(error))
    }

    fn ask_where(&self, ranks: &[usize]) {
        for peer in ranks {
            let _ = self.control.send(ControlRequest::Locate(*peer));
        }
    }

    /// Returns the fault of this operation after its data connection to `peer`, and no more than that, broke. If ranks
    /// have not answered by the deadline, they are the cause: peers whose deadlines passed a moment ago close their
    /// connections, and word of their failures is still on its way.
    pub(crate) fn disconnected(&self, peer: usize, reason: &str) -> Fault {
        let missing = self.silent();
        if self.deadline.passed() && !missing.is_empty() {
            return Fault::Timeout { missing };
        }
        let (site, reason) = (*self.tag, reason.to_owned());
        Fault::Failed(Error::Disconnected { site, rank: self.rank, peer, reason, elapsed: self.deadline.elapsed() })
    }

    /// Whether all ranks are known to have begun this operation: then those that this rank waits for are not late.
    pub(crate) fn all_called(&self) -> bool {
        self.stalled && self.is_collective() && self.calls().iter().all(Option::is_some)
    }

    /// Returns the fault of this operation if what this rank and `peer` send each other does not arrive.
    pub(crate) fn stalled(&self, peer: usize, reason: String) -> Fault {
        let (site, rank, elapsed) = (*self.tag, self.rank, self.deadline.elapsed());
        Fault::Failed(Error::Stalled { site, rank, peer, reason, elapsed })
    }

    /// As [`stalled`](Self::stalled), if the largest packets between this rank and `peer` at this address are lost.
    pub(crate) fn packets_lost(&self, peer: usize, address: &SocketAddr, lost: LostPackets) -> Fault {
        self.stalled(peer, format!("between rank {} and {address} {lost}", self.rank))
    }

    /// How long nothing must have arrived by the deadline for the network to be in doubt, and not only its speed.
    pub(crate) fn long(&self) -> Duration {
        self.deadline.tenth()
    }

    /// Once rank 0 has left in order, the others hear of each other only if they connect to each other. Has the control
    /// thread do so, because this rank waits for them, unless it need not wait: the operation has failed.
    pub(crate) fn meet(&self) {
        if self.status.has_left(0) && self.status.failure_in(self.tag).is_none() {
            let _ = self.control.send(ControlRequest::Meet);
        }
    }

    fn ask_peers(&mut self) {
        if !self.stalled && self.is_collective() {
            let site = *self.tag;
            let _ = self.control.send(ControlRequest::Calling(site));
        }
        self.stalled = true;
    }

    /// Whether all ranks' calls can be compared. Point-to-point operations are numbered per pair, so theirs cannot.
    pub(crate) fn is_collective(&self) -> bool {
        self.tag.call.operation.is_collective()
    }
}

/// Returns the interval between two checks after a stall. Of the last tenth of a short deadline, some remain.
fn poll(world_size: usize, deadline: &Deadline) -> Duration {
    let of_all = POLL_OF_EACH.saturating_mul(u32::try_from(world_size).unwrap_or(u32::MAX));
    POLL.max(of_all.min(deadline.tenth() / 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalled_ranks_together_make_at_most_2_000_checks_a_second() {
        let polls = |seconds| {
            let deadline = Deadline::after(Duration::from_secs(seconds));
            [2, 40, 256, 1000].map(|ranks| poll(ranks, &deadline).as_millis())
        };
        assert_eq!(polls(300), [20, 20, 128, 500]);
        // Four in the last tenth of the deadline.
        assert_eq!(polls(2), [20, 20, 50, 50]);
    }
}
