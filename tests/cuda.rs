//! Collectives between logical devices on one GPU, compared with results of the host. No test needs a kernel other than
//! Bonfire's own.

#[path = "common/device_cases.rs"]
mod cases;
#[path = "common/devices.rs"]
mod devices;
#[path = "cuda/failure.rs"]
mod failure;
#[path = "common/device_faults.rs"]
mod faults;
#[path = "cuda/soak.rs"]
mod soak;
#[path = "cuda/software.rs"]
mod software;
#[path = "common/software_driver.rs"]
mod software_driver;

use std::thread;

use bonfire_testing::settings::number;
use cubecl::cuda::CudaRuntime;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::server::Handle;
use cubecl::server::ReduceOperation::Sum;

use cases::{Case, all_reduces};
use devices::{Client, F32, create, read, streams};

type Devices = devices::Devices<CudaRuntime>;

/// Offsets at which elements of this type may start: accesses by vectors of any width begin in the middle of one.
fn around(dtype: ElemType) -> [(usize, usize); 4] {
    let size = dtype.size();
    [(0, 0), (size, 0), (0, 5), (32 + 3 * size, 11)]
}

fn cases(lengths: &[usize]) -> Vec<Case> {
    cases::cases(lengths, around)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn all_reduce_on_one_device() {
    all_reduces(&Devices::new(0, 1), &cases(&[0, 1, 7, 1001]));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn all_reduce_on_two_devices() {
    all_reduces(&Devices::new(1, 2), &cases(&[0, 1, 2, 7, 16, 255, 1001, 4096, 70_001]));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn all_reduce_on_three_devices() {
    all_reduces(&Devices::new(3, 3), &cases(&[0, 1, 7, 33, 1001, 70_001]));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn all_reduce_on_four_devices() {
    all_reduces(&Devices::new(6, 4), &cases(&[0, 1, 3, 64, 1001, 70_001]));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn all_reduce_on_eight_devices() {
    all_reduces(&Devices::new(10, 8), &cases(&[0, 1, 7, 65, 1001]));
}

/// Every length up to several multiples of the widths of all vectors: 20,960 calls. `BONFIRE_TEST_LENGTHS` is how many
/// lengths to take instead, for memcheck and for GPUs in software.
#[test]
#[ignore = "needs a CUDA GPU"]
fn all_reduce_of_all_short_lengths() {
    let taken = number("BONFIRE_TEST_LENGTHS").unwrap_or(131) as usize;
    // The last one is 130 in any case. A step that is no power of two visits all remainders.
    let lengths: Vec<_> = (0..=130usize).rev().step_by(131usize.div_ceil(taken)).collect();
    all_reduces(&Devices::new(18, 2), &cases(&lengths));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn all_reduce_of_large_buffers() {
    let case = |number, dtype, length, around| Case { number, dtype, mean: false, in_place: true, length, around };
    let f16 = ElemType::Float(FloatKind::F16);
    let lengths = [(1 << 24, (0, 0)), ((7 << 20) + 1, (4, 0)), (1 << 20, (8, 4)), ((1 << 18) + 1, (0, 2))];
    let sizes = |dtype| lengths.iter().enumerate().map(move |(i, (length, around))| case(i, dtype, *length, *around));
    for (first, count) in [(20, 2), (22, 4)] {
        let devices = Devices::new(first, count);
        [F32, f16].into_iter().flat_map(sizes).for_each(|case| all_reduces(&devices, &[case]));
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn reductions_of_results_that_are_not_there_yet() {
    cases::chained_all_reduces::<CudaRuntime>([(26, 2), (28, 3)]);
}

/// 50 all-reduces of all sizes in turn, all of them in flight before the first wait.
#[test]
#[ignore = "needs a CUDA GPU"]
fn fifty_all_reduces_without_a_sync() {
    for (first, count) in [(31, 2), (33, 4)] {
        let devices = Devices::new(first, count);
        for batch in 0..4 {
            let case = |number| Case {
                number: 50 * batch + number,
                dtype: cases::DTYPES[number % cases::DTYPES.len()],
                mean: number % 3 == 0,
                in_place: number % 2 == 0,
                length: 1usize << (number * 7 % 20),
                around: (0, 0),
            };
            all_reduces(&devices, &(0..50).map(case).collect::<Vec<_>>());
        }
    }
}

/// The memory of a tensor that is dropped after its call is reused, and filled with something else.
#[test]
#[ignore = "needs a CUDA GPU"]
fn tensors_may_be_dropped_right_after_the_call() {
    const LENGTH: usize = 1 << 16;
    let devices = Devices::new(37, 2);
    devices.run(|rank, mut client| {
        for round in 0..100 {
            let value = |rank: usize| (round + 3 * rank) as f32;
            let target = create(&client, &vec![0.0; LENGTH]);
            let source = create(&client, &vec![value(rank); LENGTH]);
            client.all_reduce(source, target.clone(), F32, devices.ids.clone(), Sum);
            let junk: Vec<_> = (0..4).map(|_| create(&client, &vec![-1e9; LENGTH])).collect();
            client.sync_collective();
            assert!(read(&client, &target) == vec![value(0) + value(1); LENGTH], "round {round} on device {rank}");
            drop(junk);
            // In place, and the result is not read.
            let unseen = create(&client, &vec![1.0; LENGTH]);
            client.all_reduce(unseen.clone(), unseen, F32, devices.ids.clone(), Sum);
        }
        client.sync_collective();
        client.flush().unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn tensors_of_other_threads_are_reduced_after_their_writes() {
    const LENGTH: usize = 1 << 18;
    let devices = Devices::new(39, 2);
    devices.run(|rank, mut client| {
        for round in 0..50 {
            let value = |rank: usize| (5 * round + rank) as f32;
            // Each thread has a stream of its own.
            let elsewhere = |f: &(dyn Fn() -> Handle + Sync)| thread::scope(|scope| scope.spawn(f).join().unwrap());
            let source = elsewhere(&|| create(&client, &vec![value(rank); LENGTH]));
            let target = elsewhere(&|| create(&client, &vec![-1.0; LENGTH]));
            client.all_reduce(source, target.clone(), F32, devices.ids.clone(), Sum);
            client.sync_collective();
            let expected = vec![value(0) + value(1); LENGTH];
            thread::scope(|scope| scope.spawn(|| assert!(read(&client, &target) == expected)).join().unwrap());
            assert!(read(&client, &target) == expected);
        }
    });
}

/// cubecl orders a stream after the allocation of another one's memory, once, and not after what is written later.
#[test]
#[ignore = "needs a CUDA GPU"]
fn streams_that_have_used_the_memory_see_the_result() {
    const LENGTH: usize = 1 << 10;
    let devices = Devices::new(92, 2);
    devices.run(|rank, client| {
        let [mut own, other] = streams(&client, rank);
        for round in 0..10 {
            let value = |rank: usize| (round + 3 * rank) as f32;
            let target = create(&own, &vec![-1.0; LENGTH]);
            let source = create(&own, &vec![value(rank); LENGTH]);
            assert!(read(&other, &target) == vec![-1.0; LENGTH]);
            own.all_reduce(source, target.clone(), F32, devices.ids.clone(), Sum);
            // A write of the result through host memory waits for this copy.
            let long = create(&own, &vec![0.0; 1 << 24]);
            own.sync_collective();
            assert!(read(&other, &target) == vec![value(0) + value(1); LENGTH], "round {round} on device {rank}");
            drop(long);
        }
    });
}

/// Each list of devices is a team of its own. A device is in several, and calls them in turn without a sync between.
#[test]
#[ignore = "needs a CUDA GPU"]
fn different_lists_of_devices_in_turn() {
    const LISTS: [&[usize]; 8] = [&[0, 1], &[2, 3], &[0, 1, 2, 3], &[1, 2], &[0, 3], &[2], &[0, 2, 3], &[0, 1]];
    let devices = Devices::new(41, 4);
    devices.run(|rank, client: Client<CudaRuntime>| {
        let mut streams = streams(&client, rank);
        for round in 0..40 {
            let mut calls = Vec::new();
            for (place, list) in LISTS.iter().enumerate() {
                let Some(position) = list.iter().position(|member| *member == rank) else { continue };
                let (number, dtype) = (LISTS.len() * round + place, cases::DTYPES[round % cases::DTYPES.len()]);
                let length = [3, 700, 40_000][(round + place) % 3];
                let case = Case { number, dtype, mean: false, in_place: place % 2 == 0, length, around: (0, 0) };
                let ids = list.iter().map(|member| devices.ids[*member]).collect();
                calls.push(case.call(position, &mut streams, ids));
            }
            streams[round % 2].sync_collective();
            calls.into_iter().for_each(|call| call.check(&streams));
        }
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn transfers_between_all_pairs() {
    cases::transfers::<CudaRuntime>([(45, 1), (46, 2), (48, 3), (51, 5)]);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn copies_between_all_pairs() {
    cases::copies::<CudaRuntime>([(56, 1), (57, 2), (59, 3), (62, 5)]);
}
