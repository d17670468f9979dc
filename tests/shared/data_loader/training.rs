//! A training of the digits by a loader is bit for bit the one that loads by hand.

use std::sync::Arc;

use bonfire::{Group, ShardedSampler};
use bonfire_testing::ranks;
use burn::module::Param;
use burn::nn::LinearConfig;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamConfig;
use burn::tensor::{Int, TensorData};

use crate::burn_version::*;
use crate::digits::{Digits, PIXELS};
use crate::loader_version::*;

const BATCH: usize = 50;
const EPOCHS: usize = 2;

type Image = ([f32; PIXELS], u8);
type Loaded = (Tensor<2>, Tensor<1, Int>);

fn batch(images: Vec<Image>, device: &Device) -> Loaded {
    let pixels: Vec<f32> = images.iter().flat_map(|(pixels, _)| *pixels).collect();
    let labels: Vec<i64> = images.iter().map(|(_, label)| i64::from(*label)).collect();
    let pixels = Tensor::from_data(TensorData::new(pixels, [images.len(), PIXELS]), device);
    (pixels, Tensor::from_data(TensorData::new(labels, [images.len()]), device))
}

/// Trains on these batches of each epoch. Returns the parameters.
fn train<E: Iterator<Item = Loaded>>(group: Group, epoch: impl Fn(usize) -> E) -> Vec<FloatParameter> {
    let mut layer: Linear = LinearConfig::new(PIXELS, 10).with_bias(false).init(&device());
    // The same weights in each training.
    let weights: Vec<f32> = (0..PIXELS * 10).map(|i| (i * 7993 % 1009) as f32 / 1009.0 - 0.5).collect();
    layer.weight = Param::from_data(TensorData::new(weights, [PIXELS, 10]), &device());
    let (mut model, ddp) = DataParallel::new(group, layer).unwrap();
    let mut optimizer = AdamConfig::new().init();
    for epoch in (0..EPOCHS).map(epoch) {
        for (pixels, labels) in epoch {
            let samples = labels.dims()[0];
            let criterion = CrossEntropyLossConfig::new().init(&device());
            let loss =
                |model: &Linear, (pixels, labels): Loaded| (criterion.forward(model.forward(pixels), labels), samples);
            let gradients = ddp.run(&model, [(pixels, labels)], loss).unwrap();
            model = optimizer.step(0.01, model, gradients);
        }
    }
    floats(&model)
}

#[test]
fn the_digits_trained_by_a_loader_equal_those_trained_by_hand_bit_for_bit() {
    let (digits, _) = Digits::load().unwrap();
    let images: Arc<Vec<Image>> = Arc::new(digits.images.into_iter().zip(digits.labels).take(480).collect());
    for n in 1..=3 {
        let by_hand = ranks(n, |group| {
            let sampler = ShardedSampler::new(&group, images.len(), BATCH).unwrap().seed(3);
            let load = |shard: Vec<usize>| batch(shard.iter().map(|&i| images[i]).collect(), &device());
            train(group, |epoch| sampler.epoch(epoch).unwrap().map(load))
        });
        for workers in [0, 4] {
            let loaded = ranks(n, |group| {
                let own = images.clone();
                let items = super::numbers(images.len(), move |index| own.get(index).copied());
                let builder = Builder::new(&group, Batching(batch)).batch_size(BATCH).shuffle(3).num_workers(workers);
                let loader = builder.set_device(device()).build(items);
                train(group, |epoch| loader.epoch(epoch).unwrap().map(Result::unwrap))
            });
            for (rank, (loaded, by_hand)) in loaded.iter().zip(&by_hand).enumerate() {
                let values = |floats: &[FloatParameter]| floats.iter().map(|own| own.data.clone()).collect::<Vec<_>>();
                assert_eq!(values(loaded), values(by_hand), "rank {rank} of {n}, {workers} workers");
            }
        }
    }
}
