//! Peers that train clones of one model.

use bonfire::burn_collective::initialized;
use burn::optim::{Optimizer, SgdConfig};

use super::*;

/// Trains clones of a model on two peers, as burn's example for several GPUs does. Returns their weights.
fn trained(model: Linear<Trained>) -> Vec<TensorData> {
    peers::<Flex, _>(2, move |rank| {
        let mut model = model.clone().fork(&Default::default());
        let mut optimizer = SgdConfig::new().init();
        for step in 1..4 {
            let grads = gradients(&model, rank as f32 + step as f32);
            let grads = grads.all_reduce::<Flex>(id(rank), ReduceOperation::Mean).unwrap();
            model = optimizer.step(0.1, model, grads);
        }
        model.weight.to_data()
    })
}

#[test]
fn clones_of_an_initialised_model_stay_equal() {
    let _guard = fresh::<Flex>();
    let model: Linear<Trained> = initialized(LinearConfig::new(2, 3).init(&Default::default()));
    let first = model.weight.to_data();
    let weights = trained(model);
    assert_eq!(weights[0], weights[1]);
    assert_ne!(weights[0], first);
}
