//! The order of launches of several groups on the same GPUs. With one hardware queue a GPU begins a call after the one
//! before it has ended, so calls in different orders wait for each other until the deadline.

use std::thread;
use std::time::Duration;

use bonfire::server::DeviceCollectives;
use bonfire::{DType, Group, ReduceOp};
use cubecl::cuda::CudaRuntime;

use super::{start, start_ranks};
use crate::Devices;
use crate::groups::{Memory, mine, value};
use crate::processes::join;
use crate::software_driver::SoftwareDriver;
use bonfire_testing::process::{is_child, report, send_line};
use bonfire_testing::{Kind, run_ranks_with};

const ROUNDS: usize = 100;

/// Calls one after the other, each of which ends before the next.
fn all_reduces(group: &Group, memory: &Memory<CudaRuntime>) {
    for round in 0..ROUNDS {
        let own = memory.create(&mine(group.rank(), 1 + round % 7));
        let call = memory.client.start_all_reduce(group, &own, &own, DType::I32, ReduceOp::Sum);
        call.and_then(|call| call.wait()).unwrap_or_else(|error| panic!("round {round}: {error}"));
        let sum = (0..group.world_size()).map(|rank| value(rank, 0)).sum::<i32>();
        assert_eq!(memory.read(&own)[0], sum);
    }
}

/// Each group has a rank on both GPUs.
#[test]
#[ignore = "needs the software driver"]
fn two_groups_on_the_same_gpus_do_not_wait_for_each_other() {
    const NAME: &str = "order::two_groups_on_the_same_gpus_do_not_wait_for_each_other";
    if is_child() {
        let groups = [0, 2].map(|first| {
            let limit = |builder: bonfire::Builder| builder.deadline(Duration::from_secs(20));
            let part = move |group: Group| {
                let client = Devices::new(first, 2).client(group.rank());
                all_reduces(&group, &Memory::new(client, 0));
            };
            thread::spawn(move || run_ranks_with(Kind::Threads, 2, limit, part))
        });
        groups.into_iter().for_each(|group| drop(group.join().unwrap()));
        return send_line("done");
    }
    SoftwareDriver::loaded();
    for path in ["kernels", "nccl"] {
        let mut process = start(NAME, 2, &[("SHIM_QUEUES", "1"), ("BONFIRE_CUDA", path)]);
        assert!(process.end().success(), "{path}");
    }
}

/// Each process has a GPU and a rank in three groups: two of all ranks, and one of ranks 0 and 1, or of the others.
#[test]
#[ignore = "needs the software driver"]
fn groups_of_several_processes_do_not_wait_for_each_other() {
    const NAME: &str = "order::groups_of_several_processes_do_not_wait_for_each_other";
    if is_child() {
        let (group, _, memory) = join();
        let other = group.split(Some(0), 0).unwrap().unwrap();
        let pair = group.split(Some(group.rank() as u64 / 2), 0).unwrap().unwrap();
        thread::scope(|scope| {
            for group in [&group, &other, &pair] {
                let memory = &memory;
                scope.spawn(move || all_reduces(group, memory));
            }
        });
        return report(&Ok("all".into()));
    }
    SoftwareDriver::loaded();
    for (path, n) in [("kernels", 2), ("nccl", 2), ("kernels", 3)] {
        let mut ranks = start_ranks(NAME, n, n, &[("SHIM_QUEUES", "1"), ("BONFIRE_CUDA", path)]);
        assert!(ranks.iter().all(|rank| rank.outcome() == Ok("all".into())), "{n} ranks, {path}");
        assert!(ranks.iter_mut().all(|rank| rank.end().success()));
    }
}
