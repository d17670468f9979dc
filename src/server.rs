//! The compute server: a cubecl runtime becomes a collective one.
//!
//! cubecl's own servers have no collectives, apart from CUDA's inside one process. [`CollectiveRuntime<R>`] wraps any
//! runtime `R` and forwards everything to it; to that its server adds cubecl's `ServerCommunication`: [`all_reduce`]
//! between devices, and copies from device to device. burn's backends on it are `Wgpu` and `Cuda`, and burn-train's
//! distributed training runs on them unchanged.
//!
//! Devices are *logical*: [`CollectiveDevice`] numbers several on one physical device, each with a server, a memory and
//! streams of its own. So several ranks share a GPU, and tests need none.
//!
//! # When calls wait
//! `all_reduce` and `send` take what was queued before on the tensor's stream, and return. Only `sync_collective` and
//! `recv` (and the receiving half of [`copy`]) wait for other devices, at most for the device's deadline; and the first use of
//! a device after a failure waits for what failed to come to its end. What is queued after `sync_collective`, on any stream,
//! sees the results; before it, neither a source nor a target may be written to, and a target not read. Where data goes
//! through host memory it must start at a multiple of 4 bytes in its memory.
//!
//! [`DeviceCollectives`] has the operations that cubecl's trait lacks, and all of them over a [`Group`](crate::Group):
//! ranks may then be devices of other processes, because a group compares what each rank called. cubecl's own
//! `all_reduce` carries nothing that could be compared, so it stays among the devices of one process.
//!
//! # CUDA
//! Data stays on the GPUs. Kernels of our own reduce and copy straight from device to device, those on one GPU and those on
//! GPUs that reach each other's memory, up to 8 devices of a process. They are compiled when they are first used. Between
//! processes and hosts NCCL does it (feature `nccl`), for ranks of a group that have a GPU each; it is looked for at run time.
//! What neither does goes through host memory, which the log says once.
//!
//! The first operation of a group on CUDA memory waits for the other ranks, which agree on the way; all of them have to make
//! it, with one device each. NCCL's sums of f16 and bf16 are rounded after every addition, those of kernels once.
//!
//! `BONFIRE_CUDA` is `auto`, which decides by size, `kernels` or one of their forms for all_reduce (`push`, `one-shot`,
//! `two-shot`), `nccl`, which is an error where it does not work, or `host`. Where there are several ranks on each of several
//! GPUs, a GPU's streams may have to wait for each other for want of hardware queues, up to the deadline: set
//! `CUDA_DEVICE_MAX_CONNECTIONS=32`.
//!
//! # Errors
//! cubecl loses what a collective returns: its client unwraps it on the device's thread. So a failure poisons the logical
//! devices that took part: from then on their reads, syncs and flushes fail, on every stream, and stale bytes are never
//! handed out. burn passes the text on. [`CollectiveDevice::failure`] gives the typed [`Error`](crate::Error) and clears it.
//! In these errors, a rank is a device's position in the sorted list of the devices' ids.
//!
//! What a [`Group`](crate::Group) does with devices fails in the group, whose error [`Transfer::wait`] returns; devices stay
//! sound.
//!
//! # Fusion
//! The backends have fusion on, except where the feature `ddp` is: burn's distributed training uses a gradient on two
//! threads, and burn-fusion 0.21 may free such a tensor before its last use, which ends the training in a panic.
//!
//! # A runtime of your own
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
#[doc(hidden)]
pub mod engine;
pub(crate) mod exchange;
mod host;
mod meeting;
mod memory;
mod pending;
mod post;
mod reading;
mod round;
mod runtime;
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
use self::engine::{Engine, Route};
pub use self::exchange::{DeviceCollectives, Transfer};
pub use self::runtime::CollectiveRuntime;
pub use self::status::Counters;
use bonfire_core::{Error, Group};

/// A runtime whose devices can work together; how their data travels is what differs between runtimes. By default it
/// goes through host memory, which works for every runtime.
pub trait DeviceTransport: Runtime {
    /// The name of the collective runtime on top of this one. It is part of the key of cubecl's autotune cache, so it
    /// must be different for each runtime.
    fn collective_name(_info: &<Self::Server as ComputeServer>::Info) -> &'static str {
        std::any::type_name::<CollectiveRuntime<Self>>()
    }

    /// The runtime's own way to move a device's data, if it has one.
    #[doc(hidden)]
    fn engine(_device: DeviceId) -> Option<Box<dyn Engine<Self>>> {
        None
    }

    /// How the ranks of a group, of which this one brings this device, work together without host memory, if they do. All
    /// ranks call it at the same place in their order of operations.
    #[doc(hidden)]
    fn route(_group: &Group, _device: DeviceId) -> Result<Option<Arc<dyn Route<Self>>>, Error> {
        Ok(None)
    }
}

#[cfg(feature = "wgpu")]
impl DeviceTransport for cubecl::wgpu::WgpuRuntime {}

/// burn-fusion, which joins operations, around a runtime's backend: see [the module's page](crate::server#fusion).
#[cfg(all(not(feature = "ddp"), any(feature = "wgpu", feature = "cuda")))]
pub type Layers<B> = burn_fusion::Fusion<B>;

/// A runtime's backend as it is, without burn-fusion: see [the module's page](crate::server#fusion).
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
