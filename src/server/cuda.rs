//! CUDA: data stays on the GPUs, by the kernels and the NCCL of [`bonfire_cuda`].
//!
//! cubecl does not expose its streams, so two small kernels that it launches order them against those of collectives:
//! `kernels/order.cu`. One signals, after the work on a tensor's stream, that the tensor is ready. The other waits,
//! before later work on a stream, until a call is done. This and cubecl's memory are all that `bonfire-cuda` needs of
//! cubecl 0.10: see `runtime`.

mod device;
mod route;
mod runtime;

use std::sync::Arc;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use self::runtime::{Cubecl, Server, id, operation};
use super::DeviceTransport;
use super::engine::{DeviceOperation, End, Engine, PeerBuffer};
use super::exchange::Route;
#[doc(hidden)]
pub use bonfire_cuda::bench;
#[cfg(feature = "nccl")]
#[doc(inline)]
pub use bonfire_cuda::nccl;

use bonfire_core::internal::Rows;
use bonfire_core::{Error, Group};

impl DeviceTransport for CudaRuntime {
    fn engine(device: DeviceId) -> Option<Box<dyn Engine<Self>>> {
        Some(Box::new(bonfire_cuda::Engine::<Cubecl>::new(id(device))))
    }

    fn route(group: &Group, device: DeviceId) -> Result<Option<Arc<dyn Route<Self>>>, Error> {
        route::of(group, device)
    }

    fn agreed_route(group: &Group) -> Option<Arc<dyn Route<Self>>> {
        route::agreed(group)
    }
}

fn ids(devices: &[DeviceId]) -> Vec<bonfire_cuda::DeviceId> {
    devices.iter().map(|device| id(*device)).collect()
}

impl Engine<CudaRuntime> for bonfire_cuda::Engine<Cubecl> {
    fn takes(&mut self, devices: &[DeviceId]) -> bool {
        self.takes(&ids(devices))
    }

    fn enter(&mut self, server: &mut Server, stream: StreamId) {
        self.enter(server, stream);
    }

    fn all_reduce(&mut self, server: &mut Server, devices: Vec<DeviceId>, job: DeviceOperation) -> Result<(), Error> {
        self.all_reduce(server, ids(&devices), operation(job))
    }

    fn fail(&mut self, devices: &[DeviceId], error: &Error) {
        self.fail(&ids(devices), error);
    }

    fn sync(&mut self) -> Result<(), Error> {
        self.sync()
    }

    fn follow(&mut self, end: End) {
        self.follow(end);
    }

    fn lend(
        &mut self,
        server: &mut Server,
        memory: Binding,
        bytes: usize,
        stream: StreamId,
    ) -> Result<PeerBuffer, Error> {
        self.lend(server, memory, bytes, stream)
    }

    fn copy(&mut self, server: &mut Server, lent: PeerBuffer, rows: Rows, target: Binding) -> Result<(), Error> {
        self.copy(server, lent, rows, target)
    }

    fn forget(&mut self) {
        self.forget();
    }
}
