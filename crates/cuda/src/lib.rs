//! Collectives between CUDA devices: Bonfire's kernels, windows between processes, and NCCL, without a tensor library.
//!
//! # The seam
//! Tensors belong to a library, of which this package needs one trait, [`Runtime`]: it finds and allocates memory,
//! keeps memory while a value lives, launches two small kernels that order its streams against ours ([`OrderKernel`]),
//! and has a [`Status`] of each device, where faults are reported. What it says of memory must be true, so the trait is
//! `unsafe`; all that it calls is safe. Its servers call an [`Engine`]: `enter` before new work on a stream, `follow`
//! with the end of an operation ([`End`]), and between devices without a group `all_reduce`, `lend` and `copy`.
//! Operations of a group: [`RankRoute::agree`] once; then [`Route::prepare`] on the device's thread, [`start`], and a
//! wait ([`Launched::wait`]), or `follow`, which has the streams wait instead.
//! `bonfire-burn` implements the trait for cubecl 0.10, and `tests/operations` for the smallest library.
//!
//! # Why streams of our own
//! The alternative is to launch collectives on a stream of the library, which orders it against the others. With
//! several ranks on a GPU it takes a rendezvous of their threads before each launch and another one after it: a kernel
//! that spins for a peer must not be on the GPU while the peer's thread loads a module, and no two launches of one call
//! may be in one hardware queue. NCCL needs a raw stream anyway.
//!
//! # What has been tested
//! The tests have run on one H100, never on several GPUs (`docs/measurements/gpu.md`). They also run on the software
//! driver (`kernels/check --driver`): with one hardware queue per GPU, with a driver that waits for the whole context,
//! on several GPUs, and groups on the stand-in for NCCL. That driver compiles kernels of cubecl and burn for the CPU,
//! so bonfire-burn's `tests/cuda_compute.rs` and the trainings of `tests/cuda_training.rs` run there, too.
//!
//! The interface is for adapters like `bonfire-burn`. It may change with every release.

#![warn(missing_docs)]

mod address;
mod backoff;
pub mod bench;
mod choice;
mod context;
mod control;
mod copy_stream;
mod driver;
mod engine;
mod exchange;
mod kernel;
mod launches;
mod memory;
#[cfg(feature = "nccl")]
pub mod nccl;
mod order;
mod place;
mod reach;
mod remote;
mod rounds;
mod route;
mod runtime;
mod shared;
mod side;
mod team;
mod window;

pub use self::address::{Address, Word};
pub use self::control::Order;
pub use self::copy_stream::PeerBuffer;
pub use self::driver::gpus;
pub use self::engine::Engine;
pub use self::exchange::{Launch, Launched, Transfer, start, start_message};
pub use self::kernel::OrderKernel;
pub use self::order::End;
pub use self::route::{Messages, RankRoute, Route};
pub use self::runtime::{Check, DeviceId, DeviceOperation, Look, Runtime, Status};
pub use self::shared::Shared;
