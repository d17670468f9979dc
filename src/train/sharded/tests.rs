//! Steps that fail in the middle.

use std::sync::Barrier;
use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::nn::LinearConfig;
use burn::optim::SgdConfig;

use super::*;

#[test]
fn a_step_that_fails_midway_leaves_no_rank_waiting() {
    for sharding in [Sharding::Blocks(2), Sharding::All] {
        fail_midway(sharding);
    }
}

/// Rank 3 learns that the group has failed before it makes the step whose header the others have exchanged.
#[test]
fn a_rank_that_fails_at_the_header_leaves_no_rank_waiting_in_a_subgroup() {
    let failed = &Barrier::new(4);
    std::thread::scope(|scope| {
        for group in Group::builder().deadline(Duration::from_secs(20)).threads(4).unwrap() {
            scope.spawn(move || {
                let (device, rank) = (Default::default(), group.rank());
                let linear = LinearConfig::new(2, 3).init::<Autodiff<Flex>>(&device);
                let (mut model, ddp) = DataParallel::new(group.clone(), linear).unwrap();
                let mut optimizer = ShardedOptimizer::new(&ddp, SgdConfig::new().init(), Sharding::Blocks(2)).unwrap();
                if rank == 3 {
                    let parameters = &optimizer.shards.parameters;
                    let digests = digests(parameters, &values(&model, parameters, &positions(parameters))).unwrap();
                    let header = StepHeader {
                        operation: "step",
                        samples: 1,
                        rate: 0.5,
                        digests: Some(digests),
                        ..Default::default()
                    };
                    header.exchange(&group, parameters).unwrap();
                    group.abandon(Error::broken("step", "on purpose"));
                }
                let mut grads = GradientsParams::new();
                grads.register(model.weight.id, Tensor::<Flex, 2>::ones([2, 3], &device));
                let error = optimizer.step(0.5, &mut model, grads, 1).unwrap_err();
                // All ranks still hold their optimizers.
                failed.wait();
                assert!(matches!(error, Error::Broken { .. }), "{error}");
            });
        }
    });
}

fn fail_midway(sharding: Sharding) {
    let failed = &Barrier::new(4);
    std::thread::scope(|scope| {
        for group in Group::threads(4).unwrap() {
            scope.spawn(move || {
                let (device, rank) = (Default::default(), group.rank());
                let linear = LinearConfig::new(2, 3).init::<Autodiff<Flex>>(&device);
                let (mut model, ddp) = DataParallel::new(group, linear).unwrap();
                let mut optimizer = ShardedOptimizer::new(&ddp, SgdConfig::new().init(), sharding).unwrap();
                if rank == 0 {
                    // Its block disagrees about a bucket. The other block does not, but needs this block.
                    optimizer.shards.layout[0].len += 1;
                }
                let mut step = || {
                    let mut grads = GradientsParams::new();
                    grads.register(model.weight.id, Tensor::<Flex, 2>::ones([2, 3], &device));
                    optimizer.step(0.5, &mut model, grads, 1).unwrap_err()
                };
                let error = step();
                // All ranks still hold their optimizers, yet no rank waits.
                failed.wait();
                assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                assert_eq!(step(), error);
            });
        }
    });
}
