//! The network.

use bonfire::{SyncBatchNorm, SyncBatchNormConfig};
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d, Relu};
use burn::tensor::{Device, Tensor};

/// Two convolutions with batch norm, a pooling and a linear layer. The norms take their statistics from the global
/// batch, so that the result does not depend on the number of ranks.
#[derive(Module, Debug)]
pub struct Network {
    first: Conv2d,
    first_norm: SyncBatchNorm,
    second: Conv2d,
    second_norm: SyncBatchNorm,
    pool: MaxPool2d,
    output: Linear,
    relu: Relu,
}

impl Network {
    /// Creates a network with random weights.
    pub fn new(device: &Device) -> Self {
        let conv = |inputs, outputs| {
            Conv2dConfig::new([inputs, outputs], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .with_bias(false)
                .init(device)
        };
        Network {
            first: conv(1, 16),
            first_norm: SyncBatchNormConfig::new(16).init(device),
            second: conv(16, 32),
            second_norm: SyncBatchNormConfig::new(32).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            output: LinearConfig::new(32 * 4 * 4, 10).init(device),
            relu: Relu::new(),
        }
    }

    /// Scores of the ten digits, `[n, 10]`, for images `[n, 1, 8, 8]`.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.relu.forward(self.first_norm.forward(self.first.forward(images)));
        let x = self.relu.forward(self.second_norm.forward(self.second.forward(x)));
        self.output.forward(self.pool.forward(x).flatten(1, 3))
    }
}
