//! The collective runtime around an inner runtime.

use std::fmt;
use std::marker::PhantomData;

use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::device::DeviceId;
use cubecl::ir::TargetProperties;
use cubecl::zspace::{Shape, Strides};

use super::DeviceTransport;
use super::compute::{CollectiveServer, Info};
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
        R::collective_name(client.info().inner())
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

    /// The devices of a physical type, as logical devices with the replica that `type_id` holds.
    fn enumerate_devices(type_id: u16, info: &Info<R>) -> Vec<DeviceId> {
        let (wanted, replica) = physical(DeviceId::new(type_id, 0));
        let devices = R::enumerate_devices(wanted.type_id, info.inner());
        devices.into_iter().map(|id| logical(id, replica)).collect()
    }

    fn enumerate_all_devices(info: &Info<R>) -> Vec<DeviceId> {
        R::enumerate_all_devices(info.inner())
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
