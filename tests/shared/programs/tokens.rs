//! Programs over sequences of different lengths, padded in each batch.

use bonfire::{ReduceOp, Sharding};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};

use super::*;

/// A sequence of one to five tokens.
fn length(sample: usize) -> usize {
    1 + sample * 7 % 5
}

fn tokens(samples: &[usize]) -> usize {
    samples.iter().map(|sample| length(*sample)).sum()
}

/// What the model makes of a padded batch.
struct Read {
    /// The squared errors of all tokens, without padding, added up.
    errors: Tensor<1>,
    /// The squares of the sequences' contexts, added up.
    contexts: Tensor<1>,
}

impl Net {
    /// Reads sequences that are padded to the longest of them. Each token sees the mean of its sequence.
    fn read(&self, samples: &[usize]) -> Read {
        let longest = samples.iter().map(|sample| length(*sample)).max().unwrap_or(0);
        // What padding is must not matter.
        let padded = |columns: usize, seed: usize, padding: f64| {
            let of_token = |sample: usize, token: usize, column: usize| match token < length(sample) {
                true => wave(sample * 131 + token * 17 + column, seed),
                false => padding,
            };
            let places = (0..longest).flat_map(|token| (0..columns).map(move |column| (token, column)));
            let of_sample = |sample: &usize| places.clone().map(|(token, column)| of_token(*sample, token, column));
            let values: Vec<f64> = samples.iter().flat_map(|sample| of_sample(sample).collect::<Vec<_>>()).collect();
            three(values, [samples.len(), longest, columns])
        };
        let is_token = |sample: &usize| (0..longest).map(|token| f64::from(u8::from(token < length(*sample))));
        let is_token: Vec<f64> = samples.iter().flat_map(|sample| is_token(sample).collect::<Vec<_>>()).collect();
        let mask = three(is_token, [samples.len(), longest, 1]);
        let hidden = self.first.forward(padded(INPUTS, 1, 3.0)).tanh() * mask.clone();
        let context = hidden.clone().sum_dim(1) / mask.clone().sum_dim(1);
        let output = self.second.forward(hidden + context.clone());
        let errors = ((output - padded(1, 2, -7.0)) * mask).powf_scalar(2.0).sum();
        Read { errors, contexts: context.powf_scalar(2.0).sum() }
    }

    /// The mean over these samples' tokens.
    fn mean_of_tokens(&self, samples: &[usize]) -> Tensor<1> {
        self.read(samples).errors / tokens(samples) as f64
    }
}

fn three(values: Vec<f64>, shape: [usize; 3]) -> Tensor<3> {
    Tensor::from_data(TensorData::new(values, shape), (&device(), DType::F64))
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
            model = optimizer.step(0.01, model, ddp.sync(&model, grads, tokens(&own)).unwrap());
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
