//! A sharded optimizer (ZeRO-1) gives what the optimizer on one rank gives, in less memory.

mod checkpoints;
mod errors;

use std::collections::HashSet;

use bonfire::{Error, Sharding};
use bonfire_testing::ranks;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Param, ParamId, list_param_ids};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, MuonConfig, RmsPropConfig, SgdConfig,
};
use burn::tensor::{DType, TensorData};

use crate::burn_version::*;
use crate::model_data::register;

/// World sizes and sharding: over all ranks, over blocks with several replicas, and none.
const FORMS: [(usize, Sharding); 10] = [
    (1, Sharding::All),
    (2, Sharding::All),
    (3, Sharding::All),
    (4, Sharding::All),
    (4, Sharding::Blocks(2)),
    (6, Sharding::Blocks(2)),
    (6, Sharding::Blocks(3)),
    (2, Sharding::Blocks(2)),
    (2, Sharding::Blocks(1)),
    (3, Sharding::None),
];

models! {
    /// Parameters of sizes that no number of ranks divides, one of which is sent alone, and one without gradients.
    pub struct Odd {
        one: Param<Tensor<1>>,
        few: Param<Tensor<1>>,
        matrix: Param<Tensor<2>>,
        large: Param<Tensor<2>>,
        cube: Param<Tensor<3>>,
        frozen: Param<Tensor<1>>,
    }

    /// Parameters of three types.
    struct Mixed {
        half: Param<Tensor<1>>,
        single: Param<Tensor<2>>,
        double: Param<Tensor<1>>,
    }
}

impl Odd {
    pub fn new(dtype: DType) -> Self {
        Odd {
            one: whole(&[1], dtype),
            few: whole(&[3], dtype),
            matrix: whole(&[7, 5], dtype),
            large: whole(&[257, 257], dtype),
            cube: whole(&[2, 3, 11], dtype),
            frozen: whole(&[5], dtype).set_require_grad(false),
        }
    }
}

/// Small whole numbers.
fn whole<const D: usize>(shape: &[usize], dtype: DType) -> Param<Tensor<D>> {
    let values = (0..shape.iter().product()).map(|i| (i * 5 % 13) as f64 - 6.0);
    parameter(TensorData::new(values.collect::<Vec<_>>(), shape).convert_dtype(dtype))
}

/// A parameter of the data's type.
fn parameter<const D: usize>(data: TensorData) -> Param<Tensor<D>> {
    let dtype = data.dtype();
    Param::from_tensor(Tensor::from_data(data, (&device(), dtype)))
}

pub fn bits<M: Model>(model: &M) -> Vec<TensorData> {
    floats(model).into_iter().map(|parameter| parameter.data).collect()
}

/// Builds gradients of a model's parameters. `value` returns each element by parameter and index, or none.
pub fn gradients<M: Model>(model: &M, value: impl Fn(usize, usize) -> Option<f64>) -> GradientsParams {
    let mut grads = GradientsParams::new();
    for (position, FloatParameter { id, data, trained, .. }) in floats(model).into_iter().enumerate() {
        let values: Option<Vec<f64>> = (0..data.num_elements()).map(|i| value(position, i)).collect();
        if let Some(values) = values.filter(|_| trained) {
            register(&mut grads, id, TensorData::new(values, data.shape().clone()).convert_dtype(data.dtype()));
        }
    }
    grads
}

/// A rank's gradient in a step: a multiple of 12, so that the mean over 2, 3, 4 or 6 ranks is a whole number. Some
/// ranks have none for a parameter, and in some steps no rank has one.
fn gradient(rank: usize, step: usize, position: usize, i: usize) -> Option<f64> {
    let missing = (rank + position + step).is_multiple_of(3) || (position + step).is_multiple_of(5);
    (!missing).then(|| 12.0 * ((i * 7 + step * 3 + rank * 5 + position) % 9) as f64 - 48.0)
}

/// Trains with one optimizer and the mean of all ranks' gradients.
fn whole_training(mut model: Odd, mut optimizer: impl ElementWise<Odd>, ranks: usize) -> Vec<TensorData> {
    for step in 0..STEPS {
        let grads = gradients(&model, |position, i| {
            let all: Vec<f64> = (0..ranks).filter_map(|rank| gradient(rank, step, position, i)).collect();
            (!all.is_empty()).then(|| all.iter().sum::<f64>() / ranks as f64)
        });
        model = optimizer.update(LR, model, grads);
    }
    bits(&model)
}

const STEPS: usize = 7;
const LR: f64 = 0.125;

pub fn check_all_forms<O: ElementWise<Odd>>(dtype: DType, new: impl Fn() -> O + Sync) {
    for (n, sharding) in FORMS {
        let expected = whole_training(Odd::new(dtype), new(), n);
        let trained = ranks(n, |group| {
            let rank = group.rank();
            let (mut model, ddp) = DataParallel::new(group, Odd::new(dtype)).unwrap();
            let mut optimizer = new().sharded(&ddp, sharding).unwrap();
            for step in 0..STEPS {
                let grads = gradients(&model, |position, i| gradient(rank, step, position, i));
                optimizer.advance(LR, &mut model, grads, 3).unwrap();
            }
            assert!(!model.frozen.is_require_grad() && model.few.is_require_grad());
            bits(&model)
        });
        for trained in trained {
            assert!(trained == expected, "{n} ranks, {sharding:?}: the result differs from one rank's");
        }
    }
}

#[test]
fn sgd_is_bit_identical_to_one_rank_in_every_form() {
    check_all_forms(DType::F32, || SgdConfig::new().init());
    check_all_forms(DType::F64, || SgdConfig::new().init());
    check_all_forms(DType::F32, || {
        let momentum = MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: true };
        let decay = WeightDecayConfig::new(0.01);
        SgdConfig::new().with_momentum(Some(momentum)).with_weight_decay(Some(decay)).init()
    });
}

#[test]
fn adam_is_bit_identical_to_one_rank_in_every_form() {
    check_all_forms(DType::F64, || AdamConfig::new().init());
    check_all_forms(DType::F32, || AdamConfig::new().with_amsgrad(true).init());
    // Clipping by value is element-wise, so it may stay in the optimizer.
    check_all_forms(DType::F64, || {
        AdamConfig::new().with_grad_clipping(Some(GradientClippingConfig::Value(7.0))).init()
    });
}

#[test]
fn other_element_wise_optimizers_are_bit_identical_to_one_rank() {
    check_all_forms(DType::F64, || AdamWConfig::new().with_cautious_weight_decay(true).init());
    check_all_forms(DType::F64, || AdanConfig::new().init());
    check_all_forms(DType::F64, || AdaGradConfig::new().init());
    check_all_forms(DType::F64, || RmsPropConfig::new().with_centered(true).init());
}

/// A gradient that no float type represents exactly.
pub fn wave(rank: usize, step: usize, position: usize, i: usize) -> f64 {
    ((rank * 31 + step * 17 + position * 7 + i) as f64 * 12.9898).sin()
}

#[test]
fn adam_in_f64_matches_one_rank_for_any_gradients_samples_and_norm() {
    for max in [None, Some(3.0), Some(1e9)] {
        for (n, sharding) in FORMS {
            let samples = |rank: usize| [5, 0, 3, 1, 4, 2][rank];
            let total: usize = (0..n).map(samples).sum();
            let mut model = Odd::new(DType::F64);
            let mut optimizer: AdamOf<Odd> = AdamConfig::new().init();
            for step in 0..3 {
                let mean = |position, i| {
                    let sum: f64 = (0..n).map(|rank| samples(rank) as f64 * wave(rank, step, position, i)).sum();
                    sum / total as f64
                };
                let squares = |(position, parameter): (usize, FloatParameter)| -> f64 {
                    let elements = if parameter.trained { parameter.data.num_elements() } else { 0 };
                    (0..elements).map(|i| mean(position, i) * mean(position, i)).sum()
                };
                let norm = floats(&model).into_iter().enumerate().map(squares).sum::<f64>().sqrt();
                let factor = max.map_or(1.0, |max: f64| (max / norm).min(1.0));
                let grads = gradients(&model, |position, i| Some(mean(position, i) * factor));
                model = optimizer.step(0.01, model, grads);
            }
            let trained = ranks(n, |group| {
                let rank = group.rank();
                let (mut model, ddp) = DataParallel::new(group, Odd::new(DType::F64)).unwrap();
                let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), sharding).unwrap();
                for step in 0..3 {
                    // The gradients of a rank without samples have no weight.
                    let nan = if samples(rank) == 0 { f64::NAN } else { 1.0 };
                    let grads = gradients(&model, |position, i| Some(nan * wave(rank, step, position, i)));
                    let mut parts = optimizer.sync(&model, grads, samples(rank)).unwrap();
                    if let Some(max) = max {
                        parts = parts.clip_norm(max).unwrap();
                    }
                    optimizer.step(0.01, &mut model, parts).unwrap();
                }
                bits(&model)
            });
            assert!(trained.iter().all(|bits| *bits == trained[0]), "{n} ranks, {sharding:?}: the ranks differ");
            let values = |bits: &[TensorData]| {
                bits.iter().flat_map(|data| data.iter::<f64>().collect::<Vec<_>>()).collect::<Vec<_>>()
            };
            let (ours, theirs) = (values(&trained[0]), values(&bits(&model)));
            let difference = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(difference <= 1e-12, "{n} ranks, {sharding:?}, norm {max:?}: differs by {difference:e}");
        }
    }
}

#[test]
fn a_mean_in_the_range_of_f16_stays_in_range_on_the_way() {
    for (samples, sharding) in [[64, 0, 0, 0], [63, 1, 0, 0], [17, 17, 17, 16]]
        .into_iter()
        .flat_map(|samples| [Sharding::All, Sharding::Blocks(2), Sharding::None].map(|sharding| (samples, sharding)))
    {
        let steps = ranks(4, |group| {
            let (rank, options) = (group.rank(), (&device(), DType::F16));
            let lengths = [5, 300_000];
            let model = lengths.map(|len| Param::from_tensor(Tensor::<1>::ones([len], options))).to_vec();
            let (mut model, ddp) = DataParallel::new(group, model).unwrap();
            let mut optimizer = ShardedOptimizer::new(&ddp, SgdConfig::new().init(), sharding).unwrap();
            let mut step = |value: f64, rate| {
                let mut grads = GradientsParams::new();
                for (parameter, len) in model.iter().zip(lengths) {
                    grads.register(parameter.id, Inner::<1>::full([len], value, (&inner_device(), DType::F16)));
                }
                optimizer.advance(rate, &mut model, grads, samples[rank]).unwrap();
                model
                    .iter()
                    .flat_map(|parameter| parameter.val().into_data().iter::<f64>().collect::<Vec<_>>())
                    .collect()
            };
            // 6e-8 is the smallest f16, 2^-24.
            [step(16384.0, 2f64.powi(-14)), step(6e-8, -(2f64.powi(15)))]
        });
        for [down, up] in steps {
            let wrong = |values: Vec<f64>, expected: f64| values.into_iter().find(|value| *value != expected);
            assert_eq!((wrong(down, 0.0), wrong(up, 2f64.powi(-9))), (None, None), "{samples:?}, {sharding:?}");
        }
    }
}

impl Mixed {
    fn new() -> Self {
        let device = &device();
        Mixed {
            half: Param::from_tensor(Tensor::ones([5], (device, DType::BF16))),
            single: Param::from_tensor(Tensor::ones([3, 3], (device, DType::F32))),
            double: Param::from_tensor(Tensor::ones([2], (device, DType::F64))),
        }
    }
}

#[test]
fn parameters_of_several_types_keep_their_type() {
    for sharding in [Sharding::All, Sharding::Blocks(2), Sharding::None] {
        ranks(4, |group| {
            let rank = group.rank();
            let (mut model, ddp) = DataParallel::new(group, Mixed::new()).unwrap();
            let mut optimizer = ShardedOptimizer::new(&ddp, SgdConfig::new().init(), sharding).unwrap();
            for _ in 0..2 {
                let grads = gradients(&model, |position, i| Some((4 * rank + position + i) as f64));
                optimizer.advance(0.5, &mut model, grads, 1).unwrap();
            }
            // The mean of 4 * rank is 6, and the rest is the same on all ranks.
            for ((position, data), dtype) in bits(&model).iter().enumerate().zip([DType::BF16, DType::F32, DType::F64])
            {
                assert_eq!(data.dtype(), dtype);
                let expected = (0..data.num_elements()).map(|i| 1.0 - (6 + position + i) as f64);
                assert_eq!(data.iter::<f64>().collect::<Vec<_>>(), expected.collect::<Vec<_>>());
            }
        });
    }
}

/// Elements of the parameters of `Odd` that are trained.
const ELEMENTS: usize = 1 + 3 + 35 + 257 * 257 + 66;

#[test]
fn state_shrinks_by_the_number_of_ranks_in_a_block() {
    let state = |n, sharding| {
        ranks(n, |group| {
            let (mut model, ddp) = DataParallel::new(group, Odd::new(DType::F32)).unwrap();
            let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), sharding).unwrap();
            assert_eq!(optimizer.state_bytes().unwrap(), 0);
            let grads = gradients(&model, |_, _| Some(1.0));
            optimizer.advance(0.1, &mut model, grads, 1).unwrap();
            optimizer.state_bytes().unwrap()
        })
    };
    // Two moments in f32.
    let whole = 2 * 4 * ELEMENTS;
    assert_eq!(state(2, Sharding::None), [whole; 2]);
    for (n, sharding, parts, most) in [
        (4, Sharding::All, 4, 0.3),
        (4, Sharding::Blocks(2), 2, 0.55),
        (6, Sharding::Blocks(3), 3, 0.34),
        (3, Sharding::All, 3, 0.34),
    ] {
        let bytes = state(n, sharding);
        for block in bytes.chunks(parts) {
            assert_eq!(block.iter().sum::<usize>(), whole, "{n} ranks, {sharding:?}");
        }
        let largest = *bytes.iter().max().unwrap();
        assert!(largest as f64 <= most * whole as f64, "{n} ranks, {sharding:?}: {largest} bytes of {whole}");
        // Balanced to one element of each moment and bucket.
        assert!(largest - bytes.iter().min().unwrap() <= 2 * 4 * 2, "{n} ranks, {sharding:?}: {bytes:?}");
    }
}
