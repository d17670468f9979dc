//! What a thread that waits for a peer looks out for besides the peer.

use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::board::{Board, verdict};
use super::message::Outgoing;
use crate::sync::{Deadline, NAP, Patience, STALL};
use crate::types::{Call, Error, Fault, Ranks, Site};

/// Once a mismatch is certain, how long ranks that have not called anything yet are waited for before it is reported.
const GRACE: Duration = Duration::from_secs(2);
/// How often answers are looked for after a stall.
const LOOK: Duration = Duration::from_millis(20);

pub(crate) struct Watch<'a> {
    rank: usize,
    board: &'a Board,
    control: &'a UnboundedSender<Outgoing>,
    tag: &'a Site,
    deadline: &'a Deadline,
    stalled: bool,
    patience: Patience<'a>,
}

impl<'a> Watch<'a> {
    pub fn new(
        rank: usize,
        board: &'a Board,
        control: &'a UnboundedSender<Outgoing>,
        tag: &'a Site,
        deadline: &'a Deadline,
    ) -> Self {
        Watch { rank, board, control, tag, deadline, stalled: false, patience: Patience::until(deadline) }
    }

    pub fn board(&self) -> &'a Board {
        self.board
    }

    pub fn remaining(&self) -> Duration {
        self.deadline.remaining()
    }

    /// Whether the group failed in a later operation: what wakes sleepers stays on, and is nothing to wake for.
    pub fn deaf(&self) -> bool {
        self.board.failure().is_some() && self.board.failure_in(self.tag).is_none()
    }

    /// How long to wait before the next tick.
    pub fn pause(&self) -> Duration {
        // Well before the deadline, so that the answers are there when it names who is missing.
        let next = if self.stalled { LOOK } else { STALL.min(self.deadline.tenth()) };
        next.min(self.deadline.remaining()).max(NAP)
    }

    /// Called when nothing has moved for a pause, while `peer` is waited for: looks for a failure of the group, asks the
    /// peers what they called, warns, and gives up at the deadline.
    pub fn tick(&mut self, peer: usize) -> Result<(), Fault> {
        if let Some(fault) = self.board.failure_in(self.tag) {
            return Err(fault);
        }
        self.ask();
        let calls = self.board.calls(self.rank, self.tag.sequence, self.tag.call);
        if self.collective()
            && let Some(error) = verdict(self.tag.sequence, &calls)
        {
            return Err(Fault::Failed(error));
        }
        // Ranks that have not begun this operation are what is missing; if all have, it is the peer that is slow.
        let collective = self.collective();
        let missing = || {
            let silent: Vec<usize> = (0..calls.len()).filter(|rank| calls[*rank].is_none()).collect();
            if silent.is_empty() || !collective { vec![peer] } else { silent }
        };
        if self.deadline.passed() {
            return Err(Fault::Timeout { missing: missing() });
        }
        let site = Site { call: self.tag.call, sequence: self.tag.sequence };
        let waiting = || format!("in {site} for {}", Ranks(&missing()));
        self.patience.warn(self.rank, waiting);
        Ok(())
    }

    /// `peer` sent a message with another tag. Finds out what all ranks called, so that all report the same.
    pub fn unexpected(&mut self, peer: usize, tag: Site) -> Fault {
        if !self.collective() {
            // The two ends of a message are all there is to compare, and both are known.
            return Fault::Unexpected { peer, site: tag };
        }
        self.disagree(&[(peer, tag.call)])
    }

    /// These ranks were seen to call something else in this collective, or the same. Finds out what all called, so that
    /// all report the same.
    pub fn disagree(&mut self, seen: &[(usize, Call)]) -> Fault {
        self.ask();
        let until = Instant::now() + GRACE.min(self.deadline.remaining());
        let known = || self.board.calls(self.rank, self.tag.sequence, self.tag.call);
        self.board.sleep(until, || self.board.failure_in(self.tag).is_some() || known().iter().all(Option::is_some));
        if let Some(fault) = self.board.failure_in(self.tag) {
            return fault;
        }
        let calls = known();
        verdict(self.tag.sequence, &calls).map(Fault::Failed).unwrap_or_else(|| {
            let mut calls: Vec<_> = calls.iter().enumerate().filter_map(|(r, call)| Some((r, (*call)?))).collect();
            calls.retain(|(rank, _)| seen.iter().all(|(other, _)| other != rank));
            calls.extend(seen);
            calls.sort_by_key(|(rank, _)| *rank);
            Fault::Failed(Error::Mismatch { sequence: self.tag.sequence, calls })
        })
    }

    fn ask(&mut self) {
        if !self.stalled && self.collective() {
            let site = Site { call: self.tag.call, sequence: self.tag.sequence };
            let _ = self.control.send(Outgoing::Calling(site));
        }
        self.stalled = true;
    }

    /// Messages from rank to rank are numbered apart, so there is nothing to compare among all ranks.
    fn collective(&self) -> bool {
        self.tag.call.operation.is_collective()
    }
}
