//! Measures what the data loader costs a training of the digits, beside loading by hand.
//!
//! ```sh
//! cargo bench -p bonfire-examples --bench loading                  # two ranks, as threads
//! cargo bench -p bonfire-examples --bench loading -- --workers 4
//! ```
//! Epochs take turns: with a `ShardedSampler` and a function that makes batches, with a `ShardedDataLoader` without
//! workers, and with one that has workers. All make the same batches and train the same network. Rank 0 prints the
//! median time of each, and its ratio to loading by hand within a round.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use bonfire::{DataParallel, Error, Group, ReduceOp, ShardedDataLoaderBuilder, ShardedSampler, println};
use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{Adam, AdamConfig, Optimizer, adaptor::OptimizerAdaptor};
use burn::tensor::{Int, Tensor, TensorData};
use clap::Parser;

#[path = "../digits/data.rs"]
mod data;
#[path = "../digits/model.rs"]
mod model;

use data::{Digits, PIXELS};
use model::Network;

type B = Autodiff<Flex>;
type Failure = Box<dyn std::error::Error + Send + Sync>;
type Device = burn::tensor::Device<B>;
type Batch = (Tensor<B, 4>, Tensor<B, 1, Int>);

/// Measure what the data loader costs a training
#[derive(Parser, Clone)]
#[command(name = "loading")]
struct Args {
    /// Ranks, as threads, where no launcher has started this process as a rank
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
    /// Images of a batch, over all ranks
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u16).range(1..=1500))]
    batch: u16,
    /// Threads that make batches ahead, in the loader that has some
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: u16,
    /// Rounds, of an epoch of each kind
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// What `cargo bench` passes
    #[arg(long, hide = true)]
    bench: bool,
}

type Image = ([f32; PIXELS], u8);

/// The images, as a data set of burn's.
#[derive(Clone)]
struct Images(Arc<Digits>);

impl Dataset<Image> for Images {
    fn get(&self, index: usize) -> Option<Image> {
        Some((*self.0.images.get(index)?, *self.0.labels.get(index)?))
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

struct Images8x8;

impl Batcher<B, Image, Batch> for Images8x8 {
    fn batch(&self, images: Vec<Image>, device: &Device) -> Batch {
        let pixels: Vec<f32> = images.iter().flat_map(|(pixels, _)| *pixels).collect();
        let labels: Vec<i64> = images.iter().map(|(_, label)| i64::from(*label)).collect();
        let count = images.len();
        let pixels = Tensor::from_data(TensorData::new(pixels, [count, 1, 8, 8]), device);
        (pixels, Tensor::from_data(TensorData::new(labels, [count]), device))
    }
}

/// A training in which epochs of different kinds take turns.
struct Training {
    group: Group,
    model: Network<B>,
    ddp: DataParallel<B>,
    optimizer: OptimizerAdaptor<Adam, Network<B>, B>,
}

impl Training {
    /// Trains for an epoch. Returns its time in milliseconds, on the slowest rank.
    fn epoch(&mut self, batches: impl Iterator<Item = Result<Batch, Error>>) -> Result<f64, Error> {
        let criterion = CrossEntropyLossConfig::new().init(&Default::default());
        self.group.barrier()?;
        let start = Instant::now();
        for batch in batches {
            let gradients = self.ddp.run(&self.model, [batch?], |model, (images, labels)| {
                let samples = labels.dims()[0];
                (criterion.forward(model.forward(images), labels), samples)
            })?;
            self.model = self.optimizer.step(1e-3, self.model.clone(), gradients);
        }
        let mut time = [1e3 * start.elapsed().as_secs_f64()];
        self.group.all_reduce(&mut time, ReduceOp::Max)?;
        Ok(time[0])
    }
}

fn main() -> ExitCode {
    env_logger::init();
    let args = Args::parse();
    match bonfire::launch(args.ranks.into(), move |group| measure(group, &args)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("error: {failed}");
            ExitCode::FAILURE
        }
    }
}

fn measure(group: Group, args: &Args) -> Result<(), Failure> {
    let (device, batch) = (Device::default(), usize::from(args.batch));
    let images = Images(Arc::new(Digits::load()?.0));
    let sampler = ShardedSampler::new(&group, images.len(), batch)?.seed(7);
    let by_loader = |workers: u16| {
        let builder = ShardedDataLoaderBuilder::new(&group, Images8x8).batch_size(batch).shuffle(7);
        builder.num_workers(workers.into()).build(images.clone())
    };
    let [alone, ahead] = [by_loader(0), by_loader(args.workers)];
    let by_hand = |shard: Vec<usize>| {
        let own = shard.iter().map(|&i| (images.0.images[i], images.0.labels[i])).collect();
        Ok(Images8x8.batch(own, &device))
    };
    let (model, ddp) = DataParallel::new(group.clone(), Network::<B>::new(&device))?;
    let mut training = Training { group: group.clone(), model, ddp, optimizer: AdamConfig::new().init() };
    let mut times = [const { Vec::new() }; 3];
    // The first round warms up.
    for round in 0..=usize::from(args.rounds) {
        let [hand, without, with] = [
            training.epoch(sampler.epoch(round)?.map(by_hand))?,
            training.epoch(alone.epoch(round)?)?,
            training.epoch(ahead.epoch(round)?)?,
        ];
        if round > 0 {
            times.iter_mut().zip([hand, without, with]).for_each(|(times, time)| times.push(time));
        }
    }
    let [hand, without, with] = &times;
    println!("{} images in batches of {batch}, {} ranks, {} rounds", images.len(), group.world_size(), args.rounds);
    println!("an epoch by hand:               {:8.1} ms", summary(hand.clone())[0]);
    for (workers, times) in [(0, without), (args.workers, with)] {
        // In each round, because the machine's speed changes.
        let [ratio, least, most] = summary(times.iter().zip(hand).map(|(time, hand)| time / hand).collect());
        let time = summary(times.clone())[0];
        println!("by the loader, {workers} workers:       {time:8.1} ms, {ratio:.3} of that ({least:.3} to {most:.3})");
    }
    Ok(())
}

/// Returns the median, the least and the most.
fn summary(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [values[values.len() / 2], values[0], values[values.len() - 1]]
}
