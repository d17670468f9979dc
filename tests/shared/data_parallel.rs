//! Several ranks train as one: gradients, parameters, metrics and states, on the digits and on small models.

use bonfire::{Error, Group, ShardedSampler};
use bonfire_testing::ranks;
use burn::module::{Param, RunningState, list_param_ids};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LinearConfig, LinearLayout};
use burn::optim::{AdamConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::{Bool, DType, Int, TensorData};

use crate::burn_version::*;
use crate::digits::{Digits, PIXELS};

models! {
    /// Two layers on the digits.
    struct Mlp {
        hidden: Linear,
        output: Linear,
    }

    /// Parameters that a step may or may not use.
    struct Used {
        all: Param<Tensor<1>>,
        some: Param<Tensor<2>>,
        none: Param<Tensor<3>>,
    }

    /// One of each kind of parameter.
    struct Kinds {
        first: Linear,
        steps: Param<Tensor<1, Int>>,
        mask: Param<Tensor<1, Bool>>,
        frozen: Param<Tensor<1>>,
        state: RunningState<Tensor<1>>,
    }
}

impl Mlp {
    /// Deterministic weights, which differ between ranks at first.
    fn new(rank: usize, dtype: DType) -> Self {
        Mlp { hidden: linear(PIXELS, 32, 0.2 + rank as f64, dtype), output: linear(32, 10, 0.3, dtype) }
    }

    fn forward(&self, images: Tensor<2>) -> Tensor<2> {
        self.output.forward(self.hidden.forward(images).tanh())
    }
}

fn linear(inputs: usize, outputs: usize, scale: f64, dtype: DType) -> Linear {
    let mut linear = LinearConfig::new(inputs, outputs).init(&device());
    linear.weight = Param::from_tensor(waves([inputs, outputs], scale, dtype));
    linear.bias = Some(Param::from_tensor(waves([outputs], scale, dtype)));
    linear
}

fn waves<const D: usize>(shape: [usize; D], scale: f64, dtype: DType) -> Tensor<D> {
    let values = (0..shape.iter().product()).map(|i| scale * (i as f64 * 12.9898).sin());
    Tensor::from_data(TensorData::new(values.collect::<Vec<f64>>(), shape), (&device(), dtype))
}

/// Every float parameter's bytes, in visiting order.
fn bits<M: Model>(model: &M) -> Vec<TensorData> {
    floats(model).into_iter().map(|parameter| parameter.data).collect()
}

/// What one rank saw of a training.
struct Run {
    /// The mean loss over all ranks of each step.
    losses: Vec<f64>,
    /// The parameters after each step.
    steps: Vec<Vec<TensorData>>,
    accuracy: f64,
}

fn train(group: Group, dtype: DType, digits: &Digits, test: &Digits, batch: usize, epochs: usize) -> Run {
    let model = Mlp::new(group.rank(), dtype);
    let (mut model, ddp) = DataParallel::new(group.clone(), model).unwrap();
    let mut optimizer = AdamConfig::new().init();
    let sampler = ShardedSampler::new(&group, digits.len(), batch).unwrap().seed(1);
    let (mut losses, mut steps) = (Vec::new(), Vec::new());
    for epoch in 0..epochs {
        for shard in sampler.epoch(epoch).unwrap() {
            let (mut grads, mut loss) = (GradientsParams::new(), f64::NAN);
            if !shard.is_empty() {
                let (images, labels) = tensors(digits, &shard, dtype);
                let criterion = CrossEntropyLossConfig::new().init(&device());
                let forward = criterion.forward(model.forward(images), labels);
                loss = forward.to_data().iter::<f64>().next().unwrap();
                grads = GradientsParams::from_grads(forward.backward(), &model);
            }
            let grads = ddp.sync(&model, grads, shard.len()).unwrap();
            model = optimizer.step(0.01, model, grads);
            losses.push(ddp.mean(&[loss], shard.len()).unwrap()[0]);
            steps.push(bits(&model));
        }
    }
    let (images, labels) = tensors(test, &(0..test.len()).collect::<Vec<_>>(), dtype);
    let right = model.forward(images).argmax(1).squeeze_dim::<1>(1).equal(labels).int().sum().into_data();
    let right = right.iter::<f64>().next().unwrap();
    Run { losses, steps, accuracy: right / test.len() as f64 }
}

fn tensors(digits: &Digits, chosen: &[usize], dtype: DType) -> (Tensor<2>, Tensor<1, Int>) {
    let device = &device();
    let images: Vec<f32> = chosen.iter().flat_map(|&i| digits.images[i]).collect();
    let labels: Vec<i64> = chosen.iter().map(|&i| i64::from(digits.labels[i])).collect();
    let images = Tensor::from_data(TensorData::new(images, [chosen.len(), PIXELS]), (device, dtype));
    (images, Tensor::from_data(TensorData::new(labels, [chosen.len()]), device))
}

fn first(digits: Digits, len: usize) -> Digits {
    Digits { images: digits.images[..len].to_vec(), labels: digits.labels[..len].to_vec() }
}

fn close(a: &[TensorData], b: &[TensorData], tolerance: f64) -> bool {
    let values =
        |bits: &[TensorData]| bits.iter().flat_map(|data| data.iter::<f64>().collect::<Vec<_>>()).collect::<Vec<_>>();
    values(a).iter().zip(values(b)).all(|(a, b)| (a - b).abs() <= tolerance)
}

#[test]
fn any_number_of_ranks_trains_as_one_in_f64() {
    let (digits, test) = Digits::load().unwrap();
    // The last batch of 201 is a single image: most ranks have none.
    let digits = first(digits, 201);
    let one = ranks(1, |group| train(group, DType::F64, &digits, &test, 50, 10)).remove(0);
    assert_eq!(one.losses.len(), 50);
    for n in 2..=4 {
        for run in ranks(n, |group| train(group, DType::F64, &digits, &test, 50, 10)) {
            for step in 0..one.losses.len() {
                assert!((run.losses[step] - one.losses[step]).abs() < 1e-9, "{n} ranks, step {step}");
                assert!(close(&run.steps[step], &one.steps[step], 1e-9), "{n} ranks, step {step}");
            }
        }
    }
}

#[test]
fn any_number_of_ranks_trains_as_one_in_f32() {
    let (digits, test) = Digits::load().unwrap();
    let one = ranks(1, |group| train(group, DType::F32, &digits, &test, 64, 15)).remove(0);
    assert!(one.accuracy > 0.93, "{}", one.accuracy);
    let five_epochs = one.losses.len() / 3;
    for n in 2..=4 {
        let runs = ranks(n, |group| train(group, DType::F32, &digits, &test, 64, 15));
        for run in &runs {
            assert!(run.steps == runs[0].steps, "{n} ranks: parameters differ");
            assert!((run.accuracy - one.accuracy).abs() <= 0.01, "{n} ranks: {} {}", run.accuracy, one.accuracy);
            for (ours, theirs) in run.losses.iter().zip(&one.losses).take(five_epochs) {
                assert!((ours - theirs).abs() < 1e-4, "{n} ranks: {ours} {theirs}");
            }
        }
    }
}

impl Used {
    fn new(dtype: DType) -> Self {
        fn ones<const D: usize>(shape: [usize; D], dtype: DType) -> Param<Tensor<D>> {
            Param::from_tensor(Tensor::ones(shape, (&device(), dtype)))
        }
        Used { all: ones([4], dtype), some: ones([2, 3], dtype), none: ones([1, 2, 1], dtype) }
    }
}

#[test]
fn a_missing_gradient_counts_as_zero_and_one_missing_on_all_ranks_stays_missing() {
    ranks(3, |group| {
        let rank = group.rank();
        let (model, ddp) = DataParallel::new(group, Used::new(DType::F32)).unwrap();
        for _ in 0..2 {
            // Weighted by 1, 2 and 3 samples: (1*1 + 2*2 + 3*3) / 6 and, from rank 1 alone, 5*2 / 6.
            let mut loss = model.all.val().sum() * (rank + 1) as f32;
            if rank == 1 {
                loss = loss + model.some.val().sum() * 5.0;
            }
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let grads = ddp.sync(&model, grads, rank + 1).unwrap();
            assert_eq!(grads.len(), 2);
            let all = gradient::<1>(&grads, model.all.id).unwrap().into_data();
            all.assert_approx_eq::<f32>(&TensorData::from([14.0f32 / 6.0; 4]), Default::default());
            let some = gradient::<2>(&grads, model.some.id).unwrap().into_data();
            some.assert_approx_eq::<f32>(&TensorData::from([[10.0f32 / 6.0; 3]; 2]), Default::default());
            assert!(gradient::<3>(&grads, model.none.id).is_none());
        }
    });
}

#[test]
fn gradients_keep_their_float_type() {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        ranks(2, |group| {
            let rank = group.rank();
            let (model, ddp) = DataParallel::new(group, Used::new(dtype)).unwrap();
            let mut grads = GradientsParams::new();
            let ones = || Inner::<1>::ones([4], (&inner_device(), dtype));
            // 3/4 and 1/4 of the samples: weights 1.5 and 0.5 before the mean, exact in every type.
            grads.register(model.all.id, ones() * if rank == 0 { 2.0 } else { 6.0 });
            let grads = ddp.sync(&model, grads, if rank == 0 { 3 } else { 1 }).unwrap();
            let all = gradient::<1>(&grads, model.all.id).unwrap();
            assert_eq!(all.dtype(), dtype);
            assert_eq!(all.into_data().iter::<f64>().collect::<Vec<_>>(), [3.0; 4]);
        });
    }
}

#[test]
fn a_mean_in_the_range_of_the_element_type_stays_in_range_on_the_way() {
    let limits = [
        (DType::F16, 65504.0, 6e-8),
        (DType::BF16, 3e38, 1e-38),
        (DType::F32, 3e38, 1e-38),
        (DType::F64, 1e308, 1e-308),
    ];
    for (dtype, large, small) in limits {
        for samples in [[64, 0, 0, 0], [63, 1, 0, 0], [17, 17, 17, 16], [1, 1, 1, 61]] {
            for value in [large, small, -large] {
                let means = ranks(4, |group| {
                    let samples = samples[group.rank()];
                    let model = Used::new(dtype);
                    let (model, ddp) = DataParallel::new(group, model).unwrap();
                    let mut grads = GradientsParams::new();
                    let all = Inner::<1>::full([4], value, (&inner_device(), dtype));
                    let expected = all.clone().into_data().iter::<f64>().collect::<Vec<_>>();
                    grads.register(model.all.id, all);
                    let grads = ddp.sync(&model, grads, samples).unwrap();
                    let mean = gradient::<1>(&grads, model.all.id).unwrap();
                    assert_eq!(mean.dtype(), dtype);
                    (mean.into_data().iter::<f64>().collect::<Vec<_>>(), expected)
                });
                for (mean, expected) in means {
                    let close = mean.iter().zip(&expected).all(|(a, b)| (a / b - 1.0).abs() < 0.01);
                    assert!(close, "{dtype:?}, samples {samples:?}: the mean of {expected:?} is {mean:?}");
                    assert!(dtype != DType::F16 || mean == expected, "{mean:?} was rounded on the way to {expected:?}");
                }
            }
        }
    }
}

#[test]
fn equal_samples_give_the_plain_mean() {
    ranks(2, |group| {
        let rank = group.rank();
        let (model, ddp) = DataParallel::new(group, Used::new(DType::F32)).unwrap();
        let mut grads = GradientsParams::new();
        grads.register(model.all.id, Inner::<1>::full([4], [0.1f32, 0.7][rank], &inner_device()));
        let grads = ddp.sync(&model, grads, 7).unwrap();
        assert_eq!(
            gradient::<1>(&grads, model.all.id).unwrap().into_data(),
            TensorData::from([(0.1f32 + 0.7) / 2.0; 4])
        );
    });
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    let gradient = |n| {
        ranks(n, |group| {
            let rank = group.rank();
            let (model, ddp) = DataParallel::new(group, linear(3, 2, 0.5, DType::F64)).unwrap();
            let input = waves::<2>([12, 3], 1.0, DType::F64);
            let own = input.slice(bonfire::partition(12, n, rank));
            let samples = own.dims()[0];
            let mut accumulator = GradientsAccumulator::new();
            for part in own.split(2, 0) {
                let weight = part.dims()[0] as f64 / samples as f64;
                let loss = model.forward(part).powi_scalar(2).sum_dim(1).mean() * weight;
                accumulator.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
            }
            let grads = ddp.sync(&model, accumulator.grads(), samples).unwrap();
            gradient::<2>(&grads, model.weight.id).unwrap().into_data().iter::<f64>().collect::<Vec<_>>()
        })
    };
    let one = gradient(1).remove(0);
    for many in gradient(5) {
        assert!(one.iter().zip(&many).all(|(a, b)| (a - b).abs() < 1e-12), "{one:?} {many:?}");
    }
}

#[test]
fn a_rank_without_samples_has_no_weight_and_no_samples_at_all_is_an_error() {
    ranks(2, |group| {
        let rank = group.rank();
        let (model, ddp) = DataParallel::new(group, Used::new(DType::F32)).unwrap();
        let nan = || {
            let mut grads = GradientsParams::new();
            grads.register(model.all.id, Inner::<1>::full([4], f32::NAN, &inner_device()));
            grads
        };
        assert!(matches!(ddp.sync(&model, nan(), 0), Err(Error::InvalidArgument { .. })));
        assert!(matches!(ddp.mean(&[1.0], 0), Err(Error::InvalidArgument { .. })));
        // The group is still usable.
        let mut grads = nan();
        if rank == 0 {
            grads.register(model.all.id, Inner::<1>::full([4], 2.0, &inner_device()));
        }
        let samples = [3, 0][rank];
        let grads = ddp.sync(&model, grads, samples).unwrap();
        assert_eq!(gradient::<1>(&grads, model.all.id).unwrap().into_data(), TensorData::from([2.0f32; 4]));
        assert_eq!(ddp.mean(&[[0.5, f64::NAN][rank], 1.0], samples).unwrap(), [0.5, 1.0]);
    });
}

#[test]
fn metrics_are_weighted_by_samples() {
    ranks(3, |group| {
        let rank = group.rank();
        let (_, ddp) = DataParallel::new(group, Used::new(DType::F32)).unwrap();
        let [loss, accuracy] = ddp.mean(&[rank as f64, 1.0], [17, 17, 16][rank]).unwrap();
        assert_eq!((loss, accuracy), ((17.0 + 32.0) / 50.0, 1.0));
    });
}

#[test]
fn gradients_that_do_not_fit_the_model_are_rejected_on_all_ranks() {
    ranks(2, |group| {
        let rank = group.rank();
        let (model, ddp) = DataParallel::new(group, Used::new(DType::F32)).unwrap();
        let refused = |id, len| {
            let mut grads = GradientsParams::new();
            if rank == 1 {
                grads.register(id, Inner::<1>::ones([len], &inner_device()));
            }
            ddp.sync(&model, grads, 1).unwrap_err().to_string()
        };
        let error = refused(model.all.id, 5);
        assert!(error.contains("rank 1's gradient of `all`"), "{error}");
        let error = refused(burn::module::ParamId::new(), 4);
        assert!(error.contains("rank 1 has gradients of parameters"), "{error}");
    });
}

impl Kinds {
    fn new(value: f64, outputs: usize, dtype: DType) -> Self {
        let device = &device();
        let mask = Tensor::<1>::full([3], value, device).equal_elem(0.0);
        Kinds {
            first: LinearConfig::new(4, outputs).with_layout(LinearLayout::Col).init(device),
            steps: Param::initialized(Default::default(), Tensor::full([2], value as i64, device)),
            mask: Param::initialized(Default::default(), mask),
            frozen: Param::from_tensor(Tensor::full([2], value, (device, dtype))).set_require_grad(false),
            state: RunningState::new(Tensor::full([2], value, (device, dtype))),
        }
    }
}

#[test]
fn ranks_start_with_rank_0s_parameters_of_every_kind_and_their_own_ids() {
    let models = ranks(3, |group| {
        let model = Kinds::new(group.rank() as f64, 5, DType::F32);
        let ids = list_param_ids(&model);
        let (model, _) = DataParallel::new(group, model).unwrap();
        assert_eq!(list_param_ids(&model), ids);
        assert!(model.first.weight.is_require_grad() && !model.frozen.is_require_grad());
        model
    });
    for model in &models {
        assert_eq!(bits(model), bits(&models[0]));
        assert_eq!(model.steps.to_data(), TensorData::from([0i64; 2]).convert_dtype(model.steps.dtype()));
        assert_eq!(model.mask.to_data(), TensorData::from([true; 3]));
        assert_eq!(model.state.value().to_data(), TensorData::from([0.0f32; 2]));
        // The layout's mappings for loading and saving are still there: a record holds the weight as `[4, 5]`.
        let saved = model.first.weight.transform_for_save().val();
        assert_ne!(saved.shape(), model.first.weight.shape());
        assert_eq!(saved.into_data(), models[0].first.weight.transform_for_save().val().into_data());
    }
}

#[test]
fn unequal_models_are_named_on_every_rank() {
    let errors = ranks(3, |group| {
        let outputs = if group.rank() == 2 { 6 } else { 5 };
        DataParallel::new(group, Kinds::new(0.0, outputs, DType::F32)).unwrap_err().to_string()
    });
    for error in &errors {
        assert_eq!(error, &errors[0]);
        assert!(error.contains("rank 0 has `first.weight`: trained float f32 [4, 5]"), "{error}");
        assert!(error.contains("rank 2 has `first.weight`: trained float f32 [4, 6]"), "{error}");
    }
    // The error comes before anything else, so the group stays usable.
    let errors = ranks(2, |group| {
        let layers = |n| (0..n).map(|_| linear(2, 2, 1.0, DType::F32)).collect::<Vec<_>>();
        let error = DataParallel::new(group.clone(), layers(2 - group.rank())).unwrap_err().to_string();
        assert!(DataParallel::new(group, layers(1)).is_ok());
        error
    });
    assert!(errors[1].contains("rank 0 has `1.weight`: trained float f32 [2, 2]"), "{}", errors[1]);
    assert!(errors[1].contains("rank 1 has nothing"), "{}", errors[1]);
}

#[test]
fn clones_of_one_model_train_independently() {
    let shared = Kinds::new(1.0, 5, DType::F32);
    ranks(2, |group| {
        let (rank, barrier) = (group.rank(), group.clone());
        let (model, _) = DataParallel::new(group, shared.clone()).unwrap();
        model.state.update(Tensor::full([2], rank as f32, &device()));
        barrier.barrier().unwrap();
        assert_eq!(model.state.value_sync().into_data(), TensorData::from([rank as f32; 2]));
    });
}

#[test]
fn states_that_differ_are_averaged_and_the_rest_keeps_its_bits() {
    let models = ranks(3, |group| {
        let rank = group.rank();
        let device = device();
        // The mean of three copies of this number is a different number in f64.
        let model = Kinds::new(0.1, 5, DType::F64);
        let (model, ddp) = DataParallel::new(group, model).unwrap();
        let before = bits(&model);
        let model = ddp.average_states(model).unwrap();
        assert_eq!(bits(&model), before);

        // The second update is pending when it is averaged.
        model.state.update(Tensor::full([2], 100.0, (&device, DType::F64)));
        model.state.update(Tensor::full([2], rank as f64 * 2.0, (&device, DType::F64)));
        let model = ddp.average_states(model).unwrap();
        assert_eq!(model.state.value_sync().into_data(), TensorData::from([2.0f64; 2]));
        assert_eq!(bits(&model)[..3], before[..3]);
        model
    });
    assert!(models.iter().all(|model| bits(model) == bits(&models[0])));
}
