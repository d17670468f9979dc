//! Overlapped training steps of burn 0.21 alone: what `tests/shared/step.rs` cannot have.

mod errors;

use bonfire_testing::ranks;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex, NdArray};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, activation};

use crate::shared::step::models::values;

// Not shared: on burn 0.21 checkpointing is a parameter of the type `Autodiff`, and on 0.22 a setting of `Device`.
fn other_backends_get_the_gradients_of_sync<B: AutodiffBackend>() {
    ranks(2, |group| {
        let (device, rank) = (Default::default(), group.rank());
        let model: Vec<Linear<B>> = (0..3).map(|_| LinearConfig::new(4, 4).init(&device)).collect();
        let (model, ddp) = bonfire::DataParallel::new(group, model).unwrap();
        let loss = |model: &Vec<Linear<B>>| {
            let input = Tensor::<B, 2>::from_data(values([2, 4], rank).into_data(), &device);
            model.iter().fold(input, |x, layer| activation::gelu(layer.forward(x))).powf_scalar(2.0).mean()
        };
        let after = ddp.sync(&model, GradientsParams::from_grads(loss(&model).backward(), &model), 2).unwrap();
        let step = ddp.last_pass(&model, 2).unwrap();
        let mut grads = loss(step.model()).backward();
        let during = step.finish(&mut grads).unwrap();
        assert_eq!((during.len(), after.len()), (6, 6));
        for layer in &model {
            let weight =
                |grads: &GradientsParams| grads.get::<B::InnerBackend, 2>(layer.weight.id).unwrap().into_data();
            assert_eq!(weight(&during), weight(&after));
        }
    });
}

#[test]
fn checkpointing_strategies_and_other_backends_get_the_gradients_of_sync() {
    other_backends_get_the_gradients_of_sync::<Autodiff<Flex, BalancedCheckpointing>>();
    other_backends_get_the_gradients_of_sync::<Autodiff<NdArray>>();
}
