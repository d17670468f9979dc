//! Collective communication over slices: groups of ranks that are threads of one process, or processes that share memory on
//! one host and talk over TCP or MPI between hosts.
//!
//! | you want to | use |
//! |---|---|
//! | combine slices | [`Group`] |
//! | carry messages in your own way | [`Transport`] and [`Group::on`] |
//! | speak with programs that use yscv's `TcpTransport`, or its wire | [`yscv`] |
//!
//! For burn's tensors and training loops use `bonfire-burn`, which gives all of this on as `bonfire`. Messages go through
//! `log`.
//!
//! # Features
//! * `shm` (default): shared memory between the processes of a host, on Linux.
//! * `mpi`: groups on an MPI library.

#![warn(missing_docs)]

#[cfg(unix)]
mod auth;
mod collective;
#[cfg(unix)]
mod control;
mod group;
#[doc(hidden)]
pub mod internal;
#[cfg(all(test, bonfire_loom))]
#[path = "../tests/loom/mod.rs"]
mod models;
mod plan;
mod random;
mod reduce;
#[cfg(unix)]
mod rendezvous;
mod sync;
mod transport;
mod types;
#[cfg(unix)]
pub mod yscv;

#[cfg(unix)]
pub use auth::Secret;
pub use collective::Batch;
pub use group::{Buffer, Builder, Group, Message, Record, State, Trace, Work};
pub use plan::{Algorithm, Selection};
#[cfg(unix)]
pub use rendezvous::{Launched, Medium};
pub use sync::Deadline;
pub use transport::Transport;
pub use types::{Apart, Call, DType, Element, Error, Fault, Operation, ReduceOp, Site, Tag, partition};
