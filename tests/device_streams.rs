//! When devices see what: what was queued before a collective, what is queued after it, and what has nothing to do with
//! it.

#[path = "common/devices.rs"]
mod devices;

use std::time::Duration;

use cubecl::prelude::*;
use cubecl::server::{Handle, ReduceOperation::Sum};
use cubecl::stream_id::StreamId;

use devices::{Client, Collective, Devices, create, read};

const F32: cubecl::ir::ElemType = cubecl::ir::ElemType::Float(cubecl::ir::FloatKind::F32);
const LENGTH: usize = 64;

#[cube(launch)]
fn fill(output: &mut Array<f32>, value: f32) {
    if ABSOLUTE_POS < output.len() {
        output[ABSOLUTE_POS] = value;
    }
}

#[cube(launch)]
fn double(input: &Array<f32>, output: &mut Array<f32>) {
    if ABSOLUTE_POS < output.len() {
        output[ABSOLUTE_POS] = 2.0 * input[ABSOLUTE_POS];
    }
}

fn array(handle: &Handle) -> ArrayArg<Collective> {
    // SAFETY: every buffer of these tests is this long.
    unsafe { ArrayArg::from_raw_parts(handle.clone(), LENGTH) }
}

fn launch_fill(client: &Client, target: &Handle, value: f32) {
    fill::launch::<Collective>(client, CubeCount::new_single(), CubeDim::new_1d(LENGTH as u32), array(target), value);
}

fn launch_double(client: &Client, source: &Handle, target: &Handle) {
    let size = CubeDim::new_1d(LENGTH as u32);
    double::launch::<Collective>(client, CubeCount::new_single(), size, array(source), array(target));
}

fn empty(client: &Client) -> Handle {
    create(client, &[0.0; LENGTH])
}

/// The same device on this thread's stream and on another one.
fn streams(client: &Client, rank: usize) -> [Client; 2] {
    let mut other = client.clone();
    // SAFETY: the stream is this thread's own.
    unsafe { other.set_stream(StreamId { value: (1 << 40) + rank as u64 }) };
    [client.clone(), other]
}

#[test]
fn a_tensor_that_is_written_again_is_read_anew_ten_thousand_times() {
    const BATCH: usize = 50;
    let devices = Devices::new(0, 2);
    devices.run(|rank, client| {
        let mut streams = streams(&client, rank);
        let tensors = [empty(&streams[0]), empty(&streams[1])];
        let results: Vec<_> = (0..BATCH).map(|i| empty(&streams[i / 2 % 2])).collect();
        for batch in 0..10_000 / BATCH {
            let value = |i: usize, rank: usize| (2 * (batch * BATCH + i) + rank) as f32;
            for (i, result) in results.iter().enumerate() {
                // A stream writes and reduces its own tensor and the other one's.
                let (stream, tensor) = (&mut streams[i % 2], &tensors[i / 4 % 2]);
                launch_fill(stream, tensor, value(i, rank));
                stream.all_reduce(tensor.clone(), result.clone(), F32, devices.ids.clone(), Sum);
            }
            streams[batch % 2].sync_collective();
            let values = streams[batch / 2 % 2].read(results.clone());
            for (i, values) in values.iter().enumerate() {
                assert_eq!(bytemuck::cast_slice::<u8, f32>(values), [value(i, 0) + value(i, 1); LENGTH]);
            }
        }
    });
}

#[test]
fn what_is_queued_after_sync_collective_sees_the_result_on_any_stream() {
    let devices = Devices::new(2, 3);
    devices.run(|rank, client| {
        let mut streams = streams(&client, rank);
        let (tensor, doubled) = (empty(&streams[0]), [empty(&streams[0]), empty(&streams[1])]);
        for i in 0..200 {
            let (call, sync, work) = (i % 2, i / 2 % 2, i / 4 % 2);
            launch_fill(&streams[call], &tensor, (i + rank) as f32);
            streams[call].all_reduce(tensor.clone(), tensor.clone(), F32, devices.ids.clone(), Sum);
            streams[sync].sync_collective();
            launch_double(&streams[work], &tensor, &doubled[i / 8 % 2]);
            let sum = (3 * i + 3) as f32;
            assert_eq!(read(&streams[work], &doubled[i / 8 % 2]), [2.0 * sum; LENGTH]);
            assert_eq!(read(&streams[1 - work], &tensor), [sum; LENGTH]);
        }
    });
}

#[test]
fn other_work_goes_on_while_a_peer_has_not_come() {
    let devices = Devices::new(5, 2);
    // Whoever waited would fail.
    devices.all.iter().for_each(|device| device.set_deadline(Duration::from_secs(20)));
    let (first, mut second) = (devices.client(0), devices.client(1));
    let mut streams = streams(&first, 0);
    let (tensor, peer) = (create(&first, &[1.0; LENGTH]), create(&second, &[2.0; LENGTH]));
    streams[0].all_reduce(tensor.clone(), tensor.clone(), F32, devices.ids.clone(), Sum);
    for stream in &streams {
        let (work, more) = (empty(stream), empty(stream));
        launch_fill(stream, &work, 3.0);
        launch_double(stream, &work, &more);
        assert_eq!(read(stream, &more), [6.0; LENGTH]);
        stream.flush().unwrap();
        cubecl::future::block_on(stream.sync()).unwrap();
    }
    // Nothing has been exchanged, so nothing of this waited for the peer.
    assert_eq!(devices.all[0].counters().rounds, 0);
    second.all_reduce(peer.clone(), peer.clone(), F32, devices.ids.clone(), Sum);
    second.sync_collective();
    first.sync_collective();
    assert_eq!(read(&streams[1], &tensor), [3.0; LENGTH]);
    assert_eq!(read(&second, &peer), [3.0; LENGTH]);
}

#[test]
fn a_snapshot_is_taken_before_what_is_queued_after_the_call() {
    let devices = Devices::new(7, 2);
    devices.run(|rank, client| {
        let mut streams = streams(&client, rank);
        let (source, target) = (empty(&streams[1]), empty(&streams[0]));
        for i in 0..100 {
            launch_fill(&streams[1], &source, (i + rank) as f32);
            streams[i % 2].all_reduce(source.clone(), target.clone(), F32, devices.ids.clone(), Sum);
            launch_fill(&streams[1], &source, -1.0);
            streams[0].sync_collective();
            assert_eq!(read(&streams[0], &target), [(2 * i + 1) as f32; LENGTH]);
            assert_eq!(read(&streams[0], &source), [-1.0; LENGTH]);
        }
    });
}
