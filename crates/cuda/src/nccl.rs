//! NCCL: collectives between GPUs of one process, of many processes or of many hosts.
//!
//! All ranks of a [`Group`](bonfire_core::Group) create a [`Communicator`] together, each with a GPU of its own. The
//! group carries what NCCL needs to find the other ranks, and reports to every rank what is wrong on any of them: a
//! library that is missing, too old or of another version, or a GPU that two ranks share. NCCL's own connections are
//! neither encrypted nor authenticated.
//!
//! NCCL's library is looked for when the first communicator is created. The crate builds without it. Where it is
//! missing, the result is [`Error::Library`](bonfire_core::Error::Library), which says what to install.
//!
//! # No unbounded waits
//! Communicators do not block: everything that takes NCCL time is polled until a deadline. At the deadline the
//! communicator is aborted, so that its kernels end and its stream continues. A communicator that failed stays failed:
//! every later call returns the first error.
//!
//! # Results
//! [`reduction`] says what NCCL can reduce. Reductions whose results would differ from what
//! [`ReduceOp`](bonfire_core::ReduceOp) promises are refused: means of integers (NCCL's sum wraps before it is
//! divided), and Max and Min of floats (NCCL loses a NaN). Sums, products and means of floats are those of `ReduceOp`
//! except for rounding: NCCL rounds f16 and bf16 after every addition, and multiplies by `1/n` before it adds where
//! Bonfire divides the sum. Whether all ranks get bit-identical results is up to NCCL.

mod communicator;
mod connect;
mod library;
mod operations;
mod types;

pub use self::communicator::{Communicator, Submitted, has_passed};
pub use self::connect::Gpu;
pub use self::library::version;
pub use self::operations::{Action, Work};
pub(crate) use self::types::reduces;
pub use self::types::{Scalar, reduction};
