//! As the crate's own, without TCP.

mod direct;
pub(crate) mod local;
mod seams;

pub(crate) use self::seams::{Buffers, Collectives, Storage};
pub use self::seams::{Fault, Transport};
