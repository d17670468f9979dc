//! Calls of the CUDA driver per operation, which cost the host up to a microsecond each. Prints a table, which
//! docs/measurements/driver-calls.md keeps.

use std::collections::BTreeMap;
use std::sync::Barrier;

use bonfire::server::DeviceCollectives;
use bonfire::{DType, ReduceOp};
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::{Kind, run_ranks};
use cubecl::cuda::CudaRuntime;
use cubecl::server::ReduceOperation::Sum;

use super::digits;
use crate::devices::{Devices, F32, create};
use crate::software_driver::{SoftwareDriver, with_gpus};
use crate::{COMPARED, STEPS, device};

/// Calls of each function of the driver.
type Calls = BTreeMap<String, u64>;

const RANKS: u8 = 2;
const CALLS: usize = 100;
/// 8 KiB.
const VALUES: [f32; 2048] = [1.0; 2048];

/// What is counted, and the most calls of each rank that one may make. Calls that poll are not among them: how many
/// there are depends on time.
const OPERATIONS: [(&str, u64); 4] = [
    ("all_reduce of clients, one sync at the end", 9),
    ("all_reduce of clients, a sync after each", 12),
    ("all_reduce of a group, a wait after each", 10),
    ("step of DataParallel, digits", 1020),
];

/// Returns the calls that were made since `before`.
fn since(before: &Calls, mut calls: Calls) -> Calls {
    calls.iter_mut().for_each(|(name, calls)| *calls -= before.get(name).copied().unwrap_or(0));
    calls
}

/// Counts the calls of all-reduces between two devices, with their part of the synchronisation.
fn of_clients(first: u8, sync_each: bool) -> Calls {
    let devices = Devices::<CudaRuntime>::new(first, RANKS);
    let (driver, barrier) = (SoftwareDriver::loaded(), Barrier::new(RANKS.into()));
    let counted = devices.run(|rank, mut client| {
        let tensor = create(&client, &VALUES);
        let mut reduce = |calls: usize| {
            for call in 1..=calls {
                client.all_reduce(tensor.clone(), tensor.clone(), F32, devices.ids.clone(), Sum);
                if sync_each || call == calls {
                    client.sync_collective();
                }
            }
            // Until all is done: nothing is counted for the next operation.
            cubecl::future::block_on(client.sync()).unwrap();
            barrier.wait();
        };
        reduce(10);
        let before = driver.calls();
        barrier.wait();
        reduce(CALLS);
        (rank == 0).then(|| since(&before, driver.calls()))
    });
    counted.into_iter().flatten().next().unwrap()
}

fn of_group(first: u8) -> Calls {
    let counted = run_ranks(Kind::Threads, RANKS.into(), move |group| {
        let client = Devices::<CudaRuntime>::new(first, RANKS).client(group.rank());
        let tensor = create(&client, &VALUES);
        let reduce = |calls: usize| {
            for _ in 0..calls {
                let reduced = client.start_all_reduce(&group, &tensor, &tensor, DType::F32, ReduceOp::Sum);
                reduced.unwrap().wait().unwrap();
            }
            group.barrier().unwrap();
        };
        reduce(10);
        let before = SoftwareDriver::loaded().calls();
        group.barrier().unwrap();
        reduce(CALLS);
        since(&before, SoftwareDriver::loaded().calls())
    });
    counted.into_iter().next().unwrap()
}

/// Counts the calls of steps in which ranks do not compare their parameters.
fn of_steps(first: u8) -> Calls {
    let counted = run_ranks(Kind::Threads, RANKS.into(), move |group| {
        let mut seen = Vec::new();
        digits(&group, &device(first, group.rank()), false, || seen.push(SoftwareDriver::loaded().calls()));
        let last = seen.pop().unwrap();
        since(&seen[0], last)
    });
    counted.into_iter().next().unwrap()
}

#[test]
#[ignore = "needs the software driver"]
fn calls_of_the_driver_by_operation() {
    if !is_child() {
        SoftwareDriver::loaded();
        // Other tests of this process would be counted. Without delays fewer waits are long enough to poll the driver.
        let name = "software::calls::calls_of_the_driver_by_operation";
        let mut child = Process::start(name, &with_gpus(1, &[("SHIM_DELAYS", "0")]));
        assert_eq!(child.read_line(), "done");
        return assert!(child.end().success());
    }
    let steps = STEPS - COMPARED;
    let counted =
        [(of_clients(0, false), CALLS), (of_clients(2, true), CALLS), (of_group(4), CALLS), (of_steps(6), steps)];
    // Of all ranks, so per rank.
    let per = |calls: u64, times: usize| calls as f64 / (times * usize::from(RANKS)) as f64;
    let mut names: Vec<&String> = counted.iter().flat_map(|(calls, _)| calls.keys()).collect();
    names.sort_unstable();
    names.dedup();
    eprintln!("| calls of each rank | {} |", OPERATIONS.map(|(name, _)| name).join(" | "));
    eprintln!("|---|{}", "---:|".repeat(OPERATIONS.len()));
    for name in names {
        let row = counted.each_ref().map(|(calls, times)| per(calls.get(name).copied().unwrap_or(0), *times));
        if row.iter().any(|calls| *calls > 0.0) {
            eprintln!("| {name} | {} |", row.map(|calls| format!("{calls:.2}")).join(" | "));
        }
    }
    let total = counted.each_ref().map(|(calls, times)| per(calls.values().sum(), *times));
    eprintln!("| all | {} |", total.map(|calls| format!("{calls:.2}")).join(" | "));
    for ((calls, times), (name, most)) in counted.iter().zip(OPERATIONS) {
        // A poll enters the context and leaves it.
        let polls = 3 * calls.get("cuStreamQuery").copied().unwrap_or(0);
        let calls = per(calls.values().sum::<u64>() - polls, *times);
        assert!(calls <= most as f64, "{name}: {calls} calls of the driver, of which {most} were enough");
    }
    send_line("done");
}
