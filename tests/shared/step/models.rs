//! Models that are trained with overlapped steps and with `sync`.

use bonfire::{Group, SyncBatchNormConfig};
use burn::module::Param;
use burn::nn::conv::Conv2dConfig;
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Int, TensorData};

use crate::burn_version::*;

/// Small, so that small models have many buckets.
pub const BUCKET: usize = 256;

models! {
    /// Layers that are declared in another order than they are used.
    pub struct Branches {
        pub last: Linear,
        pub sometimes: Option<Linear>,
        pub never: Linear,
        pub first: Linear,
    }

    /// Convolutions between which the ranks exchange statistics, in both passes.
    struct Convolutional {
        first: Conv2d,
        norm: SyncBatchNorm,
        second: Conv2d,
    }

    /// The embedding is used twice, first and last.
    struct Language {
        embedding: Embedding,
        encoder: TransformerEncoder,
    }
}

impl Branches {
    pub fn new() -> Self {
        let linear = |inputs, outputs| {
            let mut linear = LinearConfig::new(inputs, outputs).init(&device());
            linear.weight = Param::from_tensor(values([inputs, outputs], inputs + 10 * outputs) * 0.3);
            linear.bias = Some(Param::from_tensor(values([outputs], inputs)));
            linear
        };
        Branches { last: linear(9, 3), sometimes: Some(linear(9, 9)), never: linear(4, 4), first: linear(5, 9) }
    }

    pub fn loss(&self, input: Tensor<2>, branch: bool) -> Tensor<1> {
        let mut hidden = self.first.forward(input).tanh();
        if let Some(sometimes) = self.sometimes.as_ref().filter(|_| branch) {
            hidden = sometimes.forward(hidden).tanh();
        }
        self.last.forward(hidden).powf_scalar(2.0).mean()
    }
}

/// The bytes of every trained parameter, in visiting order. Clones of a model share running statistics.
#[derive(Clone, PartialEq, Debug)]
pub struct Bits(pub Vec<TensorData>);

pub fn bits<M: Model>(model: &M) -> Bits {
    Bits(floats(model).into_iter().filter(|parameter| parameter.trained).map(|parameter| parameter.data).collect())
}

/// Numbers in [-1, 1) that depend on the seed.
pub fn values<const D: usize>(shape: [usize; D], seed: usize) -> Tensor<D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), &device())
}

/// Trains twice from the same model: with overlapped steps, and with `sync`. Returns both results.
pub fn both_ways<M: Model>(
    group: &Group,
    model: M,
    steps: usize,
    samples: impl Fn(usize) -> usize,
    loss: impl Fn(&M, usize) -> Tensor<1>,
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

/// Trains a convolutional network with `SyncBatchNorm` [both ways](both_ways).
pub fn convolutional(group: &Group, steps: usize) -> [Bits; 2] {
    let (rank, device) = (group.rank(), &device());
    let model = Convolutional {
        first: Conv2dConfig::new([2, 4], [3, 3]).init(device),
        norm: SyncBatchNormConfig::new(4).init(device),
        second: Conv2dConfig::new([4, 3], [2, 2]).init(device),
    };
    let samples = |step| 1 + (rank + step) % 3;
    both_ways(group, model, steps, samples, |model, step| {
        let images = values([samples(step), 2, 6, 6], 10 * step + rank);
        let hidden = model.norm.forward(model.first.forward(images)).tanh();
        model.second.forward(hidden).powf_scalar(2.0).mean()
    })
}

/// Trains a transformer with a shared embedding [both ways](both_ways).
pub fn language(group: &Group, steps: usize) -> [Bits; 2] {
    let (rank, device) = (group.rank(), &device());
    let encoder = TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0);
    let model = Language { embedding: EmbeddingConfig::new(11, 8).init(device), encoder: encoder.init(device) };
    both_ways(
        group,
        model,
        steps,
        |_| 2,
        |model, step| {
            let words: Vec<i32> = (0..10).map(|i| ((i * (step + 3) + rank) % 11) as i32).collect();
            let words = Tensor::<2, Int>::from_data(TensorData::new(words, [2, 5]), device);
            let hidden = model.encoder.forward(TransformerEncoderInput::new(model.embedding.forward(words)));
            let scores = hidden.matmul(model.embedding.weight.val().transpose().unsqueeze());
            scores.powf_scalar(2.0).mean()
        },
    )
}
