//! Messages of the shrink protocol, by which the survivors of a group agree on a new one.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::hang::is_majority;
use super::invitation::Endpoint;

/// The membership of the new group, as one rank sees it. Ranks are numbered as in the old group.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Membership {
    pub members: BTreeSet<usize>,
    /// Ranks that have certainly ended and continue in no other group.
    pub ended: BTreeSet<usize>,
    /// Distinguishes attempts to connect the same members: a rank that gives one up proposes the next.
    pub attempt: u32,
}

impl Membership {
    /// Returns what the members' new group has to know of the old one, of `world_size` ranks.
    pub fn predecessor(&self, world_size: usize) -> Predecessor {
        Predecessor { world_size, first: self.members.contains(&0) }
    }
}

/// The group that this one succeeds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Predecessor {
    pub world_size: usize,
    /// Whether its rank 0 is in this group, and so is its rank 0.
    pub first: bool,
}

impl Predecessor {
    /// Whether some of these ranks of this group could have agreed to go on in another one, though a rank lives that
    /// took part in this one: they would need the majority of the former group.
    pub fn lets_go_on(self, ranks: impl Iterator<Item = usize>) -> bool {
        let (mut count, mut has_zero) = (0, false);
        for rank in ranks {
            count += 1;
            has_zero |= rank == 0;
        }
        is_majority(count, self.first && has_zero, self.world_size)
    }
}

/// A shrink message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum ShrinkMessage {
    /// The sender proposes this membership, and accepts the members' connections at this endpoint.
    Proposes(Membership, Endpoint),
    /// The sender's end of the group with this membership is ready.
    Formed(Membership),
    /// All ends of the group with this membership are ready: it succeeds the old group.
    Agreed(Membership),
}

/// A peer's shrink message, or a change in its state, for a rank that shrinks the group.
#[derive(Debug)]
pub(crate) enum PeerEvent {
    Message(ShrinkMessage),
    /// It sent a goodbye.
    Left,
    /// Its connection ended.
    Closed,
    /// It was silent for longer than the heartbeat timeout.
    Silent,
}
