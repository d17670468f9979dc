//! The order of launches of several groups on the same GPUs.

use std::thread;
use std::time::Duration;

use bonfire::server::DeviceCollectives;
use bonfire::{DType, Group, ReduceOp};

use super::start;
use crate::Devices;
use crate::groups::{Memory, mine, value};
use crate::software_driver::SoftwareDriver;
use bonfire_testing::process::{is_child, send_line};
use bonfire_testing::{Kind, run_ranks_with};

/// Two groups, each with a rank on both GPUs, whose calls are in flight at the same time. With one hardware queue a GPU
/// begins a call after the one before it has ended.
#[test]
#[ignore = "needs the software driver"]
fn two_groups_on_the_same_gpus_do_not_wait_for_each_other() {
    const NAME: &str = "order::two_groups_on_the_same_gpus_do_not_wait_for_each_other";
    const ROUNDS: usize = 100;
    if is_child() {
        let groups = [0, 2].map(|first| {
            let limit = |builder: bonfire::Builder| builder.deadline(Duration::from_secs(20));
            let part = move |group: Group| {
                let client = Devices::new(first, 2).client(group.rank());
                let memory = Memory::new(client.clone(), 0);
                for round in 0..ROUNDS {
                    let own = memory.create(&mine(group.rank(), 1 + round % 7));
                    let call = client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Sum);
                    call.and_then(|call| call.wait()).unwrap_or_else(|error| panic!("round {round}: {error}"));
                    assert_eq!(memory.read(&own)[0], value(0, 0) + value(1, 0));
                }
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
