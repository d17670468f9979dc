//! Bonfire: collective communication for distributed training with [burn](https://burn.dev).
//!
//! Many logs, one fire: many devices, one model. Ranks are threads of one process, or processes that share memory on one
//! host and talk over TCP between hosts.
//!
//! | you want to | use |
//! |---|---|
//! | train a burn model on many ranks | [`DataParallel`], [`ShardedSampler`], [`SyncBatchNorm`]; see [`train`] |
//! | keep a part of the optimizer's state on each rank | [`ShardedOptimizer`] |
//! | have burn's wgpu or CUDA backend with collectives between devices | `Wgpu`, `Cuda`; see `server` |
//! | train with burn-train's `Learner` | `DataParallelStrategy`, with the feature `ddp` |
//! | run a program written for burn-collective | [`register`], [`all_reduce`], [`broadcast`], [`reduce`]; see [`tensor`] |
//! | move and combine tensors of any kind, with gradients if you like | [`tensor::operation`], [`tensor::autodiff`] |
//! | place experts on different ranks, or move a program from vLLM's device communicator | [`DeviceCommunicator`] |
//! | combine slices | [`Group`] |
//! | carry messages in your own way | [`Transport`] and [`Group::on`] |
//! | speak with programs that use yscv's `TcpTransport`, or its wire | `TcpTransport` |
//!
//! The program `bonfire` starts ranks (`bonfire run`), measures (`bonfire perf`) and looks at the machine
//! (`bonfire doctor`). Messages go through `log`.
//!
//! # Features
//! * `cli` (default): the program `bonfire`.
//! * `flex` (default, part of `cli`): tensors of burn's backend Flex are reduced from where they are.
//! * `shm` (default): shared memory between the processes of a host, on Linux.
//! * `wgpu`, `cuda`: burn's backends on a compute server with collectives. `cubecl`: the same for a runtime of your own.
//! * `ddp`: burn-train's distributed training on these backends. It turns on burn's `distributed`, which takes
//!   `AutodiffBackend` from backends without collectives, such as Flex and NdArray.

#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

#[cfg(unix)]
mod auth;
mod call;
mod collective;
mod dtype;
mod error;
#[cfg(test)]
mod fuzz;
mod group;
mod partition;
mod plan;
mod random;
mod reduce;
#[cfg(unix)]
mod rendezvous;
mod scratch;
#[cfg(feature = "cubecl")]
pub mod server;
#[cfg(unix)]
mod star;
mod sync;
pub mod tensor;
pub mod train;
mod transport;
mod wait;

#[cfg(unix)]
pub use auth::Secret;
pub use call::{Call, Operation, Tag};
pub use collective::Batch;
pub use dtype::{DType, Element, ReduceOp, ReduceOp as ReduceOperation};
pub use error::{Apart, Error, Site};
pub use group::{Buffer, Builder, Group, Message, Record, State, Trace, Work};
pub use partition::partition;
pub use plan::{Algorithm, Selection};
#[cfg(unix)]
pub use rendezvous::{Launched, Medium};
#[cfg(feature = "cubecl")]
pub use server::{CollectiveDevice, CollectiveRuntime};
#[cfg(feature = "cuda")]
pub use server::{Cuda, CudaDevice};
#[cfg(feature = "wgpu")]
pub use server::{Wgpu, WgpuDevice};
#[cfg(unix)]
pub use star::{TcpTransport, TcpTransportBuilder, loopback_pair};
#[cfg(unix)]
pub use tensor::collective::{
    Address, AllReduceStrategy, BroadcastStrategy, CollectiveConfig, CollectiveError, GlobalCollectiveError,
    GradientsParamsExt, NodeId, PeerId, ReduceStrategy, all_reduce, broadcast, finish_collective, reduce, register,
    reset_collective, start_global_orchestrator,
};
pub use tensor::communicator::{DeviceCommunicator, Routing};
#[cfg(feature = "ddp")]
pub use train::DataParallelStrategy;
pub use train::{DataParallel, ShardedOptimizer, ShardedSampler, Sharding, SyncBatchNorm, SyncBatchNormConfig};
pub use transport::{Fault, Transport};
pub use wait::Deadline;

/// Compiles the code of the front page.
#[cfg(all(doctest, unix))]
#[doc = include_str!("../README.md")]
struct FrontPage;
