//! Parameters that need no gradient: each rank keeps a part of them too.

use bonfire::{Group, ShardedBlock};
use bonfire_testing::{Kind, ranks, run_ranks};
use burn::module::Param;
use burn::nn::{BatchNormConfig, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{DType, TensorData};

use super::models::{Form, floats, initial, train, values};
use super::{close, numbers, samples};
use crate::burn_version::*;

/// Not divisible by the number of ranks.
pub const WIDTH: usize = 7;
const STEPS: usize = 6;

models! {
    /// A frozen trunk, and layers that are adapted by matrices of a low rank.
    pub struct Adapted {
        pub trunk: Vec<ShardedBlock<Linear>>,
        pub layers: Vec<ShardedBlock<Layer>>,
        /// In no block.
        scale: Param<Tensor<1>>,
    }

    pub struct Layer {
        pub frozen: Linear,
        down: Linear,
        up: Linear,
    }

    struct Normed {
        frozen: ShardedBlock<Linear>,
        norm: ShardedBlock<BatchNorm>,
        last: Linear,
    }
}

impl Layer {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        (self.frozen.forward(x.clone()) + self.up.forward(self.down.forward(x))).tanh()
    }
}

fn frozen(seed: usize, dtype: DType) -> Linear {
    let linear: Linear = LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device());
    let weight = Param::from_tensor(values([WIDTH, WIDTH], seed, dtype) * 0.5);
    Linear { weight: weight.set_require_grad(false), ..linear }
}

impl Adapted {
    pub fn new(dtype: DType) -> Self {
        let device = device();
        let layer = |seed| Layer {
            frozen: frozen(seed, dtype),
            down: LinearConfig::new(WIDTH, 2).init(&device),
            up: LinearConfig::new(2, WIDTH).init(&device),
        };
        let scale = Param::from_tensor(values([WIDTH], 3, dtype)).set_require_grad(false);
        let model = Adapted {
            trunk: (0..3).map(|seed| ShardedBlock::new(frozen(seed, dtype))).collect(),
            layers: (3..6).map(|seed| ShardedBlock::new(layer(seed))).collect(),
            scale,
        };
        initial(model, dtype)
    }

    /// The loss of the samples with these numbers, of which each has two rows.
    fn loss(&self, samples: std::ops::Range<usize>) -> Tensor<1> {
        let dtype = self.scale.val().dtype();
        let x = Tensor::cat(samples.map(|i| values([2, WIDTH], i, dtype)).collect(), 0);
        let x = self.trunk.iter().fold(x, |x, layer| layer.run(|linear| linear.forward(x).tanh()));
        let x = self.layers.iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x)));
        (x * self.scale.val().unsqueeze()).powf_scalar(2.0).mean()
    }
}

fn results(kind: Kind, n: usize, form: Form, dtype: DType) -> Vec<(Vec<f64>, Vec<TensorData>)> {
    run_ranks(kind, n, move |group| {
        let (rank, n) = (group.rank(), group.world_size());
        train(group, form, STEPS, Adapted::new(dtype), move |model, step| model.loss(samples(rank, n, step)))
    })
}

#[test]
fn a_model_with_frozen_parameters_is_trained_as_on_one_rank() {
    let whole = results(Kind::Threads, 1, Form::Replicas, DType::F64).remove(0);
    let start = numbers(&floats(&Adapted::new(DType::F64)));
    assert!(numbers(&whole.1) != start, "it was trained");
    for (kind, n, block) in [(Kind::Threads, 2, 1), (Kind::Tcp, 3, 3), (Kind::Shm, 4, 2), (Kind::Threads, 4, 2)] {
        for form in [Form::Full, Form::Gradients, Form::Hybrid(block)] {
            for (losses, parameters) in results(kind, n, form, DType::F64) {
                assert!(close(&losses, &whole.0), "{form:?}, {n} ranks: {losses:?}, not {:?}", whole.0);
                assert!(close(&numbers(&parameters), &numbers(&whole.1)), "{form:?}, {n} ranks");
            }
        }
    }
}

#[test]
fn with_frozen_parameters_it_has_the_bits_of_replicas() {
    for (kind, n) in [(Kind::Shm, 2), (Kind::Threads, 4)] {
        let replicas = results(kind, n, Form::Replicas, DType::F32);
        assert!(results(kind, n, Form::Full, DType::F32) == replicas, "{kind:?}");
    }
}

#[test]
fn frozen_parameters_are_cut_and_gathered_only_where_they_are_needed() {
    ranks(3, |group| {
        let whole = Adapted::new(DType::F32);
        let (mut model, fsdp) = FullyShardedParallel::new(group, whole.clone()).unwrap();
        for step in 0..4 {
            let weights =
                [&model.trunk[0].clone().into_inner().weight, &model.layers[0].clone().into_inner().frozen.weight];
            for weight in weights {
                assert_eq!((weight.dims(), weight.is_require_grad()), ([WIDTH.div_ceil(3), WIDTH], false));
            }
            let running = fsdp.last_pass(&model, 1).unwrap();
            let mut grads = running.model().loss(step..step + 1).backward();
            let mut optimizer = SgdConfig::new().init();
            let grads = running.finish(&mut grads).unwrap().for_optimizer(&optimizer).unwrap();
            assert_eq!(grads.len(), 3 * 4, "gradients of what is trained");
            model = optimizer.step(0.1, model, grads);
            let counts = fsdp.gather_counts();
            // One of the blocks is that of the parameters in no block. The backward pass comes to no frozen block, and
            // from the second step on the last block stays for it.
            let kept = usize::from(step > 0);
            assert_eq!((counts.forward, counts.backward), (7, 3 - kept), "step {step}");
            assert_eq!(counts.most, 2, "step {step}");
        }
        let trained = fsdp.gather(&model).unwrap();
        let weight = |model: &Adapted, i: usize| model.layers[i].clone().into_inner().frozen.weight.to_data();
        for i in 0..3 {
            assert_eq!(weight(&trained, i), weight(&whole, i));
        }
        assert!(!trained.layers[0].clone().into_inner().frozen.weight.is_require_grad());
    });
}

#[test]
fn running_states_stay_whole_and_averaging_them_leaves_frozen_parts() {
    let means = |group: Group| {
        let device = device();
        let model = Normed {
            frozen: ShardedBlock::new(frozen(1, DType::F32)),
            norm: ShardedBlock::new(BatchNormConfig::new(WIDTH).init(&device)),
            last: LinearConfig::new(WIDTH, 1).init(&device),
        };
        let rank = group.rank();
        let (model, fsdp) = FullyShardedParallel::new(group, model).unwrap();
        let step = fsdp.last_pass(&model, 1).unwrap();
        let inner = step.model();
        let x = values([4, WIDTH, 2], rank, DType::F32).swap_dims(1, 2).reshape([8, WIDTH]);
        let x = inner.frozen.run(|linear| linear.forward(x));
        let x = inner.norm.run(|norm| norm.forward(x.reshape([8, WIDTH, 1])));
        let loss = inner.last.forward(x.reshape([8, WIDTH])).powf_scalar(2.0).mean();
        drop(step.finish(&mut loss.backward()).unwrap());
        let part = model.frozen.clone().into_inner().weight.to_data();
        let running = |model: &Normed| {
            let values = floats(&model.norm);
            assert_eq!(values.len(), 4, "gamma, beta, and the running mean and variance");
            [&values[2], &values[3]].map(|value| value.clone().iter::<f64>().collect::<Vec<_>>())
        };
        // A running state's last update is pending until then.
        drop(model.valid());
        let own = running(&model);
        assert_eq!(own[0].len(), WIDTH, "the whole mean");
        let model = fsdp.average_states(model).unwrap();
        assert_eq!(model.frozen.clone().into_inner().weight.to_data(), part);
        (own, running(&model))
    };
    let all = ranks(2, means);
    assert_ne!(all[0].0, all[1].0);
    for (_, averaged) in &all {
        for (state, averaged) in averaged.iter().enumerate() {
            for (i, value) in averaged.iter().enumerate() {
                let mean = (all[0].0[state][i] + all[1].0[state][i]) / 2.0;
                assert!((value - mean).abs() <= 1e-7 * mean.abs().max(1.0), "{value}, not {mean}");
            }
        }
    }
}
