//! The state of a rank in a star. See `plane`.

use super::calls::CallTable;
use super::message::Message;
use crate::types::Site;

/// What the control thread of a rank in a star keeps besides its connections.
#[derive(Default)]
pub(super) struct Star {
    pub hub: Hub,
    /// Whether all ranks are known to have begun this group.
    pub begun: bool,
    /// Whether rank 0 was silent or this rank was suspended. The other ranks may then have shrunk the group and exited
    /// unnoticed, so a rank that no longer listens may have ended only after that.
    pub uncertain: bool,
    /// The call for which this rank last asked all ranks for theirs. Also for ranks that connect after rank 0 is gone.
    pub question: Option<Site>,
    /// On rank 0: the calls of all ranks.
    pub calls: CallTable,
    /// Whether all ranks know of a failure, or will know of one when they learn that rank 0 is gone.
    pub failure_known: bool,
    /// By rank: whether it has called `shrink`.
    pub shrinking: Vec<bool>,
    /// By rank, on rank 0: whether it has sent its last message to relay.
    pub drained: Vec<bool>,
    /// Whether the star has become a mesh or is about to.
    pub is_mesh: bool,
    /// Heartbeats since a connection was last awaited or made.
    pub idle_ticks: u64,
    /// Messages that all ranks must receive and rank 0 may not relay, in order: this rank's failure, its shrink
    /// messages and its goodbye. Sent first on every new connection.
    pub replay: Vec<Message>,
}

/// The state of rank 0, as another rank sees it.
#[derive(Default, PartialEq)]
pub(super) enum Hub {
    #[default]
    Serves,
    /// It leaves or has left in order. The other ranks connect to each other when one of them waits for another.
    Left,
    Lost,
}

impl Star {
    pub fn new(world_size: usize) -> Star {
        let (shrinking, drained) = (vec![false; world_size], vec![false; world_size]);
        Star { shrinking, drained, calls: CallTable::new(world_size), ..Star::default() }
    }

    /// Whether this rank failed before all ranks knew of a failure.
    pub fn has_failed(&self) -> bool {
        self.replay.iter().any(|message| matches!(message, Message::Failed(..)))
    }
}
