//! The control plane: the messages that ranks exchange beside the data, and what each rank knows of its peers.
//!
//! `plane` is the control thread of groups of processes that communicate over TCP. `polled` has the same messages and
//! the same status without a thread, for groups on MPI.

#[cfg(unix)]
mod accept;
#[cfg(unix)]
mod attempt;
#[cfg(unix)]
mod calls;
#[cfg(unix)]
mod connection;
#[cfg(unix)]
pub mod frame;
pub(crate) mod hang;
#[cfg(unix)]
mod heartbeat;
#[cfg(unix)]
mod hub;
pub(crate) mod invitation;
#[cfg(unix)]
mod message;
#[cfg(unix)]
mod peer;
#[cfg(unix)]
mod plane;
#[cfg(unix)]
mod polled;
#[cfg(unix)]
mod shrink;
#[cfg(unix)]
mod status;
#[cfg(all(test, unix, not(bonfire_loom)))]
mod tests;
#[cfg(unix)]
mod watch;

#[cfg(unix)]
pub(crate) use self::{
    accept::{MAX_DATA_CONNECTIONS, RETRY, admit},
    attempt::{Attempt, CONNECT_TIMEOUT, attempt, is_own},
    connection::send_first,
    heartbeat::{HeartbeatTimeout, turn},
    message::{ControlRequest, Goodbye, Message, RankEvent},
    plane::{ControlSetup, run},
    shrink::{Membership, PeerEvent, ShrinkMessage},
    status::GroupStatus,
};
#[cfg(unix)]
pub use self::{
    polled::{ControlMessage, ControlMessages, Invited, PolledControl},
    watch::Watch,
};
