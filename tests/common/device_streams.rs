//! The order of work on streams, on any runtime: work queued before a collective, work queued after it, and unrelated
//! work.

use std::time::Duration;

use bonfire::CollectiveRuntime;
use bonfire::server::DeviceTransport;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::server::ReduceOperation::Sum;

use crate::devices::{Client, Devices, F32, create, read, streams};

pub const LENGTH: usize = 64;

#[cube(launch)]
fn fill(output: &mut Array<f32>, value: f32) {
    if ABSOLUTE_POS < output.len() {
        output[ABSOLUTE_POS] = value;
    }
}

#[cube(launch)]
fn twice(input: &Array<f32>, output: &mut Array<f32>) {
    if ABSOLUTE_POS < output.len() {
        output[ABSOLUTE_POS] = 2.0 * input[ABSOLUTE_POS];
    }
}

fn array<R: DeviceTransport>(handle: &Handle) -> ArrayArg<CollectiveRuntime<R>> {
    // SAFETY: every buffer of these tests is this long.
    unsafe { ArrayArg::from_raw_parts(handle.clone(), LENGTH) }
}

pub fn launch_fill<R: DeviceTransport>(client: &Client<R>, target: &Handle, value: f32) {
    fill::launch::<CollectiveRuntime<R>>(
        client,
        CubeCount::new_single(),
        CubeDim::new_1d(LENGTH as u32),
        array(target),
        value,
    );
}

fn launch_twice<R: DeviceTransport>(client: &Client<R>, source: &Handle, target: &Handle) {
    let size = CubeDim::new_1d(LENGTH as u32);
    twice::launch::<CollectiveRuntime<R>>(client, CubeCount::new_single(), size, array(source), array(target));
}

pub fn empty<R: DeviceTransport>(client: &Client<R>) -> Handle {
    create(client, &[0.0; LENGTH])
}

/// Work queued after `sync_collective` sees the result on any stream.
pub fn work_after_sync<R: DeviceTransport>(first: u8) {
    let devices = Devices::<R>::new(first, 3);
    devices.run(|rank, client| {
        let mut streams = streams(&client, rank);
        let (tensor, doubled) = (empty(&streams[0]), [empty(&streams[0]), empty(&streams[1])]);
        for i in 0..200 {
            let (call, sync, work) = (i % 2, i / 2 % 2, i / 4 % 2);
            launch_fill(&streams[call], &tensor, (i + rank) as f32);
            streams[call].all_reduce(tensor.clone(), tensor.clone(), F32, devices.ids.clone(), Sum);
            streams[sync].sync_collective();
            launch_twice(&streams[work], &tensor, &doubled[i / 8 % 2]);
            let sum = (3 * i + 3) as f32;
            assert_eq!(read(&streams[work], &doubled[i / 8 % 2]), [2.0 * sum; LENGTH]);
            assert_eq!(read(&streams[1 - work], &tensor), [sum; LENGTH]);
        }
    });
}

/// Other work proceeds while a peer is missing.
pub fn work_without_a_peer<R: DeviceTransport>(first: u8) {
    let devices = Devices::<R>::new(first, 2);
    // Work that waited for the peer would fail.
    devices.all.iter().for_each(|device| device.set_deadline(Duration::from_secs(20)));
    let (first, mut second) = (devices.client(0), devices.client(1));
    let mut streams = streams(&first, 0);
    let (tensor, peer) = (create(&first, &[1.0; LENGTH]), create(&second, &[2.0; LENGTH]));
    streams[0].all_reduce(tensor.clone(), tensor.clone(), F32, devices.ids.clone(), Sum);
    for stream in &streams {
        let (work, more) = (empty(stream), empty(stream));
        launch_fill(stream, &work, 3.0);
        launch_twice(stream, &work, &more);
        assert_eq!(read(stream, &more), [6.0; LENGTH]);
        stream.flush().unwrap();
        cubecl::future::block_on(stream.sync()).unwrap();
    }
    // Nothing has been exchanged, so none of this work waited for the peer.
    assert_eq!(devices.all[0].counters().rounds, 0);
    second.all_reduce(peer.clone(), peer.clone(), F32, devices.ids.clone(), Sum);
    second.sync_collective();
    first.sync_collective();
    assert_eq!(read(&streams[1], &tensor), [3.0; LENGTH]);
    assert_eq!(read(&second, &peer), [3.0; LENGTH]);
}
