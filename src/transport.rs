//! The two seams below a group.
//!
//! A [`Transport`] moves bytes between two ranks; plans run every operation on it. [`Collectives`] runs a whole
//! operation at once, where ranks reach each other's memory or an engine brings its own. A group asks for the second
//! first.

#[cfg(unix)]
pub(crate) mod frame;
pub(crate) mod local;
mod seams;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod shm;
#[cfg(unix)]
pub(crate) mod tcp;

pub(crate) use self::seams::{Buffers, Collectives};
pub use self::seams::{Fault, Transport};
