//! Collective communication over slices. The ranks of a group are threads of one process, or processes, which use
//! shared memory on one host and TCP between hosts, or with the package `bonfire-mpi` MPI for both.
//!
//! | you want to | use |
//! |---|---|
//! | combine slices | [`Group`] |
//! | start the ranks | [`launch()`] |
//! | react to a failure | [`Error`] and [`Group::shrink`] |
//! | use a transport of your own | [`Transport`] and [`Group::on`] |
//!
//! For burn's tensors and training loops use `bonfire-burn` (library `bonfire`), which re-exports all of this. Log
//! messages go through `log`. On systems other than Unix, ranks are threads or use your own transport.
//!
//! # Features
//! * `shm` (default): shared memory between the processes of a host, on Linux.

#![warn(missing_docs)]

#[cfg(unix)]
mod auth;
mod control;
#[cfg(unix)]
mod descriptors;
mod group;
#[doc(hidden)]
pub mod internal;
pub mod launch;
mod machine;
#[cfg(all(test, bonfire_loom))]
#[path = "../tests/loom/mod.rs"]
mod models;
mod plan;
mod reduce;
#[cfg(unix)]
mod rendezvous;
#[cfg(unix)]
mod report;
mod sync;
mod transport;
mod types;

#[cfg(unix)]
pub use auth::Secret;
pub use group::{Batch, Buffer, Builder, Group, Work, request_stop};
pub use launch::launch;
pub use plan::{Algorithm, Selection};
#[cfg(unix)]
pub use rendezvous::{StopSignal, TransportKind};
pub use sync::Deadline;
pub use transport::Transport;
pub use types::{Call, DType, Element, Error, Fault, Operation, ReduceOp, partition};

/// Types of the fields of [`Error`].
pub mod error {
    pub use crate::types::{Cause, ProgramCall, ShrinkError, Site, Whereabouts};
}

/// Traces: each rank's record of its last operations.
pub mod trace {
    pub use crate::group::{Message, Record, State, Trace};
}

/// Compiles the code in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct FrontPage;
