//! Ranks with shards of a batch, compared with burn's own batch normalisation of the whole batch.

mod tails;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bonfire::tensor::autodiff::attempt;
use bonfire::{DataParallel, Error, Group, ReduceOp, ShardedSampler};
use bonfire::{SyncBatchNorm, SyncBatchNormConfig};
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex, NdArray};
use burn::module::{AutodiffModule, Module, ModuleDisplay, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::record::{BinBytesRecorder, DoublePrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData, activation};

use crate::InF64;

type Training = Autodiff<Flex>;
type Gradients = <Training as AutodiffBackend>::Gradients;

/// The samples of the global batch of the convolutional tests.
const BATCH: usize = 50;

/// The common interface of the two layers.
trait Norm<B: Backend>: Module<B> + ModuleDisplay {
    fn apply(&self, input: Tensor<B, 4>) -> Tensor<B, 4>;
    fn parameters(&self) -> [Tensor<B, 1>; 2];
    fn running(&self) -> [Tensor<B, 1>; 2];
}

macro_rules! norm {
    ($layer:ident) => {
        impl<B: Backend> Norm<B> for $layer<B> {
            fn apply(&self, input: Tensor<B, 4>) -> Tensor<B, 4> {
                self.forward(input)
            }

            fn parameters(&self) -> [Tensor<B, 1>; 2] {
                [self.gamma.val(), self.beta.val()]
            }

            fn running(&self) -> [Tensor<B, 1>; 2] {
                [self.running_mean.value_sync(), self.running_var.value_sync()]
            }
        }
    };
}

norm!(BatchNorm);
norm!(SyncBatchNorm);

#[derive(Module, Debug)]
struct Net<B: Backend, N: Module<B>> {
    conv1: Conv2d<B>,
    norm1: N,
    conv2: Conv2d<B>,
    norm2: N,
}

impl<B: Backend, N: Norm<B>> Net<B, N> {
    fn new(norm: impl Fn(usize) -> N, device: &B::Device) -> Self {
        let conv = |channels| Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same);
        Net { conv1: conv([2, 4]).init(device), norm1: norm(4), conv2: conv([4, 3]).init(device), norm2: norm(3) }
    }

    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 4> {
        let hidden = activation::tanh(self.norm1.apply(self.conv1.forward(images)));
        self.norm2.apply(self.conv2.forward(hidden))
    }
}

type SyncNet = Net<Training, SyncBatchNorm<Training>>;
type WholeNet = Net<Training, BatchNorm<Training>>;

fn sync_net(group: &Group) -> SyncNet {
    let device = Default::default();
    Net::new(|features| SyncBatchNormConfig::new(features).init(group, &device), &device).map(&mut InF64)
}

fn whole_net() -> WholeNet {
    let device = Default::default();
    Net::new(|features| BatchNormConfig::new(features).init(&device), &device).map(&mut InF64)
}

/// The results of a training step of a [`Net`]: outputs, gradient of the images, gradients of the parameters, and the
/// running statistics of both norms after it.
struct Step {
    output: Vec<f64>,
    images: Vec<f64>,
    parameters: Vec<Vec<f64>>,
    running: Vec<Vec<f64>>,
}

fn step<N: Norm<Training>>(net: &Net<Training, N>, step: usize, samples: Range<usize>) -> Step {
    let images = images(step, samples.clone()).require_grad();
    let output = net.forward(images.clone());
    let dims = output.dims();
    let weights = pattern(&dims, samples.start * dims[1] * dims[2] * dims[3]);
    // The rank's loss is the mean over its shard. The gradients below are those of the sum, which add up over ranks.
    let samples = samples.len() as f64;
    let gradients = (output.clone().powf_scalar(3.0) * weights).sum().mul_scalar(samples.recip()).backward();
    let scaled = |gradient: Vec<f64>| gradient.into_iter().map(|x| x * samples).collect::<Vec<f64>>();
    let conv = |conv: &Conv2d<Training>| {
        let bias = conv.bias.as_ref().expect("convolutions have a bias by default");
        [gradient(&conv.weight.val(), &gradients), gradient(&bias.val(), &gradients)].map(scaled)
    };
    let norm = |norm: &N| norm.parameters().map(|parameter| scaled(gradient(&parameter, &gradients)));
    Step {
        output: values(output),
        images: scaled(gradient(&images, &gradients)),
        parameters: [conv(&net.conv1), norm(&net.norm1), conv(&net.conv2), norm(&net.norm2)].concat(),
        running: [net.norm1.running(), net.norm2.running()].concat().into_iter().map(values).collect(),
    }
}

#[test]
fn shards_of_any_size_match_the_whole_batch() {
    for ranks in 1..=4 {
        let weights = saved(whole_net());
        let whole = loaded(whole_net(), &weights);
        let expected: Vec<Step> = (0..3).map(|i| step(&whole, i, 0..BATCH)).collect();
        let shards = on_ranks(ranks, move |group| {
            let net = loaded(sync_net(&group), &weights);
            (0..3).map(|i| step(&net, i, shard(&group))).collect::<Vec<Step>>()
        });
        for (i, expected) in expected.iter().enumerate() {
            let steps: Vec<&Step> = shards.iter().map(|steps| &steps[i]).collect();
            let joined =
                |part: fn(&Step) -> &Vec<f64>| steps.iter().flat_map(|&step| part(step)).copied().collect::<Vec<_>>();
            assert_close(&joined(|step| &step.output), &expected.output, 1e-10);
            assert_close(&joined(|step| &step.images), &expected.images, 1e-10);
            for (p, expected) in expected.parameters.iter().enumerate() {
                let sum = |e: usize| steps.iter().map(|step| step.parameters[p][e]).sum();
                assert_close(&(0..expected.len()).map(sum).collect::<Vec<f64>>(), expected, 1e-10);
            }
            for step in &steps {
                assert_eq!(step.running, steps[0].running, "running statistics are bit-identical on all ranks");
                for (running, expected) in step.running.iter().zip(&expected.running) {
                    assert_close(running, expected, 1e-12);
                }
            }
        }
    }
}

#[test]
fn one_rank_matches_burns_batch_norm() {
    let device = Default::default();
    let group = Group::threads(1).expect("a group").remove(0);
    let burns = BatchNormConfig::new(3).with_momentum(0.3).init::<Training>(&device).map(&mut InF64);
    let ours = SyncBatchNormConfig::new(3).with_momentum(0.3).init::<Training>(&group, &device).map(&mut InF64);
    let input = |step: usize| pattern::<Training, 3>(&[5, 3, 4], step * 31).mul_scalar(2.0).add_scalar(7.0);
    for step in 0..3 {
        let inputs = [input(step).require_grad(), input(step).require_grad()];
        let outputs = [burns.forward(inputs[0].clone()), ours.forward(inputs[1].clone())];
        let gradients = outputs.clone().map(|output| (output.clone().powf_scalar(2.0) * output).sum().backward());
        let [expected, got] = [0, 1].map(|i| gradient(&inputs[i], &gradients[i]));
        assert_close(&got, &expected, 1e-12);
        for (ours, burns) in [(&ours.gamma, &burns.gamma), (&ours.beta, &burns.beta)] {
            assert_close(&gradient(&ours.val(), &gradients[1]), &gradient(&burns.val(), &gradients[0]), 1e-12);
        }
        let [expected, got] = outputs.map(values);
        assert_eq!(got, expected);
    }
    let (burns, ours) = (burns.valid(), ours.valid());
    assert_eq!(values(ours.running_mean.value()), values(burns.running_mean.value()));
    assert_eq!(values(ours.running_var.value()), values(burns.running_var.value()));
    assert_eq!(values(ours.forward(input(9).inner())), values(burns.forward(input(9).inner())));
    assert_eq!(format!("{ours}").replace("Sync", ""), format!("{burns}"));
}

#[test]
fn validation_needs_no_other_rank_and_training_goes_on_synchronised() {
    type Checkpointed = Autodiff<Flex, BalancedCheckpointing>;
    let running = on_ranks(2, |group| {
        let layer = SyncBatchNormConfig::new(2).init::<Training>(&group, &Default::default());
        let valid = layer.map(&mut InF64).valid();
        if group.rank() == 0 {
            valid.forward(images(0, 0..BATCH).inner());
        }
        let layer = valid.train::<Checkpointed>();
        let images = Tensor::<Checkpointed, 4>::from_inner(images(0, shard(&group)).inner()).require_grad();
        layer.forward(images).powf_scalar(3.0).sum().backward();
        values(layer.running_mean.value_sync())
    });
    assert_eq!(running[0], running[1]);
}

#[test]
fn records_are_interchangeable_with_burns_batch_norm() {
    fn exchange<R: Recorder<Flex, RecordArgs = (), RecordOutput = Vec<u8>, LoadArgs = Vec<u8>>>(recorder: R) {
        let device = Default::default();
        let group = Group::threads(1).expect("a group").remove(0);
        let trained = SyncBatchNormConfig::new(3).init::<Training>(&group, &device);
        trained.forward(pattern::<Training, 3>(&[5, 3, 4], 0).cast(DType::F32));
        let input = pattern::<Flex, 3>(&[5, 3, 4], 1).cast(DType::F32);
        let expected = values(trained.valid().forward(input.clone()));

        let record = recorder.record(trained.valid().into_record(), ()).expect("recorded");
        let record = recorder.load(record, &device).expect("burn's layer reads ours");
        let burns = BatchNormConfig::new(3).init::<Flex>(&device).load_record(record);
        assert_eq!(values(burns.forward(input.clone())), expected);

        let record = recorder.record(burns.into_record(), ()).expect("recorded");
        let record = recorder.load(record, &device).expect("our layer reads burn's");
        let ours = SyncBatchNormConfig::new(3).init_inference::<Flex>(&device).load_record(record);
        assert_eq!(values(ours.forward(input)), expected);
    }
    exchange(BinBytesRecorder::<DoublePrecisionSettings>::default());
    exchange(NamedMpkBytesRecorder::<DoublePrecisionSettings>::default());
}

#[test]
fn f32_keeps_a_small_variance_beside_a_large_mean() {
    type Single = Autodiff<NdArray>;
    let input = pattern::<NdArray, 2>(&[BATCH, 1], 0).cast(DType::F32).mul_scalar(0.1).add_scalar(3000.0);
    let exact: Vec<f64> = values(input.clone());
    let mean = exact.iter().sum::<f64>() / BATCH as f64;
    let var = exact.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / BATCH as f64;
    let running = on_ranks(3, move |group| {
        let layer = SyncBatchNormConfig::new(1).with_momentum(1.0).init::<Single>(&group, &Default::default());
        layer.forward(Tensor::<Single, 2>::from_inner(input.clone().slice([shard(&group)])));
        values(layer.running_var.value_sync())[0]
    });
    // The mean of NdArray depends on the width of the CPU's vectors: with 512 bits it is wrong by six units in the last
    // place, whose square is 5e-4 of the variance. A difference of sums of squares would be wrong by 100 variances.
    assert!((running[0] / var - 1.0).abs() < 1e-2, "{} instead of {var}", running[0]);
}

#[test]
fn sixteen_bit_inputs_are_normalised_in_f32() {
    // A channel has more elements than f16 can count, and their sum is larger than f16 can hold.
    let shape = [BATCH, 1, 1600];
    let input = pattern::<Flex, 3>(&shape, 0).add_scalar(10.0).cast(DType::F32);
    let expected =
        BatchNormConfig::new(1).init::<Training>(&Default::default()).forward(Tensor::from_inner(input.clone()));
    for dtype in [DType::F16, DType::BF16] {
        let input = input.clone();
        let outputs = on_ranks(2, move |group| {
            let layer = SyncBatchNormConfig::new(1).init::<Training>(&group, &Default::default());
            let shard =
                Tensor::<Training, 3>::from_inner(input.clone().slice([shard(&group)]).cast(dtype)).require_grad();
            let output = layer.forward(shard.clone());
            let gradients = output.clone().powf_scalar(3.0).sum().backward();
            assert!([output.dtype(), shard.grad(&gradients).expect("tracked").dtype()] == [dtype; 2]);
            values(output)
        });
        // Inputs are near 10, where bf16 has steps of 1/16, a tenth of their deviation.
        assert_close(&outputs.concat(), &values(expected.clone()), if dtype == DType::F16 { 0.02 } else { 0.12 });
    }
}

#[test]
fn a_rank_without_samples_takes_part() {
    let gammas = on_ranks(3, |group| {
        let layer = SyncBatchNormConfig::new(2).init::<Training>(&group, &Default::default()).map(&mut InF64);
        let samples = [0..3, 3..3, 3..5][group.rank()].clone();
        let input = pattern::<Flex, 3>(&[5, 2, 4], 0);
        let none = || Tensor::empty([0, 2, 4], (&Default::default(), DType::F64));
        let input = if samples.is_empty() { none() } else { input.slice([samples]) };
        let input = Tensor::<Training, 3>::from_inner(input).require_grad();
        let gradients = layer.forward(input).powf_scalar(3.0).sum().backward();
        (values(layer.running_var.value_sync()), gradient(&layer.gamma.val(), &gradients))
    });
    let whole = BatchNormConfig::new(2).init::<Training>(&Default::default()).map(&mut InF64);
    let gradients = whole.forward(pattern::<Training, 3>(&[5, 2, 4], 0)).powf_scalar(3.0).sum().backward();
    for (running, _) in &gammas {
        assert_close(running, &values(whole.running_var.value_sync()), 1e-12);
    }
    assert_eq!(gammas[1].1, [0.0, 0.0]);
    let sum: Vec<f64> = (0..2).map(|channel| gammas.iter().map(|(_, gamma)| gamma[channel]).sum()).collect();
    assert_close(&sum, &gradient(&whole.gamma.val(), &gradients), 1e-12);
}

#[test]
#[should_panic(expected = "a layer for inference cannot train")]
fn an_inference_layer_does_not_train() {
    let layer = SyncBatchNormConfig::new(2).init_inference::<Training>(&Default::default());
    layer.forward(Tensor::<Training, 2>::ones([3, 2], &Default::default()));
}

#[test]
fn a_backward_pass_that_peers_skip_panics_with_the_error_or_returns_it() {
    let outcomes =
        on_ranks_of(Group::builder().deadline(Duration::from_millis(300)).threads(2).expect("a group"), |group| {
            let output = sync_net(&group).forward(images(0, shard(&group)).require_grad());
            let backward = || {
                if group.rank() == 0 {
                    drop(output.sum().backward())
                }
            };
            let panics = catch_unwind(AssertUnwindSafe(backward))
                .map_err(|panic| panic.downcast_ref::<String>().cloned().unwrap_or_default());
            let attempted = || attempt(|| sync_net(&group).forward(images(0, shard(&group)))).map(drop);
            (panics, if group.rank() == 0 { attempted() } else { Ok(()) })
        });
    // Rank 1 is missing or has left, whichever is seen first.
    let error = outcomes[0].1.clone().unwrap_err();
    assert!(matches!(error, bonfire::Error::Timeout { .. } | bonfire::Error::Left { .. }), "{error}");
    assert!(error.to_string().contains("rank 1"), "{error}");
    assert_eq!((&outcomes[0].0, &outcomes[1].0), (&Err(error.to_string()), &Ok(())));
    // The panic has released the locks of burn-autodiff.
    drop(whole_net().forward(images(0, 0..2)).sum().backward());
}

#[test]
fn threads_train_for_hundreds_of_steps_beside_other_backward_passes() {
    let trained = Arc::new(AtomicBool::new(false));
    let bystander = {
        let trained = trained.clone();
        std::thread::spawn(move || {
            let net = whole_net();
            while !trained.load(Ordering::Relaxed) {
                net.forward(images(0, 0..4)).sum().backward();
            }
        })
    };
    let running = on_ranks(4, |group| {
        let mut net = sync_net(&group);
        let mut optimizer = SgdConfig::new().init();
        for step in 0..300 {
            let loss = net.forward(images(step, shard(&group))).powf_scalar(4.0).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(1e-5, net, gradients);
        }
        net.norm1.running().map(values)
    });
    trained.store(true, Ordering::Relaxed);
    bystander.join().expect("no panic");
    assert!(running.iter().all(|of_rank| *of_rank == running[0]));
}

#[test]
fn threads_go_backward_twice_with_a_collective_between() {
    on_ranks(2, |group| {
        let layer = SyncBatchNormConfig::new(2).init::<Training>(&group, &Default::default()).map(&mut InF64);
        for step in 0..1000 {
            let losses = [0, 1].map(|pass| {
                let images = images(step + pass, shard(&group)).require_grad();
                layer.forward(images).powf_scalar(3.0).sum()
            });
            for loss in losses {
                loss.backward();
                group.all_reduce(&mut [0.0f32], ReduceOp::Sum).expect("all ranks are here");
            }
        }
    });
}

/// Runs `body` on a thread per rank and returns the results by rank. Fails if a rank hangs.
fn on_ranks<T: Send + 'static>(ranks: usize, body: impl Fn(Group) -> T + Send + Clone + 'static) -> Vec<T> {
    on_ranks_of(Group::threads(ranks).expect("a group"), body)
}

fn on_ranks_of<T: Send + 'static>(groups: Vec<Group>, body: impl Fn(Group) -> T + Send + Clone + 'static) -> Vec<T> {
    let ranks = groups.into_iter().map(|group| {
        let (done, outcome) = mpsc::channel();
        let body = body.clone();
        std::thread::spawn(move || done.send(body(group)));
        outcome
    });
    let wait =
        |outcome: mpsc::Receiver<T>| outcome.recv_timeout(Duration::from_secs(120)).expect("a rank hangs or failed");
    ranks.collect::<Vec<_>>().into_iter().map(wait).collect()
}

/// This rank's samples: divided as evenly as possible, the first ranks take the remainder.
fn shard(group: &Group) -> Range<usize> {
    let (each, rest) = (BATCH / group.world_size(), BATCH % group.world_size());
    let start = |rank: usize| rank * each + rank.min(rest);
    start(group.rank())..start(group.rank() + 1)
}

fn images(step: usize, samples: Range<usize>) -> Tensor<Training, 4> {
    pattern(&[samples.len(), 2, 5, 5], 1000 * step + 50 * samples.start)
}

/// Irregular numbers, in f64, of deviation 0.7 around 0, from an endless sequence, beginning at `start`.
fn pattern<B: Backend, const D: usize>(shape: &[usize; D], start: usize) -> Tensor<B, D> {
    let count = shape.iter().product::<usize>();
    let numbers = (start..start + count).map(|i| ((i * i % 9973) as f64 * 1.7 + i as f64 * 0.61).sin()).collect();
    Tensor::from_data(TensorData::new::<f64, _>(numbers, *shape), (&Default::default(), DType::F64))
}

fn gradient<const D: usize>(tensor: &Tensor<Training, D>, gradients: &Gradients) -> Vec<f64> {
    values(tensor.grad(gradients).expect("the tensor is tracked"))
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

fn saved<N: Norm<Training>>(net: Net<Training, N>) -> Vec<u8> {
    let recorder = BinBytesRecorder::<DoublePrecisionSettings>::default();
    Recorder::<Training>::record(&recorder, net.into_record(), ()).expect("recorded")
}

fn loaded<N: Norm<Training>>(net: Net<Training, N>, record: &[u8]) -> Net<Training, N> {
    let recorder = BinBytesRecorder::<DoublePrecisionSettings>::default();
    net.load_record(recorder.load(record.to_vec(), &Default::default()).expect("loaded")).map(&mut InF64)
}

#[track_caller]
fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs() / expected.abs().max(1.0);
        assert!(error <= tolerance, "element {i} is {got} instead of {expected}");
    }
}
