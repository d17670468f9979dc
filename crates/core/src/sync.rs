//! Synchronization primitives, and how threads wait.
//!
//! Under `cfg(bonfire_loom)` the primitives are loom's: the models in `tests/loom/` explore the orders in which threads
//! can observe each other's steps. A mutex for [`lock`] must therefore be the one from here, even if no model uses it.

mod local;
#[cfg_attr(bonfire_loom, path = "../tests/loom/primitives.rs")]
mod primitives;
#[cfg(unix)]
mod runtime;
mod wait;

pub use self::local::with_local;
pub(crate) use self::primitives::*;
#[cfg(unix)]
pub use self::runtime::OwnRuntime;
pub use self::wait::Deadline;
pub use self::wait::{Bell, ENDLESS, SlowWaitWarning, deadline_from_env, lock, oversubscribed, spin};
#[cfg(unix)]
pub(crate) use self::wait::{DEADLINE_VARIABLE, from_env, seconds_from_env, warn_of_wait, yield_now};
