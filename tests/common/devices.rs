//! Logical devices for the tests of the compute server.

use bonfire::{CollectiveRuntime, WgpuDevice};
use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::device::{Device, DeviceId};
use cubecl::server::Handle;
use cubecl::wgpu::WgpuRuntime;

pub type Collective = CollectiveRuntime<WgpuRuntime>;
pub type Client = ComputeClient<Collective>;

/// Some devices, which no other test of the binary may use where failures are expected: those poison devices.
pub struct Devices {
    pub all: Vec<WgpuDevice>,
    pub ids: Vec<DeviceId>,
}

impl Devices {
    pub fn new(first: u8, count: u8) -> Devices {
        let all: Vec<_> = (first..first + count).map(|replica| WgpuDevice::new(Default::default(), replica)).collect();
        let ids = all.iter().map(Device::to_id).collect();
        Devices { all, ids }
    }

    pub fn client(&self, rank: usize) -> Client {
        Collective::client(&self.all[rank])
    }

    /// Runs each device's part on a thread of its own, and so on a stream of its own.
    pub fn run<T: Send>(&self, part: impl Fn(usize, Client) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let part = &part;
            let spawn = |rank: usize| scope.spawn(move || part(rank, self.client(rank)));
            let threads: Vec<_> = (0..self.all.len()).map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

pub fn create(client: &Client, values: &[f32]) -> Handle {
    client.create_from_slice(bytemuck::cast_slice(values))
}

pub fn read(client: &Client, handle: &Handle) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&client.read_one(handle.clone()).unwrap())
}
