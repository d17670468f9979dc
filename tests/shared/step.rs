//! Overlapped training steps: the same bits as with an exchange after the backward pass, whatever the model does.

pub mod errors;
pub mod models;

use std::thread;
use std::time::Duration;

use bonfire::Group;
use bonfire::tensor::autodiff::all_reduce_sum;
use bonfire_testing::{Kind, ranks, run_ranks};
use burn::nn::LinearConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::DType;

use self::models::{Bits, Branches, bits, both_ways, values};
use super::in_f64;
use crate::burn_version::*;

fn check(kind: Kind, n: usize, run: impl Fn(Group) -> [Bits; 2] + Clone + Send + 'static) {
    let results = run_ranks(kind, n, run);
    for (rank, [overlapped, sync]) in results.iter().enumerate() {
        assert!(overlapped == sync, "{n} ranks, {kind:?}: rank {rank}'s parameters differ from those of `sync`");
        assert!(*overlapped == results[0][0], "{n} ranks, {kind:?}: rank {rank}'s parameters differ from rank 0's");
    }
}

const KINDS: [Kind; 3] = [Kind::Threads, Kind::Tcp, Kind::Shm];

#[test]
fn a_convolutional_network_with_sync_batch_norm_gets_the_same_bits() {
    for kind in KINDS {
        for n in 1..=4 {
            check(kind, n, |group| models::convolutional(&group, 50));
        }
    }
}

#[test]
fn a_transformer_with_a_shared_embedding_gets_the_same_bits() {
    for kind in KINDS {
        for n in 1..=4 {
            check(kind, n, |group| models::language(&group, 50));
        }
    }
}

#[test]
fn a_branch_that_some_ranks_take_in_some_steps_and_ranks_without_samples_get_the_same_bits() {
    for kind in KINDS {
        for n in 1..=4 {
            check(kind, n, |group| {
                let rank = group.rank();
                // Rank 0 always has samples.
                let samples = move |step: usize| if rank == 0 { 2 } else { (rank + step) % 3 };
                both_ways(&group, Branches::new(), 50, samples, |model, step| {
                    model.loss(values([samples(step), 5], 10 * step + rank), (rank + step) % 2 == 1)
                })
            });
        }
    }
}

#[test]
fn a_parameter_without_a_gradient_on_all_ranks_has_none() {
    ranks(2, |group| {
        let (model, ddp) = DataParallel::new(group, Branches::new()).unwrap();
        for _ in 0..3 {
            let step = ddp.last_pass(&model, 1).unwrap();
            let loss = step.model().loss(values([1, 5], 1), false);
            let grads = step.finish(&mut loss.backward()).unwrap();
            assert!(gradient::<2>(&grads, model.never.weight.id).is_none());
            assert!(gradient::<2>(&grads, model.sometimes.as_ref().unwrap().weight.id).is_none());
            assert_eq!(grads.len(), 4);
        }
    });
}

#[test]
fn three_passes_are_exchanged_once_and_are_those_of_their_mean() {
    for n in 1..=3 {
        ranks(n, |group| {
            let rank = group.rank();
            let (model, ddp) = DataParallel::new(group, Branches::new()).unwrap();
            // One pass uses a layer that the last one does not.
            let loss = |model: &Branches, i: usize| model.loss(values([2, 5], 3 * rank + i), i == 1);
            let mut results = Vec::new();
            for round in 0..5 {
                let grads = match round % 3 {
                    0 => ddp.run(&model, 0..3, |model, i| (loss(model, i), 2)).unwrap(),
                    1 => {
                        // All but the last are open at a time.
                        let early = [0, 1].map(|i| (i, ddp.pass(&model, 2).unwrap()));
                        let losses = early.map(|(i, pass)| (loss(pass.model(), i), pass));
                        for (loss, pass) in losses {
                            pass.finish(&mut loss.backward()).unwrap();
                        }
                        let last = ddp.last_pass(&model, 2).unwrap();
                        let loss = loss(last.model(), 2);
                        last.finish(&mut loss.backward()).unwrap()
                    }
                    _ => {
                        let mean = (0..3).map(|i| loss(&model, i) / 3.0).reduce(|a, b| a + b).unwrap();
                        ddp.sync(&model, GradientsParams::from_grads(mean.backward(), &model), 6).unwrap()
                    }
                };
                results.push(bits(&SgdConfig::new().init().step(1.0, model.clone(), grads)));
            }
            // The buckets are fixed after the first.
            assert!(results[1] == results[3] && results[1] == results[4], "{n} ranks");
            for (a, b) in results[2].0.iter().zip(&results[3].0) {
                let close = a.iter::<f64>().zip(b.iter::<f64>()).all(|(a, b)| (a - b).abs() < 1e-6);
                assert!(close, "{n} ranks: {a} {b}");
            }
        });
    }
}

#[test]
fn ranks_whose_data_ends_earlier_join_until_all_are_done() {
    const BATCHES: [usize; 5] = [0, 1, 7, 7, 12];
    let batch = |rank: usize, number: usize| values([1 + (rank + number) % 3, 5], 100 * rank + number);
    let wide = |batch: Tensor<2>| batch.cast(DType::F64);
    let model = || in_f64(Branches::new());
    // One rank processes what the others had in each step, one after the other.
    let (mut whole, mut optimizer) = (model(), SgdConfig::new().init());
    let reference = {
        for number in 0..12 {
            let batches: Vec<_> = (0..5).filter(|rank| number < BATCHES[*rank]).map(|r| batch(r, number)).collect();
            let samples: usize = batches.iter().map(|batch| batch.dims()[0]).sum();
            let losses = batches.into_iter().map(|batch| {
                let share = batch.dims()[0] as f64 / samples as f64;
                whole.loss(wide(batch), false) * share
            });
            let loss = losses.reduce(|a, b| a + b).unwrap();
            let grads = GradientsParams::from_grads(loss.backward(), &whole);
            whole = optimizer.step(0.05, whole, grads);
        }
        bits(&whole)
    };
    for kind in KINDS {
        let start = bits(&model());
        for result in run_ranks(kind, 5, move |group| {
            let rank = group.rank();
            let (mut model, ddp) = DataParallel::new(group, in_f64(Branches::new())).unwrap();
            let mut optimizer = SgdConfig::new().init();
            for number in 0..BATCHES[rank] {
                let input = batch(rank, number);
                let step = ddp.last_pass(&model, input.dims()[0]).unwrap();
                let loss = step.model().loss(input.cast(DType::F64), false);
                let grads = step.finish(&mut loss.backward()).unwrap();
                model = optimizer.step(0.05, model, grads);
            }
            while let Some(grads) = ddp.join(&model).unwrap() {
                model = optimizer.step(0.05, model, grads);
            }
            bits(&model)
        }) {
            assert!(result.0 != start.0, "it was trained");
            for (a, b) in result.0.iter().zip(&reference.0) {
                let close = a.iter::<f64>().zip(b.iter::<f64>()).all(|(a, b)| (a - b).abs() < 1e-12);
                assert!(close, "{kind:?}");
            }
        }
    }
}

/// Random layers, some of which a rank does not use in a step, and random delays. All ranks must make all steps.
fn random_steps(steps: usize, seed: u64) {
    for kind in [Kind::Threads, Kind::Tcp] {
        for n in 2..=3 {
            check(kind, n, move |group| {
                let mut random = seed;
                let model: Vec<Linear> = (0..7)
                    .map(|_| {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let config = LinearConfig::new(6, 6).with_bias(random >> 63 == 1);
                        config.init(&device())
                    })
                    .collect();
                let rank = group.rank();
                let bit = move |step: usize, layer: usize| (step * 31 + rank * 17 + layer * 7 + seed as usize) % 5;
                both_ways(
                    &group,
                    model,
                    steps,
                    |_| 1,
                    |model, step| {
                        if bit(step, 90) == 0 {
                            thread::sleep(Duration::from_micros(300 * bit(step, 91) as u64));
                        }
                        let used = model.iter().enumerate().filter(|(layer, _)| *layer == 3 || bit(step, *layer) > 1);
                        let output =
                            used.fold(values([1, 6], 10 * step + rank), |x, (_, layer)| layer.forward(x).tanh());
                        output.powf_scalar(2.0).mean()
                    },
                )
            });
        }
    }
}

#[test]
fn random_models_with_unused_parameters_and_delays_get_the_same_bits() {
    for seed in 0..3 {
        random_steps(40, seed);
    }
}

#[test]
#[ignore = "takes minutes; .ci/full runs it"]
fn two_thousand_steps_of_random_models_get_the_same_bits() {
    for seed in 10..20 {
        random_steps(200, seed);
    }
}

#[test]
fn clones_of_the_steps_model_before_and_after_its_first_use_share_its_hooks() {
    ranks(2, |group| {
        let (model, ddp) = DataParallel::new(group, Branches::new()).unwrap();
        let input = || values([1, 5], 3);
        let mut results = Vec::new();
        for clones in [false, false, true] {
            let step = ddp.last_pass(&model, 1).unwrap();
            let before = if clones { step.model().clone() } else { model.clone() };
            let first = step.model().loss(input(), true);
            let loss = match clones {
                true => first + before.loss(input(), false) + step.model().clone().loss(input(), false),
                false => first + step.model().loss(input(), false) + step.model().loss(input(), false),
            };
            let grads = step.finish(&mut loss.backward()).unwrap();
            results.push(bits(&SgdConfig::new().init().step(1.0, model.clone(), grads)));
        }
        assert!(results[1] == results[2]);
    });
}

#[test]
fn other_devices_and_inference_copies_of_the_steps_model_work() {
    ranks(2, |group| {
        let (model, ddp) = DataParallel::new(group, Branches::new()).unwrap();
        let step = ddp.last_pass(&model, 1).unwrap();
        let moved = step.model().clone().to_device(&device());
        let mut grads = moved.loss(values([1, 5], 1), false).backward();
        // Without gradients.
        let valid = step.model().valid();
        drop(valid);
        step.model().clone().no_grad().loss(values([1, 5], 1), true);
        assert_eq!(step.finish(&mut grads).unwrap().len(), 4);
    });
}

/// Layers that communicate hold locks of burn-autodiff while they wait. On burn 0.21 ranks on other threads need them
/// where their backward pass ends.
#[test]
fn passes_whose_layers_communicate_do_not_lock_each_other_out() {
    let results = ranks(3, |group| {
        let model = Branches::new();
        let (model, ddp) = DataParallel::new(group.clone(), model).unwrap();
        let loss = |model: &Branches, i: usize| {
            let own = model.loss(values([2, 5], 3 * group.rank() + i), true);
            (all_reduce_sum(own, &group).unwrap(), 1)
        };
        let steps = (0..30).map(|_| {
            let grads = ddp.run(&model, 0..4, loss).unwrap();
            bits(&SgdConfig::new().init().step(1.0, model.clone(), grads))
        });
        steps.collect::<Vec<_>>()
    });
    assert!(results.iter().flatten().all(|bits| *bits == results[0][0]));
}
