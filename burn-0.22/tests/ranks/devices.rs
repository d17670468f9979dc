//! What a device of burn 0.22 says of a model: whether it has autodiff, and what its graphs keep.
//! Not shared: on burn 0.21 types say both, and not `Device`.

use bonfire::{DataParallel, FullyShardedParallel, ShardedBlock};
use bonfire_testing::ranks;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{DType, Device, Tensor};

use crate::burn_version::{device, inner_device};
use crate::shared::fully_sharded::models::values;

#[test]
fn a_model_on_a_device_without_autodiff_is_an_error() {
    let errors = ranks(2, |group| {
        let linear = LinearConfig::new(2, 2).init(&inner_device());
        DataParallel::new(group, linear).map(drop).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("device without autodiff")), "{errors:?}");
}

fn the_bits_of_replicas(device: Device) {
    ranks(2, |group| {
        let rank = group.rank();
        let linear = || LinearConfig::new(5, 5).init(&device);
        let model: Vec<_> = (0..3).map(|_| ShardedBlock::new(linear())).collect();
        let (whole, ddp) = DataParallel::new(group.clone(), model).unwrap();
        let (mut parts, fsdp) = FullyShardedParallel::new(group, whole.clone()).unwrap();
        let input = Tensor::<2>::from_data(values([2, 5], rank, DType::F32).into_data(), &device);
        let loss = |model: &Vec<ShardedBlock<Linear>>| {
            // A weight whose shape is changed.
            let x = model[0].run(|linear| input.clone().matmul(linear.weight.val().transpose()));
            model[1..].iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x).tanh())).powf_scalar(2.0).mean()
        };
        let mut updated = whole;
        for _ in 0..3 {
            let grads = ddp.run(&updated, [()], |model, ()| (loss(model), 2)).unwrap();
            updated = SgdConfig::new().init().step(0.1, updated, grads);
            let mut optimizer = SgdConfig::new().init();
            let grads = fsdp.run(&parts, [()], |model, ()| (loss(model), 2)).unwrap();
            parts = optimizer.step(0.1, parts, grads.for_optimizer(&optimizer).unwrap());
        }
        for (ours, theirs) in fsdp.gather(&parts).unwrap().into_iter().zip(updated) {
            let [ours, theirs] = [ours, theirs].map(|block| block.into_inner().weight.val());
            assert_eq!(ours.gradient_checkpointing_strategy(), device.gradient_checkpointing_strategy());
            assert_eq!(ours.into_data(), theirs.into_data());
        }
    });
}

#[test]
fn a_model_keeps_the_checkpointing_of_its_device_and_has_the_bits_of_replicas() {
    the_bits_of_replicas(device());
    the_bits_of_replicas(device().gradient_checkpointing());
}

#[test]
fn a_frozen_layer_uses_the_running_statistics_as_burns_does() {
    let norm = bonfire::SyncBatchNormConfig::new(3).init(&device());
    let input = values([4, 3], 1, DType::F32);
    let output = norm.freeze().forward(input.clone());
    // Of mean 0 and variance 1.
    for (output, input) in output.into_data().iter::<f32>().zip(input.into_data().iter::<f32>()) {
        assert!((output - input).abs() < 1e-4, "{output} instead of {input}");
    }
}
