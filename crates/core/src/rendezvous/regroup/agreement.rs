//! How survivors agree on who goes on: the rules, without clocks and connections.
//!
//! Every rank proposes a standing: all ranks but those it knows to be gone or lost, that a member's proposal leaves out, or
//! whose proposals leave it out. So members only become fewer, and those who hear each other come to the same standing.
//! Once all members have proposed the same one, they connect (*form*), and each says when its end is ready (*formed*). Who
//! has heard that from all members of its standing has *agreed*, and says so to everybody.
//!
//! Who has narrowed its standing meanwhile, and hears from a member that a wider one was agreed on, follows: it has said
//! itself that its end of that one is ready, and keeps such ends.
//!
//! A standing may go on where all that it leaves out are gone for certain; else, where some are silent, if it has more than
//! half of all ranks, or half of them with the lowest. So two groups never go on. Take two standings `S` and `T` that are
//! agreed on, both with ranks that live. Where they have no rank in common, each side counts the other as silent, and one of
//! them has more. Else what ranks in common propose makes one part of the other: let `T` be the narrower, and `J` the ranks
//! that agree on `S`. Who agrees on `S` says nothing about narrower ones after it, and the first member of `T` to agree on `S`
//! has not said that its end of `T` is ready: it has not come as far, or hears this of a member of `T` that is in `J` before
//! it. So `T` has no members in `J`, and is silent in the group of `S`, where it never says a word; there `J` would need half
//! of `S` or more to go on, and then `T` has less than half of all, or just not the lowest.

use std::collections::{BTreeMap, BTreeSet};

use crate::control::invitation::Door;
use crate::control::{Standing, Word};

/// One rank's part in it.
pub(super) struct Agreement {
    rank: usize,
    world_size: usize,
    standing: Standing,
    stage: Stage,
    /// What each rank proposed last, and where it awaits the others.
    proposals: BTreeMap<usize, (Standing, Door)>,
    /// By rank: the last group that its end is ready of.
    formed: BTreeMap<usize, Standing>,
    /// The groups that this rank's end was ready of.
    ready: Vec<Standing>,
    /// Who goes on in some group. It is never known to be gone, though it may end its part in this one.
    elsewhere: BTreeSet<usize>,
    end: Option<End>,
}

/// How far this rank is with its standing.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    New,
    Proposed,
    Forming,
    Formed,
}

#[derive(Clone, Debug, PartialEq)]
enum End {
    Agreed(Standing),
    Excluded { by: usize },
}

/// What a rank does next.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Next {
    /// Propose this; any attempt to form another group ends.
    Propose(Standing),
    /// Connect to these.
    Form(Vec<(usize, Door)>),
    Wait,
    /// The group of this standing is what comes of the old one.
    Agree(Standing),
    /// The others go on without this rank.
    Excluded {
        by: usize,
    },
    /// So few must not go on: these are silent, and may be more.
    Minority {
        silent: Vec<usize>,
    },
}

impl Agreement {
    pub fn new(rank: usize, world_size: usize) -> Agreement {
        Agreement {
            rank,
            world_size,
            standing: Standing { members: (0..world_size).collect(), gone: BTreeSet::new() },
            stage: Stage::New,
            proposals: BTreeMap::new(),
            formed: BTreeMap::new(),
            ready: Vec::new(),
            elsewhere: BTreeSet::new(),
            end: None,
        }
    }

    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// `peer` will not answer; `gone` says that it has ended.
    pub fn exclude(&mut self, peer: usize, gone: bool) {
        let gone = gone && !self.elsewhere.contains(&peer);
        self.narrow(|standing| {
            standing.members.remove(&peer);
            if gone {
                standing.gone.insert(peer);
            }
        });
    }

    /// `from` has said this.
    pub fn hear(&mut self, from: usize, word: Word) {
        if let Word::Agreed(standing) = &word {
            self.elsewhere.insert(from);
            if !standing.members.contains(&self.rank) && self.end.is_none() {
                self.end = Some(End::Excluded { by: from });
            }
        }
        if self.end.is_some() || !self.standing.members.contains(&from) {
            return;
        }
        match word {
            // Nobody waits for who does not wait for it. It may yet be the other who must not go on.
            Word::Proposes(theirs, _) if !theirs.members.contains(&self.rank) => self.exclude(from, false),
            Word::Proposes(theirs, door) => {
                self.narrow(|standing| {
                    standing.members.retain(|rank| theirs.members.contains(rank));
                    standing.gone.extend(&theirs.gone);
                });
                self.proposals.insert(from, (theirs, door));
            }
            Word::Formed(theirs) => {
                self.formed.insert(from, theirs);
            }
            // Who agrees has heard from this rank that its end is ready.
            Word::Agreed(theirs) if self.ready.contains(&theirs) => self.end = Some(End::Agreed(theirs)),
            Word::Agreed(_) => {}
        }
    }

    /// What there is to do now. Each step is given once.
    pub fn next(&mut self) -> Next {
        match &self.end {
            Some(End::Agreed(standing)) => return Next::Agree(standing.clone()),
            Some(End::Excluded { by }) => return Next::Excluded { by: *by },
            None => {}
        }
        match self.stage {
            Stage::New => {
                self.stage = Stage::Proposed;
                Next::Propose(self.standing.clone())
            }
            Stage::Proposed if self.waits_for().is_empty() => {
                if !self.may_go_on() {
                    return Next::Minority { silent: self.silent() };
                }
                self.stage = Stage::Forming;
                let door = |rank: &usize| self.proposals.get(rank).map(|(_, door)| (*rank, *door));
                Next::Form(self.standing.members.iter().filter_map(door).collect())
            }
            Stage::Formed if self.waits_for().is_empty() => {
                self.end = Some(End::Agreed(self.standing.clone()));
                Next::Agree(self.standing.clone())
            }
            Stage::Proposed | Stage::Forming | Stage::Formed => Next::Wait,
        }
    }

    /// This rank's end of the group of its standing is ready.
    pub fn formed(&mut self) {
        self.stage = Stage::Formed;
        self.ready.push(self.standing.clone());
    }

    /// The members that have not come as far as this rank.
    pub fn waits_for(&self) -> Vec<usize> {
        let there = |rank: &usize| match self.stage {
            Stage::Formed => self.formed.get(rank) == Some(&self.standing),
            // It does not know which of them it cannot connect to.
            Stage::Forming => false,
            _ => self.proposals.get(rank).is_some_and(|(standing, _)| *standing == self.standing),
        };
        self.standing.members.iter().copied().filter(|rank| *rank != self.rank && !there(rank)).collect()
    }

    /// Whether no other ranks go on, whoever of the silent hears whom.
    fn may_go_on(&self) -> bool {
        let Standing { members, .. } = &self.standing;
        let half = 2 * members.len() == self.world_size && members.contains(&0);
        self.silent().is_empty() || 2 * members.len() > self.world_size || half
    }

    /// Who is left out and may be there.
    fn silent(&self) -> Vec<usize> {
        let Standing { members, gone } = &self.standing;
        (0..self.world_size).filter(|rank| !members.contains(rank) && !gone.contains(rank)).collect()
    }

    fn narrow(&mut self, change: impl FnOnce(&mut Standing)) {
        let before = self.standing.clone();
        change(&mut self.standing);
        self.standing.gone.retain(|rank| *rank < self.world_size);
        let Standing { members, gone } = &mut self.standing;
        members.retain(|rank| !gone.contains(rank));
        if self.standing != before {
            self.stage = Stage::New;
        }
    }
}

#[cfg(test)]
mod tests;
