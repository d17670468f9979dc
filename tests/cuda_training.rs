//! Trainings on CUDA devices: burn's kernels in both passes, the exchange of gradients, and the optimizer.

#[path = "common/devices.rs"]
mod devices;
#[path = "common/step.rs"]
mod models;
#[path = "cuda_training/software.rs"]
mod software;
#[path = "common/software_driver.rs"]
mod software_driver;
#[path = "common/trainings.rs"]
mod trainings;

use std::ops::Range;

use bonfire::tensor::autodiff;
use bonfire::{
    Cuda, CudaDevice, DataParallel, Error, FullyShardedParallel, Group, ShardedBlock, ShardedOptimizer, Sharding,
};
use bonfire_testing::{Kind, run_ranks};
use burn::backend::{Autodiff, NdArray};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};
use cubecl::cuda::CudaRuntime;

use models::{Bits, bits, values};
use trainings::{check_ways, clipped_with_and_without_shards, replicas_and_parts, replicas_and_shards};

type Training = Autodiff<Cuda>;

/// Two ranks do not divide it.
const INPUTS: usize = 65;
const HIDDEN: usize = 1024;
const OUTPUTS: usize = 48;
const RATE: f64 = 0.01;

/// The samples of each rank in a step. They differ, so the mean is weighted.
const SAMPLES: [usize; 2] = [5, 3];

/// The ranks compare their parameters before the first two steps and then, on devices, every 64th.
const COMPARED: usize = 2;
const STEPS: usize = 7;

/// The network of the example, of 40 KB.
#[path = "../examples/digits/model.rs"]
mod digits;

/// Two layers, of nearly half a MiB, and one that is not used: it has no gradient on any rank.
#[derive(Module, Debug)]
struct Network<B: Backend> {
    first: ShardedBlock<Linear<B>>,
    second: Linear<B>,
    unused: Linear<B>,
}

impl<B: Backend> Network<B> {
    fn new(device: &B::Device) -> Self {
        let linear = |inputs, outputs, seed| {
            let scale = 1.0 / (inputs as f64).sqrt();
            let mut linear = LinearConfig::new(inputs, outputs).init(device);
            linear.weight = Param::from_tensor(values([inputs, outputs], seed, device) * scale);
            linear.bias = Some(Param::from_tensor(values([outputs], seed + 1, device) * scale));
            linear
        };
        Network {
            first: ShardedBlock::new(linear(INPUTS, HIDDEN, 1)),
            second: linear(HIDDEN, OUTPUTS, 3),
            unused: linear(HIDDEN, OUTPUTS, 5),
        }
    }

    /// The mean over the samples of a batch.
    fn loss(&self, [input, target]: [Tensor<B, 2>; 2]) -> Tensor<B, 1> {
        let output = self.second.forward(self.first.run(|first| first.forward(input)).tanh());
        (output - target).powf_scalar(2.0).mean()
    }
}

/// The inputs and the targets of some samples of a step, on the device.
fn batch<B: Backend>(step: usize, samples: Range<usize>, device: &B::Device) -> [Tensor<B, 2>; 2] {
    let rows = |columns, seed| {
        let whole = values::<NdArray, 2>([SAMPLES.iter().sum(), columns], seed, &Default::default());
        Tensor::from_data(whole.slice([samples.clone(), 0..columns]).into_data(), device)
    };
    [rows(INPUTS, 100 + 2 * step), rows(OUTPUTS, 101 + 2 * step)]
}

/// Trains with all batches on one device, without Bonfire. Each rank's batch has matrix products of its own, for which
/// the device chooses the same kernels as on that rank. Its gradients are multiplied by its share of the samples, as on
/// the ranks: a GPU rounds the factors of a matrix product to 11 bits (TF32), and a loss that is multiplied before the
/// backward pass has other factors.
fn alone<B: AutodiffBackend>(device: &B::Device) -> Bits {
    let all: usize = SAMPLES.iter().sum();
    let mut model = Network::<B>::new(device);
    let mut optimizer = AdamConfig::new().init();
    for step in 0..STEPS {
        let of_rank = |first: usize, samples: usize| {
            let loss = model.loss(batch(step, first..first + samples, device));
            GradientsParams::from_grads(loss.backward(), &model)
        };
        let grads = [of_rank(0, SAMPLES[0]), of_rank(SAMPLES[0], SAMPLES[1])];
        let mut mean = Mean {
            grads: &grads,
            shares: SAMPLES.map(|samples| samples as f64 / all as f64),
            mean: GradientsParams::new(),
        };
        model.visit(&mut mean);
        model = optimizer.step(RATE, model, mean.mean);
    }
    bits(&model)
}

/// Adds the gradients of both ranks, each times its share.
struct Mean<'a> {
    grads: &'a [GradientsParams; 2],
    shares: [f64; 2],
    mean: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Mean<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let of_ranks = self.grads.iter().zip(self.shares);
        let shares = of_ranks.filter_map(|(grads, share)| Some(grads.get::<B::InnerBackend, D>(param.id)? * share));
        if let Some(mean) = shares.reduce(|one, other| one + other) {
            self.mean.register(param.id, mean);
        }
    }
}

/// How the ranks exchange gradients and parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Step,
    Sync,
    Sharded,
    Full,
}

/// Trains as one of two ranks. Calls `at` before and after the ranks take the parameters of rank 0, before the first
/// step in which they do not compare parameters, and after the last step, each time once all ranks are there.
fn together<B: AutodiffBackend>(group: &Group, device: &B::Device, way: Way, mut at: impl FnMut()) -> Bits {
    let rank = group.rank();
    let samples = SAMPLES[rank];
    let first = SAMPLES[..rank].iter().sum();
    let batches: Vec<_> = (0..STEPS).map(|step| batch::<B>(step, first..first + samples, device)).collect();
    let mut all_are_there = || {
        // Also what was queued before.
        B::sync(device).unwrap();
        group.barrier().unwrap();
        at();
        group.barrier().unwrap();
    };
    let model = Network::new(device);
    all_are_there();
    match way {
        Way::Full => in_parts(group, model, samples, batches, all_are_there),
        _ => as_replicas(group, model, (samples, way), batches, all_are_there),
    }
}

fn in_parts<B: AutodiffBackend>(
    group: &Group,
    model: Network<B>,
    samples: usize,
    batches: Vec<[Tensor<B, 2>; 2]>,
    mut all_are_there: impl FnMut(),
) -> Bits {
    let (mut model, fsdp) = FullyShardedParallel::new(group.clone(), model).unwrap();
    all_are_there();
    let mut optimizer = AdamConfig::new().init();
    for (number, batch) in batches.into_iter().enumerate() {
        if number == COMPARED {
            all_are_there();
        }
        let parts = fsdp.run(&model, [batch], |model, batch| (model.loss(batch), samples)).unwrap();
        model = optimizer.step(RATE, model, parts.for_optimizer(&optimizer).unwrap());
    }
    all_are_there();
    bits(&fsdp.gather(&model).unwrap())
}

fn as_replicas<B: AutodiffBackend>(
    group: &Group,
    model: Network<B>,
    (samples, way): (usize, Way),
    batches: Vec<[Tensor<B, 2>; 2]>,
    mut all_are_there: impl FnMut(),
) -> Bits {
    let (mut model, ddp) = DataParallel::new(group.clone(), model).unwrap();
    all_are_there();
    let mut optimizer = AdamConfig::new().init();
    let mut sharded = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap();
    for (step, batch) in batches.into_iter().enumerate() {
        if step == COMPARED {
            all_are_there();
        }
        let grads = |model: &Network<B>, batch| GradientsParams::from_grads(model.loss(batch).backward(), model);
        match way {
            Way::Step => {
                let grads = ddp.run(&model, [batch], |model, batch| (model.loss(batch), samples)).unwrap();
                model = optimizer.step(RATE, model, grads);
            }
            Way::Sync => {
                let grads = ddp.sync(&model, grads(&model, batch), samples).unwrap();
                model = optimizer.step(RATE, model, grads);
            }
            _ => {
                let parts = sharded.run(&model, [batch], |model, batch| (model.loss(batch), samples)).unwrap();
                sharded.step(RATE, &mut model, parts).unwrap();
            }
        }
    }
    all_are_there();
    bits(&model)
}

fn device(first: u8, rank: usize) -> CudaDevice {
    device_of(first, rank, 2)
}

fn device_of(first: u8, rank: usize, ranks: u8) -> CudaDevice {
    devices::Devices::<CudaRuntime>::new(first, ranks).all[rank].clone()
}

/// Asserts that two trainings end with nearly the same parameters: with `limit` as the largest difference.
fn check_close(trained: &Bits, expected: &Bits, limit: f64) {
    assert_eq!(trained.0.len(), expected.0.len());
    let mut largest = 0.0f64;
    for (trained, expected) in trained.0.iter().zip(&expected.0) {
        assert_eq!(trained.shape, expected.shape);
        let pairs = trained.iter::<f64>().zip(expected.iter::<f64>());
        largest = pairs.map(|(a, b)| (a - b).abs()).fold(largest, f64::max);
    }
    eprintln!("the largest difference: {largest}");
    assert!(largest < limit, "{largest}");
}

fn equals_one_rank(way: Way, first: u8) {
    let trained = run_ranks(Kind::Threads, 2, move |group| {
        let device = device(first, group.rank());
        let mut counters = Vec::new();
        let trained = together::<Training>(&group, &device, way, || counters.push(device.counters()));
        assert_eq!(counters[0], counters[1], "no initial parameter passes through the host");
        assert_eq!(counters[2], counters[3], "no gradient and no parameter passes through the host");
        trained
    });
    assert!(trained[0] == trained[1], "the ranks' parameters differ");
    // Each scales and adds in another order, and Adam divides by what may be small.
    check_close(&trained[0], &alone::<Training>(&device(first, 0)), 1e-4);
    // A GPU rounds the factors of a matrix product to 11 bits (TF32), the host does not.
    check_close(&trained[0], &alone::<Autodiff<NdArray>>(&Default::default()), 1e-2);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn overlapped_steps_on_two_devices_equal_one_rank_on_the_host() {
    equals_one_rank(Way::Step, 40);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn synchronized_steps_on_two_devices_equal_one_rank_on_the_host() {
    equals_one_rank(Way::Sync, 42);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_sharded_optimizer_on_two_devices_equals_one_rank_on_the_host() {
    equals_one_rank(Way::Sharded, 44);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn full_sharding_on_two_devices_equals_one_rank_on_the_host() {
    equals_one_rank(Way::Full, 68);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn overlapped_steps_of_a_convolutional_network_with_sync_batch_norm_equal_sync() {
    check_ways(models::convolutional::<Training>, (2, 5), |rank| device(46, rank));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn overlapped_steps_of_a_transformer_with_a_shared_embedding_equal_sync() {
    check_ways(models::language::<Training>, (2, 5), |rank| device(48, rank));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn full_sharding_equals_replicas() {
    check_ways(replicas_and_parts::<Training>, (2, 5), |rank| device(50, rank));
    check_ways(replicas_and_parts::<Training>, (4, 4), |rank| device_of(70, rank, 4));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn the_sharded_optimizer_clips_and_works_in_blocks() {
    check_ways(replicas_and_shards::<Training>, (4, 4), |rank| device_of(60, rank, 4));
    check_ways(clipped_with_and_without_shards::<Training>, (3, 2), |rank| device_of(64, rank, 3));
}

/// The results of all collectives that pass gradients on, along two dimensions, and the gradients of their input.
fn through_collectives<B: AutodiffBackend>(group: &Group, device: &B::Device) -> Vec<TensorData> {
    let (rank, n) = (group.rank(), group.world_size());
    let whole = |seed: usize, shape: [usize; 3]| {
        let numbers = (0..shape.iter().product()).map(|i: usize| ((i * 7 + seed * 3) % 13) as f32 - 6.0);
        Tensor::<B, 3>::from_data(TensorData::new(numbers.collect::<Vec<_>>(), shape), device)
    };
    // Sums of these numbers are exact.
    let through = |collective: &dyn Fn(Tensor<B, 3>) -> Result<Tensor<B, 3>, Error>| {
        let input = whole(rank, [2 * n, 3 * n, 5]).require_grad();
        let result = collective(input.clone()).unwrap();
        let weights = whole(10 + rank, result.dims());
        let grads = (result.clone() * result.clone() * weights).sum().backward();
        [result.inner().into_data(), input.grad(&grads).unwrap().into_data()]
    };
    let along = [0, 1].into_iter().flat_map(|dim| {
        [
            through(&|tensor| autodiff::all_gather(tensor, dim, group)),
            through(&|tensor| autodiff::reduce_scatter(tensor, dim, group)),
            through(&|tensor| autodiff::all_to_all(tensor, dim, group)),
        ]
    });
    let whole = [
        through(&|tensor| autodiff::all_reduce_sum(tensor, group)),
        through(&|tensor| autodiff::broadcast(tensor, n - 1, group)),
    ];
    whole.into_iter().chain(along).flatten().collect()
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn gradients_through_collectives_on_devices_equal_those_on_the_host() {
    for (first, ranks) in [(84, 2), (86, 3)] {
        let on_devices = run_ranks(Kind::Threads, ranks.into(), move |group| {
            let device = device_of(first, group.rank(), ranks);
            let gradients = through_collectives::<Training>(&group, &device);
            let counters = device.counters();
            assert_eq!((counters.downloads, counters.uploads), (0, 0), "nothing passes through the host");
            gradients
        });
        let on_host = run_ranks(Kind::Threads, ranks.into(), |group| {
            through_collectives::<Autodiff<NdArray>>(&group, &Default::default())
        });
        assert!(on_devices == on_host, "{ranks} ranks");
    }
}
