//! The operations of a group on device memory, and the APIs of higher levels on top of them.

#[path = "common/device_groups.rs"]
mod groups;
#[path = "common/step.rs"]
mod models;
#[path = "common/trainings.rs"]
mod trainings;

use bonfire::server::DeviceCollectives;
use bonfire::tensor::autodiff::all_reduce_sum;
use bonfire::{
    CollectiveConfig, CollectiveRuntime, DType, DataParallel, Error, PeerId, ReduceOp, Wgpu, WgpuDevice, all_reduce,
    broadcast, finish_collective, register,
};
use bonfire_testing::{Kind, run_ranks};
use burn::backend::{Autodiff, Flex};
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Float, Int, Tensor, TensorData, TensorPrimitive};
use cubecl::Runtime;
use cubecl::stream_id::StreamId;
use cubecl::wgpu::WgpuRuntime;
use groups::{Memory, check, check_messages, check_tensors, check_unequal_parts};
use trainings::{check_ways, clipped_with_and_without_shards, replicas_and_parts, replicas_and_shards};

type Collective = CollectiveRuntime<WgpuRuntime>;

/// Padding in elements. Offsets must be multiples of the device's alignment.
const PADDING: usize = 64;

/// The device of one rank of one test: failures poison devices, so tests do not share them.
fn device(first: u8, rank: usize) -> WgpuDevice {
    WgpuDevice::new(Default::default(), first + rank as u8)
}

#[test]
fn every_operation_matches_the_host_with_1_2_3_and_5_devices() {
    for (kind, first, worlds) in [(Kind::Threads, 0, &[1, 2, 3, 5][..]), (Kind::Tcp, 5, &[3])] {
        for n in worlds.iter().copied() {
            run_ranks(kind, n, move |group| {
                let mut client = Collective::client(&device(first, group.rank()));
                for stream in [1 << 40, 1 << 41] {
                    // SAFETY: the stream is this thread's alone.
                    unsafe { client.set_stream(StreamId { value: stream }) };
                    for len in [0, 1, n, n + 1, 1000, 70_000] {
                        check(&group, &Memory::new(client.clone(), PADDING), len).unwrap();
                    }
                }
            });
        }
    }
}

#[test]
fn operations_on_tensors_match_their_definition_along_every_dimension() {
    for n in [1, 2, 3] {
        run_ranks(Kind::Threads, n, move |group| {
            let device = device(40, group.rank());
            check_tensors::<Wgpu, Float>(&group, &device, [2 * n, 3 * n, n], &[0, 1, 2]).unwrap();
            check_tensors::<Wgpu, Int>(&group, &device, [2 * n, 3 * n, n], &[0, 1, 2]).unwrap();
            check_unequal_parts::<Wgpu, Float>(&group, &device).unwrap();
            check_messages::<Wgpu, Float>(&group, &device).unwrap();
            check_messages::<Wgpu, Int>(&group, &device).unwrap();
        });
    }
}

/// The bytes of an operation do not depend on where a rank's tensors are.
#[test]
fn a_group_may_have_ranks_on_devices_and_on_the_host() {
    run_ranks(Kind::Threads, 3, |group| match group.rank() {
        1 => {
            check_tensors::<Flex, Float>(&group, &Default::default(), [6, 9, 3], &[0, 1, 2]).unwrap();
            check_unequal_parts::<Flex, Float>(&group, &Default::default()).unwrap();
            check_messages::<Flex, Float>(&group, &Default::default()).unwrap();
        }
        rank => {
            check_tensors::<Wgpu, Float>(&group, &device(44, rank), [6, 9, 3], &[0, 1, 2]).unwrap();
            check_unequal_parts::<Wgpu, Float>(&group, &device(44, rank)).unwrap();
            check_messages::<Wgpu, Float>(&group, &device(44, rank)).unwrap();
        }
    });
}

#[test]
fn every_buffer_is_copied_once_in_each_direction() {
    run_ranks(Kind::Threads, 2, |group| {
        let device = device(10, group.rank());
        let client = Collective::client(&device);
        let memory = Memory::new(client.clone(), PADDING);
        let (part, whole) = (memory.create(&[1; 8]), memory.create(&[2; 16]));
        let before = device.counters();
        let copies = || (device.counters().downloads - before.downloads, device.counters().uploads - before.uploads);
        let settle = || cubecl::future::block_on(client.sync()).unwrap();

        client.start_all_reduce(&group, &whole, &whole, DType::I32, ReduceOp::Sum).unwrap().wait().unwrap();
        settle();
        assert_eq!(copies(), (1, 1));
        client.start_all_gather(&group, &part, &whole, DType::I32).unwrap().wait().unwrap();
        settle();
        assert_eq!(copies(), (2, 2));
        client.start_reduce_scatter(&group, &whole, &part, DType::I32, ReduceOp::Sum).unwrap().wait().unwrap();
        settle();
        assert_eq!(copies(), (3, 3));
        client.start_all_to_all(&group, &whole, &whole, DType::I32).unwrap().wait().unwrap();
        settle();
        assert_eq!(copies(), (4, 4));
        client.start_broadcast(&group, &whole, DType::I32, 1).unwrap().wait().unwrap();
        settle();
        // The root only reads, the other rank only writes.
        assert_eq!(copies(), if group.rank() == 1 { (5, 4) } else { (4, 5) });
    });
}

#[test]
fn mismatched_sizes_are_rejected_and_the_group_stays_usable() {
    run_ranks(Kind::Threads, 2, |group| {
        let client = Collective::client(&device(12, group.rank()));
        let memory = Memory::new(client.clone(), PADDING);
        let (three, four) = (memory.create(&[1; 3]), memory.create(&[1; 4]));
        let refused = |result: Result<_, Error>| result.expect_err("an error").to_string();
        let all_reduce = refused(client.start_all_reduce(&group, &three, &four, DType::I32, ReduceOp::Sum).map(drop));
        assert!(all_reduce.contains("the target has 16 bytes and must have 12"), "{all_reduce}");
        let all_gather = refused(client.start_all_gather(&group, &four, &four, DType::I32).map(drop));
        assert!(all_gather.contains("the source has 16 bytes and must have 8"), "{all_gather}");
        let all_to_all = refused(client.start_all_to_all(&group, &three, &three, DType::I32).map(drop));
        assert!(all_to_all.contains("all_to_all"), "{all_to_all}");
        let broadcast = refused(client.start_broadcast(&group, &three, DType::I64, 0).map(drop));
        assert!(broadcast.contains("12 bytes are no whole number of i64"), "{broadcast}");
        assert!(refused(client.start_broadcast(&group, &three, DType::I32, 2).map(drop)).contains("root 2"));
        group.barrier().unwrap();
    });
}

#[test]
fn different_sizes_are_a_mismatch_on_both_ranks_and_the_devices_stay_usable() {
    run_ranks(Kind::Tcp, 2, |group| {
        let device = device(14, group.rank());
        let client = Collective::client(&device);
        let memory = Memory::new(client.clone(), PADDING);
        let own = memory.create(&vec![1; 4 + group.rank()]);
        let work = client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Sum).unwrap();
        assert!(matches!(work.wait(), Err(Error::Mismatch { .. })));
        assert_eq!(memory.read(&own), vec![1; 4 + group.rank()]);
        assert_eq!(device.failure(), None);
    });
}

type B = Autodiff<Wgpu>;

#[test]
fn data_parallel_on_devices_gives_the_weighted_mean_and_moves_each_bucket_once() {
    run_ranks(Kind::Threads, 3, |group| {
        let (rank, device) = (group.rank(), device(16, group.rank()));
        let mut model: Linear<B> = LinearConfig::new(2, 3).init(&device);
        model.weight = Param::from_data(TensorData::new(vec![rank as f32; 6], [2, 3]), &device);
        let (model, ddp) = DataParallel::new(group, model).unwrap();
        assert_eq!(model.weight.val().into_data(), TensorData::new(vec![0f32; 6], [2, 3]));

        // In its first two calls, `sync` reads the parameters to compare them.
        for _ in 0..2 {
            ddp.sync(&model, GradientsParams::new(), 1).unwrap();
        }
        // The gradient of the sum is the input, for each output.
        let input = Tensor::<B, 2>::from_data([[rank as f32, 1.0]], &device);
        let grads = GradientsParams::from_grads(model.forward(input).sum().backward(), &model);
        let before = device.counters();
        let samples = rank + 1;
        let grads = ddp.sync(&model, grads, samples).unwrap();
        // (0 * 1 + 1 * 2 + 2 * 3) / 6
        let mean = 8.0 / 6.0;
        let weight = grads.get::<Wgpu, 2>(model.weight.id).unwrap().into_data();
        weight.assert_approx_eq::<f32>(
            &TensorData::new(vec![mean, mean, mean, 1.0, 1.0, 1.0], [2, 3]),
            burn::tensor::Tolerance::absolute(1e-6),
        );
        let bias = grads.get::<Wgpu, 1>(model.bias.as_ref().unwrap().id).unwrap();
        bias.into_data()
            .assert_approx_eq::<f32>(&TensorData::new(vec![1f32; 3], [3]), burn::tensor::Tolerance::absolute(1e-6));
        let after = device.counters();
        assert_eq!((after.downloads - before.downloads, after.uploads - before.uploads), (2, 2), "two gradients");
    });
}

#[test]
fn the_burn_collective_api_reduces_on_devices() {
    let peers: Vec<_> = (0..3)
        .map(|rank| {
            std::thread::spawn(move || {
                let (peer, device) = (PeerId::from(rank), device(24, rank as usize));
                register::<Wgpu>(peer, device.clone(), CollectiveConfig::default().with_num_devices(3)).unwrap();
                let mine = Tensor::<Wgpu, 2>::from_floats([[rank as f32, 1.0], [2.0, 0.5]], &device).transpose();
                let before = device.counters();
                let sum = all_reduce::<Wgpu>(peer, mine.into_primitive().tensor(), ReduceOp::Sum).unwrap();
                let sum = Tensor::<Wgpu, 2>::from_primitive(TensorPrimitive::Float(sum));
                assert_eq!(sum.device(), device);
                assert_eq!(sum.into_data(), TensorData::from([[3.0f32, 6.0], [3.0, 1.5]]));
                let after = device.counters();
                assert_eq!((after.downloads - before.downloads, after.uploads - before.uploads), (1, 1));

                let provided = (rank == 1).then(|| Tensor::<Wgpu, 1>::from_floats([4.0, 5.0], &device));
                let provided = provided.map(|tensor| tensor.into_primitive().tensor());
                let received = broadcast::<Wgpu>(peer, provided).unwrap();
                let received = Tensor::<Wgpu, 1>::from_primitive(TensorPrimitive::Float(received));
                assert_eq!(received.device(), device);
                assert_eq!(received.into_data(), TensorData::from([4.0f32, 5.0]));
                finish_collective::<Wgpu>(peer).unwrap();
            })
        })
        .collect();
    peers.into_iter().for_each(|peer| peer.join().unwrap());
}

#[test]
fn sums_over_ranks_stay_on_devices_and_gradients_flow_through() {
    run_ranks(Kind::Threads, 2, |group| {
        let (rank, device) = (group.rank(), device(20, group.rank()));
        let own = Tensor::<B, 1>::from_floats([1.0 + rank as f32, 2.0], &device).require_grad();
        let sum = all_reduce_sum(own.clone(), &group).unwrap();
        assert_eq!(sum.to_data(), TensorData::from([3.0f32, 4.0]));
        let grads = (sum.clone() * sum).sum().backward();
        // Both ranks' losses are the sum of squares: twice 2 * sum.
        assert_eq!(own.grad(&grads).unwrap().into_data(), TensorData::from([12.0f32, 16.0]));
        // One upload forward and one back. Other copies are this test's own reads.
        assert_eq!(device.counters().uploads, 2);
    });
}

#[test]
#[ignore = "takes minutes; .ci/full runs it"]
fn overlapped_steps_of_a_convolutional_network_with_sync_batch_norm_equal_sync() {
    check_ways(models::convolutional::<B>, (2, 50), |rank| device(27, rank));
}

#[test]
#[ignore = "takes minutes; .ci/full runs it"]
fn overlapped_steps_of_a_transformer_with_a_shared_embedding_equal_sync() {
    check_ways(models::language::<B>, (2, 50), |rank| device(27, rank));
}

#[test]
#[ignore = "takes minutes; .ci/full runs it"]
fn full_sharding_equals_replicas_on_devices() {
    check_ways(replicas_and_parts::<B>, (2, 5), |rank| device(29, rank));
}

#[test]
#[ignore = "takes minutes; .ci/full runs it"]
fn the_sharded_optimizer_equals_replicas_on_devices() {
    check_ways(replicas_and_shards::<B>, (2, 4), |rank| device(31, rank));
}

#[test]
#[ignore = "takes minutes; .ci/full runs it"]
fn the_sharded_optimizer_clips_and_works_in_blocks_on_devices() {
    check_ways(replicas_and_shards::<B>, (4, 4), |rank| device(33, rank));
    check_ways(clipped_with_and_without_shards::<B>, (3, 2), |rank| device(37, rank));
}
