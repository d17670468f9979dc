//! Trainings of one model in two ways on devices.

use bonfire::tensor::autodiff::CollectiveBackend;
use bonfire::{DataParallel, FullyShardedParallel, Group, ShardedBlock};
use bonfire_testing::{Kind, run_ranks};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::models::{self, Bits};

/// Trains in two ways on two devices. The ranks must agree bit for bit. burn's autotune may choose another kernel in
/// between, so the two ways are only close to each other.
pub fn check_ways<D: 'static>(
    train: fn(&Group, usize, &D) -> [Bits; 2],
    steps: usize,
    device: impl Fn(usize) -> D + Clone + Send + 'static,
) {
    let results = run_ranks(Kind::Threads, 2, move |group| train(&group, steps, &device(group.rank())));
    assert!(results[0] == results[1], "the ranks' parameters differ");
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

/// Trains as replicas and with parts of the parameters.
pub fn replicas_and_parts<B: CollectiveBackend>(group: &Group, steps: usize, device: &B::Device) -> [Bits; 2] {
    let linear = |output| LinearConfig::new(7, output).init(device);
    let blocks = [7, 5].map(|output| ShardedBlock::new(linear(output))).into();
    let model = Layers::<B> { first: linear(7), blocks };
    let input = |step| models::values([3, 7], 10 * step + group.rank(), device);

    // Before, its weights are not drawn yet, and each clone would draw its own.
    let (model, mut ddp) = DataParallel::new(group.clone(), model).unwrap();
    let mut replica = model.clone();
    let mut optimizer = SgdConfig::new().init();
    for step in 0..steps {
        let grads = GradientsParams::from_grads(replica.loss(input(step)).backward(), &replica);
        replica = optimizer.step(0.1, replica.clone(), ddp.sync(&replica, grads, 3).unwrap());
    }
    let (mut parts, mut parallel) = FullyShardedParallel::new(group.clone(), model).unwrap();
    let mut optimizer = SgdConfig::new().init();
    for number in 0..steps {
        let step = parallel.step(&parts, 3).unwrap();
        let loss = step.model().loss(input(number));
        let grads = step.finish(loss.backward()).unwrap();
        parts = optimizer.step(0.1, parts, grads);
    }
    [models::bits(&replica), models::bits(&parallel.gather(&parts).unwrap())]
}
