//! Collectives between logical devices, through cubecl's clients.

use std::time::Duration;

use bonfire::{CollectiveRuntime, Error, WgpuDevice};
use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::device::{Device, DeviceId};
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::{Handle, ReduceOperation};
use cubecl::wgpu::WgpuRuntime;

type Collective = CollectiveRuntime<WgpuRuntime>;
type Client = ComputeClient<Collective>;

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Devices of one test: each test has replicas of its own, because a failure poisons devices.
fn devices(first: u8, count: u8) -> Vec<WgpuDevice> {
    (first..first + count).map(|replica| WgpuDevice::new(Default::default(), replica)).collect()
}

fn clients(devices: &[WgpuDevice]) -> (Vec<Client>, Vec<DeviceId>) {
    (devices.iter().map(Collective::client).collect(), devices.iter().map(Device::to_id).collect())
}

fn read(client: &Client, handle: &Handle) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&client.read_one(handle.clone()).unwrap())
}

fn create(client: &Client, values: &[f32]) -> Handle {
    client.create_from_slice(bytemuck::cast_slice(values))
}

#[test]
fn one_thread_issues_all_calls_of_one_device_before_the_other() {
    let devices = devices(0, 2);
    let (clients, ids) = clients(&devices);
    let mut results = Vec::new();
    for (rank, client) in clients.iter().enumerate() {
        let mut client = client.clone();
        let handles: Vec<_> = (0..200).map(|i| create(&client, &[i as f32, rank as f32, 0.5])).collect();
        for handle in &handles {
            client.all_reduce(handle.clone(), handle.clone(), F32, ids.clone(), ReduceOperation::Sum);
        }
        client.sync_collective();
        results.push(handles);
    }
    for (client, handles) in clients.iter().zip(&results) {
        for (i, handle) in handles.iter().enumerate() {
            assert_eq!(read(client, handle), [2.0 * i as f32, 1.0, 1.0]);
        }
    }
    assert!(devices[0].counters().rounds < 10, "{:?}", devices[0].counters());
}

#[test]
fn a_missing_device_is_named_and_both_are_poisoned() {
    let devices = devices(2, 2);
    let (clients, ids) = clients(&devices);
    devices[0].set_deadline(Duration::from_millis(300));
    let mut client = clients[0].clone();
    let handle = create(&client, &[1.0]);
    client.all_reduce(handle.clone(), handle.clone(), F32, ids, ReduceOperation::Sum);
    client.sync_collective();
    let error = client.read_one(handle.clone()).unwrap_err().to_string();
    assert!(error.contains("timed out") && error.contains("rank 1"), "{error}");
    for device in &devices {
        assert!(matches!(device.failure(), Some(Error::Timeout { rank: 0, .. })));
        assert_eq!(device.failure(), None);
    }
    assert_eq!(read(&client, &handle), [1.0]);
}
