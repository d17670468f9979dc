//! Full sharding on burn 0.21 alone: what `tests/shared/fully_sharded.rs` cannot have.

mod errors;
mod freed;
mod frozen;

use bonfire::ShardedBlock;
use bonfire_testing::ranks;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex, NdArray};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{Optimizer, SgdConfig};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};

use crate::shared::fully_sharded::models::values;

// Not shared: on burn 0.21 checkpointing is a parameter of the type `Autodiff`, and on 0.22 a setting of `Device`.
fn the_bits_of_replicas<B: AutodiffBackend>() {
    ranks(2, |group| {
        let (device, rank) = (Default::default(), group.rank());
        let linear = || LinearConfig::new(5, 5).init::<B>(&device);
        let model: Vec<_> = (0..3).map(|_| ShardedBlock::new(linear())).collect();
        let (whole, ddp) = bonfire::DataParallel::new(group.clone(), model).unwrap();
        let (mut parts, fsdp) = bonfire::FullyShardedParallel::new(group, whole.clone()).unwrap();
        let input = Tensor::<B, 2>::from_data(values([2, 5], rank, DType::F32).into_data(), &device);
        let loss = |model: &Vec<ShardedBlock<Linear<B>>>| {
            // A weight whose shape is changed.
            let x = model[0].run(|linear| input.clone().matmul(linear.weight.val().transpose()));
            model[1..].iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x).tanh())).powf_scalar(2.0).mean()
        };
        let mut updated = whole;
        for _ in 0..3 {
            let step = ddp.last_pass(&updated, 2).unwrap();
            let mut grads = loss(step.model()).backward();
            let grads = step.finish(&mut grads).unwrap();
            updated = SgdConfig::new().init().step(0.1, updated, grads);
            let mut optimizer = SgdConfig::new().init();
            let grads = fsdp.run(&parts, [()], |model, ()| (loss(model), 2)).unwrap();
            parts = optimizer.step(0.1, parts, grads.for_optimizer(&optimizer).unwrap());
        }
        for (ours, theirs) in fsdp.gather(&parts).unwrap().into_iter().zip(updated) {
            assert_eq!(ours.into_inner().weight.to_data(), theirs.into_inner().weight.to_data());
        }
    });
}

#[test]
fn checkpointing_strategies_and_other_backends_have_the_bits_of_replicas() {
    the_bits_of_replicas::<Autodiff<Flex>>();
    the_bits_of_replicas::<Autodiff<Flex, BalancedCheckpointing>>();
    the_bits_of_replicas::<Autodiff<NdArray>>();
}
