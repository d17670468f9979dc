//! The protocol by which survivors agree on the members of the next group, without clocks and connections.
//!
//! Every rank proposes a membership ([`Membership`]). It leaves out the ranks that the proposer knows to have ended or
//! has lost, the ranks that a member's proposal leaves out, and the ranks whose proposals leave out the proposer. So
//! memberships only shrink, and ranks that receive each other's messages converge on the same one. Once all members
//! have proposed the same membership they connect (*form*), and each announces when its end of the group is ready
//! (*formed*). A rank that has received this from all members has *agreed*, and announces that to all ranks.
//!
//! A rank may have narrowed its membership before it learns from a member that a wider one was agreed on. It then
//! follows: it has announced itself that its end of the wider group is ready, and it keeps such ends.
//!
//! A membership may go on if all ranks that it leaves out have certainly ended. If some are only silent, it needs more
//! than half of all ranks, or half of them including the lowest. Ranks that have ended count among all ranks: they may
//! have gone on with the silent ones and ended there. So two groups never go on.
//!
//! A rank may leave out ranks that are alive: it cannot reach them, or they have not called `shrink` for too long (only
//! if its membership can go on without them). To the protocol both are the same. Each finds out that the others go on
//! without it when it calls.
//!
//! A call of `shrink` that fails only pauses its rank: the next call continues with the same state, and with all that
//! has arrived meanwhile. A rank whose attempt to connect ended with the call proposes the same members again, as
//! another *attempt*, and all members follow. So an attempt is part of a membership, and a later one is narrower. A
//! rank that was ready stays ready: it keeps its end, and may learn later that it was agreed on.
//!
//! Proof: take two memberships `S` and `T` that are agreed on, both with live ranks. If they are disjoint, each counts
//! the other as silent, and only one of them can have enough ranks. Otherwise what their common ranks propose makes one
//! a subset of the other: let `T` be the narrower, and `J` the ranks that agree on `S`. No member of `T` is in `J`: a
//! rank that agrees on `S` announces nothing about narrower memberships afterwards, and the first member of `T` to
//! agree on `S` has not announced before that its end of `T` is ready, since after that it could only follow a member
//! of `T` that had agreed on `S` before it. But all members of `T` have announced that, because `T` is agreed on. So
//! `T` counts as silent in the group of `S`: its members never join it, and have said before that they may be
//! elsewhere. To go on there `J` needs half of `S` or more. Then `T` has less than half of all ranks, or exactly half
//! without the lowest.
//!
//! If `S` and `T` have the same members and differ in what has ended or in the attempt, the same argument says that `J`
//! is empty, because all its ranks would be members of `T`.
//!
//! A search runs these rules in all orders of messages with a few faults among two and three ranks, and random tests
//! run them with ranks that die, lose or leave out each other, also wrongly, and repeat their calls, at any moment.
//! Their first runs found a schedule with one wrong suspicion and one death after which two groups went on. The rules
//! on which ranks have certainly ended come from it.
//!
//! The purpose is that of `MPI_Comm_shrink` of ULFM (User Level Failure Mitigation, an extension of MPI).

use std::collections::{BTreeMap, BTreeSet};

use crate::control::hang::is_majority;
use crate::control::invitation::Endpoint;
use crate::control::{Membership, ShrinkMessage};

/// One rank's state in the agreement.
#[cfg_attr(test, derive(Clone, Hash))]
pub(super) struct Agreement {
    rank: usize,
    world_size: usize,
    membership: Membership,
    stage: Stage,
    /// By rank: its last proposal, and where it accepts the connections of the new group.
    proposals: BTreeMap<usize, (Membership, Endpoint)>,
    /// By rank: the last membership for which it announced that its end is ready.
    formed: BTreeMap<usize, Membership>,
    /// The memberships for which this rank's end was ready.
    ready: Vec<Membership>,
    /// Ranks that go on in some group. They never count as ended, even if they close their connections here.
    elsewhere: BTreeSet<usize>,
    outcome: Option<Outcome>,
}

/// This rank's progress with its membership.
#[derive(Clone, Copy, PartialEq)]
#[cfg_attr(test, derive(Hash))]
enum Stage {
    New,
    Proposed,
    Forming,
    Formed,
}

#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(test, derive(Hash))]
enum Outcome {
    Agreed(Membership),
    Excluded { by: usize },
}

/// The next step of a rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Next {
    /// Propose this membership, and drop any attempt to form another group.
    Propose(Membership),
    /// Connect to these members.
    Form(Vec<(usize, Endpoint)>),
    Wait,
    /// This membership is agreed on.
    Agree(Membership),
    /// Others go on without this rank, as rank `by` says.
    Excluded {
        by: usize,
    },
    /// The members are too few to go on: the silent ranks may be the majority.
    Minority {
        silent: Vec<usize>,
    },
}

impl Agreement {
    pub fn new(rank: usize, world_size: usize) -> Agreement {
        Agreement {
            rank,
            world_size,
            membership: Membership { members: (0..world_size).collect(), ended: BTreeSet::new(), attempt: 0 },
            stage: Stage::New,
            proposals: BTreeMap::new(),
            formed: BTreeMap::new(),
            ready: Vec::new(),
            elsewhere: BTreeSet::new(),
            outcome: None,
        }
    }

    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Leaves out `peer`, which will not answer. `ended` says whether it has certainly ended.
    pub fn exclude(&mut self, peer: usize, ended: bool) {
        let ended = ended && !self.elsewhere.contains(&peer);
        self.narrow(|membership| {
            membership.members.remove(&peer);
            if ended {
                membership.ended.insert(peer);
            }
        });
    }

    /// Leaves out `peers`, which are alive and do not call. Returns false, and does nothing, if the other members could
    /// not go on: the peers may still come.
    pub fn leave_out(&mut self, peers: &[usize]) -> bool {
        let mut without = self.membership.clone();
        without.members.retain(|rank| !peers.contains(rank));
        let may = without != self.membership && self.has_quorum(&without);
        if may {
            self.narrow(|membership| *membership = without);
        }
        may
    }

    /// Proposes the membership again, as another attempt to connect its members, unless this rank's end is ready.
    pub fn renew(&mut self) {
        if self.stage != Stage::Formed {
            self.narrow(|membership| membership.attempt = membership.attempt.saturating_add(1));
        }
    }

    /// Handles a message from rank `from`.
    pub fn receive(&mut self, from: usize, message: ShrinkMessage) {
        if let ShrinkMessage::Agreed(membership) = &message {
            self.elsewhere.insert(from);
            if !membership.members.contains(&self.rank) && self.outcome.is_none() {
                self.outcome = Some(Outcome::Excluded { by: from });
            }
        }
        if self.outcome.is_some() || !self.membership.members.contains(&from) {
            return;
        }
        match message {
            // Stops waiting for a rank that has left out this one. It may still be that rank that must not go on.
            ShrinkMessage::Proposes(theirs, _) if !theirs.members.contains(&self.rank) => self.exclude(from, false),
            ShrinkMessage::Proposes(theirs, endpoint) => {
                self.narrow(|membership| {
                    membership.members.retain(|rank| theirs.members.contains(rank));
                    membership.ended.extend(&theirs.ended);
                    membership.attempt = membership.attempt.max(theirs.attempt);
                });
                self.proposals.insert(from, (theirs, endpoint));
            }
            ShrinkMessage::Formed(theirs) => {
                self.formed.insert(from, theirs);
            }
            // All members had announced that their ends were ready, this rank included.
            ShrinkMessage::Agreed(theirs) if self.ready.contains(&theirs) => {
                self.outcome = Some(Outcome::Agreed(theirs))
            }
            ShrinkMessage::Agreed(_) => {}
        }
    }

    /// Returns the next step. Each step is returned once.
    pub fn next(&mut self) -> Next {
        match &self.outcome {
            Some(Outcome::Agreed(membership)) => return Next::Agree(membership.clone()),
            Some(Outcome::Excluded { by }) => return Next::Excluded { by: *by },
            None => {}
        }
        match self.stage {
            Stage::New => {
                self.stage = Stage::Proposed;
                Next::Propose(self.membership.clone())
            }
            Stage::Proposed if self.waits_for().is_empty() => {
                if !self.has_quorum(&self.membership) {
                    return Next::Minority { silent: self.silent(&self.membership) };
                }
                self.stage = Stage::Forming;
                let endpoint = |rank: &usize| self.proposals.get(rank).map(|(_, endpoint)| (*rank, *endpoint));
                Next::Form(self.membership.members.iter().filter_map(endpoint).collect())
            }
            Stage::Formed if self.waits_for().is_empty() => {
                self.outcome = Some(Outcome::Agreed(self.membership.clone()));
                Next::Agree(self.membership.clone())
            }
            Stage::Proposed | Stage::Forming | Stage::Formed => Next::Wait,
        }
    }

    /// Records that this rank is connected to all members.
    pub fn formed(&mut self) {
        self.stage = Stage::Formed;
        self.ready.push(self.membership.clone());
    }

    /// Returns the members that have not reached this rank's stage.
    pub fn waits_for(&self) -> Vec<usize> {
        let there = |rank: &usize| match self.stage {
            Stage::Formed => self.formed.get(rank) == Some(&self.membership),
            // This rank does not know to which of them it cannot connect.
            Stage::Forming => false,
            _ => self.proposals.get(rank).is_some_and(|(membership, _)| *membership == self.membership),
        };
        self.membership.members.iter().copied().filter(|rank| *rank != self.rank && !there(rank)).collect()
    }

    /// Returns the ranks to name if the time is up: those that have not called, or else all that this rank waits for.
    pub fn missing(&self) -> Vec<usize> {
        let waits_for = self.waits_for();
        let (called, not_called): (Vec<_>, _) = waits_for.into_iter().partition(|r| self.proposals.contains_key(r));
        if not_called.is_empty() { called } else { not_called }
    }

    /// The number of ranks that have proposed any membership with this rank.
    pub fn proposers(&self) -> usize {
        self.proposals.len()
    }

    /// Returns the members whose proposals this rank waits for, if it waits for proposals. The flag says whether the
    /// member has proposed another membership before.
    pub fn stragglers(&self) -> Vec<(usize, bool)> {
        let waits_for = if self.stage == Stage::Proposed { self.waits_for() } else { Vec::new() };
        waits_for.into_iter().map(|rank| (rank, self.proposals.contains_key(&rank))).collect()
    }

    /// Whether no group but one of this membership can go on, whichever silent ranks can reach each other.
    fn has_quorum(&self, membership: &Membership) -> bool {
        let members = &membership.members;
        self.silent(membership).is_empty() || is_majority(members.len(), members.contains(&0), self.world_size)
    }

    /// Returns the ranks that are left out and have not certainly ended.
    fn silent(&self, membership: &Membership) -> Vec<usize> {
        let Membership { members, ended, .. } = membership;
        (0..self.world_size).filter(|rank| !members.contains(rank) && !ended.contains(rank)).collect()
    }

    fn narrow(&mut self, change: impl FnOnce(&mut Membership)) {
        let before = self.membership.clone();
        change(&mut self.membership);
        self.membership.ended.retain(|rank| *rank < self.world_size);
        let Membership { members, ended, .. } = &mut self.membership;
        members.retain(|rank| !ended.contains(rank));
        if self.membership != before {
            self.stage = Stage::New;
        }
    }
}

#[cfg(test)]
mod tests;
