//! Programs over sequences of different lengths, padded in each batch.

use bonfire::{ReduceOp, Sharding};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};

use super::*;

/// A sequence of one to five tokens.
pub fn length(sample: usize) -> usize {
    1 + sample * 7 % 5
}

pub fn tokens(samples: &[usize]) -> usize {
    samples.iter().map(|sample| length(*sample)).sum()
}

/// What the model makes of a padded batch.
struct Read {
    /// The squared errors of all tokens, without padding, added up.
    errors: Tensor<1>,
    /// The squares of the sequences' contexts, added up.
    contexts: Tensor<1>,
}

/// A batch of sequences, padded to the longest of them: `[samples, longest, columns]`.
pub fn padded(samples: &[usize], columns: usize, padding: f64, token: impl Fn(usize, usize) -> f64) -> Tensor<3> {
    let longest = samples.iter().map(|sample| length(*sample)).max().unwrap_or(0);
    let mut values = Vec::new();
    for sample in samples {
        for place in 0..longest {
            let of_column = |column| token(5 * sample + place, column);
            values.extend((0..columns).map(|column| if place < length(*sample) { of_column(column) } else { padding }));
        }
    }
    Tensor::from_data(TensorData::new(values, [samples.len(), longest, columns]), (&device(), DType::F64))
}

impl Net {
    /// Reads a padded batch. Each token sees the mean of its sequence. What padding is does not matter.
    fn read(&self, samples: &[usize]) -> Read {
        let inputs = padded(samples, INPUTS, 3.0, |token, column| wave(token * 13 + column, 1));
        let targets = padded(samples, 1, -7.0, |token, _| wave(token, 2));
        let mask = padded(samples, 1, 0.0, |_, _| 1.0);
        let hidden = self.first.forward(inputs).tanh() * mask.clone();
        let context = hidden.clone().sum_dim(1) / mask.clone().sum_dim(1);
        let output = self.second.forward(hidden + context.clone());
        let errors = ((output - targets) * mask).powf_scalar(2.0).sum();
        Read { errors, contexts: context.powf_scalar(2.0).sum() }
    }

    /// The mean over these samples' tokens.
    fn mean_of_tokens(&self, samples: &[usize]) -> Tensor<1> {
        mean_of(self.read(samples).errors, tokens(samples))
    }
}

/// One rank has each step's samples in one batch; several accumulate batches of two samples, with lengths of their own.
fn batches<'a>(group: &Group, own: &'a [usize]) -> std::slice::Chunks<'a, usize> {
    own.chunks(if group.world_size() == 1 { BATCH } else { 2 })
}

#[test]
fn a_masked_mean_over_padded_batches_is_that_over_all_tokens() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let own = batch(&group, step);
            let mut sum = 0.0;
            let grads = ddp.run(&model, batches(&group, &own), |net, samples| {
                let loss = net.mean_of_tokens(samples);
                sum += number(&loss) * tokens(samples) as f64;
                (loss, tokens(samples))
            });
            model = optimizer.step(0.01, model, grads.unwrap());
            // A metric has the weights of the loss.
            losses.extend(ddp.mean(&[sum / tokens(&own) as f64], tokens(&own)).unwrap());
        }
        [weights(&model), losses].concat()
    });
}

#[test]
fn a_masked_mean_is_exchanged_after_the_backward_pass() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        for step in 0..STEPS {
            let own = batch(&group, step);
            let grads = GradientsParams::from_grads(model.mean_of_tokens(&own).backward(), &model);
            let grads = ddp.sync(&model, grads, tokens(&own)).unwrap();
            model = optimizer.step(0.01, model, grads);
        }
        weights(&model)
    });
}

#[test]
fn a_masked_mean_trains_with_a_sharded_optimizer() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: ShardedAdam<Net> =
            ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap();
        for step in 0..STEPS {
            let own = batch(&group, step);
            let loss = |net: &Net, samples: &[usize]| (net.mean_of_tokens(samples), tokens(samples));
            let parts = optimizer.run(&model, batches(&group, &own), loss).unwrap();
            optimizer.step(0.01, &mut model, parts).unwrap();
        }
        weights(&model)
    });
}

#[test]
fn a_masked_mean_trains_with_full_sharding() {
    equals_one_rank(|group| {
        let (mut model, fsdp) = FullyShardedParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        for step in 0..STEPS {
            // With full sharding all ranks run equally many passes.
            let own = batch(&group, step);
            let loss = |net: &Net, samples: Vec<usize>| (net.mean_of_tokens(&samples), tokens(&samples));
            let parts = fsdp.run(&model, [own], loss).unwrap().for_optimizer(&optimizer).unwrap();
            model = optimizer.step(0.01, model, parts);
        }
        weights(&fsdp.gather(&model).unwrap())
    });
}

#[test]
fn two_means_over_different_numbers_are_one_loss() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: SgdOf<Net> = SgdConfig::new().init();
        for step in 0..STEPS {
            let own = batch(&group, step);
            // Of all ranks: a mean over tokens, and one over samples.
            let mut of_all = [tokens(&own) as f64, own.len() as f64];
            group.all_reduce(&mut of_all, ReduceOp::Sum).unwrap();
            let grads = ddp.run(&model, [own], |net, own| {
                let Read { errors, contexts } = net.read(&own);
                let part = errors / of_all[0] + contexts * 0.1 / of_all[1];
                // The step is the mean over the ranks, and the loss is the sum of their parts.
                (part * group.world_size() as f64, 1)
            });
            model = optimizer.step(0.1, model, grads.unwrap());
        }
        weights(&model)
    });
}
