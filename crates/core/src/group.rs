//! Groups: who the ranks are, in which order their operations run, and what happens after a failure.
//!
//! Every operation goes one way: a [`Request`] says what is called and checks the buffers, `core` gives it its turn's number,
//! deadline and record, and `execute` runs it on an engine, in the hosts' memory, as a plan, or as messages.

mod agreed;
mod buffer;
mod builder;
mod bytes;
mod check;
mod core;
mod execute;
mod execution;
mod handle;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod hosts;
#[cfg(unix)]
mod interrupt;
mod lane;
mod operations;
mod progress;
pub(crate) mod record;
pub(crate) mod recorder;
mod request;
mod shrink;
mod subgroup;
mod trace;
mod turn;

pub use self::agreed::{Agreed, Agreement};
pub use self::buffer::{Buffer, zeroed};
pub use self::builder::{Builder, DEADLINE};
pub use self::bytes::ByteOperations;
pub use self::handle::{Group, Keepsake};
pub use self::operations::Batch;
pub use self::progress::Work;
pub use self::record::{Message, Record, State};
pub use self::request::Request;
pub use self::trace::Trace;
