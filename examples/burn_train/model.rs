//! The network, with burn-train's training and inference steps.

use burn::data::dataloader::batcher::Batcher;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{ElementConversion, Tensor};
use burn_train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};

use crate::data::{Batch, Images};
use crate::digits::{Digits, PIXELS};

/// Two linear layers. No batch norm, because each device would keep its own statistics.
#[derive(Module, Debug)]
pub struct Network<B: Backend> {
    first: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

impl<B: Backend> Network<B> {
    pub fn new(device: &B::Device) -> Self {
        Network {
            first: LinearConfig::new(PIXELS, 256).init(device),
            output: LinearConfig::new(256, 10).init(device),
            relu: Relu::new(),
        }
    }

    /// Scores of the ten digits, `[n, 10]`.
    fn forward(&self, images: Tensor<B, 2>) -> Tensor<B, 2> {
        self.output.forward(self.relu.forward(self.first.forward(images)))
    }

    fn classify(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        let scores = self.forward(batch.images);
        let loss = CrossEntropyLossConfig::new().init(&scores.device());
        ClassificationOutput::new(loss.forward(scores.clone(), batch.labels.clone()), scores, batch.labels)
    }

    /// Returns the fraction of the images that the network classifies correctly.
    pub fn accuracy(&self, digits: &Digits, device: &B::Device) -> f64 {
        let batch: Batch<B> = Images.batch(digits.items(), device);
        let right = self.forward(batch.images).argmax(1).squeeze_dim::<1>(1).equal(batch.labels);
        right.int().sum().into_scalar().elem::<f64>() / digits.len() as f64
    }
}

impl<B: AutodiffBackend> TrainStep for Network<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Network<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}
