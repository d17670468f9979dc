//! Bonfire: collective communication for distributed training with [burn](https://burn.dev).
//!
//! Many logs, one fire: many devices, one model. Ranks are threads of one process, or processes that share memory on
//! one host and communicate over TCP between hosts; on systems other than unix they are threads only. Every rank calls
//! the same operations in the same order. An operation returns by its deadline (300 s by default), with a result or a
//! typed [`Error`].
//!
//! ```
//! use bonfire::{Group, ReduceOp};
//!
//! fn work(group: Group) -> Result<f32, bonfire::Error> {
//!     let mut gradients = vec![group.rank() as f32; 1000];
//!     group.all_reduce(&mut gradients, ReduceOp::Mean)?;
//!     Ok(gradients[0])
//! }
//!
//! let ranks: Vec<_> = Group::threads(3)?.into_iter().map(|group| std::thread::spawn(|| work(group))).collect();
//! for rank in ranks {
//!     assert_eq!(rank.join().expect("no panic")?, 1.0);
//! }
//! # Ok::<(), bonfire::Error>(())
//! ```
//!
//! For ranks that are processes use [`Group::from_env`], whose page lists the environment variables of groups.
//! [`train`] has a training loop.
//!
//! | you want to | use |
//! |---|---|
//! | train a burn model on many ranks | [`DataParallel`], [`ShardedSampler`], [`SyncBatchNorm`]; see [`train`] |
//! | load batches on worker threads, in the order of a sampler | `ShardedDataLoader` (feature `dataset`) |
//! | save and resume a training, on any number of ranks | [`Checkpoints`], [`TrainingState`] |
//! | go on without lost ranks | [`DataParallel::shrink`] |
//! | shard the optimizer state over the ranks (ZeRO-1) | [`ShardedOptimizer`] |
//! | shard parameters, gradients and optimizer state (ZeRO-3, FSDP) | [`FullyShardedParallel`], [`ShardedBlock`] |
//! | use burn's wgpu or CUDA backend with collectives between devices | `Wgpu`, `Cuda`; see `server` |
//! | train with burn-train's `Learner` | `DataParallelStrategy` (feature `learner`) |
//! | run a program written for burn-collective | [`register`], [`all_reduce`], [`broadcast`], [`reduce`]; see [`burn_collective`] |
//! | run collectives on tensors, with or without gradients | [`tensor::autodiff`], [`tensor::operation`] |
//! | use expert parallelism, or port a program from vLLM's device communicator | [`DeviceCommunicator`] |
//! | run collectives on slices | [`Group`] |
//! | start the ranks | [`launch()`]: as processes under a launcher, otherwise as threads |
//! | supply your own transport | [`Transport`] and [`Group::on`] |
//! | exchange messages with programs that use yscv's `TcpTransport` or its wire format | `yscv` (feature `yscv`) |
//!
//! The program `bonfire` (package `bonfire-cli`) starts ranks (`bonfire run`), measures (`bonfire perf`) and inspects
//! the machine (`bonfire doctor`). Log messages go through the crate `log`.
//!
//! # Features
//! * `flex` (default): tensors of burn's backend Flex are reduced in place. Without it they are copied once more.
//! * `dataset` (default): a data loader for burn's data sets, with worker threads.
//! * `shm` (default): shared memory between the processes of a host, on Linux. Without it they communicate over TCP.
//!
//!   With `default-features = false` both are off, and nothing says so at run time: results are the same, and
//!   operations take a multiple of the time (16 MiB of a Flex tensor between threads: 7.6 ms instead of about 1.5).
//!   Name those that you want: `default-features = false, features = ["shm", "flex"]`.
//! * `mpi`: groups on an MPI library, chosen by `BONFIRE_TRANSPORT=mpi`. The build needs its headers, `mpicc` and
//!   libclang.
//! * `yscv`: messages with programs that use yscv's `TcpTransport`.
//! * `wgpu`, `cuda`: burn's backends on a compute server with collectives. `cubecl`: the same for your own runtime.
//! * `nccl`: NCCL between GPUs of several processes and hosts. It includes `cuda`. The library is looked for at run
//!   time.
//! * `learner`: a strategy for burn-train, on all backends.
//! * `ddp`: burn-train's own distributed training on these backends, which it builds without fusion. It turns on burn's
//!   `distributed`, which removes the `AutodiffBackend` impl from backends without collectives, such as Flex and
//!   NdArray.

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
    Selection, Transport, Work, error, launch, partition, println, request_stop, trace,
};
#[cfg(unix)]
pub use bonfire_core::{Secret, StopSignal, TransportKind};
// It has nothing to call. Naming it links it, which registers the transport.
#[cfg(feature = "mpi")]
use bonfire_mpi as _;
#[cfg(all(unix, feature = "yscv"))]
pub use bonfire_yscv as yscv;

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
#[cfg(feature = "learner")]
pub use train::DataParallelStrategy;
pub use train::{
    Checkpoints, DataParallel, DeviceMesh, FullyShardedParallel, Parts, ShardedBlock, ShardedOptimizer, ShardedSampler,
    Sharding, SyncBatchNorm, SyncBatchNormConfig, TrainingState,
};
#[cfg(feature = "dataset")]
pub use train::{ShardedDataLoader, ShardedDataLoaderBuilder};

/// Runs the code of the README and of the guide.
#[cfg(all(doctest, unix))]
mod pages {
    macro_rules! pages {
        ($($name:ident: $path:literal),* $(,)?) => {$(
            #[doc = include_str!($path)]
            struct $name;
        )*};
    }

    pages! {
        Readme: "../README.md",
        BatchNorm: "../docs/guide/batch-norm.md",
        Checkpoints: "../docs/guide/checkpoints.md",
        Compression: "../docs/guide/compression.md",
        Data: "../docs/guide/data.md",
        Devices: "../docs/guide/devices.md",
        Failures: "../docs/guide/failures.md",
        FromBurnCollective: "../docs/guide/from-burn-collective.md",
        Groups: "../docs/guide/groups.md",
        Launch: "../docs/guide/launch.md",
        Learner: "../docs/guide/learner.md",
        Passes: "../docs/guide/passes.md",
        Randomness: "../docs/guide/randomness.md",
        SeveralModels: "../docs/guide/several-models.md",
        Shard: "../docs/guide/shard.md",
        ShardedOptimizer: "../docs/guide/sharded-optimizer.md",
        TensorParallel: "../docs/guide/tensor-parallel.md",
        Tensors: "../docs/guide/tensors.md",
        Tokens: "../docs/guide/tokens.md",
        Train: "../docs/guide/train.md",
        Transport: "../docs/guide/transport.md",
    }
}
