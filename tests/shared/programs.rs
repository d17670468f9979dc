//! Programs as users write them. Each trains in f64 on two and three ranks what it trains on one rank alone, or is the
//! same typed error on all ranks.

mod data;
mod kinds;
mod loops;
mod models;
mod norms;
mod parts;
mod several;
mod tokens;
mod trained;
mod unusable;

use std::ops::Range;

use bonfire::{Group, partition};
use bonfire_testing::ranks;
use burn::nn::LinearConfig;
use burn::tensor::{DType, TensorData};

use super::in_f64;
use crate::burn_version::*;
use crate::model_data::map_floats;

/// Samples of all ranks in a step.
const BATCH: usize = 10;
const STEPS: usize = 50;
const INPUTS: usize = 4;
const HIDDEN: usize = 6;

models! {
    pub struct Net {
        first: Linear,
        second: Linear,
    }
}

/// A number between -1 and 1.
fn wave(i: usize, seed: usize) -> f64 {
    ((i * 37 + seed * 101 + 11) as f64 * 0.61).sin()
}

/// The same parameters on every rank, in f64.
fn known<M: Model>(model: M, seed: usize) -> M {
    let mut next = seed;
    map_floats(in_f64(model), |data, _| {
        next += 1;
        let values: Vec<f64> = (0..data.num_elements()).map(|i| 0.5 * wave(i, next)).collect();
        TensorData::new(values, data.shape().clone())
    })
}

impl Net {
    fn new(seed: usize) -> Net {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device());
        known(Net { first: linear(INPUTS, HIDDEN), second: linear(HIDDEN, 1) }, seed)
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.second.forward(self.first.forward(input).tanh())
    }

    /// The mean loss of these samples.
    fn loss(&self, samples: &[usize]) -> Tensor<1> {
        (self.forward(inputs(samples)) - targets(samples)).powf_scalar(2.0).mean()
    }
}

fn rows(samples: &[usize], columns: usize, seed: usize) -> Tensor<2> {
    let values: Vec<f64> = samples.iter().flat_map(|i| (0..columns).map(move |j| wave(i * 13 + j, seed))).collect();
    Tensor::from_data(TensorData::new(values, [samples.len(), columns]), (&device(), DType::F64))
}

fn inputs(samples: &[usize]) -> Tensor<2> {
    rows(samples, INPUTS, 1)
}

fn targets(samples: &[usize]) -> Tensor<2> {
    rows(samples, 1, 2)
}

/// Returns a sum as a mean. A division would do, but burn computes its gradient with a reciprocal in f32, whose error
/// of 3e-8 depends on the count: the mean of several such means is none of all in f64.
fn mean_of(sum: Tensor<1>, count: usize) -> Tensor<1> {
    sum * (1.0 / count as f64)
}

fn number(loss: &Tensor<1>) -> f64 {
    values(loss.clone())[0]
}

/// This rank's samples of a range of them. Three ranks have other numbers of a batch.
fn own(group: &Group, all: Range<usize>) -> Vec<usize> {
    let own = partition(all.len(), group.world_size(), group.rank());
    (all.start + own.start..all.start + own.end).collect()
}

/// This rank's samples of a step.
fn batch(group: &Group, step: usize) -> Vec<usize> {
    own(group, BATCH * step..BATCH * (step + 1))
}

/// The values of a model's parameters and states.
fn weights<M: Model>(model: &M) -> Vec<f64> {
    floats(model).into_iter().flat_map(|parameter| parameter.data.iter::<f64>().collect::<Vec<_>>()).collect()
}

/// Lets a layer train, or not.
fn trains(layer: Linear, yes: bool) -> Linear {
    let bias = layer.bias.map(|bias| bias.set_require_grad(yes));
    Linear { weight: layer.weight.set_require_grad(yes), bias }
}

/// Runs a program on one rank, two and three. Its numbers must be the same on all ranks, and those of one rank.
fn equals_one_rank(program: impl Fn(Group) -> Vec<f64> + Sync) {
    let expected = ranks(1, &program).remove(0);
    for n in [2, 3] {
        for (rank, found) in ranks(n, &program).into_iter().enumerate() {
            assert_eq!(found.len(), expected.len());
            for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let difference = (found - expected).abs();
                assert!(difference < 1e-9, "{n} ranks, rank {rank}, number {place}: {found}, not {expected}");
            }
        }
    }
}
