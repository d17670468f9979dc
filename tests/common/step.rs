//! Models that are trained with overlapped steps and with `sync`, on any backend.

use bonfire::tensor::autodiff::attempt;
use bonfire::{DataParallel, Group, SyncBatchNorm, SyncBatchNormConfig};
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};

/// Small, so that small models have many buckets.
pub const BUCKET: usize = 256;

/// The bytes of every trained parameter, in visiting order. Clones of a model share running statistics.
#[derive(Default, PartialEq, Debug)]
pub struct Bits(pub Vec<TensorData>);

impl<B: AutodiffBackend> ModuleVisitor<B> for Bits {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if param.is_require_grad() {
            self.0.push(param.val().into_data());
        }
    }
}

pub fn bits<B: AutodiffBackend, M: Module<B>>(model: &M) -> Bits {
    let mut bits = Bits::default();
    model.visit(&mut bits);
    bits
}

/// Numbers in [-1, 1) that depend on the seed.
pub fn values<B: Backend, const D: usize>(shape: [usize; D], seed: usize, device: &B::Device) -> Tensor<B, D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Trains twice from the same model: with overlapped steps, and with `sync`. Returns both results.
pub fn both_ways<B: AutodiffBackend, M: AutodiffModule<B>>(
    group: &Group,
    model: M,
    steps: usize,
    samples: impl Fn(usize) -> usize,
    loss: impl Fn(&M, usize) -> Tensor<B, 1>,
) -> [Bits; 2] {
    let (model, mut ddp) = DataParallel::new(group.clone(), model).unwrap();
    ddp.set_bucket_bytes(BUCKET);
    let train = |overlapped: bool, steps: usize| {
        let (mut model, mut optimizer) = (model.clone(), SgdConfig::new().init());
        for number in 0..steps {
            let samples = samples(number);
            let grads = if overlapped {
                if samples > 0 {
                    let pass = ddp.last_pass(&model, samples).unwrap();
                    let mut grads = attempt(|| loss(pass.model(), number).backward()).unwrap();
                    pass.finish(&mut grads).unwrap()
                } else {
                    ddp.skip(&model).unwrap()
                }
            } else if samples > 0 {
                let grads = attempt(|| loss(&model, number).backward()).unwrap();
                ddp.sync(&model, GradientsParams::from_grads(grads, &model), samples).unwrap()
            } else {
                ddp.sync(&model, GradientsParams::new(), 0).unwrap()
            };
            model = optimizer.step(0.05, model, grads);
        }
        bits(&model)
    };
    // Fixes the buckets.
    train(true, 2);
    [train(true, steps), train(false, steps)]
}

/// Convolutions between which the ranks exchange statistics, in both passes.
#[derive(Module, Debug)]
struct Convolutional<B: Backend> {
    first: Conv2d<B>,
    norm: SyncBatchNorm<B>,
    second: Conv2d<B>,
}

/// Trains a convolutional network with `SyncBatchNorm` [both ways](both_ways).
pub fn convolutional<B: AutodiffBackend>(group: &Group, steps: usize, device: &B::Device) -> [Bits; 2] {
    let rank = group.rank();
    let model = Convolutional::<B> {
        first: Conv2dConfig::new([2, 4], [3, 3]).init(device),
        norm: SyncBatchNormConfig::new(4).init(device),
        second: Conv2dConfig::new([4, 3], [2, 2]).init(device),
    };
    let samples = |step| 1 + (rank + step) % 3;
    both_ways(group, model, steps, samples, |model, step| {
        let images = values([samples(step), 2, 6, 6], 10 * step + rank, device);
        let hidden = model.norm.forward(model.first.forward(images)).tanh();
        model.second.forward(hidden).powf_scalar(2.0).mean()
    })
}

/// The embedding is used twice, first and last.
#[derive(Module, Debug)]
struct Language<B: Backend> {
    embedding: Embedding<B>,
    encoder: TransformerEncoder<B>,
}

/// Trains a transformer with a shared embedding [both ways](both_ways).
pub fn language<B: AutodiffBackend>(group: &Group, steps: usize, device: &B::Device) -> [Bits; 2] {
    let rank = group.rank();
    let encoder = TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0);
    let model = Language::<B> { embedding: EmbeddingConfig::new(11, 8).init(device), encoder: encoder.init(device) };
    both_ways(
        group,
        model,
        steps,
        |_| 2,
        |model, step| {
            let words: Vec<i32> = (0..10).map(|i| ((i * (step + 3) + rank) % 11) as i32).collect();
            let words = Tensor::<B, 2, Int>::from_data(TensorData::new(words, [2, 5]), device);
            let hidden = model.encoder.forward(TransformerEncoderInput::new(model.embedding.forward(words)));
            let scores = hidden.matmul(model.embedding.weight.val().transpose().unsqueeze());
            scores.powf_scalar(2.0).mean()
        },
    )
}
