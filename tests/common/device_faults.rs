//! Failures between devices, on any runtime.
#![allow(dead_code, reason = "each test target uses a part of it")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use bonfire::Error;
use bonfire::server::DeviceTransport;
use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};
use cubecl::server::ReduceOperation::{Mean, Sum};

use crate::devices::{Client, Devices, F32, create, read};

/// Far more than a loaded machine needs.
pub const SLACK: Duration = Duration::from_secs(10);
/// The deadline where a failure must be reported before it.
pub const LATE: Duration = Duration::from_secs(100);

/// Runs `part` on each device, where it must end in time and leave the device poisoned. Returns the devices' failures,
/// clears them, and checks that the devices work.
pub fn fails<R: DeviceTransport>(
    devices: &Devices<R>,
    deadline: Duration,
    part: impl Fn(usize, &mut Client<R>) + Sync,
) -> Vec<Error> {
    // A device's first use takes longer than a failure may.
    works(devices);
    devices.all.iter().for_each(|device| device.set_deadline(deadline));
    let begin = Instant::now();
    let took = devices.run(|rank, mut client| {
        let unrelated = create(&client, &[7.0]);
        part(rank, &mut client);
        client.sync_collective();
        assert!(client.read_one(unrelated).is_err());
        begin.elapsed()
    });
    println!("failed after {took:.0?}");
    let late = if deadline == LATE { SLACK } else { deadline + SLACK };
    assert!(took.iter().all(|took| *took < late));
    let failures = devices.all.iter().map(|device| device.failure().unwrap()).collect();
    works(devices);
    failures
}

pub fn works<R: DeviceTransport>(devices: &Devices<R>) {
    devices.all.iter().for_each(|device| device.set_deadline(LATE));
    let results = devices.run(|rank, mut client| {
        let handle = create(&client, &[rank as f32, 1.0]);
        client.all_reduce(handle.clone(), handle.clone(), F32, devices.ids.clone(), Sum);
        client.sync_collective();
        read(&client, &handle)
    });
    let count = devices.ids.len();
    for result in results {
        assert_eq!(result, [(count * (count - 1) / 2) as f32, count as f32]);
    }
}

pub fn refused(error: &Error, words: &str) {
    assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(words), "{error}");
}

/// The first of two devices makes an invalid call, which fails both before the deadline.
pub fn refuses<R: DeviceTransport>(devices: &Devices<R>, words: &str, call: impl Fn(&mut Client<R>) + Sync) {
    let failures = fails(devices, LATE, |rank, client| {
        if rank == 0 {
            call(client);
        } else {
            let handle = create(client, &[1.0; 4]);
            client.all_reduce(handle.clone(), handle, F32, devices.ids.clone(), Sum);
        }
    });
    failures.iter().for_each(|failure| refused(failure, words));
}

/// Calls that no device supports.
pub fn impossible_calls<R: DeviceTransport>(devices: &Devices<R>) {
    let ids = &devices.ids;
    refuses(devices, "16 bytes and the target 12", |client| {
        client.all_reduce(create(client, &[1.0; 4]), create(client, &[1.0; 3]), F32, ids.clone(), Sum);
    });
    let flex32 = ElemType::Float(FloatKind::Flex32);
    for dtype in [ElemType::Int(IntKind::I16), ElemType::UInt(UIntKind::U16), ElemType::Bool, flex32] {
        refuses(devices, "cannot be reduced; cast to", |client| {
            let handle = create(client, &[1.0; 4]);
            client.all_reduce(handle.clone(), handle, dtype, ids.clone(), Sum);
        });
    }
    refuses(devices, "10 bytes are no whole number of f32", |client| {
        let handle = client.create_from_slice(&[0; 10]);
        client.all_reduce(handle.clone(), handle, F32, ids.clone(), Sum);
    });
}

/// Two of four devices do not call, and are named on all.
pub fn missing_devices<R: DeviceTransport>(devices: &Devices<R>, deadline: Duration) {
    let (called, failed) = (Barrier::new(2), Barrier::new(4));
    let failures = fails(devices, deadline, |rank, client| {
        if rank % 2 == 0 {
            let handle = create(client, &[1.0]);
            client.all_reduce(handle.clone(), handle, F32, devices.ids.clone(), Sum);
            client.flush().unwrap();
            called.wait();
            client.sync_collective();
            assert!(client.flush().is_err());
        }
        failed.wait();
    });
    for failure in &failures {
        assert!(matches!(failure, Error::Timeout { missing, .. } if missing == &[1, 3]), "{failure}");
    }
}

/// The second of three devices makes a different call: all get the same error.
pub fn disagreements<R: DeviceTransport>(devices: &Devices<R>) {
    let disagree = |lengths: [usize; 2], dtypes: [ElemType; 2], means: [bool; 2], words: [&str; 2]| {
        let failures = fails(devices, LATE, |rank, client| {
            let which = usize::from(rank == 1);
            let handle = create(client, &vec![1.0; lengths[which]]);
            let op = if means[which] { Mean } else { Sum };
            client.all_reduce(handle.clone(), handle, dtypes[which], devices.ids.clone(), op);
        });
        for failure in &failures {
            let text = failure.to_string();
            assert!(matches!(failure, Error::Mismatch { .. }), "{text}");
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
            assert_eq!(failure, &failures[0]);
        }
    };
    let i32 = ElemType::Int(IntKind::I32);
    disagree([4, 5], [F32, F32], [false, false], ["f32 x 4", "f32 x 5"]);
    disagree([4, 4], [F32, i32], [false, false], ["f32 x 4", "i32 x 4"]);
    disagree([4, 4], [F32, F32], [false, true], ["sum", "mean"]);
}
