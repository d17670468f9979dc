//! Messages of the shrink protocol, by which the survivors of a group agree on a new one.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

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
    /// Its connection ended, and it had not said that it may go on elsewhere.
    Closed,
    /// It was silent for longer than the heartbeat timeout, or may go on elsewhere.
    Silent,
}
