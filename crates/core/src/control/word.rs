//! What ranks of a group tell each other to go on without those that are lost.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::invitation::Door;

/// Who goes on, as one rank sees it. Ranks are those of the old group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Standing {
    pub members: BTreeSet<usize>,
    /// Who has certainly ended, and goes on nowhere else.
    pub gone: BTreeSet<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// These should go on; this is where I await them.
    Proposes(Standing, Door),
    /// My end of the group of these is ready.
    Formed(Standing),
    /// All ends of the group of these are ready: it is what comes of the old group.
    Agreed(Standing),
}

/// What a rank that goes on hears of another.
#[derive(Debug)]
pub(crate) enum News {
    Said(Word),
    /// It said farewell.
    Left,
    /// Its connection ended.
    Closed,
    /// Nothing was heard of it for too long.
    Silent,
}
