//! Devices that wait for an operation while the host goes on.

use bonfire::server::{DeviceCollectives, copy};
use bonfire::{DType, Error, ReduceOp};
use bonfire_testing::Kind;
use bonfire_testing::process::{is_child, send_line};
use rustix::process::Signal;

use super::start_ranks;
use crate::groups::{Memory, mine, value};
use crate::on_devices;
use crate::processes::join;
use crate::software_driver::SoftwareDriver;

/// An all-reduce of two ranks by this kernel.
const KERNEL: &str = "push_min_i32";
const LEN: usize = 64;

#[test]
#[ignore = "needs the software driver"]
fn work_that_follows_an_operation_sees_its_result_and_the_host_waits_for_neither() {
    let driver = SoftwareDriver::loaded();
    driver.hold(KERNEL);
    on_devices(Kind::Threads, 140, 2, |group, client| {
        let memory = Memory::new(client.clone(), 0);
        let (source, target) = (memory.create(&mine(group.rank(), LEN)), memory.create(&[-1; LEN]));
        let start = || client.start_all_reduce(&group, &source, &target, DType::I32, ReduceOp::Min).unwrap();
        let completion = start().follow().unwrap();
        let copied = copy(&client, target.clone().copy_descriptor([LEN].into(), [1].into(), 4), &client).unwrap();
        // Both ranks are here though the kernel has not run.
        group.barrier().unwrap();
        if group.rank() == 0 {
            SoftwareDriver::loaded().hold("");
        }
        let least: Vec<i32> = (0..LEN).map(|i| value(0, i).min(value(1, i))).collect();
        assert_eq!(memory.read(&copied), least);
        completion.wait().unwrap();
        // What has ended needs no waiting, and a completion may be dropped.
        drop(start().follow().unwrap());
        start().wait().unwrap();
        assert_eq!(memory.read(&target), least);
    });
    assert!(driver.launches(KERNEL) > 0, "the kernel that was held");
}

/// Rank 1 is killed while the kernels of both are held.
#[test]
#[ignore = "needs the software driver"]
fn a_completion_returns_the_failure_of_an_operation_that_was_followed() {
    const NAME: &str = "follow::a_completion_returns_the_failure_of_an_operation_that_was_followed";
    let driver = SoftwareDriver::loaded();
    if is_child() {
        let (group, devices, memory) = join();
        let source = memory.create(&mine(group.rank(), LEN));
        let start = || memory.client.start_all_reduce(&group, &source, &source, DType::I32, ReduceOp::Min);
        start().unwrap().wait().unwrap();
        driver.hold(KERNEL);
        let completion = start().unwrap().follow().unwrap();
        send_line("followed");
        if group.rank() == 1 {
            loop {
                std::thread::park();
            }
        }
        let error = completion.wait().expect_err("a peer was killed");
        assert!(matches!(&error, Error::PeerLost { peer: 1, .. }), "{error}");
        driver.hold("");
        assert_eq!(devices.all[0].failure(), None);
        assert_eq!(memory.read(&memory.create(&[5])), [5]);
        return send_line("told");
    }
    let mut ranks = start_ranks(NAME, 2, 2, &[("BONFIRE_CUDA", "kernels")]);
    ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "followed"));
    ranks[1].signal(Signal::KILL);
    assert_eq!(ranks[0].read_line(), "told");
    assert!(ranks[0].end().success());
}
