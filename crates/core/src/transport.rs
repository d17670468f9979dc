//! The two seams below a group.
//!
//! A [`Transport`] moves bytes between two ranks; plans run every operation on it. [`Collectives`] runs a whole
//! operation at once, where ranks reach each other's memory or an engine brings its own. A group asks for the second
//! first.

mod direct;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod hosts;

#[cfg(all(feature = "mpi", unix))]
pub(crate) mod mpi;
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
pub(crate) use self::regroup::hosts_of;
pub(crate) use self::regroup::{Base, Regroup};
pub use self::seams::Transport;
pub(crate) use self::seams::{Buffers, Collectives, Storage};
#[cfg(not(bonfire_loom))]
use crate::reduce;

/// What ranks reach each other by besides messages.
pub(crate) enum Near {
    /// Nothing.
    Nobody,
    /// All ranks reach each other's memory, or share some: this runs whole operations.
    Everybody(std::sync::Arc<dyn Collectives>),
    /// The ranks of a host share memory. Plans run operations, in it and between the hosts.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    Hosts(hosts::Hosts),
}

impl Near {
    /// Whether there is a way of the transport's own.
    pub fn is_somebody(&self) -> bool {
        !matches!(self, Near::Nobody)
    }

    /// As [`Collectives::allocate`].
    pub fn allocate(&self, bytes: usize) -> Option<std::io::Result<Box<dyn Storage>>> {
        match self {
            Near::Everybody(engine) => engine.allocate(bytes),
            _ => None,
        }
    }
}
