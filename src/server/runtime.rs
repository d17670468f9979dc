//! The runtime around a runtime.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::device::DeviceId;
use cubecl::ir::TargetProperties;
use cubecl::server::{
    ComputeServer, Handle, MemoryLayout, MemoryLayoutDescriptor, MemoryLayoutPolicy, ServerUtilities,
};
use cubecl::stream_id::StreamId;
use cubecl::zspace::{Shape, Strides};

use super::DeviceTransport;
use super::compute::CollectiveServer;
use super::device::{CollectiveDevice, logical, physical};

/// The runtime `R`, with collectives between its devices: see [the module's page](crate::server).
pub struct CollectiveRuntime<R>(PhantomData<R>);

impl<R: DeviceTransport> Runtime for CollectiveRuntime<R> {
    type Compiler = R::Compiler;
    type Server = CollectiveServer<R>;
    type Device = CollectiveDevice<R>;

    fn client(device: &Self::Device) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(client: &ComputeClient<Self>) -> &'static str {
        R::collective_name(&client.info().inner.info)
    }

    fn require_array_lengths() -> bool {
        R::require_array_lengths()
    }

    fn max_cube_count() -> (u32, u32, u32) {
        R::max_cube_count()
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        R::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        R::target_properties()
    }

    /// The devices of a physical type, as the logical devices whose replica is in `type_id`.
    fn enumerate_devices(type_id: u16, info: &Info<R>) -> Vec<DeviceId> {
        let (wanted, replica) = physical(DeviceId::new(type_id, 0));
        let devices = R::enumerate_devices(wanted.type_id, &info.inner.info);
        devices.into_iter().map(|id| logical(id, replica)).collect()
    }

    fn enumerate_all_devices(info: &Info<R>) -> Vec<DeviceId> {
        R::enumerate_all_devices(&info.inner.info)
    }
}

impl<R> Clone for CollectiveRuntime<R> {
    fn clone(&self) -> Self {
        CollectiveRuntime(PhantomData)
    }
}

impl<R> fmt::Debug for CollectiveRuntime<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CollectiveRuntime<{}>", std::any::type_name::<R>())
    }
}

/// What a client knows of its server: the inner server's own, and which device this is.
pub struct Info<R: DeviceTransport> {
    pub(super) inner: Arc<ServerUtilities<R::Server>>,
    pub(super) device: DeviceId,
}

impl<R: DeviceTransport> Info<R> {
    /// What the inner runtime says of its server.
    pub fn inner(&self) -> &<R::Server as ComputeServer>::Info {
        &self.inner.info
    }
}

impl<R: DeviceTransport> fmt::Debug for Info<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Info").field("inner", &self.inner.info).field("device", &self.device).finish()
    }
}

/// The inner server's way of laying out memory.
pub struct LayoutPolicy<R: DeviceTransport> {
    pub(super) inner: Arc<ServerUtilities<R::Server>>,
}

impl<R: DeviceTransport> MemoryLayoutPolicy for LayoutPolicy<R> {
    fn apply(&self, stream: StreamId, descriptors: &[MemoryLayoutDescriptor]) -> (Handle, Vec<MemoryLayout>) {
        self.inner.layout_policy.apply(stream, descriptors)
    }
}
