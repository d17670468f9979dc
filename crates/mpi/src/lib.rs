//! Groups of ranks that are processes of an MPI job, on MPI's own operations: a transport of `bonfire-core`.
//!
//! A program that is built with this package has it: `BONFIRE_TRANSPORT=mpi`, or `Builder::transport` with
//! `TransportKind::Mpi` or `MpiBlocking`, chooses it. `bonfire-burn` has it with its feature `mpi`. Otherwise depend on
//! `bonfire-mpi` with the feature `library`, and name it, so that it is linked:
//!
//! ```
//! use bonfire_mpi as _;
//! ```
//!
//! # Feature
//! * `library`: the transport. The build needs an MPI library's headers, its `mpicc`, and libclang. Without the feature
//!   the package is empty, so the packages beside it are built and tested on a machine that has no MPI.
//!
//! # Operations
//!
//! MPI's calls wait forever for a missing rank, and may keep the memory that they are given for as long. So an
//! operation has two steps:
//! 1. All ranks agree on the call (`agreement.rs`). Any rank may give up this step at its deadline, and in it all ranks
//!    learn whether they called the same operation. A barrier is this step and nothing more.
//! 2. MPI gets the callers' memory, and a rank stays in this step until MPI is done (`lent.rs`). If a peer is stopped
//!    in the middle, the rank cannot wait longer than its deadline, and cannot return while MPI has the memory. So it
//!    ends the job with `MPI_Abort`.
//!
//! *Blocking* groups leave out the first step and are as fast as MPI itself. They rely on MPI to detect ranks that
//! disagree, and a watchdog ends the job when a rank waits longer than its deadline.
//!
//! # Threads
//!
//! Every call into MPI is made under one lock of the process. Non-blocking groups hold it for one poll at a time, so
//! several threads may use the groups of a rank, in any order. A blocking call holds it until it is done: operations of
//! several blocking groups must be called by one thread, in the same order on all ranks. The same holds for making
//! groups of either kind, since MPI 3.1 has no non-blocking `MPI_Comm_create_group` or `MPI_Comm_split_type`. A
//! watchdog monitors these calls too.
//!
//! # Bindings
//!
//! The bindings are `mpi-sys`, the lower half of rsmpi. rsmpi's own functions drop what MPI returns, and some do not
//! compare the lengths of the buffers that they pass on.

#![warn(missing_docs)]

#[cfg(all(feature = "library", not(unix)))]
compile_error!("the feature `library` needs a unix system");

#[cfg(all(feature = "library", unix))]
mod group;

#[cfg(all(feature = "library", unix))]
inventory::submit! {
    bonfire_core::internal::TransportPackage {
        kinds: &[bonfire_core::TransportKind::Mpi, bonfire_core::TransportKind::MpiBlocking],
        connect: group::connect,
    }
}
