//! The control plane: what ranks tell each other beside the data, and what each knows of the others.
//!
//! `plane` is its thread in groups of processes that talk over TCP; groups on MPI have one of their own, with the same
//! messages and the same board.

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
    beat::Silence,
    board::Board,
    line::greet,
    meet::{MOST, RETRY, SYN, admit, is_own},
    message::{Heard, Outgoing},
    plane::{Mesh, run},
    watch::Watch,
    word::{News, Standing, Word},
};
#[cfg(all(feature = "mpi", unix))]
pub(crate) use self::{
    board::verdict,
    message::{Message, hear},
};
