//! Bonfire's strategy on collective devices. What does not depend on devices is tested on Flex (`tests/learner.rs`).

use std::thread;
use std::time::Duration;

use bonfire::{Builder, Group};

use crate::model::{Log, Net, Shape, Steps, devices, samples};
use crate::training::{Training, alone, check};
use bonfire_testing::process::{Process, is_child, send_line};

/// Trains on a device for each of these ranks of this process, which start with different parameters.
fn train(training: &Training, shape: Shape, layers: usize, groups: Vec<Group>, log: &Log) {
    thread::scope(|scope| {
        let devices = devices(groups.len());
        let rank = |(group, device): (Group, _)| {
            scope.spawn(move || {
                let net = Net::new(shape, layers, 1 + group.rank() as u32, log, &device);
                training.run_rank(group, net).expect("no failure")
            })
        };
        let ranks: Vec<_> = groups.into_iter().zip(devices).map(rank).collect();
        let trained: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(trained.iter().all(|parameters| *parameters == trained[0]));
    });
}

/// Two processes of two devices each.
fn processes(test: &str, shape: Shape, layers: usize, delay: Duration) {
    let _alone = alone();
    let training = Training::of_steps(50, 4);
    if is_child() {
        let log = Log { delay, ..Log::default() };
        train(&training, shape, layers, Builder::from_env().unwrap().connect_ranks(2).unwrap(), &log);
        let steps = log.steps.lock().unwrap();
        let bits = |step: &Vec<f32>| step.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (replica, steps) in steps.iter() {
            let bits: Vec<_> = steps.iter().map(bits).collect();
            send_line(serde_json::to_string(&(replica, bits)).unwrap());
        }
        return;
    }
    let mut processes = Process::start_ranks(test, 2, "auto", "120");
    let expected = training.reference(Net::new(shape, layers, 1, &Log::default(), &Default::default()), 4);
    assert_eq!(expected.len(), 50);
    let mut steps = Steps::new();
    for (number, process) in (0u8..).zip(&mut processes) {
        for _ in 0..2 {
            let (replica, bits): (u8, Vec<Vec<u32>>) = serde_json::from_str(&process.read_line()).unwrap();
            let values = bits.into_iter().map(|step| step.into_iter().map(f32::from_bits).collect());
            steps.insert(2 * number + replica, values.collect());
        }
        assert!(process.end().success());
    }
    check(&steps, &[0, 1, 2, 3], &expected);
}

#[test]
fn two_processes_of_two_devices_equal_one_device() {
    let name = "strategy::two_processes_of_two_devices_equal_one_device";
    processes(name, Shape::Chain, 3, Duration::ZERO);
}

#[test]
fn parallel_branches_of_equal_shape_keep_their_gradients_apart() {
    let name = "strategy::parallel_branches_of_equal_shape_keep_their_gradients_apart";
    processes(name, Shape::Branches, 4, Duration::from_millis(20));
}

#[test]
fn three_devices_of_a_process_equal_one_device() {
    let _alone = alone();
    // The last rank has a third batch, whose gradients no step uses where two are accumulated.
    for accumulation in [1, 2] {
        let training = Training { samples: samples(11), batch: 2, epochs: 2, decay: 0.97, accumulation };
        let expected = training.reference(Net::new(Shape::Chain, 2, 1, &Log::default(), &Default::default()), 3);
        assert_eq!(expected.len(), if accumulation == 1 { 6 } else { 2 });
        let log = Log::default();
        train(&training, Shape::Chain, 2, Group::threads(3).unwrap(), &log);
        check(&log.steps.lock().unwrap(), &[0, 1, 2], &expected);
    }
}
