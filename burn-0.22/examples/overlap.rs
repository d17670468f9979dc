//! Trains a network that is large enough for communication to matter, and measures what the exchange of gradients
//! costs. As `examples/overlap.rs` of the root package, on burn 0.22:
//!
//! ```sh
//! cargo run --release --example overlap                                            # two ranks, as threads
//! scripts/hosts -n 2 --rate 100mbit -- burn-0.22/target/release/examples/overlap   # as root: two simulated hosts
//! ```

#[path = "../../examples/digits/data.rs"]
mod data;
#[path = "../../examples/overlap/measuring.rs"]
mod measuring;

use std::process::ExitCode;

use bonfire::train::compression;
use bonfire::{DataParallel, Group};
use burn::module::Module;
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::data::{Digits, PIXELS};
use crate::measuring::{Args, Exchange, Failure, measure};

/// Fully connected layers.
#[derive(Module, Debug)]
struct Network {
    hidden: Vec<Linear>,
    output: Linear,
}

impl Network {
    fn new(args: &Args, device: &Device) -> Self {
        let width = usize::from(args.hidden);
        let inputs = std::iter::once(PIXELS).chain((0..args.layers).map(|_| width));
        let hidden = inputs.map(|inputs| LinearConfig::new(inputs, width).init(device)).collect();
        Network { hidden, output: LinearConfig::new(width, 10).init(device) }
    }

    fn forward(&self, images: Tensor<2>) -> Tensor<2> {
        let hidden = self.hidden.iter().fold(images, |x, layer| burn::tensor::activation::relu(layer.forward(x)));
        self.output.forward(hidden)
    }
}

fn main() -> ExitCode {
    measuring::run(train)
}

fn train(group: &Group, args: &Args) -> Result<(), Failure> {
    let (digits, _) = Digits::load()?;
    let device = Device::flex().autodiff();
    let (mut model, mut ddp) = DataParallel::new(group.clone(), Network::new(args, &device))?;
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
            Exchange::DuringBackward => ddp.run(&model, [(images, labels)], |model: &Network, (images, labels)| {
                (loss.forward(model.forward(images), labels), samples.len())
            })?,
        };
        model = optimizer.step(1e-3, model.clone(), grads);
        Ok(())
    })
}

/// Returns this rank's own gradients.
fn own(model: &Network, loss: &CrossEntropyLoss, images: Tensor<2>, labels: Tensor<1, Int>) -> GradientsParams {
    GradientsParams::from_grads(loss.forward(model.forward(images), labels).backward(), model)
}

/// Returns the images `[n, PIXELS]` and labels `[n]` of the chosen samples.
fn tensors(digits: &Digits, chosen: &[usize], device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
    let images: Vec<f32> = chosen.iter().flat_map(|&i| digits.images[i]).collect();
    let labels: Vec<i64> = chosen.iter().map(|&i| i64::from(digits.labels[i])).collect();
    let images = Tensor::from_data(TensorData::new(images, [chosen.len(), PIXELS]), device);
    (images, Tensor::from_data(TensorData::new(labels, [chosen.len()]), device))
}
