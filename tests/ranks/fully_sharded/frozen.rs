//! Frozen parameters that are gathered, on burn 0.21 alone.

use bonfire_testing::ranks;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;

use crate::burn_version::{FullyShardedParallel, Linear};
use crate::shared::fully_sharded::frozen::{Adapted, WIDTH};
use crate::shared::fully_sharded::models::values;

// Not shared: burn 0.22 hides the `FlexTensor` of a tensor in `Dispatch`.
#[test]
fn frozen_parameters_are_freed_after_the_run_of_their_block() {
    ranks(2, |group| {
        let (model, fsdp) = FullyShardedParallel::new(group, Adapted::new(DType::F32)).unwrap();
        let step = fsdp.last_pass(&model, 1).unwrap();
        let mut held: Vec<FlexTensor> = Vec::new();
        let mut hold = |linear: &Linear| {
            held.push(linear.weight.val().into_primitive().tensor().primitive);
        };
        let mut x = values([2, WIDTH], 1, DType::F32);
        for layer in &step.model().trunk {
            x = layer.run(|linear| {
                hold(linear);
                linear.forward(x).tanh()
            });
        }
        for layer in &step.model().layers {
            x = layer.run(|layer| {
                hold(&layer.frozen);
                layer.forward(x)
            });
        }
        assert_eq!(held.iter().map(FlexTensor::is_unique).collect::<Vec<_>>(), [true; 6]);
        let mut grads = x.mean().backward();
        assert!(held.iter().all(FlexTensor::is_unique), "after the backward pass");
        drop(step.finish(&mut grads).unwrap());
    });
}
