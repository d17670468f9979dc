//! The control plane: the messages that ranks exchange beside the data, and what each rank knows of its peers.
//!
//! `plane` is the control thread of groups of processes that communicate over TCP. Groups on MPI have a control plane
//! of their own, with the same messages and the same board.

#[cfg(unix)]
mod beat;
#[cfg(unix)]
mod board;
#[cfg(unix)]
pub mod frame;
#[cfg(unix)]
mod hub;
pub(crate) mod invitation;
#[cfg(unix)]
mod line;
#[cfg(unix)]
mod meet;
#[cfg(unix)]
mod message;
#[cfg(unix)]
mod plane;
#[cfg(all(test, unix, not(bonfire_loom)))]
mod tests;
#[cfg(unix)]
mod watch;
#[cfg(unix)]
mod word;

#[cfg(unix)]
pub(crate) use self::{
    beat::HeartbeatTimeout,
    board::Board,
    line::greet,
    meet::{MOST, RETRY, SYN, admit, is_own},
    message::{RankEvent, Outgoing},
    plane::{Mesh, run},
    watch::Watch,
    word::{PeerEvent, Membership, ShrinkMessage},
};
#[cfg(all(feature = "mpi", unix))]
pub(crate) use self::{
    board::verdict,
    message::{Message, hear},
};
