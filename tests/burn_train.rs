//! burn-train on collective devices: its own distributed training within a process, and Bonfire's strategy on any
//! number of ranks.

#[path = "burn_train/model.rs"]
mod model;
#[path = "burn_train/strategy.rs"]
mod strategy;
#[path = "burn_train/training.rs"]
mod training;

use burn::tensor::backend::distributed::{DistributedConfig, ReduceOperation};
use burn_train::{ExecutionStrategy, TrainingStrategy};

use model::{Log, Net, Shape, devices};
use training::{Components, Training, alone, check};

/// burn's own distributed training on so many devices.
fn ddp(count: usize) -> TrainingStrategy<Components> {
    ExecutionStrategy::ddp(devices(count), DistributedConfig { all_reduce_op: ReduceOperation::Mean }).into()
}

/// Trains 84 parameters, `runs` times on each number of devices.
fn eighty_four_parameters(counts: &[usize], runs: usize) {
    for count in counts.iter().copied() {
        for run in 0..runs {
            let log = Log::default();
            let net = Net::new(Shape::Chain, 42, run as u32, &log, &Default::default());
            let trained = Training::of_steps(3, count).run(net, ddp(count));
            let steps = log.steps.lock().unwrap();
            assert_eq!(steps.len(), count, "every device trains");
            for (replica, steps) in steps.iter() {
                assert_eq!(steps.len(), 3);
                assert!(steps[2] == trained, "run {run}: device {replica} of {count} has other parameters");
            }
        }
        println!("{runs} trainings on {count} devices");
    }
}

#[test]
fn ddp_of_84_parameters_ends_with_equal_models() {
    let _alone = alone();
    eighty_four_parameters(&[2, 3], 1);
}

#[test]
#[ignore = "takes minutes"]
fn ddp_of_84_parameters_ends_with_equal_models_20_times_each() {
    let _alone = alone();
    eighty_four_parameters(&[2, 3, 4], 20);
}

#[test]
fn ddp_equals_one_device_with_the_batches_of_all() {
    let _alone = alone();
    for count in [2, 4] {
        let log = Log::default();
        let net = Net::new(Shape::Chain, 3, 1, &log, &Default::default());
        let training = Training::of_steps(50, count);
        let expected = training.reference(net.clone(), count);
        assert_eq!(expected.len(), 50);
        training.run(net, ddp(count));
        check(&log.steps.lock().unwrap(), &[0, 1, 2, 3][..count], &expected);
    }
}

#[test]
fn the_gradients_of_100_parameters_travel_in_fewer_than_10_operations() {
    let _alone = alone();
    let devices = devices(2);
    let before = devices[0].counters().rounds;
    let net = Net::new(Shape::Chain, 50, 1, &Log::default(), &Default::default());
    Training::of_steps(1, 2).run(net, ddp(2));
    let rounds = devices[0].counters().rounds - before;
    println!("{rounds} rounds");
    assert!((1..10).contains(&rounds), "{rounds} rounds");
}
