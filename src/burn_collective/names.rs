//! Who takes part, and where.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A participant of collective operations: usually a thread with a device of its own. Unique within the session, and
/// over all nodes: a reduction with a root needs that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PeerId(pub u32);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerId({})", self.0)
    }
}

/// A process of a session that spans several, numbered from 0 by the orchestrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(u32);

impl NodeId {
    /// The node's rank in the group of nodes.
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
            /// Numbers beyond 32 bits are cut off, negative ones wrap.
            fn from(number: $number) -> Self {
                $id(number as u32)
            }
        }
    )*};
}

from_numbers!(PeerId: u32, i32, usize);
from_numbers!(NodeId: u32, i32, usize);
