//! Ids of peers and nodes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The id of a peer, a participant of collective operations: usually a thread with a device of its own. It must be
/// unique in the session, over all nodes: a reduction to a root relies on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PeerId(pub u32);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerId({})", self.0)
    }
}

/// The id of a node, a process of a session that spans several. The orchestrator numbers nodes from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(u32);

impl NodeId {
    /// Returns the node's rank in the group of nodes.
    pub(super) fn rank(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({})", self.0)
    }
}

macro_rules! from_numbers {
    ($id:ident: $($number:ty),*) => {$(
        impl From<$number> for $id {
            /// Truncates numbers to 32 bits; negative ones wrap.
            fn from(number: $number) -> Self {
                $id(number as u32)
            }
        }
    )*};
}

from_numbers!(PeerId: u32, i32, usize);
from_numbers!(NodeId: u32, i32, usize);
