//! What ranks tell each other beside the data.

use serde::{Deserialize, Serialize};

use super::board::Board;
use super::invitation::Invitation;
use super::word::{News, Word};
use crate::types::{Error, Fault, Site};

/// From the threads that run operations to the control thread.
pub(crate) enum Outgoing {
    /// This rank stalls at this call and asks all peers for theirs.
    Calling(Site),
    /// This rank's call, to a peer that asked before it was made.
    Called(usize, Site),
    /// This rank failed, having completed so many collectives.
    Failed(Error, u64),
    /// To a member of a subgroup to be.
    Invites(usize, Invitation),
    /// To all peers, of going on without those that are lost.
    Word(Word),
    /// This rank leaves, in order or because its thread panics; the control thread ends.
    Farewell { panicked: bool },
}

/// What a rank tells others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Nothing but a word: this rank is there.
    Here,
    Calling(Site),
    Called(Site),
    Failed(Error, u64),
    Word(Word),
    Invites(Invitation),
    Farewell {
        panicked: bool,
    },
}

/// Takes what `peer` said; gives what to answer, if anything.
pub(crate) fn hear(board: &Board, peer: usize, message: Message) -> Option<Message> {
    match message {
        Message::Here => {}
        Message::Calling(site) => return board.hear(peer, site, true).map(Message::Called),
        Message::Called(site) => drop(board.hear(peer, site, false)),
        Message::Failed(error, completed) => board.fail(Fault::Failed(error), completed),
        Message::Word(_) => board.moves(peer),
        Message::Invites(invitation) => board.invited(peer, invitation),
        Message::Farewell { panicked: true } => drop(board.lost(peer, "its thread panicked".into())),
        Message::Farewell { panicked: false } => board.left(peer),
    }
    None
}

/// Who a word of going on is from, or of whom the news are.
pub(crate) type Heard = (usize, News);
