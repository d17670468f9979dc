//! Bonfire for burn 0.22: collective communication for distributed training.
//!
//! | to | use |
//! |---|---|
//! | start ranks, as threads or as processes | [`launch()`], [`Group::from_env`] |
//! | train a model on several ranks | [`DataParallel`] |
//! | shard the state of the optimizer (ZeRO-1) | [`ShardedOptimizer`] |
//! | shard parameters and gradients too (ZeRO-2, ZeRO-3) | [`FullyShardedParallel`] |
//! | save and resume a training, on any number of ranks | [`Checkpoints`], [`TrainingState`] |
//! | normalise over the batch of all ranks | [`SyncBatchNorm`] |
//! | distribute samples over ranks | [`ShardedSampler`] |
//! | load batches on worker threads, in the order of a sampler | `ShardedDataLoader` (feature `dataset`) |
//! | run collectives on tensors, with or without gradients | [`tensor::autodiff`], [`tensor::operation`] |
//! | use expert parallelism, or port a program from vLLM's device communicator | [`DeviceCommunicator`] |
//! | run a program written for burn-collective, in one process | [`register`], [`all_reduce`], [`broadcast`], [`reduce`]; see [`burn_collective`] |
//! | run collectives on slices | [`Group`] |
//! | start with the same weights on any number of ranks | [`train::seeded`] |
//! | train with burn-train's `Learner` | `DataParallelStrategy` (feature `learner`) |
//!
//! The root package of the repository is the same for burn 0.21. What it has and this one has not yet: collective
//! devices, and sessions of burn-collective over several nodes.
//!
//! # Features
//! * `flex` (default), `ndarray`, `wgpu`, `cuda`, `rocm`: burn's backends. Tensors go through host memory on all of
//!   them, which is logged once on the last three. With `wgpu` also burn's `vulkan`, `metal` and `webgpu`.
//! * `cubecl`: what the last three have in common. Alone it is for another of burn's backends on cubecl, which the
//!   program turns on in burn.
//! * `dataset` (default): a data loader for burn's data sets, with worker threads.
//! * `learner`: a strategy for burn-train.
//! * `shm` (default): shared memory between the processes of a host, on Linux. Without it they communicate over TCP.
//! * `yscv`: messages with programs that use yscv's `TcpTransport`.

#![warn(missing_docs)]
// NdArray is supported while burn has it.
#![cfg_attr(feature = "ndarray", allow(deprecated))]

pub mod burn_collective;
pub mod tensor;
pub mod train;

pub use bonfire_core::ReduceOp as ReduceOperation;
pub use bonfire_core::{
    Algorithm, Batch, Buffer, Builder, Call, DType, Deadline, Element, Error, Fault, Group, Operation, ReduceOp,
    Selection, Transport, Work, error, launch, partition, println, request_stop, trace,
};
#[cfg(unix)]
pub use bonfire_core::{Secret, StopSignal, TransportKind};
// It has nothing to call. Naming it links it, which registers the transport.
#[cfg(feature = "mpi")]
use bonfire_mpi as _;
#[cfg(all(unix, feature = "yscv"))]
pub use bonfire_yscv as yscv;
pub use burn_collective::{
    CollectiveConfig, CollectiveError, PeerId, all_reduce, broadcast, finish_collective, reduce, register,
    reset_collective,
};
pub use tensor::communicator::{DeviceCommunicator, Routing};
#[cfg(feature = "learner")]
pub use train::DataParallelStrategy;
pub use train::{
    Checkpoints, DataParallel, DeviceMesh, FullyShardedParallel, Parts, ShardedBlock, ShardedOptimizer, ShardedSampler,
    Sharding, SyncBatchNorm, SyncBatchNormConfig, TrainingState,
};
#[cfg(feature = "dataset")]
pub use train::{ShardedDataLoader, ShardedDataLoaderBuilder};
