//! Trainings of one model in two ways on devices.
#![allow(dead_code, reason = "each test target uses a part of it")]

use bonfire::{DataParallel, DeviceMesh, FullyShardedParallel, Group, ShardedBlock, ShardedOptimizer, Sharding};
use bonfire_testing::{Kind, run_ranks};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};

use crate::models::{self, Bits};

/// Trains in two ways on so many devices. The ranks must agree bit for bit. burn's autotune may choose another kernel
/// in between, so the two ways are only close to each other.
pub fn check_ways<D: 'static>(
    train: fn(&Group, usize, &D) -> [Bits; 2],
    (ranks, steps): (usize, usize),
    device: impl Fn(usize) -> D + Clone + Send + 'static,
) {
    let results = run_ranks(Kind::Threads, ranks, move |group| train(&group, steps, &device(group.rank())));
    assert!(results.iter().all(|result| *result == results[0]), "the ranks' parameters differ");
    let [one, other] = &results[0];
    assert_eq!(one.0.len(), other.0.len());
    let pairs = one.0.iter().zip(&other.0).flat_map(|(a, b)| a.iter::<f64>().zip(b.iter::<f64>()));
    for (a, b) in pairs {
        assert!((a - b).abs() < 1e-5, "{a} one way, {b} the other");
    }
}

/// Two layers in blocks of their own, and one in none.
#[derive(Module, Debug)]
struct Layers<B: Backend> {
    first: Linear<B>,
    blocks: Vec<ShardedBlock<Linear<B>>>,
}

impl<B: Backend> Layers<B> {
    fn loss(&self, input: Tensor<B, 2>) -> Tensor<B, 1> {
        let x = self.first.forward(input);
        let x = self.blocks.iter().fold(x, |x, block| block.run(|linear| linear.forward(x).tanh()));
        x.powf_scalar(2.0).mean()
    }
}

/// Before it is distributed, its weights are not drawn yet, and each clone would draw its own.
fn layers<B: Backend>(device: &B::Device) -> Layers<B> {
    let linear = |output| LinearConfig::new(7, output).init(device);
    let blocks = [7, 5].map(|output| ShardedBlock::new(linear(output))).into();
    Layers { first: linear(7), blocks }
}

/// Trains as replicas and with parts of the parameters: of all ranks, and if these are four, of each two. Gradients are
/// clipped by a norm that they exceed.
pub fn replicas_and_parts<B: AutodiffBackend>(group: &Group, steps: usize, device: &B::Device) -> [Bits; 2] {
    const NORM: f64 = 1e-2;
    let (rank, ranks) = (group.rank(), group.world_size());
    // They differ from rank to rank in one step, and rank 1 has none in another.
    let samples = |step: usize| [3, 2 + rank, if rank == 1 { 0 } else { 3 }][step % 3];
    let input = |step: usize| models::values([samples(step), 7], 10 * step + rank, device);

    let (model, ddp) = DataParallel::new(group.clone(), layers::<B>(device)).unwrap();
    let mut replica = model.clone();
    let mut optimizer = ShardedOptimizer::new(&ddp, SgdConfig::new().init(), Sharding::None).unwrap();
    for step in 0..steps {
        let grads = match samples(step) {
            0 => GradientsParams::new(),
            _ => GradientsParams::from_grads(replica.loss(input(step)).backward(), &replica),
        };
        let parts = optimizer.sync(&replica, grads, samples(step)).unwrap().clip_norm(NORM).unwrap();
        optimizer.step(1.0, &mut replica, parts).unwrap();
    }
    let in_parts = |mesh: DeviceMesh| {
        let (mut parts, parallel) = FullyShardedParallel::new(mesh, model.clone()).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for number in 0..steps {
            let batches = (samples(number) > 0).then(|| input(number));
            let gradients = parallel.run(&parts, batches, |model, input| (model.loss(input), samples(number))).unwrap();
            let gradients = gradients.clip_norm(NORM).unwrap().for_optimizer(&optimizer).unwrap();
            parts = optimizer.step(1.0, parts, gradients);
        }
        models::bits(&parallel.gather(&parts).unwrap())
    };
    let mut meshes = vec![DeviceMesh::from(group.clone())];
    if ranks == 4 {
        meshes.push(DeviceMesh::new(group.clone(), [("replicate", 2), ("shard", 2)]).unwrap());
    }
    let replicas = std::iter::repeat_n(models::bits(&replica).0, meshes.len()).flatten();
    [Bits(replicas.collect()), Bits(meshes.into_iter().flat_map(|mesh| in_parts(mesh).0).collect())]
}

/// Trains as replicas and with parts of the optimizer state: of all ranks, and of two blocks.
pub fn replicas_and_shards<B: AutodiffBackend>(group: &Group, steps: usize, device: &B::Device) -> [Bits; 2] {
    let (model, ddp) = DataParallel::new(group.clone(), layers::<B>(device)).unwrap();
    let mut replica = model.clone();
    let mut optimizer = AdamConfig::new().init();
    for step in 0..steps {
        let (grads, samples) = some_gradients(group.rank(), step, &replica, device);
        replica = optimizer.step(0.01, replica.clone(), ddp.sync(&replica, grads, samples).unwrap());
    }
    let sharded = |sharding| {
        let mut model = model.clone();
        let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), sharding).unwrap();
        for step in 0..steps {
            let (grads, samples) = some_gradients(group.rank(), step, &model, device);
            let parts = optimizer.sync(&model, grads, samples).unwrap();
            optimizer.step(0.01, &mut model, parts).unwrap();
        }
        models::bits(&model)
    };
    let (all, blocks) = (sharded(Sharding::All), sharded(Sharding::Blocks(group.world_size() / 2)));
    let (all, blocks) = (all.0.into_iter(), blocks.0.into_iter());
    let twice = models::bits(&replica).0.into_iter().cycle();
    let twice = twice.take(2 * all.len());
    [models::Bits(twice.collect()), models::Bits(all.chain(blocks).collect())]
}

/// Trains with and without parts of the optimizer state, and clips gradients by a norm that they exceed.
pub fn clipped_with_and_without_shards<B: AutodiffBackend>(
    group: &Group,
    steps: usize,
    device: &B::Device,
) -> [Bits; 2] {
    let (model, ddp) = DataParallel::new(group.clone(), layers::<B>(device)).unwrap();
    [Sharding::None, Sharding::All].map(|sharding| {
        let mut model = model.clone();
        let mut optimizer = ShardedOptimizer::new(&ddp, SgdConfig::new().init(), sharding).unwrap();
        for step in 0..steps {
            let (grads, samples) = some_gradients(group.rank(), step, &model, device);
            let parts = optimizer.sync(&model, grads, samples).unwrap().clip_norm(1e-3).unwrap();
            optimizer.step(10.0, &mut model, parts).unwrap();
        }
        models::bits(&model)
    })
}

/// The gradients of a step, and the number of samples, which differs from rank to rank in every other step. Rank 1 has
/// none for the first layer's bias, and in the last steps no rank has.
fn some_gradients<B: AutodiffBackend>(
    rank: usize,
    step: usize,
    model: &Layers<B>,
    device: &B::Device,
) -> (GradientsParams, usize) {
    let samples = if step.is_multiple_of(2) { 3 } else { 2 + rank };
    let loss = model.loss(models::values([samples, 7], 10 * step + rank, device));
    let mut grads = GradientsParams::from_grads(loss.backward(), model);
    if let Some(bias) = model.first.bias.as_ref().filter(|_| rank == 1 || step > 2) {
        grads.remove::<B::InnerBackend, 1>(bias.id);
    }
    (grads, samples)
}
