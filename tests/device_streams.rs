//! The order of work on streams: work queued before a collective, work queued after it, and unrelated work.

#[path = "common/devices.rs"]
mod devices;
#[path = "common/device_streams.rs"]
mod streams;

use cubecl::server::ReduceOperation::Sum;
use cubecl::wgpu::WgpuRuntime;

use devices::{Devices, F32, read};
use streams::{LENGTH, empty, launch_fill};

#[test]
fn a_rewritten_tensor_is_read_anew_ten_thousand_times() {
    const BATCH: usize = 50;
    let devices = Devices::<WgpuRuntime>::new(0, 2);
    devices.run(|rank, client| {
        let mut streams = devices::streams(&client, rank);
        let tensors = [empty(&streams[0]), empty(&streams[1])];
        let results: Vec<_> = (0..BATCH).map(|i| empty(&streams[i / 2 % 2])).collect();
        for batch in 0..10_000 / BATCH {
            let value = |i: usize, rank: usize| (2 * (batch * BATCH + i) + rank) as f32;
            for (i, result) in results.iter().enumerate() {
                // A stream writes and reduces its own tensor and the other stream's.
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
fn work_queued_after_sync_collective_sees_the_result_on_any_stream() {
    streams::work_after_sync::<WgpuRuntime>(2);
}

#[test]
fn other_work_proceeds_while_a_peer_is_missing() {
    streams::work_without_a_peer::<WgpuRuntime>(5);
}

#[test]
fn a_snapshot_is_taken_before_work_queued_after_the_call() {
    let devices = Devices::<WgpuRuntime>::new(7, 2);
    devices.run(|rank, client| {
        let mut streams = devices::streams(&client, rank);
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
