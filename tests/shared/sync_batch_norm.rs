//! Ranks with shards of a batch, compared with burn's own batch normalisation of the whole batch.

mod ranks;
mod tails;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bonfire::{Error, Group, ReduceOp, ShardedSampler, SyncBatchNormConfig};
use burn::module::Param;
use burn::nn::conv::Conv2dConfig;
use burn::nn::{BatchNormConfig, LinearConfig, PaddingConfig2d};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, TensorData, activation};

use super::in_f64;
use crate::burn_version::*;

/// The samples of the global batch of the convolutional tests.
const BATCH: usize = 50;

models! {
    struct SyncNet {
        conv1: Conv2d,
        norm1: SyncBatchNorm,
        conv2: Conv2d,
        norm2: SyncBatchNorm,
    }

    struct WholeNet {
        conv1: Conv2d,
        norm1: BatchNorm,
        conv2: Conv2d,
        norm2: BatchNorm,
    }
}

/// What the two nets have in common.
trait Net: Model {
    fn forward(&self, images: Tensor<4>) -> Tensor<4>;
    /// The weight of each convolution; its bias, and the scale and offset of the normalisation behind it.
    fn parameters(&self) -> Vec<(Tensor<4>, [Tensor<1>; 3])>;
    fn running(&self) -> [Tensor<1>; 4];
}

macro_rules! net {
    ($net:ident) => {
        impl Net for $net {
            fn forward(&self, images: Tensor<4>) -> Tensor<4> {
                let hidden = activation::tanh(self.norm1.forward(self.conv1.forward(images)));
                self.norm2.forward(self.conv2.forward(hidden))
            }

            fn parameters(&self) -> Vec<(Tensor<4>, [Tensor<1>; 3])> {
                let bias = |conv: &Conv2d| conv.bias.as_ref().expect("convolutions have a bias by default").val();
                let of = |conv: &Conv2d, scales: [Tensor<1>; 2]| {
                    let [gamma, beta] = scales;
                    (conv.weight.val(), [bias(conv), gamma, beta])
                };
                vec![
                    of(&self.conv1, [self.norm1.gamma.val(), self.norm1.beta.val()]),
                    of(&self.conv2, [self.norm2.gamma.val(), self.norm2.beta.val()]),
                ]
            }

            fn running(&self) -> [Tensor<1>; 4] {
                let ([first, second], [third, fourth]) = (
                    [&self.norm1.running_mean, &self.norm1.running_var],
                    [&self.norm2.running_mean, &self.norm2.running_var],
                );
                [first, second, third, fourth].map(|state| state.value_sync())
            }
        }
    };
}

net!(SyncNet);
net!(WholeNet);

fn convolution(channels: [usize; 2]) -> Conv2d {
    Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(&device())
}

fn sync_net(group: &Group) -> SyncNet {
    let norm = |features| SyncBatchNormConfig::new(features).init(&device()).over(group);
    let (conv1, conv2) = (convolution([2, 4]), convolution([4, 3]));
    in_f64(SyncNet { conv1, norm1: norm(4), conv2, norm2: norm(3) })
}

fn whole_net() -> WholeNet {
    let norm = |features| BatchNormConfig::new(features).init(&device());
    let (conv1, conv2) = (convolution([2, 4]), convolution([4, 3]));
    in_f64(WholeNet { conv1, norm1: norm(4), conv2, norm2: norm(3) })
}

/// The results of a training step of a net: outputs, gradient of the images, gradients of the parameters, and the
/// running statistics of both norms after it.
struct Step {
    output: Vec<f64>,
    images: Vec<f64>,
    parameters: Vec<Vec<f64>>,
    running: Vec<Vec<f64>>,
}

fn step(net: &impl Net, step: usize, samples: Range<usize>) -> Step {
    let images = images(step, samples.clone()).require_grad();
    let output = net.forward(images.clone());
    let dims = output.dims();
    let weights = pattern(&dims, samples.start * dims[1] * dims[2] * dims[3]);
    // The rank's loss is the mean over its shard. The gradients below are those of the sum, which add up over ranks.
    let samples = samples.len() as f64;
    let gradients = (output.clone().powf_scalar(3.0) * weights).sum().mul_scalar(samples.recip()).backward();
    let scaled = |gradient: Vec<f64>| gradient.into_iter().map(|x| x * samples).collect::<Vec<f64>>();
    let of = |(weight, others): (Tensor<4>, [Tensor<1>; 3])| {
        let others = others.map(|parameter| gradient(&parameter, &gradients));
        [gradient(&weight, &gradients)].into_iter().chain(others).map(scaled).collect::<Vec<_>>()
    };
    Step {
        output: values(output),
        images: scaled(gradient(&images, &gradients)),
        parameters: net.parameters().into_iter().flat_map(of).collect(),
        running: net.running().map(values).to_vec(),
    }
}

#[test]
fn shards_of_any_size_match_the_whole_batch() {
    for ranks in 1..=4 {
        let weights = saved(whole_net());
        let whole = in_f64(loaded(whole_net(), &weights));
        let expected: Vec<Step> = (0..3).map(|i| step(&whole, i, 0..BATCH)).collect();
        let shards = on_ranks(ranks, move |group| {
            let net = in_f64(loaded(sync_net(&group), &weights));
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
    let group = Group::threads(1).expect("a group").remove(0);
    let burns: BatchNorm = in_f64(BatchNormConfig::new(3).with_momentum(0.3).init(&device()));
    let ours: SyncBatchNorm = in_f64(SyncBatchNormConfig::new(3).with_momentum(0.3).init(&device()).over(&group));
    let input = |step: usize| pattern(&[5, 3, 4], step * 31).mul_scalar(2.0).add_scalar(7.0);
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
    let running = on_ranks(2, |group| {
        let layer: SyncBatchNorm = SyncBatchNormConfig::new(2).init(&device()).over(&group);
        let valid = in_f64(layer).valid();
        if group.rank() == 0 {
            valid.forward(images(0, 0..BATCH).inner());
        }
        let layer = in_training(valid);
        let images = images(0, shard(&group)).require_grad();
        layer.forward(images).powf_scalar(3.0).sum().backward();
        values(layer.running_mean.value_sync())
    });
    assert_eq!(running[0], running[1]);
}

#[test]
fn records_are_interchangeable_with_burns_batch_norm() {
    let group = Group::threads(1).expect("a group").remove(0);
    let trained: SyncBatchNorm = SyncBatchNormConfig::new(3).init(&device()).over(&group);
    trained.forward(pattern(&[5, 3, 4], 0).cast(DType::F32));
    let input = pattern::<3>(&[5, 3, 4], 1).cast(DType::F32).inner();
    let expected = values(trained.valid().forward(input.clone()));

    let burns: BatchNorm = loaded(BatchNormConfig::new(3).init(&device()), &saved(trained.valid()));
    assert_eq!(values(burns.valid().forward(input.clone())), expected);
    let ours: SyncBatchNorm = loaded(SyncBatchNormConfig::new(3).init(&device()), &saved(burns.valid()));
    assert_eq!(values(ours.valid().forward(input)), expected);
}

#[test]
fn f32_keeps_a_small_variance_beside_a_large_mean() {
    let input = pattern::<2>(&[BATCH, 1], 0).cast(DType::F32).mul_scalar(0.1).add_scalar(3000.0);
    let exact = values(input.clone());
    let mean = exact.iter().sum::<f64>() / BATCH as f64;
    let var = exact.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / BATCH as f64;
    let running = on_ranks(3, move |group| {
        let layer: SyncBatchNorm = SyncBatchNormConfig::new(1).with_momentum(1.0).init(&device()).over(&group);
        layer.forward(input.clone().slice([shard(&group)]));
        values(layer.running_var.value_sync())[0]
    });
    // The mean depends on the width of the CPU's vectors: it may be wrong by six units in the last place, whose square
    // is 5e-4 of the variance. A difference of sums of squares would be wrong by 100 variances.
    assert!((running[0] / var - 1.0).abs() < 1e-2, "{} instead of {var}", running[0]);
}

#[test]
fn sixteen_bit_inputs_are_normalised_in_f32() {
    // A channel has more elements than f16 can count, and their sum is larger than f16 can hold.
    let shape = [BATCH, 1, 1600];
    let input = pattern::<3>(&shape, 0).add_scalar(10.0).cast(DType::F32);
    let burns: BatchNorm = BatchNormConfig::new(1).init(&device());
    let expected = burns.forward(input.clone());
    for dtype in [DType::F16, DType::BF16] {
        let input = input.clone();
        let outputs = on_ranks(2, move |group| {
            let layer: SyncBatchNorm = SyncBatchNormConfig::new(1).init(&device()).over(&group);
            let shard = input.clone().slice([shard(&group)]).cast(dtype).require_grad();
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
        let layer: SyncBatchNorm = in_f64(SyncBatchNormConfig::new(2).init(&device()).over(&group));
        let samples = [0..3, 3..3, 3..5][group.rank()].clone();
        let input = pattern::<3>(&[5, 2, 4], 0);
        let none = || Tensor::empty([0, 2, 4], (&device(), DType::F64));
        let input = if samples.is_empty() { none() } else { input.slice([samples]) }.require_grad();
        let gradients = layer.forward(input).powf_scalar(3.0).sum().backward();
        (values(layer.running_var.value_sync()), gradient(&layer.gamma.val(), &gradients))
    });
    let whole: BatchNorm = in_f64(BatchNormConfig::new(2).init(&device()));
    let gradients = whole.forward(pattern::<3>(&[5, 2, 4], 0)).powf_scalar(3.0).sum().backward();
    for (running, _) in &gammas {
        assert_close(running, &values(whole.running_var.value_sync()), 1e-12);
    }
    assert_eq!(gammas[1].1, [0.0, 0.0]);
    let sum: Vec<f64> = (0..2).map(|channel| gammas.iter().map(|(_, gamma)| gamma[channel]).sum()).collect();
    assert_close(&sum, &gradient(&whole.gamma.val(), &gradients), 1e-12);
}

#[test]
#[should_panic(expected = "does not know the ranks over which it normalises")]
fn a_layer_without_ranks_does_not_train() {
    let layer: SyncBatchNorm = SyncBatchNormConfig::new(2).init(&device());
    layer.forward(Tensor::<2>::ones([3, 2], &device()));
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
        net.running().map(values)
    });
    trained.store(true, Ordering::Relaxed);
    bystander.join().expect("no panic");
    assert!(running.iter().all(|of_rank| *of_rank == running[0]));
}

#[test]
fn threads_go_backward_twice_with_a_collective_between() {
    on_ranks(2, |group| {
        let layer: SyncBatchNorm = in_f64(SyncBatchNormConfig::new(2).init(&device()).over(&group));
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

fn images(step: usize, samples: Range<usize>) -> Tensor<4> {
    pattern(&[samples.len(), 2, 5, 5], 1000 * step + 50 * samples.start)
}

/// Irregular numbers, in f64, of deviation 0.7 around 0, from an endless sequence, beginning at `start`.
fn pattern<const D: usize>(shape: &[usize; D], start: usize) -> Tensor<D> {
    let count = shape.iter().product::<usize>();
    let numbers = (start..start + count).map(|i| ((i * i % 9973) as f64 * 1.7 + i as f64 * 0.61).sin()).collect();
    Tensor::from_data(TensorData::new::<f64, _>(numbers, *shape), (&device(), DType::F64))
}

fn gradient<const D: usize>(tensor: &Tensor<D>, gradients: &Gradients) -> Vec<f64> {
    values(tensor.grad(gradients).expect("the tensor is tracked"))
}

#[track_caller]
fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs() / expected.abs().max(1.0);
        assert!(error <= tolerance, "element {i} is {got} instead of {expected}");
    }
}
