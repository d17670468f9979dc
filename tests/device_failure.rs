//! Failures between devices: every device that took part gets a typed error in time, and no stale bytes.

#[path = "common/devices.rs"]
mod devices;
#[path = "common/device_faults.rs"]
mod faults;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use bonfire::server::CollectiveServer;
use bonfire::{Error, WgpuDevice};
use cubecl::Runtime;
use cubecl::device_handle::DeviceHandle;
use cubecl::future::block_on;
use cubecl::ir::{ElemType, IntKind};
use cubecl::server::ReduceOperation::Sum;
use cubecl::server::{CopyDescriptor, Handle, ServerCommunication};
use cubecl::stream_id::StreamId;
use cubecl::wgpu::WgpuRuntime;

use devices::{F32, create, read};
use faults::{LATE, SLACK, fails, refused, works};

type Devices = devices::Devices<WgpuRuntime>;

const DEADLINE: Duration = Duration::from_millis(300);

#[test]
fn a_device_missing_from_its_own_list_is_rejected_and_the_others_time_out() {
    let devices = Devices::new(0, 3);
    let called = Barrier::new(3);
    let failures = fails(&devices, DEADLINE, |rank, client| {
        let handle = create(client, &[1.0]);
        let ids = if rank == 2 { devices.ids[..2].to_vec() } else { devices.ids.clone() };
        client.all_reduce(handle.clone(), handle, F32, ids, Sum);
        assert_eq!(client.flush().is_err(), rank == 2);
        called.wait();
    });
    refused(&failures[2], "is not among the devices");
    assert!(matches!(&failures[0], Error::Timeout { missing, .. } if missing == &[2]), "{}", failures[0]);
    assert_eq!(failures[0], failures[1]);
}

#[test]
fn a_device_that_is_listed_twice_is_rejected() {
    let devices = Devices::new(3, 2);
    let failures = fails(&devices, LATE, |_, client| {
        let handle = create(client, &[1.0]);
        let ids = vec![devices.ids[0], devices.ids[1], devices.ids[0]];
        client.all_reduce(handle.clone(), handle, F32, ids, Sum);
    });
    failures.iter().for_each(|error| refused(error, "is listed twice"));
}

#[test]
fn missing_devices_are_named_on_all_devices() {
    faults::missing_devices(&Devices::new(5, 4), DEADLINE);
}

#[test]
fn a_peer_that_panics_before_its_call_is_reported_missing() {
    let devices = Devices::new(9, 2);
    devices.all[0].set_deadline(DEADLINE);
    let mut client = devices.client(0);
    let handle = create(&client, &[1.0]);
    client.all_reduce(handle.clone(), handle.clone(), F32, devices.ids.clone(), Sum);
    let peer = std::thread::spawn(|| panic!("the peer's own mistake"));
    assert!(peer.join().is_err());
    client.sync_collective();
    assert!(client.read_one(handle).is_err());
    for device in &devices.all {
        assert!(matches!(device.failure(), Some(Error::Timeout { missing, .. }) if missing == [1]));
    }
    works(&devices);
}

#[test]
fn devices_that_disagree_get_the_same_error() {
    faults::disagreements(&Devices::new(11, 3));
}

#[test]
fn an_invalid_call_of_one_device_fails_all_before_the_deadline() {
    let devices = Devices::new(14, 2);
    faults::impossible_calls(&devices);
    // wgpu refuses such copies with a panic.
    faults::refuses(&devices, "starts at byte 2", |client| {
        let handle = create(client, &[1.0; 5]).offset_start(2).offset_end(2);
        client.all_reduce(handle.clone(), handle, F32, devices.ids.clone(), Sum);
    });
}

#[test]
fn memory_of_another_device_is_rejected() {
    let devices = Devices::new(16, 3);
    let foreign = create(&devices.client(2), &[1.0; 4]);
    let failures = fails(&devices, LATE, |rank, client| {
        let own = create(client, &[1.0; 4]);
        let source = if rank == 1 { foreign.clone() } else { own.clone() };
        client.all_reduce(source, own, F32, devices.ids.clone(), Sum);
    });
    assert!(failures.iter().all(|failure| matches!(failure, Error::Io { .. })), "{failures:?}");
}

#[test]
fn a_poisoned_device_returns_no_data_on_any_stream() {
    let devices = Devices::new(19, 2);
    devices.all[0].set_deadline(DEADLINE);
    let mut client = devices.client(0);
    let handle = create(&client, &[1.0]);
    let mut other_stream = devices.client(0);
    // SAFETY: the stream is this test's.
    unsafe { other_stream.set_stream(StreamId { value: u64::MAX }) };
    let elsewhere = create(&other_stream, &[2.0]);
    client.all_reduce(handle.clone(), handle.clone(), F32, devices.ids.clone(), Sum);
    client.sync_collective();
    for client in [&client, &other_stream, &devices.client(1)] {
        // Twice: cubecl's own errors are cleared when they are first read.
        for _ in 0..2 {
            assert!(client.read_one(elsewhere.clone()).unwrap_err().to_string().contains("timed out"));
            assert!(client.flush().unwrap_err().to_string().contains("timed out"));
            assert!(block_on(client.sync()).unwrap_err().to_string().contains("timed out"));
            assert!(client.get_resource(elsewhere.clone()).is_err());
        }
    }
    // A device that was not in the list.
    let bystander = Devices::new(21, 1).client(0);
    assert_eq!(read(&bystander, &create(&bystander, &[3.0])), [3.0]);

    assert!(devices.all.iter().all(|device| device.failure().is_some()));
    assert_eq!(read(&client, &handle), [1.0]);
    assert_eq!(read(&other_stream, &elsewhere), [2.0]);
    assert!(client.flush().is_ok() && block_on(other_stream.sync()).is_ok());
    works(&devices);
}

#[test]
fn failed_calls_are_forgotten_once_their_device_is_cleared() {
    let devices = Devices::new(22, 3);
    devices.all[0].set_deadline(DEADLINE);
    let (mut first, mut second) = (devices.client(0), devices.client(1));
    // The second device never waits for this call.
    for client in [&mut second, &mut first] {
        let handle = create(client, &[1.0]);
        client.all_reduce(handle.clone(), handle, F32, devices.ids.clone(), Sum);
        assert!(client.flush().is_ok());
    }
    first.sync_collective();
    assert!(first.flush().is_err());
    assert!(devices.all.iter().all(|device| device.failure().is_some()));
    works(&devices);
}

#[test]
fn a_failure_in_one_list_leaves_no_stale_result_in_another() {
    let devices = Devices::new(25, 3);
    devices.all[0].set_deadline(DEADLINE);
    let (absent, sound) = ([devices.ids[0], devices.ids[1]], [devices.ids[0], devices.ids[2]]);
    let (mut first, mut third) = (devices.client(0), devices.client(2));
    let (a, b, c) = (create(&first, &[1.0]), create(&first, &[10.0]), create(&third, &[20.0]));
    first.all_reduce(a.clone(), a, F32, absent.to_vec(), Sum);
    first.all_reduce(b.clone(), b, F32, sound.to_vec(), Sum);
    first.flush().unwrap();
    third.all_reduce(c.clone(), c.clone(), F32, sound.to_vec(), Sum);
    third.sync_collective();
    assert_eq!(read(&third, &c), [30.0]);
    first.sync_collective();
    assert!(first.flush().is_err());
    assert!(devices.all[0].failure().is_some() && devices.all[1].failure().is_some());
    assert_eq!(devices.all[2].failure(), None);

    devices.all[0].set_deadline(SLACK);
    let results: Vec<_> = [&mut first, &mut third]
        .map(|client| {
            let handle = create(client, &[100.0]);
            client.all_reduce(handle.clone(), handle.clone(), F32, sound.to_vec(), Sum);
            client.sync_collective();
            handle
        })
        .into();
    assert_eq!(read(&first, &results[0]), [200.0]);
    assert_eq!(read(&third, &results[1]), [200.0]);
}

#[test]
fn a_late_message_is_not_taken_for_the_next_one() {
    let devices = Devices::new(28, 3);
    let (mut source, target, mut late) = (devices.client(0), devices.client(1), devices.client(2));
    let busy = [devices.ids[0], devices.ids[2]];
    // Warms up: the first transfer leaves more in a device's queue than the second may. The queue holds one batch
    // behind the one that waits.
    let warm = source.to_client(create(&source, &[0.0]), &target, F32);
    assert_eq!(read(&target, &warm), [0.0]);
    devices.all[1].set_deadline(DEADLINE);
    let (old, new) = (create(&source, &[1.0]), create(&source, &[2.0]));
    let sum = create(&source, &[0.0]);
    source.all_reduce(sum.clone(), sum, F32, busy.to_vec(), Sum);
    // The source blocks here until `late` calls, so it sends after the target has timed out.
    source.sync_collective();
    let received = source.to_client(old, &target, F32);
    let error = target.read_one(received).unwrap_err().to_string();
    assert!(error.contains("nothing was sent"), "{error}");
    assert!(matches!(devices.all[1].failure(), Some(Error::Io { .. })));

    let sum = create(&late, &[0.0]);
    late.all_reduce(sum.clone(), sum, F32, busy.to_vec(), Sum);
    late.sync_collective();
    devices.all[1].set_deadline(SLACK);
    let received = source.to_client(new, &target, F32);
    assert_eq!(read(&target, &received), [2.0]);
    assert_eq!(devices.all[0].failure(), None);
}

/// cubecl's client always calls both halves of a transfer, and with the same size. A direct call of a server need not.
mod halves {
    use super::*;

    type Server = DeviceHandle<CollectiveServer<WgpuRuntime>>;

    const STREAM: StreamId = StreamId { value: 1 << 40 };

    fn receive(devices: &Devices, size: u64, dtype: ElemType) -> Handle {
        let (handle, source) = (Handle::new(STREAM, size), devices.ids[0]);
        let target = handle.clone();
        Server::new(devices.ids[1])
            .submit_blocking(move |server| server.recv(target, dtype, STREAM, source))
            .unwrap()
            .unwrap();
        handle
    }

    fn send(devices: &Devices, data: Handle, dtype: ElemType) {
        let size = data.size_in_used() as usize;
        let descriptor = CopyDescriptor::new(data.binding(), [size].into(), [1].into(), 1);
        let target = devices.ids[1];
        Server::new(devices.ids[0])
            .submit_blocking(move |server| server.send(descriptor, dtype, STREAM, target))
            .unwrap()
            .unwrap();
    }

    #[test]
    fn a_receive_without_a_send_ends_with_the_deadline() {
        let devices = Devices::new(31, 2);
        devices.all[1].set_deadline(DEADLINE);
        let begin = Instant::now();
        let handle = receive(&devices, 4, F32);
        println!("failed after {:.0?}", begin.elapsed());
        assert!(begin.elapsed() < DEADLINE + SLACK);
        assert!(devices.client(1).read_one(handle.clone()).is_err());
        assert!(matches!(devices.all[1].failure(), Some(Error::Io { operation, .. }) if operation == "recv"));
        // The memory exists, since later calls may refer to it.
        assert_eq!(devices.client(1).read_one(handle).unwrap().len(), 4);
        works(&devices);
    }

    #[test]
    fn a_different_size_or_type_is_rejected() {
        let devices = Devices::new(33, 2);
        let i32 = ElemType::Int(IntKind::I32);
        for (size, dtype) in [(8, F32), (4, i32)] {
            send(&devices, create(&devices.client(0), &[1.0]), F32);
            let handle = receive(&devices, size, dtype);
            assert!(devices.client(1).read_one(handle).is_err());
            refused(&devices.all[1].failure().unwrap(), "got 4 of Float(F32)");
            works(&devices);
        }
    }
}

#[test]
fn copy_on_a_runtime_without_collectives_names_the_feature_to_use() {
    let client = WgpuRuntime::client(&Default::default());
    let tensor = || client.create_from_slice(&[0; 4]).copy_descriptor([1].into(), [1].into(), 4);
    let error = bonfire::server::copy(&client, tensor(), &client).unwrap_err();
    refused(&error, "feature `wgpu`");
}

#[test]
fn a_copy_from_a_poisoned_device_poisons_its_target() {
    let devices = Devices::new(35, 2);
    devices.all[0].set_deadline(DEADLINE);
    let mut source = devices.client(0);
    let absent: WgpuDevice = Devices::new(37, 1).all.remove(0);
    let handle = create(&source, &[1.0]);
    let ids = vec![devices.ids[0], cubecl::device::Device::to_id(&absent)];
    source.all_reduce(handle.clone(), handle.clone(), F32, ids, Sum);
    source.sync_collective();
    let target = devices.client(1);
    let tensor = || handle.clone().copy_descriptor([1].into(), [1].into(), 4);
    let copied = bonfire::server::copy(&source, tensor(), &target).unwrap();
    assert!(target.read_one(copied).is_err());
    assert!(devices.all.iter().all(|device| matches!(device.failure(), Some(Error::Timeout { .. }))));
    let copied = bonfire::server::copy(&source, tensor(), &target).unwrap();
    assert_eq!(read(&target, &copied), [1.0]);
}
