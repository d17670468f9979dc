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
//! | run a program written for burn-collective | [`register`], [`all_reduce`], [`broadcast`], [`reduce`]; see [`burn_collective`] |
//! | move and combine tensors of any kind, with gradients if you like | [`tensor::operation`], [`tensor::autodiff`] |
//! | place experts on different ranks, or move a program from vLLM's device communicator | [`DeviceCommunicator`] |
//! | combine slices | [`Group`] |
//! | carry messages in your own way | [`Transport`] and [`Group::on`] |
//! | speak with programs that use yscv's `TcpTransport`, or its wire | [`yscv`] |
//!
//! The program `bonfire` (package `bonfire-cli`) starts ranks (`bonfire run`), measures (`bonfire perf`) and looks at the
//! machine (`bonfire doctor`). Messages go through `log`.
//!
//! # Features
//! * `flex` (default): tensors of burn's backend Flex are reduced from where they are. Without it they are copied once.
//! * `shm` (default): shared memory between the processes of a host, on Linux. Without it they talk over TCP.
//! * `mpi`: groups on an MPI library.
//! * `wgpu`, `cuda`: burn's backends on a compute server with collectives. `cubecl`: the same for a runtime of your own.
//! * `ddp`: burn-train's distributed training on these backends. It turns on burn's `distributed`, which takes
//!   `AutodiffBackend` from backends without collectives, such as Flex and NdArray.

#![warn(missing_docs)]

#[cfg(unix)]
pub mod burn_collective;
#[cfg(any(feature = "flex", feature = "cubecl"))]
mod pool;
#[cfg(feature = "cubecl")]
pub mod server;
pub mod tensor;
pub mod train;

pub use bonfire_core::{
    Algorithm, Batch, Buffer, Builder, Call, DType, Deadline, Element, Error, Fault, Group, Operation, ReduceOp,
    Selection, Transport, Work, error, partition, trace,
};
#[cfg(unix)]
pub use bonfire_core::{Medium, Secret, launch, yscv};

pub use bonfire_core::ReduceOp as ReduceOperation;
#[cfg(unix)]
pub use burn_collective::{
    CollectiveConfig, CollectiveError, GradientsParamsExt, PeerId, all_reduce, broadcast, finish_collective, reduce,
    register, reset_collective, start_global_orchestrator,
};
#[cfg(feature = "cubecl")]
pub use server::{CollectiveDevice, CollectiveRuntime};
#[cfg(feature = "cuda")]
pub use server::{Cuda, CudaDevice};
#[cfg(feature = "wgpu")]
pub use server::{Wgpu, WgpuDevice};
pub use tensor::communicator::{DeviceCommunicator, Routing};
#[cfg(feature = "ddp")]
pub use train::DataParallelStrategy;
pub use train::{DataParallel, ShardedOptimizer, ShardedSampler, Sharding, SyncBatchNorm, SyncBatchNormConfig};

/// Compiles the code of the front page.
#[cfg(all(doctest, unix))]
#[doc = include_str!("../README.md")]
struct FrontPage;
