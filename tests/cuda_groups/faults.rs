//! A kernel that accesses an illegal address, which the software driver does on request, ends all work on its GPU.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use bonfire::server::DeviceCollectives;
use bonfire::{DType, Error, Group, ReduceOp};

use super::{SOON, start};
use crate::Devices;
use crate::groups::{Memory, check, mine};
use crate::software_driver::{SoftwareDriver, faulty_gpu};
use bonfire_testing::process::{is_child, report, send_line};
use bonfire_testing::{Kind, logged, run_ranks, run_ranks_with};

/// No rank may wait for it.
const DEADLINE: Duration = Duration::from_secs(120);

/// Runs the test `name` in a process of its own, with this many GPUs, of which the first faults in the third
/// all-reduce. Returns the errors of two ranks.
fn faulty(name: &str, gpus: usize) -> Vec<Error> {
    SoftwareDriver::loaded();
    let mut process = start(name, gpus, &[("SHIM_FAULT", "0:two_shot:3"), ("BONFIRE_CUDA", "two-shot")]);
    let errors = (0..2).map(|_| process.outcome().expect_err("the GPU has a fault")).collect();
    assert_eq!(process.read_line(), "done");
    assert!(process.end_within(SOON).is_some_and(|status| status.success()));
    errors
}

/// Two ranks that call until they fail. Returns their errors.
fn errors_of_two_ranks(first: u8) -> Vec<Error> {
    let limit = |builder: bonfire::Builder| builder.deadline(DEADLINE);
    run_ranks_with(Kind::Threads, 2, limit, move |group: Group| {
        let client = Devices::new(first, 2).client(group.rank());
        let own = Memory::new(client.clone(), 0).create(&mine(group.rank(), 1 << 20));
        let begin = std::time::Instant::now();
        let error = loop {
            let call = client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Max);
            if let Err(error) = call.and_then(|call| call.wait()) {
                break error;
            }
        };
        assert!(begin.elapsed() < SOON, "found after {:.1?}", begin.elapsed());
        error
    })
}

fn names_the_fault(error: &Error, ranks: &[usize]) {
    assert_eq!(faulty_gpu(error), (0, ranks), "{error}");
    assert!(error.to_string().contains("all_reduce"), "{error}");
}

#[test]
#[ignore = "needs the software driver"]
fn a_fault_of_one_gpu_is_named_on_both_and_the_other_gpu_stays_usable() {
    if is_child() {
        errors_of_two_ranks(0).into_iter().for_each(|error| report(&Err(error)));
        run_ranks(Kind::Threads, 2, |group| {
            // Both on the second GPU.
            let client = Devices::new(3 + 2 * group.rank() as u8, 1).client(0);
            check(&group, &Memory::new(client, 1), 1000).unwrap();
        });
        return send_line("done");
    }
    let name = "faults::a_fault_of_one_gpu_is_named_on_both_and_the_other_gpu_stays_usable";
    faulty(name, 2).iter().for_each(|error| names_the_fault(error, &[0]));
}

#[test]
#[ignore = "needs the software driver"]
fn a_fault_of_a_shared_gpu_is_named_by_both_ranks() {
    if is_child() {
        errors_of_two_ranks(0).into_iter().for_each(|error| report(&Err(error)));
        return send_line("done");
    }
    faulty("faults::a_fault_of_a_shared_gpu_is_named_by_both_ranks", 1)
        .iter()
        .for_each(|error| names_the_fault(error, &[0, 1]));
}

/// NCCL's abort waits for all kernels on its GPU, and one of them spins there for a rank whose GPU has a fault.
#[test]
#[ignore = "needs the software driver"]
fn a_communicator_is_aborted_after_the_kernels_of_its_group_have_ended() {
    const NAME: &str = "faults::a_communicator_is_aborted_after_the_kernels_of_its_group_have_ended";
    let driver = SoftwareDriver::loaded();
    if is_child() {
        logged::record();
        let (driver, aborted) = (Arc::new(driver), Arc::new(Barrier::new(2)));
        let limit = |builder: bonfire::Builder| builder.deadline(DEADLINE);
        let errors = run_ranks_with(Kind::Threads, 2, limit, move |group: Group| {
            let client = Devices::new(0, 2).client(group.rank());
            let memory = Memory::new(client.clone(), 0);
            let own = [1 << 20, 1000].map(|len| memory.create(&mine(group.rank(), len)));
            let start = |own, op| client.start_all_reduce(&group, own, own, DType::I32, op).unwrap();
            // It hangs, so that its communicator has to be aborted.
            let by_nccl = start(&own[0], ReduceOp::Sum);
            let by_kernel = start(&own[1], ReduceOp::Min);
            while driver.launches("two_shot_min_i32") < 2 {
                std::thread::yield_now();
            }
            let error = by_nccl.wait().expect_err("rank 0's GPU has a fault");
            // Until then no rank finds out about the kernels.
            aborted.wait();
            by_kernel.wait().expect_err("the group has failed");
            error
        });
        errors.into_iter().for_each(|error| report(&Err(error)));
        let lines = logged::lines();
        assert!(!lines.iter().any(|line| line.contains("ncclCommAbort")), "{lines:?}");
        return send_line("done");
    }
    let variables = [
        ("SHIM_FAULT", "0:two_shot_min:1"),
        ("BONFIRE_CUDA", "two-shot:0-65535;nccl:65536-"),
        ("FAKE_NCCL_HANGS", "0"),
        ("FAKE_NCCL_WAITS", "1"),
    ];
    let mut process = start(NAME, 2, &variables);
    let errors = [(); 2].map(|()| process.outcome().expect_err("the GPU has a fault"));
    errors.iter().for_each(|error| names_the_fault(error, &[0]));
    assert_eq!(process.read_line(), "done");
    assert!(process.end().success());
}
