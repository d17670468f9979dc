//! Logical devices for the tests of the compute server, on any runtime.
#![allow(dead_code, reason = "each test target uses a part of it")]

use bonfire::server::DeviceTransport;
use bonfire::{CollectiveDevice, CollectiveRuntime};
use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::device::{Device, DeviceId};
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use cubecl::stream_id::StreamId;

pub type Client<R> = ComputeClient<CollectiveRuntime<R>>;

pub const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Some devices. Where failures are expected, no other test of the binary may use them, since failures poison devices.
pub struct Devices<R: DeviceTransport> {
    pub all: Vec<CollectiveDevice<R>>,
    pub ids: Vec<DeviceId>,
}

impl<R: DeviceTransport> Devices<R> {
    /// On one physical device, or in turn on as many as `BONFIRE_TEST_GPUS` sets.
    pub fn new(first: u8, count: u8) -> Self {
        let gpus = std::env::var("BONFIRE_TEST_GPUS").map_or(1, |gpus| gpus.parse().unwrap());
        let device = |replica| {
            let id = CollectiveDevice::<R>::new(Default::default(), replica).to_id();
            CollectiveDevice::from_id(DeviceId::new(id.type_id, id.index_id + u16::from(replica) % gpus))
        };
        let all: Vec<_> = (first..first + count).map(device).collect();
        let ids = all.iter().map(Device::to_id).collect();
        Devices { all, ids }
    }

    pub fn client(&self, rank: usize) -> Client<R> {
        CollectiveRuntime::client(&self.all[rank])
    }

    /// Runs each device's part on a thread of its own, and therefore on a stream of its own.
    pub fn run<T: Send>(&self, part: impl Fn(usize, Client<R>) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let part = &part;
            let spawn = |rank: usize| scope.spawn(move || part(rank, self.client(rank)));
            let threads: Vec<_> = (0..self.all.len()).map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

pub fn create<R: DeviceTransport>(client: &Client<R>, values: &[f32]) -> Handle {
    client.create_from_slice(bytemuck::cast_slice(values))
}

pub fn read<R: DeviceTransport>(client: &Client<R>, handle: &Handle) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&client.read_one(handle.clone()).unwrap())
}

/// The same device on this thread's stream and on another one.
pub fn streams<R: DeviceTransport>(client: &Client<R>, rank: usize) -> [Client<R>; 2] {
    let mut other = client.clone();
    // SAFETY: the stream is this thread's own.
    unsafe { other.set_stream(StreamId { value: (1 << 40) + rank as u64 }) };
    [client.clone(), other]
}
