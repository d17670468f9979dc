//! The calls of all ranks, as rank 0 of a star collects them for ranks that make no progress.
//!
//! If one rank makes no progress, all ranks soon make none. If each asked each other one through rank 0, it would relay
//! the square of the world size in messages. So ranks ask rank 0. It passes on the first question about an operation,
//! every rank answers it once, and those that asked get the answers of many ranks in one message. A rank that begins
//! late costs a message to each of them, so partial tables go out at a limited rate. A complete table goes out at once:
//! only that one decides whether there is a mismatch.
//!
//! The alternative, that every rank reports each call, would put a message on the path of operations that do not wait.

use std::time::Duration;

use tokio::time::Instant;

use crate::types::Site;

/// For each rank of the group, how long rank 0 collects answers before it passes on a table that is not complete. So it
/// sends at most 2,000 such messages a second.
const COLLECT: Duration = Duration::from_micros(500);

/// Calls, each with the ranks that made it.
pub(super) type Calls = Vec<(Site, Vec<u32>)>;

/// The last call that each rank has reported, and the ranks that ask for the calls of the others.
#[derive(Default)]
pub(super) struct CallTable {
    reports: Vec<Report>,
    /// The last operation about which all ranks were asked.
    asked: Option<u64>,
    /// When the ranks that ask get what is new.
    due: Option<Instant>,
}

#[derive(Default)]
struct Report {
    last: Option<Site>,
    /// Whether it came after the last update.
    new: bool,
    /// The operation about which the rank asks.
    question: Option<Question>,
}

#[derive(Clone, Copy)]
struct Question {
    sequence: u64,
    /// Whether the rank was sent a part of the table.
    answered: bool,
}

impl CallTable {
    pub fn new(world_size: usize) -> CallTable {
        CallTable { reports: (0..world_size).map(|_| Report::default()).collect(), ..CallTable::default() }
    }

    /// Records that `rank` makes no progress in this call. Returns whether this is the first question about the
    /// operation, which goes to all ranks. None is needed about an earlier operation, because a rank begins one only
    /// after all ranks have begun the one before.
    pub fn ask(&mut self, rank: usize, site: Site, now: Instant) -> bool {
        self.reports[rank].question = Some(Question { sequence: site.sequence, answered: false });
        self.report(rank, site, now);
        let first = self.asked.is_none_or(|asked| asked < site.sequence);
        self.asked = self.asked.max(Some(site.sequence));
        first
    }

    /// Records the call of `rank`.
    pub fn report(&mut self, rank: usize, site: Site, now: Instant) {
        let report = &mut self.reports[rank];
        // A rank may be asked about the operation before the one about which it has asked.
        if report.last.is_none_or(|last| last.sequence < site.sequence) {
            (report.last, report.new) = (Some(site), true);
        }
        if self.reports.iter().any(|report| report.question.is_some()) {
            let paced = now + COLLECT * self.reports.len() as u32;
            self.due = if self.is_complete(site.sequence) { Some(now) } else { self.due.or(Some(paced)) };
        }
    }

    /// When [`updates`](CallTable::updates) is to be called, if there is anything to send.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Returns what each rank that asks does not know yet.
    pub fn updates(&mut self) -> Vec<(usize, Calls)> {
        self.due = None;
        let (all, new) = (self.group(|_| true), self.group(|report| report.new));
        let mut updates = Vec::new();
        for rank in 0..self.reports.len() {
            self.reports[rank].new = false;
            let Some(question) = self.reports[rank].question else { continue };
            let calls = if question.answered { &new } else { &all };
            if !calls.is_empty() {
                updates.push((rank, calls.clone()));
            }
            let open = !self.is_complete(question.sequence);
            self.reports[rank].question = open.then_some(Question { answered: true, ..question });
        }
        updates
    }

    /// Whether all ranks are known to have begun the operation.
    fn is_complete(&self, sequence: u64) -> bool {
        self.reports.iter().all(|report| report.last.is_some_and(|site| site.sequence >= sequence))
    }

    fn group(&self, included: impl Fn(&Report) -> bool) -> Calls {
        let mut calls = Calls::new();
        for (rank, report) in self.reports.iter().enumerate().filter(|(_, report)| included(report)) {
            let Some(site) = report.last else { continue };
            match calls.iter_mut().find(|(other, _)| *other == site) {
                Some((_, ranks)) => ranks.push(rank as u32),
                None => calls.push((site, vec![rank as u32])),
            }
        }
        calls
    }
}
