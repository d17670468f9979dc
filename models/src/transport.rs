//! As the crate's own, without TCP.

pub(crate) mod local;
mod seams;

pub(crate) use self::seams::{Buffers, Collectives};
pub use self::seams::{Fault, Transport};
