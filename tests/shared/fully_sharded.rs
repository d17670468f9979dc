//! Full sharding: the results of replicas, in a part of the memory.

pub mod checkpoints;
pub mod errors;
pub mod frozen;
mod memory;
pub mod models;
mod replicas;

use std::ops::Range;

use bonfire::{DeviceMesh, Group, ShardedBlock};
use bonfire_testing::{Kind, ranks, run_ranks};
use burn::module::Param;
use burn::nn::LinearConfig;
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::{DType, TensorData};

use self::models::{Form, Language, Odd, floats, initial, train, values};
use crate::burn_version::*;
use crate::model_data::{gradient_data, norm};

models! {
    /// Layers of equal size, each a block.
    pub struct Deep {
        pub layers: Vec<ShardedBlock<Linear>>,
        pub scale: Param<Tensor<1>>,
    }
}

const STEPS: usize = 10;

/// The numbers of a rank's samples in a step. All ranks together always have the same 12.
pub fn samples(rank: usize, ranks: usize, step: usize) -> Range<usize> {
    let count = 12 / ranks;
    let start = 12 * step + rank * count;
    start..start + count
}

/// Trains a model on the samples of all ranks.
fn results(kind: Kind, n: usize, form: Form, model: &'static str, dtype: DType) -> Vec<(Vec<f64>, Vec<TensorData>)> {
    run_ranks(kind, n, move |group| {
        let (rank, n) = (group.rank(), group.world_size());
        match model {
            "language" => {
                let model = Language::new(dtype);
                train(group, form, STEPS, model, move |model, step| model.loss(samples(rank, n, step)))
            }
            _ => {
                let model = Odd::new(dtype);
                train(group, form, STEPS, model, move |model, step| model.loss(samples(rank, n, step)))
            }
        }
    })
}

pub fn numbers(data: &[TensorData]) -> Vec<f64> {
    data.iter().flat_map(|data| data.iter::<f64>().collect::<Vec<_>>()).collect()
}

/// Compares loss and parameters of every form with those of one rank.
fn check_all_forms(model: &'static str) {
    let whole = results(Kind::Threads, 1, Form::Replicas, model, DType::F64).remove(0);
    let start = results_at_start(model);
    assert!(numbers(&whole.1) != start, "it was trained");
    let forms = |n: usize| {
        let all = [Form::Replicas, Form::Optimizer, Form::Gradients, Form::Full];
        let divisors = (1..=n).filter(move |ranks| n.is_multiple_of(*ranks));
        all.into_iter().chain(divisors.flat_map(|ranks| [Form::OptimizerOn(ranks), Form::Hybrid(ranks)]))
    };
    for n in 1..=4 {
        let hosts = (n == 4).then_some(Kind::Hosts(&[0, 1]));
        for kind in [Kind::Threads, Kind::Shm, Kind::Tcp].into_iter().chain(hosts) {
            for form in forms(n) {
                for (rank, result) in results(kind, n, form, model, DType::F64).iter().enumerate() {
                    let what = format!("{form:?}, {n} ranks, {kind:?}, rank {rank}");
                    assert!(close(&result.0, &whole.0), "{what}: losses {:?}, not {:?}", result.0, whole.0);
                    assert!(close(&numbers(&result.1), &numbers(&whole.1)), "{what}: parameters differ");
                }
            }
        }
    }
}

fn results_at_start(model: &'static str) -> Vec<f64> {
    numbers(&match model {
        "language" => floats(&Language::new(DType::F64)),
        _ => floats(&Odd::new(DType::F64)),
    })
}

pub fn close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-9)
}

#[test]
fn a_transformer_is_trained_as_on_one_rank_in_every_form() {
    check_all_forms("language");
}

#[test]
fn a_model_whose_sizes_do_not_divide_is_trained_as_on_one_rank_in_every_form() {
    check_all_forms("odd");
}

#[test]
fn full_sharding_has_the_bits_of_replicas() {
    for (kind, n) in [(Kind::Shm, 2), (Kind::Threads, 4)] {
        for model in ["language", "odd"] {
            let replicas = results(kind, n, Form::Replicas, model, DType::F32);
            for form in [Form::Full, Form::Gradients] {
                assert!(results(kind, n, form, model, DType::F32) == replicas, "{model}, {form:?}, {kind:?}");
            }
        }
    }
}

pub const WIDTH: usize = 16;

impl Deep {
    pub fn new(layers: usize) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device());
        let layers = (0..layers).map(|_| ShardedBlock::new(linear())).collect();
        initial(Deep { layers, scale: Param::from_tensor(Tensor::ones([WIDTH], &device())) }, DType::F32)
    }

    pub fn loss(&self, seed: usize) -> Tensor<1> {
        // Its gradient is needed, so the first layer's weight is too.
        let x = values([3, WIDTH], seed, DType::F32) * self.scale.val().unsqueeze();
        let x = self.layers.iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x).tanh()));
        x.powf_scalar(2.0).mean()
    }
}

#[test]
fn each_block_is_gathered_once_in_each_pass_and_two_at_a_time() {
    for n in [1, 2, 3] {
        ranks(n, |group| {
            let (mut model, fsdp) = FullyShardedParallel::new(group, Deep::new(6)).unwrap();
            for step in 0..4 {
                let running = fsdp.last_pass(&model, 1).unwrap();
                let mut grads = running.model().loss(step).backward();
                let parts = running.finish(&mut grads).unwrap();
                let mut optimizer = SgdConfig::new().init();
                model = optimizer.step(0.1, model, parts.for_optimizer(&optimizer).unwrap());
                let counts = fsdp.gather_counts();
                // Beside the parameters in no block. From the second step on the last one stays for the backward pass.
                let kept = usize::from(step > 0);
                assert_eq!((counts.forward, counts.backward), (7, 6 - kept), "step {step}");
                assert_eq!(counts.most, 2, "step {step}");
            }
        });
    }
}

#[test]
fn zero_2_gathers_each_block_once() {
    ranks(2, |group| {
        let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(6)).unwrap();
        let fsdp = fsdp.keep_gathered();
        for step in 0..3 {
            let running = fsdp.last_pass(&model, 1).unwrap();
            let mut grads = running.model().loss(step).backward();
            drop(running.finish(&mut grads).unwrap());
            let counts = fsdp.gather_counts();
            assert_eq!((counts.forward, counts.backward, counts.most), (7, 0, 6));
        }
    });
}

#[test]
fn parameters_gradients_and_optimizer_state_are_a_part_of_the_whole() {
    let held = |n: usize| {
        ranks(n, |group| {
            let (mut model, fsdp) = FullyShardedParallel::new(group, Deep::new(4)).unwrap();
            let mut optimizer: AdamOf<Deep> = AdamConfig::new().init();
            let running = fsdp.last_pass(&model, 1).unwrap();
            let mut grads = running.model().loss(1).backward();
            let grads = running.finish(&mut grads).unwrap().for_optimizer(&optimizer).unwrap();
            let values = floats(&model);
            let gradients: Vec<_> = gradient_data(&model, &grads).into_iter().map(Option::unwrap).collect();
            assert!(values.iter().zip(&gradients).all(|(value, gradient)| value.shape() == gradient.shape()));
            let [parameters, gradients] =
                [values, gradients].map(|all| all.iter().map(TensorData::num_elements).sum::<usize>());
            model = optimizer.step(0.1, model, grads);
            drop(model);
            // Numbers, and a little text.
            [parameters, gradients, optimizer_bytes(&optimizer).len()]
        })
    };
    let whole = held(1)[0];
    assert_eq!(whole[0], 4 * (WIDTH * WIDTH + WIDTH) + WIDTH);
    for n in [2, 4, 8] {
        for [parameters, gradients, state] in held(n) {
            assert_eq!([parameters, gradients], [whole[0] / n; 2]);
            let text = 9 * 700;
            assert!(state <= whole[2] / n + text, "{state} bytes of state, {} on one rank", whole[2]);
        }
    }
}

#[test]
fn gradients_of_micro_batches_are_added_as_parts() {
    let trained = |n: usize, micro: usize| {
        ranks(n, |group| {
            let rank = group.rank();
            let (mut model, fsdp) = FullyShardedParallel::new(group, Language::new(DType::F64)).unwrap();
            let mut optimizer = AdamConfig::new().init();
            for step in 0..4 {
                let loss = |model: &Language, i| model.loss(samples(rank * micro + i, n * micro, step));
                let parts = fsdp.run(&model, 0..micro, |model, i| (loss(model, i), 1)).unwrap();
                let grads = parts.clip_norm(0.05).unwrap().for_optimizer(&optimizer).unwrap();
                model = optimizer.step(0.01, model, grads);
            }
            numbers(&floats(&fsdp.gather(&model).unwrap()))
        })
        .remove(0)
    };
    let whole = trained(1, 1);
    assert!(close(&trained(1, 3), &whole));
    assert!(close(&trained(2, 3), &whole));
    assert!(close(&trained(2, 1), &whole));
}

#[test]
fn a_norm_is_that_of_all_parts() {
    for mesh in [None, Some(2), Some(4)] {
        ranks(4, |group| {
            let mesh = match mesh {
                None => DeviceMesh::from(group),
                Some(n) => DeviceMesh::new(group, [("shard", n), ("replicate", 4 / n)]).unwrap(),
            };
            let (model, fsdp) = FullyShardedParallel::new(mesh, Odd::new(DType::F64)).unwrap();
            let running = fsdp.last_pass(&model, 1).unwrap();
            let mut grads = running.model().loss(0..2).backward();
            let grads = running.finish(&mut grads).unwrap();
            // The same samples on all ranks, so the mean is one rank's gradient.
            let alone = Group::threads(1).unwrap().remove(0);
            let (single, _) = DataParallel::new(alone, Odd::new(DType::F64)).unwrap();
            let of_one = GradientsParams::from_grads(single.loss(0..2).backward(), &single);
            let norm = norm(&single, &of_one);
            assert!((grads.norm().unwrap() - norm).abs() < 1e-12);
            let mut optimizer = SgdConfig::new().init();
            let clipped = grads.clip_norm(norm / 2.0).unwrap().for_optimizer(&optimizer).unwrap();
            let updated = optimizer.step(1.0, model.clone(), clipped);
            let halved = SgdConfig::new().init().step(0.5, single, of_one);
            let (updated, halved) = (fsdp.gather(&updated).unwrap(), halved);
            assert!(close(&numbers(&floats(&updated)), &numbers(&floats(&halved))));
        });
    }
}

#[test]
fn blocks_may_change_from_step_to_step_and_ranks_may_have_no_samples() {
    let trained = |n: usize, sharded: bool| {
        ranks(n, |group| {
            let rank = group.rank();
            let (model, layers) =
                (Deep::new(5), |step: usize| if step % 3 == 2 { vec![4, 0, 2] } else { vec![0, 1, 2, 3] });
            let loss = |model: &Deep, step: usize| {
                let x = values([3, WIDTH], 10 * step, DType::F32);
                let x = layers(step).into_iter().fold(x, |x, i| model.layers[i].run(|layer| layer.forward(x).tanh()));
                (x * model.scale.val().unsqueeze()).powf_scalar(2.0).mean()
            };
            if !sharded {
                let (mut model, mut optimizer) = (model, SgdConfig::new().init());
                for step in 0..9 {
                    let grads = GradientsParams::from_grads(loss(&model, step).backward(), &model);
                    model = optimizer.step(0.1, model, grads);
                }
                return floats(&model);
            }
            let (mut model, fsdp) = FullyShardedParallel::new(group, model).unwrap();
            let mut optimizer = SgdConfig::new().init();
            for step in 0..9 {
                // A rank without samples takes part in what the others gather.
                let batches = (rank != 1 || step % 3 == 2).then_some(step);
                let parts = fsdp.run(&model, batches, |model, step| (loss(model, step), 2)).unwrap();
                let grads = parts.for_optimizer(&optimizer).unwrap();
                // Layers that are not used have no gradient.
                assert_eq!(grads.len(), 2 * layers(step).len() + 1);
                model = optimizer.step(0.1, model, grads);
            }
            floats(&fsdp.gather(&model).unwrap())
        })
        .remove(0)
    };
    let whole = trained(1, false);
    for n in 1..=3 {
        let difference =
            numbers(&trained(n, true)).iter().zip(numbers(&whole)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(difference < 1e-5, "{n} ranks: {difference:e}");
    }
}

#[test]
fn marks_change_neither_records_nor_results() {
    let model = Deep::new(2);
    let plain: Vec<Linear> = model.layers.iter().map(|layer| layer.clone().into_inner()).collect();
    let marked = model.layers.clone();
    assert_eq!(saved(plain.clone()), saved(marked));
    let x = || values([2, WIDTH], 3, DType::F32);
    assert_eq!(plain[0].forward(x()).into_data(), model.layers[0].run(|layer| layer.forward(x())).into_data());
    // burn draws weights at their first use.
    let drawn: ShardedBlock<Linear> = ShardedBlock::new(LinearConfig::new(4, 4).init(&device()));
    let weight = || drawn.run(|linear| linear.weight.val().into_data());
    assert_eq!(weight(), weight());
}
