//! What the ranks of a star know of it.

use super::message::Message;

/// What there is to know of a star, besides.
#[derive(Default)]
pub(super) struct Star {
    pub hub: Hub,
    /// All ranks have begun this group.
    pub begun: bool,
    /// Rank 0 was silent, or this rank was away: others may have gone on and ended unnoticed, and who listens no more is
    /// not known to have ended before that.
    pub doubts: bool,
    /// The last collective of which this rank has told all what it called there.
    pub announced: Option<u64>,
    /// That, for those that connect after rank 0 has gone.
    pub question: Option<Message>,
    /// All ranks know of a failure, or will have heard of it when they hear that rank 0 is gone.
    pub known: bool,
    /// By rank: it goes on without the lost.
    pub moved: Vec<bool>,
    /// By rank, on rank 0: it has given the last to pass on.
    pub through: Vec<bool>,
    /// The star has become a mesh, or is about to.
    pub met: bool,
    /// Beats since it was to become one, or since the last connection was made.
    pub quiet: u64,
    /// What all must hear and rank 0 may not pass on, in its order: this rank's failure, and its words of going on.
    pub said: Vec<Message>,
}

/// Rank 0, as it looks to the others.
#[derive(Default, PartialEq)]
pub(super) enum Hub {
    #[default]
    Serves,
    /// It leaves or left in order; the others connect after so many beats.
    Left(u32),
    Lost,
}

impl Star {
    /// Whether this rank has failed before all knew of a failure.
    pub fn failed(&self) -> bool {
        self.said.iter().any(|message| matches!(message, Message::Failed(..)))
    }
}
