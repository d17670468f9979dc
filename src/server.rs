//! The compute server: wraps a cubecl runtime and adds collectives to it.
//!
//! cubecl's own servers have no collectives, apart from CUDA's inside one process. [`CollectiveRuntime<R>`] wraps any
//! runtime `R` and forwards every call to it. Its server also implements cubecl's `ServerCommunication`: [`all_reduce`]
//! between devices, and copies from device to device. burn's backends on it are `Wgpu` and `Cuda`, and burn-train's
//! distributed training runs on them unchanged.
//!
//! Devices are *logical*: [`CollectiveDevice`] numbers several on one physical device, each with its own server, memory
//! and streams. So several ranks can share a GPU, and tests need none.
//!
//! # When calls wait
//! `all_reduce` and `send` read what was queued before them on the tensor's stream, and return at once. Only
//! `sync_collective` and `recv` (and the receiving half of [`copy`]) wait for other devices, at most for the device's
//! deadline. The first use of a device after a failure waits until the failed work has ended. Work queued after
//! `sync_collective`, on any stream, sees the results. Before it, sources and targets must not be written to, and
//! targets must not be read. Data that goes through host memory must start at a multiple of 4 bytes in its memory.
//!
//! [`DeviceCollectives`] has the operations that cubecl's trait lacks, and all of them over a [`Group`].
//! A group compares what each rank called, so its ranks may be devices of several processes. cubecl's own `all_reduce`
//! carries nothing that could be compared, so it works between the devices of one process only.
//!
//! # CUDA
//! Data stays on the GPUs. Bonfire's own kernels reduce and copy directly between up to 8 devices, on one GPU or on
//! GPUs of a host that can access each other's memory. They are compiled on first use. Larger calls between GPUs, and
//! all calls between hosts, are NCCL's (feature `nccl`), for ranks of a group that have a GPU each. It is looked for at
//! run time, and without it kernels do all calls of a host. What neither supports goes through host memory, which is
//! logged once.
//!
//! Between processes, kernels use 10 MiB of each rank's GPU memory for each group that exists at a time. It is used
//! again, but never freed. The processes must be able to open each other's memory: containers need the same PID and IPC
//! namespaces, and should see all GPUs that the ranks use. If a rank cannot, rank 0 logs why, and all use NCCL or host
//! memory. Processes that share a GPU use host memory unless `BONFIRE_CUDA` requests kernels: without MPS the GPU runs
//! one process at a time, so each signal between their kernels takes a slice of its time.
//!
//! The first collective of a group on CUDA memory waits for the other ranks, which agree on the path. All ranks have to
//! call it, with one device each. Messages of tensors before it pass through host memory. After it, both ranks of a
//! message must have their tensors on their devices. Between ranks of one process the sender's device lends a copy of
//! the tensor to the receiver's, and neither rank waits for a device. Between processes messages are NCCL's, or go
//! through host memory. NCCL rounds sums of f16 and bf16 after every addition, the kernels round once.
//!
//! `BONFIRE_CUDA` is `auto`, the default, which decides by connection, ranks and size; `kernels`, or one of their forms
//! for all_reduce (`push`, `one-shot`, `two-shot`); `nccl`, which is an error where NCCL does not work; `host`; or a
//! table of these by size in bytes, such as `kernels:0-65535;nccl:65536-`. `BONFIRE_CUDA_MULTIPROCESSORS` is `all`, the
//! default, or `half`: what kernels between ranks on one GPU take of its multiprocessors. Another value is an error of
//! the first collective, and so are different values on the ranks of a group.
//!
//! Collectives of several groups are launched in one order on all GPUs; between processes that costs a second small
//! exchange per call. With several ranks on each of several GPUs, or with messages between processes beside the
//! collectives of another group, the streams of a GPU may block each other for lack of hardware queues, up to the
//! deadline. Set `CUDA_DEVICE_MAX_CONNECTIONS=32` before the program starts, as `bonfire run` does.
//!
//! cubecl's `memory_cleanup` frees host memory, and the driver then waits for all GPUs. Between an `all_reduce` and the
//! end of its work it can wait for a kernel that waits for this device, up to the deadline: call it after
//! `sync_collective` and a read.
//!
//! # Errors
//! cubecl loses what a collective returns: its client unwraps it on the device's thread. A failure therefore poisons
//! the logical devices that took part: from then on their reads, syncs and flushes fail, on every stream, and they
//! never return stale bytes. burn passes on the error's text. [`CollectiveDevice::failure`] returns the typed
//! [`Error`] and clears it. In these errors, a rank is a device's position in the sorted list of device
//! ids.
//!
//! If an operation of a [`Group`] on devices fails, [`Transfer::wait`] or [`Completion::wait`] returns the group's
//! error and the devices stay usable, also if the GPU has too little memory ([`Error::OutOfMemory`]). Only a GPU that
//! has a fault ([`Error::Gpu`]) needs a new process.
//!
//! # Fusion
//! The backends use fusion, unless the feature `ddp` is on: burn's distributed training uses a gradient on two threads,
//! and burn-fusion 0.21 may free such a tensor before its last use: it does so when the operations *before* that use
//! have run. Training 84 parameters with fusion ended in the panic "Should have handle for tensor" each time (burn's
//! issue 4347). Without fusion 60 of 60 trainings ended.
//!
//! # Custom runtimes
//! One empty impl is enough; data then goes through host memory:
//! ```ignore
//! impl bonfire::server::DeviceTransport for MyRuntime {}
//! ```
//! and `Fusion<CubeBackend<CollectiveRuntime<MyRuntime>, f32, i32, u32>>` is its burn backend.
//!
//! [`all_reduce`]: cubecl::client::ComputeClient::all_reduce

mod communication;
mod compute;
mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod device_group;
mod download;
#[doc(hidden)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CUDA has a data path of its own"))]
pub mod engine;
pub(crate) mod exchange;
mod host;
pub(crate) mod mailbox;
mod memory;
mod pending;
mod runtime;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CUDA has a data path of its own"))]
mod status;

use std::sync::Arc;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn_cubecl::CubeBackend;
use cubecl::Runtime;
use cubecl::device::DeviceId;
use cubecl::server::ComputeServer;

pub use self::compute::{CollectiveServer, Info, LayoutPolicy};
pub use self::copy::{CopyBetweenDevices, copy};
pub use self::device::CollectiveDevice;
use self::engine::Engine;
use self::exchange::Route;
pub use self::exchange::{Completion, DeviceCollectives, Transfer};
pub use self::runtime::CollectiveRuntime;
pub use self::status::Counters;
use bonfire_core::{Error, Group};

/// A runtime with collectives between its devices. Implementations differ in how they move data. The default goes
/// through host memory, which works for every runtime.
pub trait DeviceTransport: Runtime {
    /// Whether flushed work of all streams runs in one order, as on wgpu. By default a stream waits for results that
    /// were written on another one.
    #[doc(hidden)]
    const ONE_QUEUE: bool = false;

    /// Returns the name of the collective runtime on top of this one. It is part of the key of cubecl's autotune cache,
    /// so it must be unique per runtime. The default is the name of the Rust type.
    fn collective_name(_info: &<Self::Server as ComputeServer>::Info) -> &'static str {
        std::any::type_name::<CollectiveRuntime<Self>>()
    }

    /// The runtime's own data path between devices of this process, if it has one.
    #[doc(hidden)]
    fn engine(_device: DeviceId) -> Option<Box<dyn Engine<Self>>> {
        None
    }

    /// How the ranks of `group` exchange data without host memory, if they can. This rank contributes `device`. All
    /// ranks call it at the same point in their order of operations.
    #[doc(hidden)]
    fn route(_group: &Group, _device: DeviceId) -> Result<Option<Arc<dyn Route<Self>>>, Error> {
        Ok(None)
    }

    /// The route that the ranks of `group` have agreed on, if they have. Waits for no rank.
    #[doc(hidden)]
    fn agreed_route(_group: &Group) -> Option<Arc<dyn Route<Self>>> {
        None
    }
}

#[cfg(feature = "wgpu")]
impl DeviceTransport for cubecl::wgpu::WgpuRuntime {
    const ONE_QUEUE: bool = true;
}

/// A runtime's backend inside burn-fusion, which fuses operations: see [the module's page](crate::server#fusion).
#[cfg(all(not(feature = "ddp"), any(feature = "wgpu", feature = "cuda")))]
pub type Layers<B> = burn_fusion::Fusion<B>;

/// A runtime's backend without burn-fusion: see [the module's page](crate::server#fusion).
#[cfg(all(feature = "ddp", any(feature = "wgpu", feature = "cuda")))]
pub type Layers<B> = B;

/// burn's backend on wgpu, with collectives: `burn::backend::Wgpu` on [`CollectiveRuntime`]. See [`Layers`] for fusion.
#[cfg(feature = "wgpu")]
pub type Wgpu<F = f32, I = i32, B = u32> = Layers<CubeBackend<CollectiveRuntime<cubecl::wgpu::WgpuRuntime>, F, I, B>>;

/// A logical device of [`Wgpu`].
#[cfg(feature = "wgpu")]
pub type WgpuDevice = CollectiveDevice<cubecl::wgpu::WgpuRuntime>;

/// burn's backend on CUDA, with collectives: `burn::backend::Cuda` on [`CollectiveRuntime`]. See [`Layers`] for fusion.
/// Collectives and copies stay on the GPUs.
#[cfg(feature = "cuda")]
pub type Cuda<F = f32, I = i32> = Layers<CubeBackend<CollectiveRuntime<cubecl::cuda::CudaRuntime>, F, I, u8>>;

/// A logical device of [`Cuda`].
#[cfg(feature = "cuda")]
pub type CudaDevice = CollectiveDevice<cubecl::cuda::CudaRuntime>;
