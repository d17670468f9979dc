//! Groups of ranks: handles, subgroups, the order of operations, and what happens after a failure.
//!
//! All operations take the same path. A [`Request`] describes the call and checks its buffers. `core` assigns the
//! sequence number, the deadline and the record. `execute` runs the operation on an engine, in the memory of each host,
//! as a plan, or as messages.

mod agreed;
mod buffer;
mod builder;
mod bytes;
mod check;
mod core;
mod device_calls;
mod execute;
mod execution;
mod handle;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod hosts;
#[cfg(unix)]
mod interrupt;
mod journal;
mod operations;
mod progress;
pub(crate) mod record;
pub(crate) mod recorder;
mod request;
mod shrink;
mod stop;
mod subgroup;
mod trace;
mod turn;
mod values;
mod workspace;

pub use self::agreed::{Agreed, AgreedOperations, Peers, Started};
pub use self::buffer::{Buffer, zeroed};
pub use self::builder::{Builder, DEADLINE};
pub use self::bytes::ByteOperations;
pub use self::device_calls::{DeviceCalls, DeviceWait};
pub use self::handle::{Attachment, Group};
#[cfg(unix)]
pub use self::interrupt::answer_stop;
pub use self::journal::{Entered, Waiting, call_site, go_on};
pub use self::operations::Batch;
pub use self::progress::Work;
pub use self::record::{CallSite, Message, Record, State};
pub use self::request::Request;
#[cfg(not(unix))]
pub use self::stop::answer_stop;
pub use self::stop::{request_stop, stop_is_requested};
pub use self::trace::Trace;
