//! burn-train's `Learner` on handwritten digits, on several devices in one process or several.
//!
//! A single process uses burn's own distributed training:
//!
//! ```sh
//! cargo run --release -p bonfire-examples --features wgpu,ddp --bin burn_train -- --devices 2
//! cargo run --release -p bonfire-examples --features cuda,ddp --bin burn_train -- --devices 2 --backend cuda
//! ```
//!
//! Processes that `bonfire run` or another launcher started use Bonfire's strategy, with `--devices` devices in each.

#[cfg(feature = "cuda")]
#[path = "digits/cuda.rs"]
mod cuda;
#[path = "burn_train/data.rs"]
mod data;
#[path = "digits/data.rs"]
mod digits;
#[path = "burn_train/model.rs"]
mod model;
#[path = "burn_train/progress.rs"]
mod progress;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use bonfire::{Builder, DataParallelStrategy};
use burn::backend::Autodiff;
use burn::backend::flex::Flex;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::linear::{LinearLrScheduler, LinearLrSchedulerConfig};
use burn::module::Module;
use burn::optim::{Adam, AdamConfig, adaptor::OptimizerAdaptor};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::backend::distributed::{DistributedBackend, DistributedConfig, ReduceOperation};
use burn_train::metric::{AccuracyMetric, LossMetric};
use burn_train::{ExecutionStrategy, Learner, LearningComponentsMarker, SupervisedTraining, TrainingStrategy};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};

use crate::data::Images;
use crate::digits::Digits;
use crate::model::Network;
use crate::progress::{Epochs, Silent};

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Components<B> = LearningComponentsMarker<B, LinearLrScheduler, Network<B>, OptimizerAdaptor<Adam, Network<B>, B>>;

/// Default images in a step, rounded up to a multiple of the number of ranks.
const BATCH: usize = 60;

/// Train a small network on handwritten digits with burn-train, on several devices at once.
#[derive(Parser)]
#[command(name = "burn_train")]
struct Args {
    /// Logical devices of this process, which share a physical device. With cuda each gets its own GPU as long as there
    /// are enough
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
    devices: u8,
    /// Backend
    #[arg(long, value_enum, default_value_t = if cfg!(feature = "wgpu") { Backend::Wgpu } else { Backend::Cuda })]
    backend: Backend,
    /// Passes over the training images
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Global batch size: images in a step over all devices of all processes [default: about 60]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Learning rate of the first step; it falls linearly to 0
    #[arg(long, default_value_t = 0.02, value_parser = learning_rate)]
    lr: f64,
    /// Seed of the initial weights and of the order of the images
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Backend {
    Wgpu,
    Cuda,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn,cubecl_runtime=error")).init();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    match args.backend {
        #[cfg(feature = "wgpu")]
        Backend::Wgpu => {
            let device = |replica| bonfire::WgpuDevice::new(Default::default(), replica);
            train::<Autodiff<bonfire::Wgpu>>(args, (0..args.devices).map(device).collect())
        }
        #[cfg(feature = "cuda")]
        Backend::Cuda => {
            let first = cuda::local_rank() * usize::from(args.devices);
            let devices =
                (first..).take(args.devices.into()).map(bonfire::CudaDevice::of_rank).collect::<Result<_, _>>()?;
            train::<Autodiff<bonfire::Cuda>>(args, devices)
        }
        #[allow(unreachable_patterns, reason = "a program may have both backends")]
        backend => {
            let name = backend.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            Err(format!("this program was built without {name}: build it with `--features {name},ddp`").into())
        }
    }
}

#[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), allow(dead_code))]
fn train<B: AutodiffBackend + DistributedBackend>(args: &Args, devices: Vec<B::Device>) -> Result<(), Failure> {
    let device = devices[0].clone();
    let (digits, test) = Digits::load()?;

    let (strategy, rank, ranks) = strategy::<B>(devices)?;
    let (batch, steps) = batch_per_rank(args, digits.len(), ranks);
    let loader = DataLoaderBuilder::new(Images).batch_size(batch).shuffle(args.seed).set_device(device.clone());
    let train = loader.build(InMemDataset::new(digits.items()));
    let valid = DataLoaderBuilder::new(Images).batch_size(test.len()).set_device(device.clone());
    let valid = valid.build(InMemDataset::new(test.items()));

    B::seed(&device, args.seed);
    let network = Network::<B>::new(&device);
    // burn initialises weights lazily, when they are first used. Its strategy copies the network to its devices before
    // that, and each copy would draw its own weights. Counting the parameters is such a use.
    network.num_params();

    let folder = tempfile::tempdir()?;
    let mut training = SupervisedTraining::<Components<B>>::new(folder.path(), train, valid)
        .metrics((AccuracyMetric::<Flex>::new(), LossMetric::<Flex>::new()))
        .num_epochs(args.epochs as usize)
        .with_application_logger(None)
        .with_training_strategy(strategy);
    training = if rank == 0 { training.renderer(Epochs::new()) } else { training.renderer(Silent) };

    // In each iteration burn advances the schedule by one step for each rank.
    let schedule = LinearLrSchedulerConfig::new(args.lr, 0.0, args.epochs as usize * steps * ranks).init()?;
    let clock = Instant::now();
    let trained = training.launch(Learner::new(network, AdamConfig::new().init(), schedule)).model;
    if rank == 0 {
        let (accuracy, seconds) = (100.0 * trained.accuracy(&test, &device), clock.elapsed().as_secs_f64());
        println!("{ranks} devices, {} epochs in {seconds:.1} s", args.epochs);
        println!("test accuracy: {accuracy:.1} %");
    }
    Ok(())
}

/// Returns the training strategy for these devices, this process's first rank, and the world size.
fn strategy<B: AutodiffBackend + DistributedBackend>(
    devices: Vec<B::Device>,
) -> Result<(TrainingStrategy<Components<B>>, usize, usize), Failure> {
    let builder = Builder::from_env()?;
    if builder.launched().is_none() {
        let ranks = devices.len();
        let config = DistributedConfig { all_reduce_op: ReduceOperation::Mean };
        return Ok((ExecutionStrategy::ddp(devices, config).into(), 0, ranks));
    }
    let groups = builder.connect_ranks(devices.len())?;
    let (rank, ranks) = (groups[0].rank(), groups[0].world_size());
    let strategy = DataParallelStrategy::new(devices.into_iter().zip(groups).collect())?;
    Ok((TrainingStrategy::Custom(Arc::new(strategy)), rank, ranks))
}

/// Returns the images in a step of each rank, and the steps in an epoch. Exits if the ranks would make different
/// numbers of steps: burn's own strategy would wait forever for the missing ones.
fn batch_per_rank(args: &Args, images: usize, ranks: usize) -> (usize, usize) {
    let batch = args.batch.map_or(BATCH.next_multiple_of(ranks), |batch| batch as usize);
    if !batch.is_multiple_of(ranks) {
        usage_error(&format!("a batch of {batch} cannot be shared by {ranks} devices: give a multiple of {ranks}"));
    }
    let batch = batch / ranks;
    // burn gives each rank an equal part of the images, and the remainder to the last.
    let part = images / ranks;
    let (steps, last) = (part.div_ceil(batch), (images - part * (ranks - 1)).div_ceil(batch));
    if steps != last {
        usage_error(&format!(
            "{ranks} devices get {part} of {images} images each and the last also the remainder: {steps} and {last} \
             batches of {batch}, but all need the same number; give another --batch or another number of devices"
        ));
    }
    (batch, steps)
}

fn learning_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(lr) if lr > 0.0 && lr <= 1.0 => Ok(lr),
        _ => Err("give a number above 0 and up to 1".into()),
    }
}

/// Exits as clap does for invalid arguments: with a message and status 2.
fn usage_error(message: &str) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}
