//! Overlapped training steps: the same bits as with an exchange after the backward pass, whatever the model does.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bonfire::tensor::autodiff::attempt;
use bonfire::{DataParallel, Error, Group, SyncBatchNorm, SyncBatchNormConfig};
use bonfire_testing::{Kind, ranks, run_ranks};
use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsAccumulator, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

type F32 = Autodiff<Flex>;
type Loss = Tensor<F32, 1>;

/// Small, so that small models have many buckets.
const BUCKET: usize = 256;

/// The bytes of every trained parameter, in visiting order. Clones of a model share running statistics.
#[derive(Default, PartialEq, Debug)]
struct Bits(Vec<TensorData>);

impl ModuleVisitor<F32> for Bits {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<F32, D>>) {
        if param.is_require_grad() {
            self.0.push(param.val().into_data());
        }
    }
}

fn bits<M: Module<F32>>(model: &M) -> Bits {
    let mut bits = Bits::default();
    model.visit(&mut bits);
    bits
}

/// Numbers in [-1, 1) that depend on the seed.
fn values<const D: usize>(shape: [usize; D], seed: usize) -> Tensor<F32, D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

/// Trains twice from the same model: with overlapped steps, and with `sync`. Returns both results.
fn both_ways<M: AutodiffModule<F32>>(
    group: &Group,
    model: M,
    steps: usize,
    samples: impl Fn(usize) -> usize,
    loss: impl Fn(&M, usize) -> Loss,
) -> [Bits; 2] {
    let (model, mut ddp) = DataParallel::new(group.clone(), model).unwrap();
    ddp.set_bucket_bytes(BUCKET);
    let mut train = |overlapped: bool, steps: usize| {
        let (mut model, mut optimizer) = (model.clone(), SgdConfig::new().init());
        for number in 0..steps {
            let samples = samples(number);
            let grads = if overlapped {
                let step = ddp.step(&model, samples).unwrap();
                if samples > 0 {
                    let grads = attempt(|| loss(step.model(), number).backward()).unwrap();
                    step.finish(grads).unwrap()
                } else {
                    step.skip().unwrap()
                }
            } else if samples > 0 {
                let grads = attempt(|| loss(&model, number).backward()).unwrap();
                ddp.sync(&model, GradientsParams::from_grads(grads, &model), samples).unwrap()
            } else {
                ddp.sync(&model, GradientsParams::new(), 0).unwrap()
            };
            model = optimizer.step(0.05, model, grads);
        }
        bits(&model)
    };
    // Fixes the buckets.
    train(true, 2);
    [train(true, steps), train(false, steps)]
}

fn check(kind: Kind, n: usize, run: impl Fn(Group) -> [Bits; 2] + Clone + Send + 'static) {
    let results = run_ranks(kind, n, run);
    for (rank, [overlapped, sync]) in results.iter().enumerate() {
        assert!(overlapped == sync, "{n} ranks, {kind:?}: rank {rank}'s parameters differ from those of `sync`");
        assert!(*overlapped == results[0][0], "{n} ranks, {kind:?}: rank {rank}'s parameters differ from rank 0's");
    }
}

const KINDS: [Kind; 3] = [Kind::Threads, Kind::Tcp, Kind::Shm];

/// Convolutions between which the ranks exchange statistics, in both passes.
#[derive(Module, Debug)]
struct Convolutional<B: Backend> {
    first: Conv2d<B>,
    norm: SyncBatchNorm<B>,
    second: Conv2d<B>,
}

#[test]
fn a_convolutional_network_with_sync_batch_norm_gets_the_same_bits() {
    for kind in KINDS {
        for n in 1..=4 {
            check(kind, n, |group| {
                let (device, rank) = (Default::default(), group.rank());
                let model = Convolutional {
                    first: Conv2dConfig::new([2, 4], [3, 3]).init(&device),
                    norm: SyncBatchNormConfig::new(4).init(&group, &device),
                    second: Conv2dConfig::new([4, 3], [2, 2]).init(&device),
                };
                both_ways(
                    &group,
                    model,
                    50,
                    |step| 1 + (rank + step) % 3,
                    |model, step| {
                        let images = values([1 + (rank + step) % 3, 2, 6, 6], 10 * step + rank);
                        let hidden = model.norm.forward(model.first.forward(images)).tanh();
                        model.second.forward(hidden).powf_scalar(2.0).mean()
                    },
                )
            });
        }
    }
}

/// The embedding is used twice, first and last.
#[derive(Module, Debug)]
struct Language<B: Backend> {
    embedding: Embedding<B>,
    encoder: TransformerEncoder<B>,
}

#[test]
fn a_transformer_with_a_shared_embedding_gets_the_same_bits() {
    for kind in KINDS {
        for n in 1..=4 {
            check(kind, n, |group| {
                let (device, rank) = (Default::default(), group.rank());
                let encoder = TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0);
                let model =
                    Language { embedding: EmbeddingConfig::new(11, 8).init(&device), encoder: encoder.init(&device) };
                both_ways(
                    &group,
                    model,
                    50,
                    |_| 2,
                    |model, step| {
                        let words: Vec<i32> = (0..10).map(|i| ((i * (step + 3) + rank) % 11) as i32).collect();
                        let words =
                            Tensor::<F32, 2, Int>::from_data(TensorData::new(words, [2, 5]), &Default::default());
                        let embedded = model.embedding.forward(words);
                        let hidden = model.encoder.forward(TransformerEncoderInput::new(embedded));
                        let scores = hidden.matmul(model.embedding.weight.val().transpose().unsqueeze());
                        scores.powf_scalar(2.0).mean()
                    },
                )
            });
        }
    }
}

/// Layers that are declared in another order than they are used.
#[derive(Module, Debug)]
struct Branches<B: Backend> {
    last: Linear<B>,
    sometimes: Option<Linear<B>>,
    never: Linear<B>,
    first: Linear<B>,
}

impl Branches<F32> {
    fn new() -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Default::default());
        Branches { last: linear(9, 3), sometimes: Some(linear(9, 9)), never: linear(4, 4), first: linear(5, 9) }
    }

    fn loss(&self, input: Tensor<F32, 2>, branch: bool) -> Loss {
        let mut hidden = self.first.forward(input).tanh();
        if let Some(sometimes) = self.sometimes.as_ref().filter(|_| branch) {
            hidden = sometimes.forward(hidden).tanh();
        }
        self.last.forward(hidden).powf_scalar(2.0).mean()
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
        let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
        for _ in 0..3 {
            let step = ddp.step(&model, 1).unwrap();
            let loss = step.model().loss(values([1, 5], 1), false);
            let grads = step.finish(loss.backward()).unwrap();
            assert!(grads.get::<Flex, 2>(model.never.weight.id).is_none());
            assert!(grads.get::<Flex, 2>(model.sometimes.as_ref().unwrap().weight.id).is_none());
            assert_eq!(grads.len(), 4);
        }
    });
}

#[test]
fn three_micro_batches_are_exchanged_once_with_the_same_bits() {
    for n in 1..=3 {
        ranks(n, |group| {
            let rank = group.rank();
            let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
            // One micro-batch uses a layer that the last one does not.
            let loss = |model: &Branches<F32>, i: usize| model.loss(values([2, 5], 3 * rank + i), i == 1) / 3.0;
            let mut results = Vec::new();
            for round in 0..4 {
                let mut accumulator = GradientsAccumulator::new();
                let overlapped = round % 2 == 1 || round == 0;
                let early = if overlapped { 2 } else { 3 };
                for i in 0..early {
                    let grads = loss(&model, i).backward();
                    accumulator.accumulate(&model, GradientsParams::from_grads(grads, &model));
                }
                let grads = if overlapped {
                    let step = ddp.step(&model, 6).unwrap();
                    step.accumulate(accumulator.grads());
                    let grads = loss(step.model(), 2).backward();
                    step.finish(grads).unwrap()
                } else {
                    ddp.sync(&model, accumulator.grads(), 6).unwrap()
                };
                results.push(bits(&SgdConfig::new().init().step(1.0, model.clone(), grads)));
            }
            // The buckets are fixed after the first.
            assert!(results[1] == results[2] && results[2] == results[3], "{n} ranks");
        });
    }
}

/// Random layers, some of which a rank does not use in a step, and random delays. All ranks must make all steps.
fn random_steps(steps: usize, seed: u64) {
    for kind in [Kind::Threads, Kind::Tcp] {
        for n in 2..=3 {
            check(kind, n, move |group| {
                let mut random = seed;
                let model: Vec<Linear<F32>> = (0..7)
                    .map(|_| {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let config = LinearConfig::new(6, 6).with_bias(random >> 63 == 1);
                        config.init(&Default::default())
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

/// Runs one step on two ranks and returns their errors.
fn errors(
    step: impl Fn(&mut DataParallel<F32>, &Branches<F32>, usize) -> Result<GradientsParams, Error> + Sync,
) -> Vec<Error> {
    ranks(2, |group| {
        let rank = group.rank();
        let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
        let error = step(&mut ddp, &model, rank).err().unwrap();
        if matches!(error, Error::InvalidArgument { .. }) {
            // The group is usable.
            let good = ddp.step(&model, 1).unwrap();
            let grads = good.model().loss(values([1, 5], 1), false).backward();
            good.finish(grads).unwrap();
        }
        error
    })
}

fn check_errors(errors: &[Error], text: &str) {
    for error in errors {
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn gradients_that_never_arrive_are_an_error_on_all_ranks() {
    // A fork has leaves of its own.
    let forked = errors(|ddp, model, rank| {
        let step = ddp.step(model, 1)?;
        let fork = step.model().clone().fork(&Default::default());
        let used = if rank == 1 { &fork } else { step.model() };
        let grads = used.loss(values([1, 5], 1).require_grad(), false).backward();
        step.finish(grads)
    });
    check_errors(&forked, "rank 1 has samples, and no gradient has arrived");
    let no_backward = errors(|ddp, model, _| ddp.step(model, 1)?.skip());
    check_errors(&no_backward, "rank 0 has samples, and no gradient has arrived");
}

#[test]
fn a_second_backward_pass_is_an_error_on_all_ranks() {
    let errors = errors(|ddp, model, rank| {
        let step = ddp.step(model, 1)?;
        let mut grads = step.model().loss(values([1, 5], 1), false).backward();
        if rank == 1 {
            grads = step.model().loss(values([1, 5], 1), false).backward();
        }
        step.finish(grads)
    });
    check_errors(&errors, "rank 1 has two gradients of `");
}

#[test]
fn clones_of_the_steps_model_before_and_after_its_first_use_share_its_hooks() {
    ranks(2, |group| {
        let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
        let input = || values([1, 5], 3);
        let mut results = Vec::new();
        for clones in [false, false, true] {
            let step = ddp.step(&model, 1).unwrap();
            let before = if clones { step.model().clone() } else { model.clone() };
            let first = step.model().loss(input(), true);
            let loss = match clones {
                true => first + before.loss(input(), false) + step.model().clone().loss(input(), false),
                false => first + step.model().loss(input(), false) + step.model().loss(input(), false),
            };
            let grads = step.finish(loss.backward()).unwrap();
            results.push(bits(&SgdConfig::new().init().step(1.0, model.clone(), grads)));
        }
        assert!(results[1] == results[2]);
    });
}

#[test]
fn other_devices_and_inference_copies_of_the_steps_model_work() {
    ranks(2, |group| {
        let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
        let step = ddp.step(&model, 1).unwrap();
        let moved = step.model().clone().to_device(&Default::default());
        let grads = moved.loss(values([1, 5], 1), false).backward();
        // Without gradients.
        let valid = step.model().valid();
        drop(valid);
        step.model().clone().no_grad().loss(values([1, 5], 1), true);
        assert_eq!(step.finish(grads).unwrap().len(), 4);
    });
}

#[test]
fn a_step_that_is_dropped_fails_on_all_ranks() {
    let errors = errors(|ddp, model, rank| {
        let step = ddp.step(model, 1)?;
        if rank == 1 {
            drop(step);
            return ddp.step(model, 1)?.skip();
        }
        let grads = step.model().loss(values([1, 5], 1), false).backward();
        step.finish(grads)
    });
    check_errors(&errors, "rank 1 has dropped its training step");
}

#[test]
fn different_settings_and_sync_on_one_rank_are_errors_on_all_ranks() {
    let sizes = errors(|ddp, model, rank| {
        ddp.set_bucket_bytes(1000 + rank);
        let step = ddp.step(model, 1)?;
        let grads = step.model().loss(values([1, 5], 1), false).backward();
        let outcome = step.finish(grads);
        ddp.set_bucket_bytes(1000);
        outcome
    });
    check_errors(&sizes, "rank 0's buckets have 1000 bytes and rank 1's 1001 bytes");
    let nobody = errors(|ddp, model, _| ddp.step(model, 0)?.skip());
    check_errors(&nobody, "no rank has any samples");
}

#[test]
fn a_backward_pass_ends_although_the_other_rank_has_not_begun_its_step() {
    let (told, heard) = mpsc::channel();
    let heard = std::sync::Mutex::new(heard);
    ranks(2, |group| {
        let rank = group.rank();
        let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
        // The first step makes the group of the gradients, for which the ranks wait for each other.
        for round in 0..2 {
            if round == 1 && rank == 1 {
                heard.lock().unwrap().recv_timeout(Duration::from_secs(20)).expect("rank 0's backward pass has ended");
                // burn-autodiff takes the locks of all graphs of the process at the end of this.
                values([3], 1).require_grad().sum().backward();
            }
            let step = ddp.step(&model, 1).unwrap();
            let grads = step.model().loss(values([1, 5], 1), false).backward();
            if round == 1 && rank == 0 {
                told.send(()).unwrap();
            }
            step.finish(grads).unwrap();
        }
    });
}

#[test]
fn a_rank_that_is_lost_during_the_backward_pass_is_a_typed_error_and_shrink_continues() {
    use bonfire::TrainingState;
    for kind in [Kind::Threads, Kind::Tcp] {
        run_ranks(kind, 3, |group| {
            let rank = group.rank();
            let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
            let mut state = TrainingState::new(model, SgdConfig::new().init(), 0.1, ());
            let mut made = 0;
            while made < 6 {
                let step = ddp.step(&state.model, 1);
                let outcome = step.and_then(|step| {
                    let loss = step.model().loss(values([1, 5], made), false);
                    if rank == 1 && made == 3 {
                        return Ok(None);
                    }
                    step.finish(loss.backward()).map(Some)
                });
                match outcome {
                    Ok(Some(grads)) => state.step(grads),
                    // Leaves the group: its handles are dropped.
                    Ok(None) => return,
                    Err(
                        Error::PeerLost { .. } | Error::Left { .. } | Error::Disconnected { .. } | Error::Broken { .. },
                    ) => {
                        assert_eq!(made, 3, "only then was a rank lost");
                        ddp.shrink(&mut state).unwrap();
                        assert_eq!(ddp.group().world_size(), 2);
                    }
                    Err(error) => panic!("{error}"),
                }
                made = state.batch;
            }
        });
    }
}
