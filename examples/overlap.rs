//! Trains a network that is large enough for communication to matter, and measures what the exchange of gradients
//! costs.
//!
//! ```sh
//! cargo run --release -p bonfire-examples --bin overlap                    # two ranks, as threads
//! scripts/hosts -n 2 --rate 100mbit -- target/release/overlap              # as root: two simulated hosts
//! ```
//! Rank 0 prints the median time of a training step without an exchange, with the exchange after the backward pass, and
//! with the exchange during it. Bonfire's part is `step` and `finish`, and `sync`.

#[path = "digits/data.rs"]
mod data;
#[path = "overlap/measuring.rs"]
mod measuring;

use std::process::ExitCode;

use bonfire::train::compression;
use bonfire::{DataParallel, Group};
use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::{Backend, BackendTypes};
use burn::tensor::{Int, Tensor, TensorData};

use crate::data::{Digits, PIXELS};
use crate::measuring::{Args, Exchange, Failure, measure};

type B = Autodiff<Flex>;

/// Fully connected layers.
#[derive(Module, Debug)]
struct Network<B: Backend> {
    hidden: Vec<Linear<B>>,
    output: Linear<B>,
}

impl<B: Backend> Network<B> {
    fn new(args: &Args, device: &B::Device) -> Self {
        let width = usize::from(args.hidden);
        let inputs = std::iter::once(PIXELS).chain((0..args.layers).map(|_| width));
        let hidden = inputs.map(|inputs| LinearConfig::new(inputs, width).init(device)).collect();
        Network { hidden, output: LinearConfig::new(width, 10).init(device) }
    }

    fn forward(&self, images: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = self.hidden.iter().fold(images, |x, layer| burn::tensor::activation::relu(layer.forward(x)));
        self.output.forward(hidden)
    }
}

fn main() -> ExitCode {
    measuring::run(train)
}

fn train(group: &Group, args: &Args) -> Result<(), Failure> {
    let (digits, _) = Digits::load()?;
    let device = Default::default();
    let (mut model, mut ddp) = DataParallel::new(group.clone(), Network::<B>::new(args, &device))?;
    if let Some(compression) = args.compression.as_deref().and_then(compression::by_name) {
        ddp.set_compression(compression)?;
    }
    let mut optimizer = SgdConfig::new().init();
    let loss = CrossEntropyLossConfig::new().init(&device);
    measure(group, args, model.num_params(), &digits, |exchange, samples| {
        let (images, labels) = tensors(&digits, samples, &device);
        let grads = match exchange {
            // Without an exchange the ranks' models would differ, so that step is not applied.
            Exchange::None => {
                own(&model, &loss, images, labels);
                return Ok(());
            }
            Exchange::AfterBackward => ddp.sync(&model, own(&model, &loss, images, labels), samples.len())?,
            Exchange::DuringBackward => {
                ddp.run(&model, [(images, labels)], |model: &Network<B>, (images, labels)| {
                    (loss.forward(model.forward(images), labels), samples.len())
                })?
            }
        };
        model = optimizer.step(1e-3, model.clone(), grads);
        Ok(())
    })
}

/// Returns this rank's own gradients.
fn own(
    model: &Network<B>,
    loss: &CrossEntropyLoss<B>,
    images: Tensor<B, 2>,
    labels: Tensor<B, 1, Int>,
) -> GradientsParams {
    GradientsParams::from_grads(loss.forward(model.forward(images), labels).backward(), model)
}

/// Returns the images `[n, PIXELS]` and labels `[n]` of the chosen samples.
fn tensors(
    digits: &Digits,
    chosen: &[usize],
    device: &<B as BackendTypes>::Device,
) -> (Tensor<B, 2>, Tensor<B, 1, Int>) {
    let images: Vec<f32> = chosen.iter().flat_map(|&i| digits.images[i]).collect();
    let labels: Vec<i64> = chosen.iter().map(|&i| i64::from(digits.labels[i])).collect();
    let images = Tensor::from_data(TensorData::new(images, [chosen.len(), PIXELS]), device);
    (images, Tensor::from_data(TensorData::new(labels, [chosen.len()]), device))
}
