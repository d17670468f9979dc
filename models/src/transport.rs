//! As the crate's own, with as little of TCP as shared memory needs.

mod direct;
pub(crate) mod invitation;
pub(crate) mod local;
mod seams;
pub(crate) mod shm;
pub(crate) mod tcp;

pub(crate) use self::seams::{Buffers, Collectives, Storage};
pub use self::seams::{Fault, Transport};
