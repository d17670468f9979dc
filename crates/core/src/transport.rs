//! The two interfaces below a group, and their implementations.
//!
//! A [`Transport`] moves bytes between two ranks; plans run every operation on it. A [`Collectives`] engine runs a
//! whole operation at once, where ranks access each other's memory or a library has its own operations. A group tries
//! the engine first.

mod direct;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod hosts;

#[cfg(bonfire_loom)]
#[path = "../tests/loom/reduce.rs"]
mod reduce;
mod regroup;
mod seams;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod shm;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod subset;
#[cfg(unix)]
pub(crate) mod tcp;
pub(crate) mod threads;

#[cfg(unix)]
pub use self::regroup::hosts_of;
pub use self::regroup::{GroupEndpoint, Regroup};
pub use self::seams::{Buffers, Collectives, Neighbours, Storage, Transport};
#[cfg(not(bonfire_loom))]
use crate::reduce;

/// The engine of a group, which runs operations without plans or in part without them.
pub(crate) enum Engines {
    /// No engine: plans run all operations.
    None,
    /// One engine for all ranks, which runs whole operations.
    AllRanks(std::sync::Arc<dyn Collectives>),
    /// The ranks of each host share memory. Operations run there, and as plans between the hosts.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    PerHost(hosts::Hosts),
}

impl Engines {
    /// Whether there is an engine, for all ranks or per host.
    pub fn is_some(&self) -> bool {
        !matches!(self, Engines::None)
    }

    /// See [`Collectives::blocks_process`].
    pub fn block_process(&self) -> bool {
        matches!(self, Engines::AllRanks(engine) if engine.blocks_process())
    }

    /// See [`Collectives::allocate`]. `None` without one engine for all ranks.
    pub fn allocate(&self, bytes: usize) -> Option<std::io::Result<Box<dyn Storage>>> {
        match self {
            Engines::AllRanks(engine) => engine.allocate(bytes),
            _ => None,
        }
    }
}
