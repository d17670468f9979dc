//! NCCL: collectives between GPUs of one process, of many processes or of many hosts.
//!
//! A [`Communicator`] is made by all ranks of a [`Group`](crate::Group), each with a GPU of its own. The group carries
//! what NCCL needs to find the other ranks, and tells every rank what is wrong with any of them: a library that is
//! missing, too old or another version, a GPU that two ranks share. NCCL's own connections are neither encrypted nor
//! authenticated.
//!
//! NCCL's library is looked for when the first communicator is made. The crate builds without it, and without it this
//! is [`Error::Library`](crate::Error::Library), which says what to install.
//!
//! # Nothing waits for ever
//! Communicators do not block: whatever NCCL takes its time for is polled until a deadline, and at the deadline the
//! communicator is aborted, so that its kernels end and its stream goes on. A communicator that failed stays failed:
//! every later call returns the first error.
//!
//! # Results
//! [`reduction`] says what NCCL can reduce. What it would give other numbers for than [`ReduceOp`](crate::ReduceOp)
//! promises is refused: means of integers (NCCL's sum wraps before it is divided), and the largest and smallest of
//! floats (NCCL loses a NaN). Sums, products and means of floats are those of `ReduceOp` but for rounding: NCCL rounds
//! f16 and bf16 after every addition, and multiplies by `1/n` before it adds where Bonfire divides the sum. Whether all
//! ranks have the same bits is up to NCCL.

mod communicator;
mod connect;
mod library;
mod operations;
mod types;

pub use self::communicator::{Communicator, Submitted, has_passed};
pub use self::connect::Gpu;
pub use self::library::version;
pub use self::operations::{Action, Work};
pub(super) use self::types::reduces;
pub use self::types::{Scalar, reduction};
