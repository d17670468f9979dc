//! Devices that wait for an operation while the host goes on.

use std::time::Instant;

use bonfire::server::{DeviceCollectives, copy};
use bonfire::{Cuda, DType, DataParallel, Error, ReduceOp, ShardedOptimizer, Sharding};
use bonfire_testing::Kind;
use bonfire_testing::process::{is_child, send_line};
use burn::backend::Autodiff;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::tensor::Tensor;
use rustix::process::Signal;

use super::{KERNELS, SOON, start, start_ranks};
use crate::groups::{Memory, mine, value};
use crate::on_devices;
use crate::processes::join;
use crate::software_driver::SoftwareDriver;

type B = Autodiff<Cuda>;

/// An all-reduce of two ranks by this kernel.
const KERNEL: &str = "push_min_i32";
const LEN: usize = 64;

#[test]
#[ignore = "needs the software driver"]
fn work_that_follows_an_operation_sees_its_result_and_the_host_waits_for_neither() {
    const NAME: &str = "follow::work_that_follows_an_operation_sees_its_result_and_the_host_waits_for_neither";
    let driver = SoftwareDriver::loaded();
    if !is_child() {
        let mut child = start(NAME, 2, &[KERNELS]);
        assert_eq!(child.read_line(), "done");
        assert!(child.end().success());
        return;
    }
    driver.hold(KERNEL);
    on_devices(Kind::Threads, 0, 2, |group, client| {
        let memory = Memory::new(client.clone(), 0);
        let new = || (memory.create(&mine(group.rank(), LEN)), memory.create(&[-1; LEN]));
        let calls: Vec<_> = (0..3).map(|_| new()).collect();
        let started = calls.iter().map(|(source, target)| {
            client.start_all_reduce(&group, source, target, DType::I32, ReduceOp::Min).unwrap()
        });
        // The last one first: what is followed later must not end the wait for it.
        let started: Vec<_> = started.collect();
        let completions: Vec<_> = started.into_iter().rev().map(|transfer| transfer.follow().unwrap()).collect();
        let copied = calls.iter().map(|(_, target)| {
            copy(&client, target.clone().copy_descriptor([LEN].into(), [1].into(), 4), &client).unwrap()
        });
        let copied: Vec<_> = copied.collect();
        // Both ranks are here though no kernel has run.
        group.barrier().unwrap();
        if group.rank() == 0 {
            SoftwareDriver::loaded().hold("");
        }
        let least: Vec<i32> = (0..LEN).map(|i| value(0, i).min(value(1, i))).collect();
        assert!(copied.iter().all(|copied| memory.read(copied) == least));
        completions.into_iter().for_each(|completion| completion.wait().unwrap());
        // Its completion may be dropped.
        let (source, target) = &calls[0];
        let again = || client.start_all_reduce(&group, source, target, DType::I32, ReduceOp::Max).unwrap();
        drop(again().follow().unwrap());
        again().wait().unwrap();
    });
    assert!(driver.launches(KERNEL) > 0, "the kernel that was held");
    send_line("done");
}

/// Starts the test of this name in two processes, and kills rank 1 when both have sent `ready`. Rank 0 must end well.
fn kill_one(name: &str) {
    let mut ranks = start_ranks(name, 2, 2, &[KERNELS]);
    ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "ready"));
    ranks[1].signal(Signal::KILL);
    let killed = Instant::now();
    assert_eq!(ranks[0].read_line(), "told");
    assert!(killed.elapsed() < SOON, "{:.1?}", killed.elapsed());
    assert!(ranks[0].end().success());
}

fn names_rank_1(error: &Error) {
    assert!(matches!(error, Error::PeerLost { peer: 1, .. }), "{error}");
}

#[test]
#[ignore = "needs the software driver"]
fn a_completion_returns_the_failure_of_an_operation_that_was_followed() {
    let driver = SoftwareDriver::loaded();
    if !is_child() {
        return kill_one("follow::a_completion_returns_the_failure_of_an_operation_that_was_followed");
    }
    let (group, devices, memory) = join();
    let source = memory.create(&mine(group.rank(), LEN));
    let start = || memory.client.start_all_reduce(&group, &source, &source, DType::I32, ReduceOp::Min);
    start().unwrap().wait().unwrap();
    driver.hold(KERNEL);
    let completion = start().unwrap().follow().unwrap();
    send_line("ready");
    names_rank_1(&completion.wait().expect_err("a peer was killed"));
    driver.hold("");
    assert_eq!(devices.all[0].failure(), None);
    assert_eq!(memory.read(&memory.create(&[5])), [5]);
    send_line("told");
}

/// The last operation of a step of the sharded optimizer gathers the new parameters.
#[test]
#[ignore = "needs the software driver"]
fn a_step_whose_last_operation_fails_changes_no_parameter() {
    const GATHER: &str = "all_gather";
    let driver = SoftwareDriver::loaded();
    if !is_child() {
        return kill_one("follow::a_step_whose_last_operation_fails_changes_no_parameter");
    }
    let (group, devices, _memory) = join();
    let device = &devices.all[0];
    let (mut model, ddp) = DataParallel::new(group, LinearConfig::new(3, 2).init::<B>(device)).unwrap();
    let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap();
    let weights = |model: &Linear<B>| model.weight.val().into_data();
    let mut values = vec![weights(&model)];
    let mut step = |model: &mut Linear<B>| {
        let input = Tensor::<B, 2>::ones([4, 3], device);
        let loss = |model: &Linear<B>, input| (model.forward(input).powf_scalar(2.0).mean(), 4);
        let parts = optimizer.run(model, [input], loss)?;
        optimizer.step(0.1, model, parts)
    };
    step(&mut model).unwrap();
    values.push(weights(&model));
    assert_ne!(values[0], values[1]);

    driver.hold(GATHER);
    let launched = driver.launches(GATHER);
    std::thread::spawn(move || {
        let driver = SoftwareDriver::loaded();
        while driver.launches(GATHER) == launched {
            std::thread::yield_now();
        }
        send_line("ready");
    });
    names_rank_1(&step(&mut model).expect_err("a peer was killed"));
    driver.hold("");
    assert_eq!(weights(&model), values[1]);
    names_rank_1(&step(&mut model).expect_err("the optimizer has failed"));
    send_line("told");
}
