//! Collectives on a GPU together with kernels of cubecl and of burn.

#[path = "common/devices.rs"]
mod devices;
#[path = "common/device_streams.rs"]
mod streams;

use std::sync::Barrier;

use bonfire::{
    CollectiveConfig, CollectiveRuntime, Cuda, CudaDevice, PeerId, ReduceOp, all_reduce, finish_collective, register,
};
use bonfire_testing::settings::number;
use burn::tensor::{Tensor, TensorData, TensorPrimitive};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::server::ReduceOperation::Sum;

use devices::{Client, F32, read};
use streams::{LENGTH, empty, launch_fill};

type Devices = devices::Devices<CudaRuntime>;

/// Or as often as `BONFIRE_REWRITES` says.
#[test]
#[ignore = "needs a CUDA GPU"]
fn a_rewritten_tensor_is_read_anew_ten_thousand_times() {
    const BATCH: usize = 50;
    let times = number("BONFIRE_REWRITES").unwrap_or(10_000) as usize;
    let devices = Devices::new(0, 2);
    devices.run(|rank, client| {
        let mut streams = devices::streams(&client, rank);
        let tensors = [empty(&streams[0]), empty(&streams[1])];
        let results: Vec<_> = (0..BATCH).map(|i| empty(&streams[i / 2 % 2])).collect();
        for batch in 0..times / BATCH {
            let value = |i: usize, rank: usize| (2 * (batch * BATCH + i) + rank) as f32;
            for (i, result) in results.iter().enumerate() {
                // A stream writes and reduces its own tensor and the other stream's, without a wait.
                let (stream, tensor) = (&mut streams[i % 2], &tensors[i / 4 % 2]);
                launch_fill(stream, tensor, value(i, rank));
                // Every other one is in place, and then copied by a reduction of one device.
                if i % 2 == 0 {
                    stream.all_reduce(tensor.clone(), result.clone(), F32, devices.ids.clone(), Sum);
                } else {
                    stream.all_reduce(tensor.clone(), tensor.clone(), F32, devices.ids.clone(), Sum);
                    // The result of another list of devices is used below.
                    stream.sync_collective();
                    stream.all_reduce(tensor.clone(), result.clone(), F32, vec![devices.ids[rank]], Sum);
                }
                streams[i / 8 % 2].sync_collective();
            }
            let values = streams[batch / 2 % 2].read(results.clone());
            for (i, values) in values.iter().enumerate() {
                assert_eq!(bytemuck::cast_slice::<u8, f32>(values), [value(i, 0) + value(i, 1); LENGTH]);
            }
        }
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn work_queued_after_sync_collective_sees_the_result_on_any_stream() {
    streams::work_after_sync::<CudaRuntime>(2);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn other_work_proceeds_while_a_peer_is_missing() {
    streams::work_without_a_peer::<CudaRuntime>(5);
}

/// A different kernel for each number of steps, which a device compiles when it is first launched.
#[cube(launch)]
fn count(output: &mut Array<f32>, #[comptime] steps: u32) {
    if ABSOLUTE_POS < output.len() {
        #[unroll]
        for _ in 0..steps {
            output[ABSOLUTE_POS] += 1.0;
        }
    }
}

const LARGE: usize = 1 << 22;

fn launch_count(client: &Client<CudaRuntime>, tensor: &Handle, steps: u32) {
    const THREADS: u32 = 256;
    // SAFETY: the buffer is this long.
    let tensor = unsafe { ArrayArg::from_raw_parts(tensor.clone(), LARGE) };
    let cubes = CubeCount::new_1d((LARGE as u32).div_ceil(THREADS));
    count::launch::<CollectiveRuntime<CudaRuntime>>(client, cubes, CubeDim::new_1d(THREADS), tensor, steps);
}

/// Loading a module may wait for all kernels of the context, so no kernel may wait for what is queued after it.
#[test]
#[ignore = "needs a CUDA GPU"]
fn a_rank_compiles_a_kernel_while_its_peers_are_in_a_collective() {
    const ROUNDS: u32 = 12;
    for (first, ranks) in [(7, 2), (9, 4)] {
        let devices = Devices::new(first, ranks);
        let called = Barrier::new(ranks.into());
        devices.run(|rank, mut client| {
            for round in 0..ROUNDS {
                // The kernel is new to every device in every round.
                let steps = 1 + 2 * round;
                let late = round as usize % devices.ids.len() == rank;
                let tensor = devices::create(&client, &vec![rank as f32; LARGE]);
                if late {
                    called.wait();
                    launch_count(&client, &tensor, steps);
                }
                client.all_reduce(tensor.clone(), tensor.clone(), F32, devices.ids.clone(), Sum);
                if !late {
                    client.flush().unwrap();
                    called.wait();
                }
                client.sync_collective();
                // And while the collective runs.
                if late {
                    launch_count(&client, &tensor, steps + 1);
                }
                let ranks = devices.ids.len() as u32;
                let sum = ranks * (ranks - 1) / 2 + steps + if late { steps + 1 } else { 0 };
                assert!(read(&client, &tensor) == vec![sum as f32; LARGE], "round {round} on rank {rank} of {ranks}");
            }
        });
    }
}

/// The input of rank `rank` in row-major order, of which sums are exact.
fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + rank * 3) % 31) as f32).collect()
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn burn_tensors_are_reduced() {
    const RANKS: usize = 3;
    let rank = |rank: usize| {
        let (peer, device) = (PeerId::from(rank as u32), CudaDevice::new(Default::default(), 13 + rank as u8));
        register::<Cuda>(peer, device.clone(), CollectiveConfig::default().with_num_devices(RANKS)).unwrap();
        for (rows, columns) in [(1, 1), (3, 5), (64, 1000), (1024, 1025)] {
            let count = rows * columns;
            let mine = Tensor::<Cuda, 2>::from_data(TensorData::new(values(rank, count), [rows, columns]), &device);
            // Computed by kernels that are queued just before, and neither contiguous nor at the start of its memory.
            let mine = (mine.transpose() * 2.0 + 1.0).slice([columns / 2..columns, 0..rows]);
            for (op, divisor) in [(ReduceOp::Sum, 1.0), (ReduceOp::Mean, RANKS as f32)] {
                let result = all_reduce::<Cuda>(peer, mine.clone().into_primitive().tensor(), op).unwrap();
                let result = Tensor::<Cuda, 2>::from_primitive(TensorPrimitive::Float(result));
                assert_eq!(result.device(), device);
                let result = (result * 3.0).into_data();
                let inputs: Vec<_> = (0..RANKS).map(|rank| values(rank, count)).collect();
                let sum = |i: usize| inputs.iter().map(|values| 2.0 * values[i] + 1.0).sum::<f32>();
                let expected = (columns / 2..columns)
                    .flat_map(|column| (0..rows).map(move |row| row * columns + column))
                    .map(|i| sum(i) / divisor * 3.0);
                let expected = TensorData::new(expected.collect::<Vec<_>>(), [columns - columns / 2, rows]);
                result.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::relative(1e-6));
            }
        }
        finish_collective::<Cuda>(peer).unwrap();
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..RANKS).map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
