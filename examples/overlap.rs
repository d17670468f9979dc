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

use std::process::ExitCode;
use std::time::Instant;

use bonfire::train::compression;
use bonfire::{DataParallel, Error, Group, ReduceOp, ShardedSampler};
use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use clap::Parser;

use crate::data::{Digits, PIXELS};

type B = Autodiff<Flex>;
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Measure what the exchange of gradients costs in the training of a large network
#[derive(Parser, Clone)]
#[command(name = "overlap")]
struct Args {
    /// Ranks, as threads, where no launcher has started this process as a rank
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
    /// Neurons of each hidden layer: 2,304 make 10.8 million parameters in all
    #[arg(long, default_value_t = 2304, value_parser = clap::value_parser!(u16).range(1..=16_384))]
    hidden: u16,
    /// Hidden layers after the first
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    layers: u16,
    /// Images of a batch, over all ranks
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1500))]
    batch: u16,
    /// Let gradients travel in fewer bytes
    #[arg(long, value_parser = compression::NAMES, value_name = "TYPE")]
    compression: Option<String>,
    /// Steps of each kind to time
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    steps: u16,
}

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

/// How gradients are exchanged.
#[derive(Clone, Copy)]
enum Exchange {
    None,
    AfterBackward,
    DuringBackward,
}

fn main() -> ExitCode {
    env_logger::init();
    let args = Args::parse();
    let ranks = usize::from(args.ranks);
    match bonfire::launch(ranks, move |group| measure(&group, &args)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("error: {failed}");
            ExitCode::FAILURE
        }
    }
}

fn measure(group: &Group, args: &Args) -> Result<(), Failure> {
    let (digits, _) = Digits::load()?;
    let device = Default::default();
    let (mut model, mut ddp) = DataParallel::new(group.clone(), Network::<B>::new(args, &device))?;
    if let Some(compression) = args.compression.as_deref().and_then(compression::by_name) {
        ddp.set_compression(compression)?;
    }
    let parameters = model.num_params();
    let mut optimizer = SgdConfig::new().init();
    let sampler = ShardedSampler::new(group, digits.len(), args.batch.into())?.drop_last();
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut train = |exchange: Exchange, samples: &[usize]| -> Result<(), Error> {
        let (images, labels) = tensors(&digits, samples);
        let grads = match exchange {
            Exchange::None => own(&model, &loss, images, labels),
            Exchange::AfterBackward => {
                let grads = own(&model, &loss, images, labels);
                ddp.sync(&model, grads, samples.len())?
            }
            Exchange::DuringBackward => {
                let loss = |model: &Network<B>, (images, labels)| loss.forward(model.forward(images), labels);
                ddp.run(&model, [(images, labels)], |model, batch| (loss(model, batch), samples.len()))?
            }
        };
        // Without an exchange the ranks' models would differ, so that step is not applied.
        if !matches!(exchange, Exchange::None) {
            model = optimizer.step(1e-3, model.clone(), grads);
        }
        Ok(())
    };
    let mut shards = (0..).flat_map(|epoch| sampler.epoch(epoch));
    let mut median = |exchange: Exchange| {
        let mut times = Vec::new();
        for round in 0..2 + args.steps {
            let Some(shard) = shards.next() else { break };
            group.barrier()?;
            let start = Instant::now();
            train(exchange, &shard)?;
            if round >= 2 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        times.sort_by(f64::total_cmp);
        let mut median = [times[times.len() / 2]];
        group.all_reduce(&mut median, ReduceOp::Max)?;
        Ok::<f64, Error>(1e3 * median[0])
    };
    let alone = median(Exchange::None)?;
    let after = median(Exchange::AfterBackward)?;
    let during = median(Exchange::DuringBackward)?;
    if group.rank() == 0 {
        println!("{parameters} parameters, {} ranks, batches of {}", group.world_size(), args.batch);
        println!("step without exchange:                    {alone:8.1} ms");
        println!("with the exchange after the backward pass:{after:8.1} ms");
        println!("with the exchange during the backward pass:{during:7.1} ms");
    }
    Ok(())
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
fn tensors(digits: &Digits, chosen: &[usize]) -> (Tensor<B, 2>, Tensor<B, 1, Int>) {
    let device = Default::default();
    let images: Vec<f32> = chosen.iter().flat_map(|&i| digits.images[i]).collect();
    let labels: Vec<i64> = chosen.iter().map(|&i| i64::from(digits.labels[i])).collect();
    let images = Tensor::from_data(TensorData::new(images, [chosen.len(), PIXELS]), &device);
    (images, Tensor::from_data(TensorData::new(labels, [chosen.len()]), &device))
}
