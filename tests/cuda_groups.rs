//! The operations of a group on GPU memory: by kernels, or by NCCL if `BONFIRE_CUDA` selects it. Few tests
//! need kernels of burn's.

#[path = "common/devices.rs"]
mod devices;
#[path = "common/device_groups.rs"]
mod groups;
#[path = "cuda_groups/processes.rs"]
mod processes;
#[path = "cuda_groups/software.rs"]
mod software;
#[path = "common/software_driver.rs"]
mod software_driver;

use std::sync::{Arc, Barrier};
use std::time::Duration;

use bonfire::server::{DeviceCollectives, Transfer};
use bonfire::tensor::operation;
use bonfire::{Cuda, DType, DataParallel, Error, Group, ReduceOp};
use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{Float, Int, Tensor, TensorData};
use cubecl::cuda::CudaRuntime;
use half::bf16;

use bonfire_testing::{Kind, errors, run_ranks, run_ranks_with};
use groups::{Memory, check, check_messages, check_tensors, check_unequal_parts, mine};

type Devices = devices::Devices<CudaRuntime>;

/// Runs `part` on `n` ranks, each of them with a thread and a device of its own.
fn on_devices<T: Send + 'static>(
    kind: Kind,
    first: u8,
    n: u8,
    part: impl Fn(Group, devices::Client<CudaRuntime>) -> T + Clone + Send + 'static,
) -> Vec<T> {
    run_ranks(kind, n.into(), move |group| {
        // The order of the ranks differs from that of the devices.
        let client = Devices::new(first, n).client(usize::from(n) - 1 - group.rank());
        part(group, client)
    })
}

/// Checks that no data has passed through the host.
fn stays_on_gpus(devices: &Devices) {
    for device in &devices.all {
        let counters = device.counters();
        assert_eq!((counters.downloads, counters.uploads), (0, 0), "{device:?}");
    }
}

fn all_operations(kind: Kind, first: u8, n: u8, lengths: &'static [usize]) {
    on_devices(kind, first, n, move |group, client| {
        for padding in [0, 1, 64] {
            for len in lengths {
                check(&group, &Memory::new(client.clone(), padding), *len).unwrap();
            }
        }
    });
    stays_on_gpus(&Devices::new(first, n));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn every_operation_on_one_and_two_devices() {
    all_operations(Kind::Threads, 0, 1, &[0, 1, 1000]);
    all_operations(Kind::Threads, 1, 2, &[0, 1, 2, 3, 1000, 70_001]);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn every_operation_on_three_and_five_devices() {
    all_operations(Kind::Threads, 3, 3, &[0, 1, 3, 1000, 70_001]);
    all_operations(Kind::Tcp, 6, 5, &[0, 1, 5, 7, 1000]);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn tensors_stay_on_gpus() {
    for (first, n) in [(70, 2), (72, 3)] {
        run_ranks(Kind::Threads, n.into(), move |group| {
            let device = &Devices::new(first, n).all[group.rank()];
            let shape = [2 * usize::from(n), usize::from(n), 3];
            check_tensors::<Cuda, Float>(&group, device, shape, &[0, 1]).unwrap();
            check_tensors::<Cuda, Int>(&group, device, shape, &[0, 1]).unwrap();
            check_unequal_parts::<Cuda, Float>(&group, device).unwrap();
            check_unequal_parts::<Cuda, Int>(&group, device).unwrap();
            check_messages::<Cuda, Float>(&group, device).unwrap();
            check_messages::<Cuda, Int>(&group, device).unwrap();
        });
        stays_on_gpus(&Devices::new(first, n));
    }
}

/// The bits of `len` elements of rank `rank`, which are small whole numbers.
fn elements(dtype: DType, rank: usize, len: usize) -> Vec<u8> {
    let value = |i: usize| (rank * 3 + i * 7) % 5;
    match dtype {
        DType::BF16 => (0..len).flat_map(|i| bf16::from_f32(value(i) as f32).to_le_bytes()).collect(),
        DType::F64 => (0..len).flat_map(|i| (value(i) as f64).to_le_bytes()).collect(),
        DType::U8 => (0..len).map(|i| value(i) as u8).collect(),
        _ => panic!("no test of {dtype}"),
    }
}

fn reduced(dtype: DType, op: ReduceOp, n: usize, len: usize) -> Vec<u8> {
    let value = |i: usize| {
        let values = (0..n).map(|rank| (rank * 3 + i * 7) % 5);
        match op {
            ReduceOp::Sum => values.sum::<usize>(),
            ReduceOp::Max => values.max().unwrap(),
            ReduceOp::Min => values.min().unwrap(),
            _ => values.product(),
        }
    };
    match dtype {
        DType::BF16 => (0..len).flat_map(|i| bf16::from_f32(value(i) as f32).to_le_bytes()).collect(),
        DType::F64 => (0..len).flat_map(|i| (value(i) as f64).to_le_bytes()).collect(),
        _ => (0..len).map(|i| value(i) as u8).collect(),
    }
}

/// Every reduction, also those that kernels or NCCL do not support, on elements that begin anywhere.
#[test]
#[ignore = "needs a CUDA GPU"]
fn reductions_of_several_types() {
    on_devices(Kind::Threads, 11, 3, |group, client| {
        let (rank, n) = (group.rank(), group.world_size());
        for dtype in [DType::BF16, DType::F64, DType::U8] {
            for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product] {
                for len in [1, 12, 1000, 4096] {
                    // Data that passes through the host must begin and end at words.
                    let around = 4usize.next_multiple_of(dtype.size());
                    let padded = [vec![9; around], elements(dtype, rank, len), vec![9; around]].concat();
                    let source = client.create_from_slice(&padded);
                    let source = source.offset_start(around as u64).offset_end(around as u64);
                    let target = client.empty(len * dtype.size());
                    client.start_all_reduce(&group, &source, &target, dtype, op).unwrap().wait().unwrap();
                    let result = client.read_one(target).unwrap();
                    assert!(result[..] == reduced(dtype, op, n, len), "{op} of {len} {dtype} on rank {rank}");
                }
            }
        }
    });
}

/// Many operations in flight, waited for in any order, one of them never. Their memory is reused meanwhile.
#[test]
#[ignore = "needs a CUDA GPU"]
fn many_operations_in_flight() {
    const LENGTH: usize = 30_000;
    on_devices(Kind::Threads, 14, 2, |group, client| {
        let memory = Memory::new(client.clone(), 0);
        let sums = |round: usize| -> Vec<i32> {
            (0..LENGTH).map(|i| (0..2).map(|rank| groups::value(rank + round, i)).sum()).collect()
        };
        for _ in 0..5 {
            let mut started: Vec<(usize, _, Transfer<CudaRuntime>)> = (0..8)
                .map(|round| {
                    let own = memory.create(&mine(group.rank() + round, LENGTH));
                    let transfer = client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Sum).unwrap();
                    (round, own, transfer)
                })
                .collect();
            started.reverse();
            // This one is never waited for, and its result is not read.
            drop(started.remove(3));
            let junk: Vec<_> = (0..4).map(|_| memory.create(&[-1_000_000; LENGTH])).collect();
            for (round, own, transfer) in started {
                transfer.wait().unwrap();
                assert!(memory.read(&own) == sums(round), "round {round}");
            }
            drop(junk);
        }
    });
}

/// Parts of one buffer that overlap, but not as in an operation in place.
#[test]
#[ignore = "needs a CUDA GPU"]
fn sources_and_targets_that_overlap() {
    on_devices(Kind::Threads, 16, 2, |group, client| {
        let rank = group.rank();
        let both = client.create_from_slice(bytemuck::cast_slice(&mine(rank, 1500)));
        let (source, target) = (both.clone().offset_end(4 * 500), both.clone().offset_start(4 * 500));
        client.start_all_reduce(&group, &source, &target, DType::I32, ReduceOp::Sum).unwrap().wait().unwrap();
        let result: Vec<i32> = bytemuck::pod_collect_to_vec(&client.read_one(target).unwrap());
        let sum: Vec<i32> = (0..1000).map(|i| groups::value(0, i) + groups::value(1, i)).collect();
        assert!(result == sum, "rank {rank}");
    });
}

/// Parameters of one dimension: burn pads the rows of others, and reads them with kernels of its own.
#[derive(Module, Debug)]
struct Vectors<B: Backend> {
    all: Vec<Param<Tensor<B, 1>>>,
}

/// A bucket of several gradients is packed on the GPU.
#[test]
#[ignore = "needs a CUDA GPU"]
fn gradients_of_several_parameters() {
    type Training = Autodiff<Cuda>;
    const LENGTHS: [usize; 3] = [3, 700, 2];
    run_ranks(Kind::Threads, 3, |group| {
        let rank = group.rank();
        let device = Devices::new(33, 3).all[rank].clone();
        let data = |length: usize, value: usize| TensorData::new(vec![value as f32; length], [length]);
        let all = LENGTHS.map(|length| Param::from_data(data(length, rank), &device));
        let (model, ddp) = DataParallel::<Training>::new(group, Vectors { all: all.into() }).unwrap();
        // In its first two calls, `sync` reads the parameters to compare them.
        for _ in 0..2 {
            ddp.sync(&model, GradientsParams::new(), 1).unwrap();
        }
        let mut grads = GradientsParams::new();
        for (parameter, length) in model.all.iter().zip(LENGTHS) {
            assert_eq!(parameter.val().into_data(), data(length, 0), "rank 0's values");
            grads.register(parameter.id, Tensor::<Cuda, 1>::from_data(data(length, rank * length), &device));
        }
        let before = device.counters();
        let synced = ddp.sync(&model, grads, 4).unwrap();
        assert_eq!(device.counters(), before, "nothing passes through the host");
        for (parameter, length) in model.all.iter().zip(LENGTHS) {
            let mean = synced.get::<Cuda, 1>(parameter.id).unwrap().into_data();
            assert_eq!(mean, data(length, length), "{length} on rank {rank}");
        }
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn subgroups_and_their_parent_alternate() {
    on_devices(Kind::Threads, 18, 4, |group, client| {
        let pair = group.split(Some(group.rank() as u64 % 2), 0).unwrap().unwrap();
        for len in [7, 20_000] {
            for group in [&group, &pair, &group, &pair] {
                check(group, &Memory::new(client.clone(), 2), len).unwrap();
            }
        }
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn different_sizes_are_a_mismatch_on_both_ranks_and_the_devices_stay_usable() {
    on_devices(Kind::Tcp, 22, 2, |group, client| {
        let memory = Memory::new(client.clone(), 1);
        let own = memory.create(&vec![1; 4 + group.rank()]);
        let work = client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Sum).unwrap();
        let Err(Error::Mismatch { calls, .. }) = work.wait() else { panic!("the sizes differ") };
        assert_eq!(calls.iter().map(|(rank, call)| (*rank, call.count)).collect::<Vec<_>>(), [(0, 4), (1, 5)]);
        assert_eq!(memory.read(&own), vec![1; 4 + group.rank()]);
    });
    assert!(Devices::new(22, 2).all.iter().all(|device| device.failure().is_none()));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_message_of_another_shape_is_a_mismatch_and_the_devices_stay_usable() {
    let results = run_ranks(Kind::Threads, 2, |group| {
        let device = &Devices::new(30, 2).all[group.rank()];
        // Before the ranks have agreed on a path, messages go through host memory.
        for agreed in [false, true] {
            if agreed {
                operation::all_reduce(Tensor::<Cuda, 1>::ones([1], device), ReduceOp::Sum, &group)?;
            }
            check_messages::<Cuda, Float>(&group, device)?;
        }
        match group.rank() {
            0 => operation::send(Tensor::<Cuda, 2>::zeros([3, 4], device), 1, &group)?,
            _ => operation::recv::<Cuda, 2, Float>([4, 3], 0, device, &group).map(drop)?,
        }
        group.barrier()
    });
    let found = |result: &Result<(), Error>| matches!(result, Err(Error::Mismatch { calls, .. }) if calls.len() == 2);
    assert!(found(&results[1]), "{results:?}");
    assert!(results[0].is_err());
    for device in Devices::new(30, 2).all {
        assert_eq!(device.failure(), None);
        let ones = Tensor::<Cuda, 1>::ones([2], &device).into_data();
        assert_eq!(ones, TensorData::from([1.0f32; 2]));
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_rank_that_does_not_call_is_named_and_the_devices_stay_usable() {
    let limit = |builder: bonfire::Builder| builder.deadline(Duration::from_secs(3));
    let ended = Arc::new(Barrier::new(3));
    let results = run_ranks_with(Kind::Threads, 3, limit, move |group| {
        let client = Devices::new(24, 3).client(group.rank());
        let memory = Memory::new(client.clone(), 0);
        let own = memory.create(&[1, 2, 3]);
        let call = |group: &Group| client.start_all_reduce(group, &own, &own, DType::I32, ReduceOp::Sum);
        call(&group).unwrap().wait().unwrap();
        // Rank 1 stays in the group, and calls nothing.
        let result = if group.rank() == 1 { Ok(()) } else { call(&group).unwrap().wait() };
        assert_eq!(memory.read(&own).len(), 3);
        ended.wait();
        result
    });
    for error in errors([&results[0], &results[2]].map(Clone::clone).to_vec()) {
        assert!(matches!(&error, Error::Timeout { missing, .. } if missing[..] == [1]), "{error}");
    }
    assert!(Devices::new(24, 3).all.iter().all(|device| device.failure().is_none()));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_rank_uses_one_device_per_group() {
    on_devices(Kind::Threads, 27, 2, |group, client| {
        let memory = Memory::new(client.clone(), 0);
        let own = memory.create(&[1]);
        client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Sum).unwrap().wait().unwrap();
        let other = Devices::new(29, 2).client(group.rank());
        let own = Memory::new(other.clone(), 0).create(&[1]);
        let error = other.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Sum).map(drop).unwrap_err();
        assert!(error.to_string().contains("in this group, not with"), "{error}");
        let own = memory.create(&[1]);
        client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Sum).unwrap().wait().unwrap();
    });
}
