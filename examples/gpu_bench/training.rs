//! Training steps of burn's on two logical devices of one GPU.

use std::time::Instant;

use bonfire::{Cuda, CudaDevice, DataParallel, FullyShardedParallel, Group, ShardedBlock, ShardedOptimizer, Sharding};
use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};

use crate::Failure;
use crate::kernels::Extent;
use crate::report::Report;

type B = Autodiff<Cuda>;

const RANKS: usize = 2;
/// Each has a weight and a bias: 150 tensors.
const LAYERS: usize = 75;
const SAMPLES: usize = 256;
const RATE: f64 = 1e-4;
const WAYS: [&str; 5] = [
    "no exchange",
    "`sync` after the backward pass",
    "`DataParallel::run`",
    "`ShardedOptimizer`",
    "`FullyShardedParallel`",
];

#[derive(Module, Debug)]
struct Network<B: Backend> {
    layers: Vec<ShardedBlock<Linear<B>>>,
}

impl Network<B> {
    fn new(width: usize, device: &CudaDevice) -> Self {
        let layer = |_| ShardedBlock::new(LinearConfig::new(width, width).init(device));
        Network { layers: (0..LAYERS).map(layer).collect() }
    }

    fn loss(&self, input: Tensor<B, 2>) -> Tensor<B, 1> {
        let output = self.layers.iter().fold(input, |x, layer| layer.run(|layer| relu(layer.forward(x))));
        output.powf_scalar(2.0).mean()
    }

    fn gradients(&self, input: Tensor<B, 2>) -> GradientsParams {
        GradientsParams::from_grads(self.loss(input).backward(), self)
    }
}

/// Measures a step of Adam's of a model with 150 tensors, `largest` bytes in all, in each way to share the work.
pub fn steps(report: &mut Report, extent: Extent) {
    let width = (extent.largest / 4 / LAYERS).isqrt();
    let (rounds, calls) = (report.rounds(), extent.calls.div_ceil(100));
    let times = measured(width, rounds, calls);
    let name = |way| format!("a step of 150 tensors, {} MiB, {RANKS} ranks: {way}", extent.largest >> 20);
    report.figures(WAYS.map(name), "ms", &times);
}

/// Returns the milliseconds of a step, in each round and each way, of the slower rank.
fn measured(width: usize, rounds: usize, steps: usize) -> Result<Vec<[f64; WAYS.len()]>, Failure> {
    let ranks = bonfire::launch::run(Group::threads(RANKS)?, move |group| rank(&group, width, rounds, steps))?;
    let slower = |round: usize, way: usize| ranks.iter().map(|times| 1e3 * times[round][way]).fold(0.0, f64::max);
    Ok((0..rounds).map(|round| std::array::from_fn(|way| slower(round, way))).collect())
}

/// Trains a model in each way in turn. The first round does not count. It is an error if replicas differ afterwards.
fn rank(group: &Group, width: usize, rounds: usize, steps: usize) -> Result<Vec<[f64; WAYS.len()]>, Failure> {
    let device = CudaDevice::new(Default::default(), group.rank() as u8);
    let input = Tensor::<B, 2>::random([SAMPLES, width], Distribution::Default, &device);
    let optimizer = || AdamConfig::new().init();
    let network = || Network::new(width, &device);

    let (mut alone, mut alone_optimizer) = (network(), optimizer());
    let (mut synced, sync) = DataParallel::new(group.clone(), network())?;
    let mut sync_optimizer = optimizer();
    let (mut overlapped, run) = DataParallel::new(group.clone(), network())?;
    let mut run_optimizer = optimizer();
    let (mut sliced, slices) = DataParallel::new(group.clone(), network())?;
    let mut slices = ShardedOptimizer::new(&slices, optimizer(), Sharding::All)?;
    let (mut parted, parts) = FullyShardedParallel::new(group.clone(), network())?;
    let mut parts_optimizer = optimizer();

    let loss = |model: &Network<B>, input| (model.loss(input), SAMPLES);
    let mut step = |way: usize| -> Result<(), Failure> {
        let batch = [input.clone()];
        match way {
            0 => {
                let grads = alone.gradients(input.clone());
                alone = alone_optimizer.step(RATE, alone.clone(), grads);
            }
            1 => {
                let grads = sync.sync(&synced, synced.gradients(input.clone()), SAMPLES)?;
                synced = sync_optimizer.step(RATE, synced.clone(), grads);
            }
            2 => {
                let grads = run.run(&overlapped, batch, loss)?;
                overlapped = run_optimizer.step(RATE, overlapped.clone(), grads);
            }
            3 => {
                let parts = slices.run(&sliced, batch, loss)?;
                slices.step(RATE, &mut sliced, parts)?;
            }
            _ => {
                let grads = parts.run(&parted, batch, loss)?.for_optimizer(&parts_optimizer)?;
                parted = parts_optimizer.step(RATE, parted.clone(), grads);
            }
        }
        Ok(())
    };
    let mut times = Vec::new();
    for round in 0..=rounds {
        let mut of_ways = [0.0; WAYS.len()];
        for (way, seconds) in of_ways.iter_mut().enumerate() {
            group.barrier()?;
            let clock = Instant::now();
            (0..steps).try_for_each(|_| step(way))?;
            B::sync(&device)?;
            *seconds = clock.elapsed().as_secs_f64() / steps as f64;
        }
        if round > 0 {
            times.push(of_ways);
        }
    }
    sync.verify(&synced, &sync_optimizer)?;
    run.verify(&overlapped, &run_optimizer)?;
    Ok(times)
}
