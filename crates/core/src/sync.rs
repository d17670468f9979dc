//! What threads hand each other things with, and how they wait.
//!
//! Under `cfg(bonfire_loom)` the primitives are loom's: the models in `tests/loom/` try the orders in which threads can see
//! each other's steps. So a mutex that is locked with [`lock`] is one from here, also where no model comes.

#[cfg_attr(bonfire_loom, path = "../tests/loom/primitives.rs")]
mod primitives;
mod wait;

pub(crate) use self::primitives::*;
pub use self::wait::Deadline;
pub(crate) use self::wait::seconds_from_env;
pub use self::wait::{Bell, ENDLESS, Patience, crowded, deadline_from_env, lock, spin};
