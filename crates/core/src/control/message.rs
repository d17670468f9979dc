//! Control messages, and the requests that make the control thread send them.

use serde::{Deserialize, Serialize};

use super::invitation::Invitation;
use super::shrink::{PeerEvent, ShrinkMessage};
use super::status::GroupStatus;
use crate::types::{Error, Fault, Site, Whereabouts};

/// A request from the threads that run operations to the control thread.
pub(crate) enum ControlRequest {
    /// This rank makes no progress in this call. Asks all peers for theirs.
    Calling(Site),
    /// This rank has waited for long. Asks a peer where it is in its program.
    Locate(usize),
    /// This rank waits for others, which rank 0 has left. Connects it to them, if it is not.
    Meet,
    /// Sends this rank's call to a peer that asked before the call was made.
    Called(usize, Site),
    /// This rank failed after it had completed this many collectives.
    Failed(Error, u64),
    /// Sends an invitation to a member of a new subgroup.
    Invites(usize, Invitation),
    /// Sends a shrink message to all peers.
    ShrinkMessage(ShrinkMessage),
    /// This rank leaves. The control thread ends.
    Goodbye(Goodbye),
}

/// A message from one rank to others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Heartbeat.
    Heartbeat,
    /// The sender makes no progress in this call. Asks for the receiver's call with this sequence number.
    Calling(Site),
    /// The answer: the sender's call, at once or when the sender makes it.
    Called(Site),
    /// The sender has waited for long. Asks where the receiver is in its program.
    Locate,
    /// The answer. It does not wait until the receiver makes a call.
    Located(Whereabouts),
    /// The error that poisoned the sender's group, and how many collectives the sender had completed.
    Failed(Error, u64),
    ShrinkMessage(ShrinkMessage),
    Invites(Invitation),
    /// On a connection of a group that survivors may have agreed on: the sender may go on in another one. Its next
    /// message says that it has not.
    Elsewhere,
    /// The sender leaves. A connection that ends without it means a lost rank.
    Goodbye(Goodbye),
}

/// How a rank leaves.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Goodbye {
    /// Its thread panics. Otherwise it leaves in order.
    pub panicked: bool,
    /// How many collectives it has begun in the group. No rank completes one that it has not.
    pub begun: u64,
}

/// Records a message of `peer` in the status. Returns the answer, if any.
pub(crate) fn apply_message(status: &GroupStatus, peer: usize, message: Message) -> Option<Message> {
    match message {
        Message::Heartbeat | Message::Elsewhere => {}
        Message::Calling(site) => return status.record_call(peer, site, true).map(Message::Called),
        Message::Called(site) => drop(status.record_call(peer, site, false)),
        Message::Locate => return status.own_whereabouts().map(Message::Located),
        Message::Located(whereabouts) => status.set_whereabouts(peer, whereabouts),
        Message::Failed(error, completed) => status.fail(Fault::Failed(error), completed),
        Message::ShrinkMessage(_) => status.set_shrinking(peer),
        Message::Invites(invitation) => status.add_invitation(peer, invitation),
        Message::Goodbye(Goodbye { panicked: true, .. }) => drop(status.mark_lost(peer, "its thread panicked".into())),
        Message::Goodbye(Goodbye { begun, .. }) => status.mark_left(peer, begun),
    }
    None
}

/// A peer, and a shrink message from it or a change in its state.
pub(crate) type RankEvent = (usize, PeerEvent);
