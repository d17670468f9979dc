//! A runtime for those of cubecl's tests that need several devices of type 0, numbered from 0.

use std::cell::Cell;

use bonfire::CollectiveRuntime;
use bonfire::server::{CollectiveServer, Info};
use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::device::{Device, DeviceId};
use cubecl::ir::TargetProperties;
use cubecl::wgpu::WgpuRuntime;
use cubecl::zspace::{Shape, Strides};

type Collective = CollectiveRuntime<WgpuRuntime>;

/// wgpu's type for the default device, whose index it ignores: each index is another logical device on it.
const DEFAULT_DEVICE: u16 = 4;

/// The collective runtime with `N` devices, for any device type.
#[derive(Clone, Debug)]
pub struct Indexed<const N: u16>;

/// A logical device, identified by its index alone.
#[derive(Clone, Debug, Default)]
pub struct IndexedDevice(u16);

thread_local! {
    static CLIENTS: Cell<usize> = const { Cell::new(0) };
}

/// Returns how many clients this thread has made: cubecl's tests pass without any work if they find too few devices.
pub fn clients_made() -> usize {
    CLIENTS.get()
}

impl Device for IndexedDevice {
    fn from_id(id: DeviceId) -> Self {
        IndexedDevice(id.index_id)
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(DEFAULT_DEVICE, self.0)
    }
}

impl<const N: u16> Runtime for Indexed<N> {
    type Compiler = <Collective as Runtime>::Compiler;
    type Server = CollectiveServer<WgpuRuntime>;
    type Device = IndexedDevice;

    fn client(device: &IndexedDevice) -> ComputeClient<Self> {
        CLIENTS.set(CLIENTS.get() + 1);
        ComputeClient::load(device)
    }

    fn name(_client: &ComputeClient<Self>) -> &'static str {
        "indexed"
    }

    fn max_cube_count() -> (u32, u32, u32) {
        Collective::max_cube_count()
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        Collective::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        Collective::target_properties()
    }

    fn enumerate_devices(_type_id: u16, _info: &Info<WgpuRuntime>) -> Vec<DeviceId> {
        (0..N).map(|index| IndexedDevice(index).to_id()).collect()
    }
}
